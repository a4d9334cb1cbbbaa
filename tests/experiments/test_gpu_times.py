"""Times and memory of calls on a GPU, with a clock, a memory pool and contenders that do what they are told."""

import math
import types

import ml_dtypes
import numpy as np
import pytest

from experiments.gpu import decode, launches, memory, problems, speed, stopwatch
from experiments.gpu.contenders import OURS, Contender
from experiments.gpu.problems import BACKWARD, FORWARD, Shape
from experiments.gpu.speed import MATMUL
from experiments.gpu.stopwatch import ROUNDS, WARM_UP, Stopwatch, Times, interleaved


class Clock:
    """Milliseconds of calls that are numbers."""

    def __init__(self):
        self.measured = []

    def __call__(self, call):
        self.measured.append(call)
        return call()


class FakeStream:
    """What is put on a stream, with times: each piece of work takes so many milliseconds."""

    def __init__(self):
        self.now, self.log = 0.0, []
        stream = self

        class Event:
            def record(self):
                self.time = stream.now
                stream.log.append("event")

            def synchronize(self):
                stream.log.append("synchronize")

        class Array:
            def __init__(self, size):
                self.size = size

            def fill(self, value):
                stream.work(f"fill {self.size}", 0.3)

        class Module:
            @staticmethod
            def get_function(name):
                return lambda grid, block, args: stream.work(f"{name} {args[0]}", 2)

        self.cuda = types.SimpleNamespace(
            Event=Event,
            Device=lambda: types.SimpleNamespace(id=0),
            get_elapsed_time=lambda start, stop: stop.time - start.time,
            runtime=types.SimpleNamespace(getDeviceProperties=lambda number: {"l2CacheSize": 50 * 2**20}),
        )
        self.empty = lambda size, dtype: Array(size)
        self.RawModule = lambda code: Module

    def work(self, what, milliseconds):
        self.log.append(what)
        self.now += milliseconds


def test_a_stopwatch_flushes_waits_and_measures_the_call_alone():
    stream = FakeStream()
    watch = Stopwatch(stream)
    assert watch(lambda: stream.work("call", 7)) == pytest.approx(7)
    flushed = f"fill {4 * 50 * 2**20}"
    assert stream.log == [flushed, "wait 3000000", "event", "call", "event", "synchronize"]


def test_calls_take_turns_and_warm_up_does_not_count():
    clock, seen = Clock(), {"a": [100, 50], "b": [9, 9]}

    def call(name, usual):
        return lambda: seen[name].pop(0) if seen[name] else usual

    times = interleaved(clock, {"a": call("a", 2.0), "b": call("b", 3.0)})
    assert times["a"].rounds[:MOST_OF_A] == (2.0,) * MOST_OF_A and len(times["a"].rounds) == MOST_OF_A
    assert times["b"].rounds == (3.0,) * ROUNDS
    assert times["b"].columns == {"median_ms": 3.0, "least_ms": 3.0, "most_ms": 3.0, "rounds": ROUNDS, "error": ""}
    assert len(clock.measured) == MOST_OF_A + ROUNDS + 2 * WARM_UP
    assert clock.measured[0] is clock.measured[2] is not clock.measured[1]


MOST_OF_A = stopwatch.MOST_MS // 50


@pytest.mark.parametrize(("second", "rounds"), [(0.01, ROUNDS), (stopwatch.MOST_MS / 4, 4), (10_000, 1)])
def test_slow_calls_have_fewer_rounds(second, rounds):
    assert len(interleaved(Clock(), {"x": lambda: second})["x"].rounds) == rounds


def test_a_call_that_fails_is_a_cell_and_the_others_go_on():
    class OutOfMemoryError(RuntimeError):
        pass

    left = [1.0, 1.0, 1.0]

    def later():
        if not left:
            raise OutOfMemoryError("Out of memory allocating 68,719,476,736 bytes")
        return left.pop()

    def never():
        raise RuntimeError("No available kernel. Aborting execution.")

    clock = Clock()
    times = interleaved(clock, {"later": later, "never": never, "fine": lambda: 2.0})
    assert clock.measured.count(never) == 1 and clock.measured.count(later) == 4
    assert times["later"] == Times(error="out of memory")
    assert times["never"] == Times(error="RuntimeError: No available kernel. Aborting execution.")
    assert times["fine"].median == 2.0 and times["never"].median is None


