"""mbarrier, one operation after another: against words read from a GPU, and a model made of the ISA's sentences."""

import contextlib

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, schedule_name


def line_of(source, text):
    """The first line with a text."""
    return next(n for n, line in enumerate(source.splitlines(), 1) if text in line)


every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

HELPERS = r"""
typedef unsigned long long word;
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(word* b, unsigned n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"(n)); }
__device__ void inval(word* b) { asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(b))); }
#define ARRIVAL(name, text) __device__ word name(word* b, unsigned n = 1) { word t; \
  asm volatile(text : "=l"(t) : "r"(at(b)), "r"(n) : "memory"); return t; }
ARRIVAL(arrive, "mbarrier.arrive.shared.b64 %0, [%1], %2;")
ARRIVAL(arrive_once, "mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1];")
ARRIVAL(drop, "mbarrier.arrive_drop.shared.b64 %0, [%1], %2;")
ARRIVAL(arrive_expect, "mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;")
ARRIVAL(drop_expect, "mbarrier.arrive_drop.expect_tx.relaxed.cta.shared::cta.b64 %0, [%1], %2;")
ARRIVAL(arrive_no_complete, "mbarrier.arrive.noComplete.shared.b64 %0, [%1], %2;")
ARRIVAL(drop_no_complete, "mbarrier.arrive_drop.noComplete.release.cta.shared.b64 %0, [%1], %2;")
__device__ void expect(word* b, unsigned n) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(at(b)), "r"(n)); }
__device__ void complete(word* b, unsigned n) {
  asm volatile("mbarrier.complete_tx.shared::cluster.b64 [%0], %1;" :: "r"(at(b)), "r"(n)); }
#define TEST(name, text, type, kind) __device__ bool name(word* b, type x) { unsigned done; \
  asm volatile("{ .reg .pred p; mbarrier." text "; selp.u32 %0, 1, 0, p; }" \
               : "=r"(done) : "r"(at(b)), kind(x) : "memory"); return done; }
TEST(test, "test_wait.shared.b64 p, [%1], %2", word, "l")
TEST(test_parity, "test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2", unsigned, "r")
TEST(try_wait, "try_wait.shared.b64 p, [%1], %2", word, "l")
TEST(try_parity, "try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2, 1000", unsigned, "r")
__device__ unsigned pending(word token) {
  unsigned n; asm("mbarrier.pending_count.b64 %0, %1;" : "=r"(n) : "l"(token)); return n; }
"""

# State of an mbarrier in shared memory after these operations, as a GPU of compute capability 12.0 shows it.
WORDS = {
    "init(b, 1);": 0x7FFFF800001FFFFE,
    "init(b, 3);": 0x7FFFE800001FFFFA,
    "init(b, 3); arrive(b);": 0x7FFFF000001FFFFA,
    "init(b, 3); drop(b);": 0x7FFFF000001FFFFC,
    "init(b, 3); expect(b, 64);": 0x7FFFEBFFF81FFFFA,
    "init(b, 3); expect(b, 0x12345);": 0x7FFFEBDB977FFFFA,
    "init(b, 2); arrive(b); arrive(b);": 0xFFFFF000001FFFFC,
}


def in_one_thread(body, **settings):
    """Run statements about `b`, an mbarrier's place, in one thread: what they leave in `out`."""
    out = poisoned(2, np.uint64)
    source = f"""{HELPERS}
extern "C" __global__ void kernel(word* out) {{
  __shared__ word b[4];
  {body}
}}"""
    launch(source, 1, 1, out, arch="sm_90", **settings)
    return out


def test_the_word_is_that_of_a_gpu():
    found = {
        operations: int(in_one_thread(f"{operations} inval(b); out[0] = *(volatile word*)b;")[0])
        for operations in WORDS
    }
    assert found == WORDS


# -- any sequence of operations -------------------------------------------------------------------------------
INTERPRETER = (
    HELPERS
    + r"""
extern "C" __global__ void interpreter(const int2* program, int steps, int count, unsigned* seen) {
  __shared__ word barrier;
  word *b = &barrier, token = 0;
  init(b, count);
  for (int i = 0; i < steps; i++) {
    unsigned n = program[i].y;
    switch (program[i].x) {
      case 0: token = arrive(b, n); break;
      case 1: token = drop(b, n); break;
      case 2: token = arrive_expect(b, n); break;
      case 3: token = drop_expect(b, n); break;
      case 4: token = arrive_no_complete(b, n); break;
      case 5: token = drop_no_complete(b, n); break;
      case 6: expect(b, n); break;
      case 7: complete(b, n); break;
      case 8: token = arrive_once(b); break;
    }
    seen[3 * i] = pending(token);
    seen[3 * i + 1] = test(b, token) + 2 * test_parity(b, 0) + 4 * test_parity(b, 1);
    seen[3 * i + 2] = try_wait(b, token) + 2 * try_parity(b, 2) + 4 * try_parity(b, 1);
  }
}"""
)


