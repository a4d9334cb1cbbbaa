"""How long until the first result: import, compilation, and both again with a warm cache?

CPU seconds of processes of their own (not the time on a clock, which other programs share), the least of several. Of an
import and of a first result all that the process does counts, the interpreter's start too; a result is the forward of
float16 (64, 64) in the simulator, with the directory of compiled kernels empty or as the run before left it. Machine
code is what a GPU's owner waits for at the first call, when CuPy has none in its cache; the simulator needs PTX. NVRTC
is loaded before the kernels are timed, and both are compiled from the same source with the options that CuPy gives.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from experiments import record
from experiments.cost_table import FORWARD, KERNELS, NO_MASK, cases
from experiments.experiment import Experiment, Outcome, Row

ARCH = "sm_80"
IMPORTS = ("numpy", "cupyflash", "cupy")
START, EMPTY, WARM, AGAIN = "Python starts", "first result, empty cache", "first result, warm cache", "second result"
PTX, MACHINE_CODE, LOAD = "PTX", "machine code", "NVRTC is loaded"
FIRST_RESULT = """
import time
import numpy as np
from cupyflash import attention
q, k, v = np.random.default_rng(0).standard_normal((3, 64, 64)).astype(np.float16)
attention(q, k, v)
first = time.process_time()
attention(q, k, v)
print(first, time.process_time() - first)
"""
COMPILATION = """
import json, sys, time
from cupyflash import _launch
from cupyflash._cli.compiled import cubin
from cupyflash.ptxsim import compile_ptx
from experiments.cost_table import Case
case = Case(*json.loads(sys.argv[1]))
source, empty = case.source, 'extern "C" __global__ void empty() {}'
seconds = [time.process_time()]
for compiled in (
    lambda: cubin(empty, case.arch), lambda: compile_ptx(source, _launch.OPTIONS, case.arch),
    lambda: cubin(source, case.arch),
):
    compiled()
    seconds.append(time.process_time())
print(*(end - start for start, end in zip(seconds, seconds[1:])))
"""
MOST_SECONDS = {PTX: 0.8, MACHINE_CODE: 1.6}  # for one kernel: tenths of a second, and about a second


def run(code: str, *arguments: str, cache: str | None = None) -> list[float]:
    """Numbers that a process prints, with compiled kernels in ``cache``, or in an empty directory."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "CUPYFLASH_CACHE_DIR": cache or empty, "OPENBLAS_NUM_THREADS": "1"},
            cwd=Path(__file__).parent.parent, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    return [float(number) for number in done.stdout.split()]


def best(repeats: int, code: str, *arguments: str, cache: str | None = None) -> list[float]:
    """The least of each number."""
    return [min(numbers) for numbers in zip(*(run(code, *arguments, cache=cache) for _ in range(repeats)), strict=True)]


def measure(kernels: list[str], head_dims: list[int], repeats: int) -> list[Row]:
    """Imports and results, then kernels."""
    rows = [*starts(repeats), *results(repeats)]
    for case in tqdm(cases(kernels, head_dims, [NO_MASK], [ARCH]), unit="kernel"):
        described = json.dumps([case.kernel, case.head_dim, case.mask, case.arch])
        load, ptx, machine_code = best(repeats, COMPILATION, described)
        rows += [
            row(LOAD, load, case.kernel, case.head_dim),
            row(PTX, ptx, case.kernel, case.head_dim),
            row(MACHINE_CODE, machine_code, case.kernel, case.head_dim),
        ]
    return rows


def starts(repeats: int) -> list[Row]:
    """Python, and Python with one import."""
    end = "import time; print(time.process_time())"
    found = [row(START, *best(repeats, end))]
    for name in IMPORTS:
        if importlib.util.find_spec(name):
            found.append(row(f"import {name}", *best(repeats, f"import {name}; {end}")))
    return found


def results(repeats: int) -> list[Row]:
    """Without compiled kernels, and with those that the call before has left."""
    empty, _ = best(repeats, FIRST_RESULT)
    with tempfile.TemporaryDirectory() as cache:
        run(FIRST_RESULT, cache=cache)
        warm, again = best(repeats, FIRST_RESULT, cache=cache)
    return [row(EMPTY, empty), row(WARM, warm), row(AGAIN, again)]


def row(what: str, seconds: float, kernel: str | None = None, head_dim: int | None = None) -> Row:
    return {"what": what, "kernel": kernel, "head_dim": head_dim, "seconds": seconds}