# Problems


@pytest.mark.parametrize("head_dim", speed.HEAD_DIMS)
@pytest.mark.parametrize("seqlen", speed.SEQLENS)
def test_sizes_are_those_of_flash_attention_2(seqlen, head_dim):
    shape = speed.shape_of(seqlen, head_dim, False, "float16")
    assert shape.heads * head_dim == 2048
    assert shape.batch * seqlen == max(16384, seqlen)


def test_flops_count_two_products_forward_and_five_backward():
    shape = Shape(3, 8, 2, 100, 200, 64)
    product = 2 * 100 * 200 * 64 * 24
    assert shape.flops(FORWARD) == 2 * product and shape.flops(BACKWARD) == 5 * product
    causal = Shape(3, 8, 8, 100, 100, 64, causal=True)
    assert causal.flops(BACKWARD) == 5 * product / 4


def test_bytes_of_decode():
    shape = decode.shape_of(2, 4096, "bfloat16")
    assert decode.least_bytes(shape) == 2 * (2 * 64 * 2 * 128 + 2 * 8 * 4096 * 128)
    assert shape.input_bytes(FORWARD) == decode.least_bytes(shape) - 2 * 64 * 2 * 128


def test_long_arrays_repeat_a_million_numbers():
    x = problems.normal(0, (2, 3 * 10**6), "bfloat16")
    assert x.dtype == ml_dtypes.bfloat16 and x.shape == (2, 3 * 10**6)
    assert (problems.normal(0, (5, 7), "float16") != problems.normal(1, (5, 7), "float16")).any()


# Tables


@pytest.fixture
def staged(monkeypatch):
    """Contenders and a clock: each time is the sequence length by a factor of the contender."""
    freed = []

    def of(factor, offset=0.0, *, fails=False, stores_scores=False):
        def prepare(problem, direction):
            if fails:
                raise MemoryError("out of memory")

            def call():
                call.milliseconds = factor * problem.shape.seqlen_q * (0.5 if problem.shape.causal else 1)
                return (np.full((1, 1, 2, 2), 1 + offset, np.float32),)

            return call

        return Contender(prepare, stores_scores=stores_scores)

    def watch(call):
        call()
        return getattr(call, "milliseconds", 5.0)

    known = {
        "slow": of(0.1, stores_scores=True), OURS: of(0.001), "wrong": of(0.002, 0.1), "none": of(1, fails=True)
    }  # fmt: skip
    for module in speed, decode:
        monkeypatch.setattr(module, "contenders", lambda: dict(known))
        monkeypatch.setattr(module, "Stopwatch", lambda cupy: watch)
    monkeypatch.setattr(speed, "free_memory", lambda cupy: freed.append(1))
    monkeypatch.setattr(speed, "matmul", lambda cupy, dtype, size: lambda: None)
    return freed


def test_rows_of_speed(staged):
    cells = list(speed.measure(None, BACKWARD, 128, "float16", (1024, 2048, 4096), 4096))
    assert [cell[0]["seqlen"] for cell in cells] == [1024, 1024, 2048, 2048, 4096, 4096]
    assert all([row["what"] for row in cell] == [MATMUL, "slow", OURS, "wrong", "none"] for cell in cells)
    plain, causal = ({row["what"]: row for row in cell} for cell in cells[:2])
    assert plain[OURS]["median_ms"] == pytest.approx(1.024)
    assert plain[OURS]["tflops"] == pytest.approx(10 * 16384 * 1024 * 2048 / 1.024e-3 / 1e12)
    assert causal[OURS]["tflops"] == pytest.approx(plain[OURS]["tflops"])  # half the time for half the FLOP
    assert plain[MATMUL]["tflops"] == pytest.approx(2 * 4096**3 / 5e-3 / 1e12)
    assert plain[OURS]["percent_of_matmul"] == pytest.approx(100 * plain[OURS]["tflops"] / plain[MATMUL]["tflops"])
    assert plain["wrong"]["times_ours"] == pytest.approx(2) and plain[OURS]["times_ours"] == 1
    assert plain["slow"]["agrees"] and plain[OURS]["agrees"] and not plain["wrong"]["agrees"]
    assert plain["wrong"]["difference_from_ours"] == pytest.approx(0.1)
    assert plain["none"]["error"] == "out of memory" and plain["none"]["tflops"] is plain["none"]["agrees"] is None
    assert len({tuple(row) for cell in cells for row in cell}) == 1