class Model:
    """The ISA's description of phases: tx-count, pending and expected arrivals."""

    def __init__(self, count):
        self.expected = self.pending = count
        self.phase = self.transactions = 0

    def arrive(self, count):
        self.pending -= count
        self.end_phase()

    def end_phase(self):
        if self.pending == self.transactions == 0:
            self.phase, self.pending = self.phase + 1, self.expected


def random_program(rng, count, steps=60):
    """Valid operations, and what a thread sees after each: pending count, and whether phases are complete."""
    model, program, seen = Model(count), [], []
    token = (0, 0)
    while len(program) < steps:
        code, n = int(rng.integers(9)), int(rng.integers(1, 4))
        if model.transactions > 0 and rng.random() < 0.5:
            code, n = 7, int(rng.integers(1, model.transactions + 1))
        one = code in (2, 3, 8)
        arrivals = 0 if code in (6, 7) else 1 if one else n
        drops = arrivals if code in (1, 3, 5) else 0
        if arrivals > model.pending or (drops and model.expected - drops < 2):
            continue
        if code in (4, 5) and model.pending == arrivals and model.transactions == 0:
            continue
        transactions = model.transactions + n * (code in (2, 3, 6)) - n * (code == 7)
        if model.pending == arrivals and transactions < 0:
            continue  # then nobody could arrive any more
        if arrivals:
            token = (model.phase, model.pending)
        model.transactions = transactions
        model.expected -= drops
        model.arrive(arrivals)
        program.append((code, n))
        complete = [model.phase != token[0], model.phase % 2 == 1, model.phase % 2 == 0]
        seen += [token[1], *2 * [sum(done << bit for bit, done in enumerate(complete))]]
    return program, seen, model.phase


def test_sequences_of_operations():
    phases = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(2, 20))
        program, seen, last = random_program(rng, count)
        found = poisoned(len(seen), np.uint32)
        steps = np.array(program, np.int32)
        arguments = steps, np.int32(len(program)), np.int32(count), found
        launch(INTERPRETER, 1, 1, *arguments, name="interpreter", arch="sm_90")
        np.testing.assert_array_equal(found, seen)
        phases += last
    assert phases > 10  # so that something has been tested


# -- many threads ---------------------------------------------------------------------------------------------
TOGETHER = (
    HELPERS
    + r"""
extern "C" __global__ void together(const int* which, const unsigned* counts, unsigned* before, int* phases) {
  __shared__ word b[4];
  int t = threadIdx.x;
  if (t < 4) init(&b[t], 100);
  __syncthreads();
  word token = arrive(&b[which[t]], counts[t]);
  before[t] = pending(token);
  __syncthreads();
  if (t < 4) phases[t] = test_parity(&b[t], 0);
}"""
)


@every_schedule
def test_arrivals_of_many_threads_are_one_after_another(settings):
    rng = np.random.default_rng(8)
    which, counts = rng.integers(0, 4, 96).astype(np.int32), rng.integers(1, 5, 96).astype(np.uint32)
    for b in range(3):  # three of the four phases are completed, exactly
        own = np.flatnonzero(which == b)
        counts[own[0]] += 100 - counts[own].sum() if counts[own].sum() < 100 else 0
    assert [counts[which == b].sum() for b in range(3)] == [100] * 3
    before, phases = poisoned(96, np.uint32), poisoned(4, np.int32)
    launch(TOGETHER, 1, 96, which, counts, before, phases, name="together", arch="sm_90", **settings)
    assert phases.tolist() == [1, 1, 1, 0]
    for b in range(4):
        own = np.argsort(-before[which == b].astype(int), kind="stable")
        left = 100 - np.cumsum(counts[which == b][own])
        np.testing.assert_array_equal(before[which == b][own], [100, *left[:-1]])


LANES = (
    HELPERS
    + r"""
extern "C" __global__ void lanes(const int* order, int* out) {
  __shared__ word b[32];
  __shared__ int box[32];
  int t = threadIdx.x;
  if (t < 32) init(&b[t], 1);
  __syncthreads();
  if (t < 32) {
    while (!try_parity(&b[t], 0)) { }
    out[t] = *(volatile int*)&box[t];
  } else if (t == 32) {
    for (int i = 0; i < 32; i++) {
      box[order[i]] = i;
      arrive(&b[order[i]]);
    }
  }
}"""
)


