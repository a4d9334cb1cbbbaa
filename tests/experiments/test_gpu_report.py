"""What a GPU owner runs: steps within a time, a second start, failures, tables and figures; nothing without a GPU."""

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
import types

import pytest

from experiments import gpu_report, record
from experiments.gpu import card, decode, figures, hardware, launches, memory, speed, steps, suite, tables
from experiments.gpu.contenders import OURS
from experiments.gpu.problems import BACKWARD, FORWARD, Shape
from experiments.gpu.steps import DONE, FAILED, NOT_BEGUN, OUT_OF_TIME, Ended, Step
from experiments.gpu.stopwatch import Times
from tests.experiments.fake_gpu import FakeCupy
from tests.experiments.running import PNG

THREE = [Step(name, ("-c", f"print('{name}')"), 10) for name in ("first", "second", "third")]


class Machine:
    """A clock, and steps that take the seconds and end as they are told; ``KeyboardInterrupt`` where no seconds are."""

    def __init__(self, **seconds):
        self.now, self.seconds, self.ran, self.endings, self.written = 0.0, seconds, [], {}, []

    def clock(self):
        return self.now

    def execute(self, step, limit):
        self.ran.append((step.name, limit))
        seconds = self.seconds.get(step.name)
        if seconds is None:
            raise KeyboardInterrupt
        self.now += min(seconds, limit)
        return Ended(OUT_OF_TIME) if seconds > limit else self.endings.get(step.name, Ended(DONE, "fine"))

    def run(self, seconds, earlier=()):
        self.ran.clear()
        return steps.run(
            THREE, earlier, seconds, lambda rows: self.written.append([dict(row) for row in rows]),
            clock=self.clock, execute=self.execute,
        )  # fmt: skip


def outcomes(rows):
    return [row["outcome"] for row in rows]


def test_all_steps_are_done_in_order():
    machine = Machine(first=3, second=4, third=5)
    rows = machine.run(100)
    assert machine.ran == [("first", 10), ("second", 10), ("third", 10)]
    assert outcomes(rows) == [DONE] * 3 and [row["seconds"] for row in rows] == [3, 4, 5]
    assert [outcomes(x) for x in machine.written[:2]] == [[DONE, NOT_BEGUN, NOT_BEGUN], [DONE, DONE, NOT_BEGUN]]


def test_an_interrupted_report_goes_on_where_it_was():
    machine = Machine(first=3, second=4)
    with pytest.raises(KeyboardInterrupt):
        machine.run(100)
    earlier = machine.written[-1]
    assert outcomes(earlier) == [DONE, DONE, NOT_BEGUN]
    machine.seconds["third"] = 5
    assert outcomes(machine.run(100, earlier)) == [DONE] * 3
    assert machine.ran == [("third", 10)]
    assert outcomes(machine.run(100, machine.written[-1])) == [DONE] * 3 and not machine.ran


def test_a_step_that_fails_is_recorded_and_the_others_go_on(capsys):
    machine = Machine(first=3, second=4, third=5)
    machine.endings["second"] = Ended(FAILED, "Traceback\nRuntimeError: no")
    rows = machine.run(100)
    assert outcomes(rows) == [DONE, FAILED, DONE] and rows[1]["said"] == "RuntimeError: no"
    assert "    RuntimeError: no" in capsys.readouterr().out
    del machine.endings["second"]
    assert outcomes(machine.run(100, rows)) == [DONE] * 3 and machine.ran == [("second", 10)]


def test_when_time_is_up():
    machine = Machine(first=6, second=8, third=1)
    rows = machine.run(13)
    assert machine.ran == [("first", 10), ("second", 7)] and outcomes(rows) == [DONE, OUT_OF_TIME, NOT_BEGUN]
    machine.seconds["second"] = 2
    assert outcomes(machine.run(13, rows)) == [DONE] * 3
    assert [name for name, _ in machine.ran] == ["third", "second"]  # what was never begun first