def test_what_was_slow_is_left_out_of_longer_sequences(staged):
    cells = list(speed.measure(None, FORWARD, 128, "float16", (1024, 2048, 4096)))
    slow = {(row["seqlen"], row["causal"]): row for cell in cells for row in cell if row["what"] == "slow"}
    assert slow[2048, False]["median_ms"] > speed.TOO_SLOW > slow[2048, True]["median_ms"]
    assert slow[4096, False]["error"] == "left out: 205 ms for shorter sequences"
    assert slow[4096, True]["median_ms"] > speed.TOO_SLOW
    assert len(staged) == 6 * 2  # what stores all scores is a group of its own


def test_summary_of_speed(staged):
    rows = [row for cell in speed.measure(None, FORWARD, 128, "float16", (512, 1024)) for row in cell]
    first, *others = speed.summary(rows).splitlines()
    assert first.startswith("forward, head_dim 128: at most ") and first.endswith("L = 512")
    assert others == [
        "  slow: 100.00 to 100.00 times our time",
        "  wrong: 2.00 to 2.00 times our time; results differ",
        "  none: out of memory",
    ]
    failed = [{**row, "tflops": None, "percent_of_matmul": None, "times_ours": None, "error": "no"} for row in rows]
    first = speed.summary(failed).splitlines()[0]
    assert first == "forward, head_dim 128: at most 0 TFLOP/s, 0 % of CuPy matmul, at L = 512 no"


def test_rows_of_decode(staged, monkeypatch):
    cupy = types.SimpleNamespace(empty=lambda size, dtype: np.empty(1, np.uint8), copyto=np.copyto)
    cells = list(decode.measure(cupy, "bfloat16", (1, 8), (4096,), copied=10**9))
    rows = {row["what"]: row for row in cells[0]}
    assert rows[decode.COPY]["gigabytes_per_second"] == pytest.approx(2e9 / 5e-3 / 1e9)
    assert rows[OURS]["gigabytes_per_second"] == pytest.approx(decode.least_bytes(decode.shape_of(1, 4096, "")) / 1e3)
    assert rows[OURS]["percent_of_copy"] == pytest.approx(rows[OURS]["gigabytes_per_second"] / 4)
    assert {f"{OURS}, split_size {size}" for size in decode.SPLITS} < set(rows)
    assert rows["none"]["error"] == "out of memory"
    assert len(cells) == 2 and cells[1][0]["seqlen_q"] == 8
    assert decode.summary(cells[0] + cells[1]).splitlines()[1].startswith("  copy: 100, 100")


class Pool:
    """CuPy's memory pool, of blocks that are given back when nothing holds them."""

    def __init__(self):
        self.used, self.free, self.limit = 0, 0, math.inf

    def allocate(self, size):
        if self.used + size > self.limit:
            raise MemoryError("out of memory")
        self.used, self.free = self.used + size, max(self.free - size, 0)
        pool = self

        class Block:
            def __del__(self):
                pool.used, pool.free = pool.used - size, pool.free + size

        return Block()

    def used_bytes(self):
        return self.used

    def total_bytes(self):
        return self.used + self.free

    def free_all_blocks(self):
        self.free = 0