@every_schedule
def test_each_lane_waits_for_a_barrier_of_its_own(settings):
    order, out = np.random.default_rng(4).permutation(32).astype(np.int32), poisoned(32, np.int32)
    launch(LANES, 1, 64, order, out, name="lanes", arch="sm_90", **settings)
    np.testing.assert_array_equal(out[order], np.arange(32))


WORK = (
    HELPERS
    + r"""
extern "C" __global__ void work(int* turns) {
  __shared__ word b;
  __shared__ int done;
  int t = threadIdx.x;
  if (t == 0) { init(&b, 1); done = 0; }
  __syncthreads();
  if (t == WAITER) {
    int i = 0;
    while (!test_parity(&b, 0)) { atomicAdd(&done, 1); i++; }
    *turns = i;
  } else if (t == 64 - WAITER) {
    while (atomicAdd(&done, 0) < 5) { }
    arrive(&b);
  }
}"""
)


@every_schedule
@pytest.mark.parametrize("waiter", [0, 63])
def test_whoever_waits_may_work_on_what_the_other_waits_for(waiter, settings):
    turns = np.zeros(1, np.int32)
    source = WORK.replace("64 - WAITER", "63 - WAITER").replace("WAITER", str(waiter))
    launch(source, 1, 64, turns, name="work", arch="sm_90", **settings)
    assert turns[0] >= 5


@every_schedule
def test_a_bounded_wait_ends(settings):
    out = in_one_thread("init(b, 1); int i = 0; while (!test_parity(b, 0) && i < 300) i++; out[0] = i;", **settings)
    assert out[0] == 300


@every_schedule
@pytest.mark.parametrize("wait", ["while (!try_wait(b, token)) { }", "while (!test_parity(b, 0)) { }"])
def test_a_wait_without_end_is_a_deadlock(wait, settings):
    body = f"init(b, 5);\n  word token = drop(b, 2);\n  expect(b, 48);\n  {wait}\n  out[0] = 1;"
    with pytest.raises(ptxsim.Deadlock) as error:
        in_one_thread(body, **settings)
    assert f"1 thread waiting at the mbarrier of kernel.cu:{line_of(HELPERS, 'init(word')}" in str(error.value)
    assert "which lacks 3 of 3 arrivals and a tx-count of 48" in str(error.value)


STANDSTILL = (
    HELPERS
    + r"""
extern "C" __global__ void standstill(int* out) {
  __shared__ word b;
  int t = threadIdx.x;
  if (t == 0) init(&b, 2);
  __syncthreads();
  bool done = test_parity(&b, 0);
  if (t == 0) while (*(volatile int*)out == 0) { }  // loop
  if (t == 1) __syncthreads();  // barrier
  if (t > 2 && !done) return;
  while (!try_parity(&b, 0)) { }
}"""
)


@every_schedule
def test_whoever_waits_for_something_else_is_not_said_to_wait_for_a_barrier(settings):
    with pytest.raises(ptxsim.Deadlock) as error:
        launch(STANDSTILL, 1, 32, np.zeros(1, np.int32), name="standstill", arch="sm_90", **settings)
    made, called = (line_of(STANDSTILL, text) for text in ("init(word", "init(&b, 2)"))
    assert sorted(what.partition(",")[0] for _, what, _, _ in error.value.groups) == [
        "1 thread repeating a loop for ever",
        "1 thread waiting at a barrier for all others",
        f"1 thread waiting at the mbarrier of kernel.cu:{made} called at kernel.cu:{called}",
    ]


# -- what is undefined ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body, message",
    [
        ("arrive(b);", "mbarrier.arrive.shared.b64 at 0x0, where no mbarrier is"),
        ("init(b, 1); test_parity(b + 1, 0);", "at 0x8, where no mbarrier is"),
        ("init(b, 1); inval(b); arrive(b);", "at 0x0, where no mbarrier is"),
        ("inval(b + 3);", "at 0x18, where no mbarrier is"),
        ("init(b, 0);", "with a count of 0, must be 1 to 1048575"),
        ("init(b, 1 << 20);", "with a count of 1048576, must be 1 to 1048575"),
        ("init(b, 2); arrive(b, 3);", "arrives, when all have arrived that it waits for"),
        ("init(b, 1); expect(b, 4); arrive(b); arrive(b);", "arrives, when all have arrived that it waits for"),
        ("init(b, 2); arrive_no_complete(b, 2);", "completes the phase"),
        ("init(b, 1); expect(b, 1 << 19); expect(b, 1 << 19);", "a tx-count above its range"),
        ("init(b, 1); complete(b, 1 << 19); complete(b, 1 << 19);", "a tx-count below its range"),
        ("init((word*)((char*)b + 4), 1);", "misaligned"),
        ("init(b + 100, 1);", "outside its"),
    ],
)
def test_what_is_undefined_ends_the_launch(body, message):
    with pytest.raises(ptxsim.SimulationError) as error:
        in_one_thread(body)
    assert message in str(error.value) and "thread (0, 0, 0) of block (0, 0, 0)" in str(error.value)