def test_a_step_is_not_begun_with_too_little_left():
    machine = Machine(first=9, second=1, third=1)
    assert outcomes(machine.run(12)) == [DONE, NOT_BEGUN, NOT_BEGUN]
    assert machine.now == 9
    assert outcomes(machine.run(0)) == [NOT_BEGUN] * 3 and not machine.ran


def test_rows_of_steps_that_are_no_more_are_dropped():
    machine = Machine(first=1, second=1, third=1)
    old = {"step": "zeroth", "outcome": DONE, "seconds": 1.0, "said": ""}
    assert [row["step"] for row in machine.run(100, [old])] == ["first", "second", "third"]


# Processes


def test_a_step_is_a_process():
    done = steps.execute(Step("x", ("-c", "import os; print(os.getcwd()); print('last')"), 60), 60)
    assert done == Ended(DONE, f"{steps.ROOT}\nlast")
    failed = steps.execute(Step("x", ("-c", "raise ValueError('no')"), 60), 60)
    assert failed.outcome == FAILED and failed.said.endswith("ValueError: no")
    killed = steps.execute(Step("x", ("-c", "import os; os.kill(os.getpid(), 11)"), 60), 60)
    assert killed.outcome == FAILED


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(other.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n"
    )
    begin = time.monotonic()
    ended = steps.execute(Step("x", ("-c", code), 5), 5)
    assert ended == Ended(OUT_OF_TIME, "begun") and time.monotonic() - begin < 60
    state = ended_state(int(child.read_text()))
    assert state is None or state == "Z"  # nobody may have asked how it ended


def ended_state(pid):
    """Of a process, once it is gone or waits to be asked for."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            return None
        if state == "Z":
            return state
        time.sleep(0.05)
    return state


def test_a_killed_report_leaves_what_it_has_done(tmp_path):
    """By a signal that nothing can catch, in the third step."""
    written = tmp_path / "steps.csv"
    code = f"""
import os, signal
from pathlib import Path
from experiments import record
from experiments.gpu import steps
from experiments.gpu.steps import DONE, Ended, Step
def execute(step, limit):
    if step.name == "c":
        os.kill(os.getpid(), signal.SIGKILL)
    return Ended(DONE)
steps.run([Step(x, (), 1) for x in "abc"], [], 9, lambda rows: record.write_csv(Path({str(written)!r}), rows,
          {{"card": "x"}}), execute=execute)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=steps.ROOT, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    assert outcomes(record.read_csv(written, ("card",))[0]) == [DONE, DONE, NOT_BEGUN]
    assert os.listdir(tmp_path) == ["steps.csv"]


# The card


ENVIRONMENT = dict(zip(card.COLUMNS, ("NVIDIA Fake 1", "580.65.06", "2026-11-30", "sm_80", *"abcdefgh"), strict=True))


@pytest.fixture
def with_card(monkeypatch):
    """A card, as far as tables and steps need one."""
    monkeypatch.setattr(card, "environment", lambda: dict(ENVIRONMENT))
    monkeypatch.setattr(card, "usable_cupy", lambda: None)
    monkeypatch.setattr(card, "state", lambda: dict.fromkeys(card._STATE))
    properties = {"multiProcessorCount": 108, "totalGlobalMem": 2**35, "l2CacheSize": 2**25}
    monkeypatch.setattr(card, "properties", lambda: properties)


@pytest.fixture
def without_gpu(monkeypatch):
    def none():
        raise card.NoGpu("CuPy finds no usable GPU (cudaErrorNoDevice)")

    monkeypatch.setattr(card, "usable_cupy", none)
    card.environment.cache_clear()


COMMANDS = [
    (gpu_report.main, []),
    (hardware.main, ["kernels"]),
    (suite.main, ["first"]),
    (speed.main, [FORWARD]),
    (decode.main, []),
    (memory.main, []),
    (launches.main, []),
]


