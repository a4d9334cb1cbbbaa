"""How fast is the simulator, and what do counters and checks cost?

The forward of float16 (heads, seqlen, 64), as floating-point operations of the two matrix products by time; the same
under `profile` and `sanitize` and in worker processes; other kernels of this library on a quarter of the heads and of
the length; and scalar kernels of one warp, as time per PTX instruction that the warp executes. Peers run the same
problem in the same run: NumPy's three-step attention in float32, and Triton's interpreter where torch and triton are
installed. Each time is the best of several; run it on a machine that does nothing else.

Nothing is published on it: what is expected is what earlier versions took on two cores of a shared virtual machine,
with room for another machine. All kernels are real, none is emulated.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cupyflash import attention, attention_backward, ptxsim
from experiments import record
from experiments.experiment import Experiment, Outcome, Row

HEAD_DIM = 64
STEPS = 400  # passes of each scalar kernel's loop
NUMPY = "NumPy, three steps in float32"
PER_INSTRUCTION = "us per PTX instruction"

SCALAR = r"""
extern "C" __global__ void integers(const int* a, int* out, int n) {
    int x = a[threadIdx.x], s = 0;
    for (int k = 0; k < n; k++) {
        x = x * 1664525 + 1013904223; s ^= x >> (k & 15); if (x & 1) s += k; s = max(s, x - k); }
    out[threadIdx.x] = s; }
extern "C" __global__ void float32(const float* a, float* out, int n) {
    float x = a[threadIdx.x], s = 0;
    for (int k = 0; k < n; k++) { s = s * 0.5f + x; x = x * 0.75f + 0.1f; s = fmaxf(s, x) - x * x; }
    out[threadIdx.x] = s; }
extern "C" __global__ void float64(const double* a, double* out, int n) {
    double x = a[threadIdx.x], s = 0;
    for (int k = 0; k < n; k++) { s = s * 0.5 + x; x = x * 0.75 + 0.1; s = s * 0.25 - x * x; }
    out[threadIdx.x] = s; }
extern "C" __global__ void shared(const float* a, float* out, int n) {
    __shared__ float tile[32]; float s = 0;
    for (int k = 0; k < n; k++) {
        tile[threadIdx.x] = a[threadIdx.x] + s; __syncthreads();
        s += tile[(threadIdx.x + k) % 32]; __syncthreads(); }
    out[threadIdx.x] = s; }
extern "C" __global__ void divergent(const int* a, int* out, int n) {
    int x = a[threadIdx.x], s = 0;
    for (int k = 0; k < n; k++) {
        if (x >> (k & 7) & 1) { s += x * k; x += s; x ^= k * 7; s -= x; out[threadIdx.x] = x; }
        else { s ^= k; x -= k; s *= 3; out[threadIdx.x] = s; } }
    out[threadIdx.x] = s; }
"""
SCALAR_TYPES = {
    "integers": np.int32,
    "float32": np.float32,
    "float64": np.float64,
    "shared": np.float32,
    "divergent": np.int32,
}


def problem(heads: int, seqlen: int, head_dim: int, dtype=np.float16) -> list[np.ndarray]:
    """Normal q, k and v."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((heads, seqlen, head_dim)).astype(dtype) for _ in range(3)]


def three_steps(q, k, v) -> np.ndarray:
    """Scores, softmax and product, each whole and in float32."""
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2)
    scores *= np.float32(q.shape[-1] ** -0.5)
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores @ v