ENDED = (
    HELPERS
    + r"""
extern "C" __global__ void ended(int* turns) {
  __shared__ word b;
  if (threadIdx.x == 40) init(&b, 1);
  __syncthreads();
  if (threadIdx.x == 0) { while (!try_parity(&b, 0)) { } }
  if (threadIdx.x == 40) {
#pragma unroll 1
    for (int i = 0; i < 300; i++) *(volatile int*)turns;
    inval(&b);
  }
}"""
)


@every_schedule
def test_whoever_waits_for_one_that_ends_is_told(settings):
    with pytest.raises(ptxsim.SimulationError, match="where no mbarrier is"):
        launch(ENDED, 1, 64, np.zeros(1, np.int32), name="ended", arch="sm_90", **settings)


def test_generic_addresses():
    body = """
      asm volatile("mbarrier.init.b64 [%0], 1;" :: "l"(b));
      asm volatile("{ .reg .b64 t; mbarrier.arrive.b64 t, [%0]; }" :: "l"(b));
      out[0] = test_parity(b, 0);"""
    assert in_one_thread(body)[0] == 1
    with pytest.raises(ptxsim.SimulationError, match="outside"):
        in_one_thread("""asm volatile("mbarrier.init.b64 [%0], 1;" :: "l"(out));""")


# -- copies that arrive ---------------------------------------------------------------------------------------
COPIES = (
    HELPERS
    + r"""
extern "C" __global__ void copies(const int4* x, int4* out, int* early) {
  __shared__ int4 box[2][64];
  __shared__ word b[2];
  int t = threadIdx.x;
  if (t == 0) { init(&b[0], 64); init(&b[1], 64); }
  for (int i = 0; i < 2; i++) box[i][t] = make_int4(-1, -1, -1, -1);
  __syncthreads();
  for (int i = 0; i < 2; i++) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(&box[i][t])), "l"(x + 64 * i + t));
    if (i == 0) asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at(&b[0])) : "memory");
    else asm volatile("cp.async.mbarrier.arrive.b64 [%0];" :: "l"(&b[1]) : "memory");
  }
  early[t] = test_parity(&b[1], 0);  // with the increment all 64 are still missing
  while (!try_parity(&b[0], 0)) { }
  out[t] = box[0][63 - t];
  arrive(&b[1]);
  while (!try_parity(&b[1], 0)) { }
  out[64 + t] = box[1][63 - t];
}"""
)


CROSSED = (
    HELPERS
    + r"""
extern "C" __global__ void crossed(const int* x, int* out) {
  __shared__ int box[8][32];
  __shared__ word b[8];
  int t = threadIdx.x % 32;
  if (threadIdx.x < 8) init(&b[threadIdx.x], 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = 7; i >= 0; i--) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(&box[i][t])), "l"(x + 32 * i + t));
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at(&b[i])) : "memory");
    }
  } else {
    while (!test_parity(&b[t % 8], 0)) { }
    for (int i = t / 8; i < 32; i += 4) out[32 * (t % 8) + i] = box[t % 8][i];
  }
}"""
)


@every_schedule
@pytest.mark.parametrize("watch", [contextlib.nullcontext, ptxsim.sanitize])
def test_arrivals_of_several_copies_that_come_together(watch, settings):
    x, out = np.arange(256, dtype=np.int32), poisoned(256, np.int32)
    with watch() as report:
        launch(CROSSED, 1, 64, x, out, name="crossed", arch="sm_90", **settings)
    np.testing.assert_array_equal(out, x)
    assert not report


@every_schedule
def test_copies_arrive_with_and_without_an_increment(settings):
    x, out = np.arange(512, dtype=np.int32).reshape(2, 64, 4), poisoned((2, 64, 4), np.int32)
    early = poisoned(64, np.int32)
    launch(COPIES, 1, 64, x, out, early, name="copies", arch="sm_90", **settings)
    np.testing.assert_array_equal(out, x[:, ::-1])
    assert not early.any()