@pytest.mark.parametrize(("main", "arguments"), COMMANDS, ids=lambda x: getattr(x, "__module__", ""))
def test_without_a_gpu_there_is_one_line_and_nothing_is_written(main, arguments, without_gpu, tmp_path, capsys):
    out = tmp_path / "results" / "x"
    assert main([*arguments, "--out", str(out)]) == tables.NO_GPU
    said = capsys.readouterr()
    assert said.err.startswith("CuPy finds no usable GPU (cudaErrorNoDevice)") and said.err.count("\n") == 1
    assert said.out == "" and not list(tmp_path.iterdir())


def test_why_cupy_has_no_gpu(monkeypatch):
    def no_driver():
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient\nmore")

    card.usable_cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(Device=no_driver)))
    with pytest.raises(card.NoGpu, match=r"^CuPy finds no usable GPU \(cudaErrorInsufficientDriver: [^\n]*\)$"):
        card.usable_cupy()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(card.NoGpu, match="cupy"):
        card.usable_cupy()


def test_the_first_columns(monkeypatch):
    cupy = FakeCupy(arch="sm_90")
    monkeypatch.setattr(card, "usable_cupy", lambda: cupy)
    monkeypatch.setattr(card, "state", lambda: {"driver_version": "580.65.06"})
    card.environment.cache_clear()
    found = card.environment()
    card.environment.cache_clear()
    assert tuple(found)[:3] == ("card", "driver", "date") and tuple(found) == card.COLUMNS
    assert [found[name] for name in ("card", "driver", "arch", "cuda")] == [
        "NVIDIA Fake 1",
        "580.65.06",
        "sm_90",
        "13.0",
    ]
    assert len(found["code"]) == 8 and all(found.values())


def test_cupy_has_what_the_fakes_have():
    """Names and parameters, without a GPU."""
    cupy = pytest.importorskip("cupy")
    for arguments in {"code": "", "options": ("-std=c++17",)}, {"path": "kernel.ptx"}:
        cupy.RawModule(**arguments)  # loads nothing
    of_cuda = "Device Event get_elapsed_time get_current_stream runtime.getDeviceProperties runtime.driverGetVersion"
    of_cupy = "empty asarray copyto matmul exp where arange get_default_memory_pool"
    for module, names in (
        (cupy.cuda, of_cuda),
        (cupy, of_cupy),
        (cupy.ndarray, "set get fill data reshape swapaxes max sum astype"),
        (cupy.cuda.Device, "compute_capability pci_bus_id synchronize id"),
        (cupy.cuda.Event, "record synchronize"),
        (cupy.cuda.MemoryPool, "used_bytes total_bytes free_all_blocks"),
    ):
        for name in names.split():
            assert functools.reduce(getattr, name.split("."), module) is not None, name


def test_what_nvidia_smi_says(monkeypatch):
    assert set(card.parsed_state("a, b").values()) == {None}
    found = card.parsed_state("580.1, 1980 MHz, [N/A], [Unknown Error], 31, Enabled\n")
    assert found["driver_version"] == "580.1" and found["clocks.max.mem"] is found["power.limit"] is None


def test_results_of_other_code_are_not_mixed(tmp_path):
    for name in "kernels_cu", "cupyflash":
        (tmp_path / name).mkdir()
    kernel, module = tmp_path / "kernels_cu" / "a.cu", tmp_path / "cupyflash" / "a.py"
    kernel.write_text("1")
    module.write_text("2")
    digests = [card.code_digest(tmp_path)]
    for change in (lambda: kernel.write_text("3"), lambda: module.write_text("3"), lambda: kernel.rename(f"{kernel}h")):
        change()
        digests.append(card.code_digest(tmp_path))
    assert len(set(digests)) == 4


# The report