def best(call: Callable[[], object], repeats: int) -> float:
    """Least seconds, after one call that loads and compiles."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def row(what: str, how: str, seconds: float | None, value: float, unit: str) -> Row:
    return {"what": what, "how": how, "seconds": seconds, "value": value, "unit": unit}


def measure(heads: int, seqlen: int, repeats: int) -> list[Row]:
    """Every time, one after the other: nothing else may run."""
    few, short = max(heads // 4, 1), max(seqlen // 4, 16)
    timings = [
        *forwards(heads, seqlen, repeats),
        *peers(heads, seqlen, repeats),
        *other_kernels(few, short, repeats),
        functools.partial(peak_memory, heads, seqlen),
        *(functools.partial(scalar_kernel, name, repeats) for name in SCALAR_TYPES),
    ]
    return [timing() for timing in tqdm(timings, unit="timing")]


def forwards(heads: int, seqlen: int, repeats: int) -> list[Callable[[], Row]]:
    """The tensor-core forward, watched and not."""
    ways = {
        "cupyflash": contextlib.nullcontext,
        "cupyflash, profile": ptxsim.profile,
        "cupyflash, sanitize": ptxsim.sanitize,
    }
    if sys.platform == "linux" and os.cpu_count() > 1:
        ways[f"cupyflash, {os.cpu_count()} workers"] = lambda: ptxsim.settings(workers=os.cpu_count())
    arrays = problem(heads, seqlen, HEAD_DIM)

    def timed(how: str) -> Row:
        with ways[how]():
            return rate("float16 forward", (heads, seqlen), 2, how, best(lambda: attention(*arrays), repeats))

    return [functools.partial(timed, how) for how in ways]


def rate(kernel: str, lengths: tuple[int, int], products: int, how: str, seconds: float) -> Row:
    """A row: the floating-point operations of all matrix products by time."""
    heads, seqlen = lengths
    gflop = 2 * products * heads * seqlen**2 * HEAD_DIM / 1e9
    return row(f"{kernel} ({heads}, {seqlen}, {HEAD_DIM})", how, seconds, gflop / seconds, "GFLOP/s")


def peers(heads: int, seqlen: int, repeats: int) -> list[Callable[[], Row]]:
    """The same problem without the simulator."""
    ways = {NUMPY: lambda: best(lambda: three_steps(*problem(heads, seqlen, HEAD_DIM)), repeats)}
    if all(importlib.util.find_spec(name) for name in ("torch", "triton")):
        ways["Triton's interpreter"] = lambda: triton_seconds(heads, seqlen)
    return [lambda how=how: rate("float16 forward", (heads, seqlen), 2, how, ways[how]()) for how in ways]


def triton_seconds(heads: int, seqlen: int) -> float:
    """Seconds of the peer, whose results must be right."""
    arguments = [str(n) for n in (heads, seqlen, HEAD_DIM)]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.triton_forward", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parent.parent,
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds, difference = map(float, done.stdout.split())
    if not difference < 2e-3:
        raise RuntimeError(f"Triton's result is {difference} away from NumPy's")
    return seconds


def other_kernels(heads: int, seqlen: int, repeats: int) -> list[Callable[[], Row]]:
    """Kernels of multiply-adds, and backwards."""

    def timed(dtype, direction: str) -> Row:
        q, k, v = problem(heads, seqlen, HEAD_DIM, dtype)
        out, lse = attention(q, k, v, return_lse=True)
        forward = functools.partial(attention, q, k, v)
        backward = functools.partial(attention_backward, q, q, k, v, out, lse)
        call, products = {"forward": (forward, 2), "backward": (backward, 7)}[direction]
        kernel = f"{np.dtype(dtype).name} {direction}"
        return rate(kernel, (heads, seqlen), products, "cupyflash", best(call, repeats))

    return [
        functools.partial(timed, dtype, direction)
        for dtype in (np.float16, np.float32, np.float64)
        for direction in ("forward", "backward")
    ]


def scalar_kernel(name: str, repeats: int) -> Row:
    """Time per instruction of one warp."""
    kernel = ptxsim.RawModule(code=SCALAR).get_function(name)
    a = (np.arange(32) * 37 % 101).astype(SCALAR_TYPES[name])
    arguments = (a, np.zeros_like(a), np.int32(STEPS))
    with ptxsim.profile() as counted:
        kernel((1,), (32,), arguments)
    instructions = counted.kernels[0].warp_instructions
    seconds = best(functools.partial(kernel, (1,), (32,), arguments), repeats)
    return row(f"scalar kernel, {name}", "cupyflash", seconds, 1e6 * seconds / instructions, PER_INSTRUCTION)


def peak_memory(heads: int, seqlen: int) -> Row:
    """Largest resident set of a process that computes one forward."""
    code = f"""from cupyflash import attention