def test_memory_of_calls(monkeypatch):
    """A forward takes 100 for each query; a backward 300, and keeps 7 from its forward."""
    pool = Pool()
    cupy = types.SimpleNamespace(
        get_default_memory_pool=lambda: pool,
        asarray=lambda host: pool.allocate(host.nbytes),
        cuda=types.SimpleNamespace(Device=lambda: types.SimpleNamespace(synchronize=lambda: None)),
    )

    def prepare(problem, direction):
        kept = pool.allocate(7) if direction == BACKWARD else None
        temporary = pool.allocate(1000)  # of the preparation alone
        del temporary

        def call():
            first = pool.allocate((100 if direction == FORWARD else 200) * problem.shape.seqlen_q)
            second = pool.allocate(100 * problem.shape.seqlen_q) if direction == BACKWARD else None
            return first, second, kept

        return call

    monkeypatch.setattr(memory, "contenders", lambda: {OURS: Contender(prepare)})
    pool.limit = 4 * 2**20
    rows = [row for found in memory.measure(cupy, "float16", (64, 128, 4096)) for row in found]
    measured = [(row["seqlen"], row["kept_from_forward_bytes"], row["call_bytes"]) for row in rows[:4]]
    assert measured == [(64, 0, 6400), (64, 7, 19200), (128, 0, 12800), (128, 7, 38400)]
    assert [row["error"] for row in rows] == [""] * 4 + ["out of memory"] * 2
    assert rows[0]["inputs_bytes"] == 3 * 64 * 16 * 128 * 2 and rows[1]["inputs_bytes"] == 4 * 64 * 16 * 128 * 2
    assert pool.used == 0  # nothing is held from one problem to the next
    assert (
        memory.summary(rows) == f"forward, L = 4096, {OURS}: out of memory\nbackward, L = 4096, {OURS}: out of memory"
    )

    pool.limit = math.inf
    monkeypatch.setattr(memory, "TOO_SLOW", -1)
    rows = [row for found in memory.measure(cupy, "float16", (64, 128)) for row in found]
    assert [row["error"] for row in rows] == [""] * 2 + ["left out: too slow for shorter sequences"] * 2


class Queue:
    """A GPU that works for 5 us on what costs the host 3 us to launch; `now` is its clock."""

    def __init__(self):
        self.now = self.busy_until = 0.0
        self.launched = 0

    def launch(self):
        self.launched += 1
        self.now += 3e-6
        self.busy_until = max(self.now, self.busy_until) + 5e-6

    def synchronize(self):
        self.now = max(self.now, self.busy_until)


def test_host_time_of_calls(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(launches, "time", types.SimpleNamespace(perf_counter=lambda: queue.now))
    returned, done = launches.host_microseconds(queue.launch, queue.synchronize, 10, 2)
    assert (returned, done) == (pytest.approx(3), pytest.approx((3 + 10 * 5) / 10))
    assert queue.launched == 21


def test_rows_of_launches(monkeypatch):
    queue = Queue()
    cupy = types.SimpleNamespace(asarray=lambda host: host, cuda=types.SimpleNamespace(Device=lambda: queue))
    monkeypatch.setattr(launches, "time", types.SimpleNamespace(perf_counter=lambda: queue.now))

    def none(problem, direction):
        raise ValueError("no kernel")

    def prepared(problem, direction):
        assert problem.arrays[0].shape[1] == problem.shape.heads
        return queue.launch

    found = {OURS: Contender(prepared), "none": Contender(none)}
    monkeypatch.setattr(launches, "contenders", lambda: found)
    monkeypatch.setattr(launches.host_time, "calls", lambda array: {
        (launches.host_time.FORWARD, "decoding"): queue.launch, (launches.host_time.BACKWARD, "causal"): queue.launch,
    })  # fmt: skip
    rows = [row for group in launches.measure(cupy, "float16", 4, 1) for row in group]
    assert [(row["what"], row["direction"], row["call"]) for row in rows] == [
        (OURS, FORWARD, "decoding"), (OURS, BACKWARD, "causal"),
        (OURS, FORWARD, "beside others"), ("none", FORWARD, "beside others"),
        (OURS, BACKWARD, "beside others"), ("none", BACKWARD, "beside others"),
    ]  # fmt: skip
    assert {row["error"] for row in rows if row["what"] == "none"} == {"ValueError: no kernel"}
    assert all(row["least_us"] == pytest.approx(3) for row in rows if row["what"] == OURS)
    assert launches.summary(rows).splitlines()[0] == f"forward, decoding, {OURS}: 3 us on the host, 6 us in all"