def test_a_report_in_two_starts(with_card, monkeypatch, tmp_path, capsys):
    ran, failing = [], {"decode"}

    def execute(step, limit):
        ran.append(step.name)
        return Ended(FAILED, "RuntimeError: no") if step.name in failing else Ended(DONE)

    real = steps.run
    monkeypatch.setattr(gpu_report.steps, "run", lambda *args: real(*args, clock=lambda: 0.0, execute=execute))
    assert gpu_report.main(["--out", str(tmp_path)]) == 1
    names = [step.name for step in gpu_report.report_steps(tmp_path)]
    assert ran == names and names[:3] == ["hardware_instructions", "hardware_kernels", "tests_first"]
    assert "decode: failed RuntimeError: no\nthe same command goes on" in capsys.readouterr().out
    folder = tmp_path / "nvidia-fake-1"
    assert sorted(path.name for path in folder.iterdir()) == ["card.csv", "steps.csv"]
    for path in folder.iterdir():
        assert path.read_text().startswith("card,driver,date,")
    assert tables.read(folder / "card.csv")[0][0]["multiprocessors"] == 108

    ran.clear()
    failing.clear()
    assert gpu_report.main(["--out", str(tmp_path)]) == 0 and ran == ["decode"]
    ran.clear()
    assert gpu_report.main(["--out", str(tmp_path)]) == 0 and ran == []
    monkeypatch.setitem(ENVIRONMENT, "code", "other")
    assert gpu_report.main(["--out", str(tmp_path)]) == 0 and ran == names


def test_a_damaged_table_of_steps_is_as_none(with_card, tmp_path):
    path = tmp_path / "steps.csv"
    assert gpu_report.earlier_rows(path) == []
    path.write_bytes(b"\xff,\n")
    assert gpu_report.earlier_rows(path) == []


def test_every_step_is_a_command_that_its_module_takes(monkeypatch, without_gpu, capsys):
    """Arguments that it does not know would end it with a message of its own."""
    mains = {"hardware": hardware.main, "suite": suite.main, "speed": speed.main, "decode": decode.main,
             "memory": memory.main, "launches": launches.main, "figures": figures.main}  # fmt: skip
    for step in gpu_report.report_steps(steps.ROOT / "nowhere"):
        flag, module, *arguments = step.arguments
        assert flag == "-m" and mains[module.rpartition(".")[2]](arguments) in (1, tables.NO_GPU)
    assert "usage" not in capsys.readouterr().err


# Tests of the library on the GPU


JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites>
<testsuite name="pytest" errors="1" failures="1" skipped="2" tests="9" time="3.5">
<testcase name="test_a[x]"><failure message="no">assert</failure></testcase><testcase name="test_b"/>
<testcase name="test_c"><error message="no"/></testcase></testsuite></testsuites>"""


def test_a_row_of_what_pytest_says():
    row = suite.of_report("test_x", JUNIT)
    assert [row[name] for name in suite.COUNTS] == [9, 1, 1, 2]
    assert (row["seconds"], row["failing"], row["error"]) == (3.5, "test_a[x] test_c", "")
    assert not suite.passed(row) and suite.passed({**row, "failures": 0, "errors": 0})
    assert suite.summary([row]) == "  test_x: test_a[x] test_c\n1 files, 5 tests passed, 2 failed"


def test_files_are_those_that_use_the_backend():
    first, rest = suite.files("first"), suite.files("rest")
    assert tuple(first) == suite.FIRST and not set(first) & set(rest)
    assert "test_variants" in rest and "test_config" not in rest
    for name in first + rest:
        assert (steps.ROOT / "tests" / f"{name}.py").exists()


def test_a_run_without_a_gpu_is_a_row():
    """pytest ends before any test, and says why."""
    try:
        card.usable_cupy()
        pytest.skip("there is a GPU")
    except card.NoGpu:
        row = suite.run("test_corners")
    assert row["tests"] == 0 and "no usable GPU" in row["error"] and not suite.passed(row)


def test_only_tests_that_are_given_the_backend_are_run():
    left_out = []
    config = types.SimpleNamespace(hook=types.SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)))
    items = [types.SimpleNamespace(fixturenames=names) for names in (["backend", "arch"], ["tmp_path"])]
    items.append(types.SimpleNamespace())  # a doctest
    given = list(items)
    suite.pytest_collection_modifyitems(config, items)
    assert items == given[:1] and left_out == given[1:]


# Figures


def speed_rows(direction, head_dim):
    for seqlen in 512, 1024:
        for causal in False, True:
            shape = Shape(1, 2, 2, seqlen, seqlen, head_dim, causal)
            times = {speed.MATMUL: Times((1.0,)), OURS: Times((2.0, 3.0)), "other": Times(error="out of memory")}
            yield from speed.rows(shape, direction, times, {}, 1e12)


def test_figures_of_what_there_is(with_card, tmp_path, capsys, monkeypatch):
    assert figures.main([str(tmp_path)]) == 1 and capsys.readouterr().out == f"{tmp_path}: no tables\n"
    nowhere = tmp_path / "nowhere"
    assert figures.main([str(nowhere)]) == 1 and capsys.readouterr().out == f"{nowhere}: no such folder\n"
    monkeypatch.setattr(tables, "RESULTS", nowhere)
    assert figures.main([]) == 1 and capsys.readouterr().out == f"no tables under {nowhere}\n"
    for direction, head_dim in (FORWARD, 64), (FORWARD, 128), (BACKWARD, 256):
        tables.write(tmp_path / f"speed_{direction}_{head_dim}.csv", list(speed_rows(direction, head_dim)))
    times = {decode.COPY: Times((1.0,)), OURS: Times((2.0,))}
    rows = [row for n in (1, 8) for row in decode.rows(decode.shape_of(n, 4096, "float16"), times, {}, 10**9)]
    tables.write(tmp_path / "decode.csv", rows)
    memory_rows = [
        {"direction": direction, "head_dim": 128, "heads": 16, "seqlen": seqlen, "what": OURS,
         "kept_from_forward_bytes": kept, "call_bytes": kept, "error": ""}
        for direction in (FORWARD, BACKWARD) for seqlen, kept in ((512, 1000), (1024, None))
    ]  # fmt: skip
    tables.write(tmp_path / "memory.csv", memory_rows)
    assert figures.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(": speed_forward, speed_backward, decode, memory\n")
    drawn = {path.name for path in tmp_path.iterdir() if path.suffix != ".csv"}
    assert drawn == {f"{name}.{suffix}" for name in figures.FIGURES for suffix in ("png", "svg")}
    assert all(path.read_bytes()[:4] == PNG for path in tmp_path.glob("*.png"))


def test_tables_are_read_as_they_were_written(with_card, tmp_path):
    rows = list(speed_rows(FORWARD, 64))
    tables.write(tmp_path / "x.csv", rows)
    read, environment = tables.read(tmp_path / "x.csv")
    assert environment == ENVIRONMENT
    assert [row["median_ms"] for row in read] == [row["median_ms"] for row in rows]
    assert {row["error"] for row in read} == {None, "out of memory"}


def test_a_command_writes_what_it_has_found_so_far(with_card, tmp_path):
    def measure(cupy, args):
        yield [{"a": 1}]
        assert tables.read(tmp_path / "new" / "x.csv")[0] == [{"a": 1}]
        yield [{"a": 2}]
        raise RuntimeError("the GPU is lost")

    with pytest.raises(RuntimeError, match="lost"):
        tables.main(argparse.ArgumentParser(), ["--out", str(tmp_path / "new" / "x.csv")], None, measure, None)
    assert tables.read(tmp_path / "new" / "x.csv")[0] == [{"a": 1}, {"a": 2}]


def test_hardware_of_a_whole_command(with_card, monkeypatch, tmp_path, capsys):
    """From the command line to the table, with the simulator in the place of the card."""
    monkeypatch.setattr(card, "usable_cupy", lambda: FakeCupy(mma="ampere"))
    monkeypatch.setattr(hardware, "INSTRUCTIONS", hardware.INSTRUCTIONS[:2])
    assert hardware.main(["instructions", "--out", str(tmp_path / "x.csv")]) == 0
    assert capsys.readouterr().out == "4 comparisons: 4 same bits, 0 documented approximation, 0 finding\n"
    rows, _ = tables.read(tmp_path / "x.csv")
    assert [row["assembled_by"] for row in rows] == ["driver", "NVRTC"] * 2
    assert (tmp_path / "x.csv").read_text().startswith("card,driver,date,")