from experiments.memory import largest_resident_set
from experiments.simulator_speed import problem
attention(*problem({heads}, {seqlen}, {HEAD_DIM}))
print(largest_resident_set())"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    what = f"float16 forward ({heads}, {seqlen}, {HEAD_DIM}), memory of the process"
    return row(what, "cupyflash", None, int(done.stdout) / 2**20, "MiB")


def draw(figure, rows: list[Row]) -> None:
    """Rates at the left, those of peers in another colour; times of scalar kernels at the right."""
    rates, scalars = figure.subplots(1, 2, width_ratios=(1.4, 1))
    shown = [row for row in rows if row["unit"] == "GFLOP/s"]
    draw_bars(rates, [f"{row['what']}: {row['how']}" for row in shown], shown)
    rates.set_xscale("log")
    values = [row["value"] for row in shown]
    rates.set_xlim(min(values) / 3, 3 * max(values))
    rates.set_xlabel("GFLOP/s; grey: without the simulator")
    rates.set_title("Attention")
    shown = [row for row in rows if row["unit"] == PER_INSTRUCTION]
    draw_bars(scalars, [row["what"].removeprefix("scalar kernel, ") for row in shown], shown)
    scalars.set_xlim(right=1.25 * max(row["value"] for row in shown))
    scalars.set_xlabel("us per PTX instruction")
    scalars.set_title("Scalar kernels, one warp")


def draw_bars(axes, labels: list[str], rows: list[Row]) -> None:
    """From above, each with its value."""
    for place, row in enumerate(rows):
        axes.barh(place, row["value"], color=record.OURS if row["how"].startswith("cupyflash") else record.EXTRA)
        axes.annotate(f"{row['value']:.3g}", (row["value"], place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Rates and ratios of times."""
    forward = rows[0]["what"]
    seconds = {row["how"]: row["seconds"] for row in rows if row["what"] == forward}
    rates = {row["how"]: row["value"] for row in rows if row["what"] == forward}
    plain = seconds["cupyflash"]
    judged = [
        judge(f"{forward}, GFLOP/s", rates["cupyflash"], 2, 20),
        judge("the same under profile(), times the seconds", seconds["cupyflash, profile"] / plain, 1, 1.6),
        judge("the same under sanitize(), times the seconds", seconds["cupyflash, sanitize"] / plain, 1, 3),
    ]
    for how, taken in seconds.items():
        if how.endswith("workers"):
            workers = int(how.split()[1])
            judged.append(judge(f"the same with {workers} workers, times the speed", plain / taken, 1.25, workers))
    judged.append(judge("NumPy's three steps in float32, times the speed", plain / seconds[NUMPY], 3, 50))
    scalars = [row["value"] for row in rows if row["unit"] == PER_INSTRUCTION]
    judged += [
        judge("scalar kernels, us per PTX instruction: the fastest", min(scalars), 0.3, 3),
        judge("scalar kernels, us per PTX instruction: the slowest", max(scalars), 1, 8),
    ]
    (memory,) = (row["value"] for row in rows if row["unit"] == "MiB")
    return [*judged, judge("memory of the process of that forward, MiB", memory, 60, 200)]


def judge(what: str, value: float, least: float, most: float) -> Outcome:
    """Of a figure that depends on the machine, and on what else it does."""
    note = "it depends on the machine, on its number of cores, and on what else was running"
    expected = f"{least:g} to {most:g} (earlier runs, with room)"
    return Outcome(what, expected, f"{value:.3g}", least <= value <= most, note)


EXPERIMENT = Experiment(
    claim="What the simulator computes in a second (about 4 GFLOP/s of a float16 forward on one core), what counters, "
    "checks and worker processes change, and what NumPy and (where installed) Triton's interpreter do with the same "
    "problem in the same run",
    caption="Speed of the simulator on a CPU, watched and not, beside NumPy's three steps on the same problem.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"heads": 8, "seqlen": 1024, "repeats": 5},
    quick={"heads": 1, "seqlen": 128, "repeats": 1},
    figure_size=(12.5, 4.6),
)