def seconds_of(rows: list[Row], what: str) -> float:
    """Of one that no kernel belongs to."""
    (found,) = (row["seconds"] for row in rows if row["what"] == what and row["kernel"] is None)
    return found


def draw(figure, rows: list[Row]) -> None:
    """Processes at the left; at the right each kernel, compiled twice."""
    processes, kernels = figure.subplots(1, 2, width_ratios=(1, 1.2))
    whole = [row for row in rows if row["kernel"] is None]
    for place, shown in enumerate(whole):
        ours = "cupyflash" in shown["what"] or "result" in shown["what"]
        draw_bar(processes, place, shown["seconds"], record.OURS if ours else record.EXTRA)
    set_bars(processes, [row["what"] for row in whole], whole)
    processes.set_title("A process, from its start (CPU)")
    compiled = [row for row in rows if row["what"] in MOST_SECONDS]
    kinds = list(dict.fromkeys((row["kernel"], row["head_dim"]) for row in compiled))
    for what, offset, colour in (PTX, -0.2, record.OURS), (MACHINE_CODE, 0.2, record.COLOURS[2]):
        for shown in (row for row in compiled if row["what"] == what):
            draw_bar(
                kernels, kinds.index((shown["kernel"], shown["head_dim"])) + offset, shown["seconds"], colour, 0.38
            )
        kernels.barh(0, 0, color=colour, label=f"to {what}")
    set_bars(kernels, [f"{kernel.removeprefix('flash_')} {head_dim}" for kernel, head_dim in kinds], compiled)
    kernels.set_title(f"NVRTC compiles one kernel (CPU), {ARCH}")
    figure.legend(*kernels.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
    kernels.set_ylabel("kernel, head_dim")


def draw_bar(axes, place: float, seconds: float, colour: str, height: float = 0.8) -> None:
    """With its value."""
    axes.barh(place, seconds, height, color=colour)
    axes.annotate(
        f"{seconds:.2g}", (seconds, place), (4, 0), textcoords="offset points", va="center", fontsize=8
    )  # fmt: skip


def set_bars(axes, labels: list[str], rows: list[Row]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlim(right=1.2 * max(row["seconds"] for row in rows))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("CPU seconds")


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Ratios within the run, and the longest compilations."""
    start, numpy, ours = (seconds_of(rows, what) for what in (START, "import numpy", "import cupyflash"))
    empty, warm, again = (seconds_of(rows, what) for what in (EMPTY, WARM, AGAIN))
    found = [
        judge("import cupyflash over import numpy, without the interpreter", (ours - start) / (numpy - start), 4),
        judge("first result over import: warm cache", warm / ours, 5),
        judge("first result, warm cache over empty", warm / empty, 0.8),
        judge("second result over the first, warm cache", again / warm, 0.1),
    ]
    for what, most in MOST_SECONDS.items():
        slowest = max((row for row in rows if row["what"] == what), key=lambda row: row["seconds"])
        shown = f"{slowest['seconds']:.2f} ({slowest['kernel']}, head_dim {slowest['head_dim']})"
        expected = f"at most {most:g} {_WITH_ROOM}"
        longest = f"{what} of one kernel, CPU seconds of NVRTC, longest"
        found.append(Outcome(longest, expected, shown, slowest["seconds"] <= most, _MACHINE))
    ptx, code = (sum(row["seconds"] for row in rows if row["what"] == what) for what in (PTX, MACHINE_CODE))
    return [*found, judge("seconds to machine code over seconds to PTX, all kernels", code / ptx, 4)]


_WITH_ROOM = "(earlier runs, with room)"
_MACHINE = "it depends on the machine, and on what else was running"


def judge(what: str, value: float, most: float) -> Outcome:
    """Of a ratio within one run."""
    return Outcome(what, f"at most {most:g} {_WITH_ROOM}", f"{value:.2g}", value <= most, _MACHINE)


EXPERIMENT = Experiment(
    claim="A first result takes seconds at most: kernels include no CUDA header, one compiles to PTX in tenths of a "
    "second and to machine code in about one, and a second process finds it compiled",
    caption="CPU seconds until a first result with and without compiled kernels, and NVRTC's for each kernel of the "
    "tensor cores.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"kernels": [*KERNELS], "head_dims": [64, 128, 256], "repeats": 3},
    quick={"kernels": [FORWARD], "head_dims": [64], "repeats": 1},
    figure_size=(12.0, 5.0),
)
