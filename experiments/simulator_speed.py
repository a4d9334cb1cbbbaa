"""How fast is the simulator, and what do counters and checks cost?

The forward of float16 (HEADS, SEQLEN, 64), as floating-point operations of the two matrix products by time; the same
under `profile` and `sanitize` and in worker processes; other kernels of this library on a 16th of the problem; and
scalar kernels of one warp, as time per PTX instruction that the warp executes. Peers run the same problem in the same
run: NumPy's three-step attention in float32, and Triton's interpreter where torch and triton are installed. Each time
is the best of several; run it on a machine that does nothing else.
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

from cupyflash import attention, attention_backward, ptxsim
from experiments import record

HEAD_DIM = 64
STEPS = 400  # passes of each scalar kernel's loop

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


def row(what: str, how: str, seconds: float | None, value: float, unit: str) -> dict:
    return {"what": what, "how": how, "seconds": seconds, "value": value, "unit": unit}


def forwards(heads: int, seqlen: int, repeats: int) -> list[dict]:
    """The tensor-core forward, watched and not, and its peers."""
    q, k, v = problem(heads, seqlen, HEAD_DIM)
    gflop = 4 * heads * seqlen**2 * HEAD_DIM / 1e9
    what = f"float16 forward ({heads}, {seqlen}, {HEAD_DIM})"
    ways = {
        "cupyflash": contextlib.nullcontext,
        "cupyflash, profile": ptxsim.profile,
        "cupyflash, sanitize": ptxsim.sanitize,
    }
    if sys.platform == "linux":
        ways[f"cupyflash, {os.cpu_count()} workers"] = lambda: ptxsim.settings(workers=os.cpu_count())
    found = []
    for how, around in ways.items():
        with record.timed(f"{what}, {how}"), around():
            seconds = best(lambda: attention(q, k, v), repeats)
        found.append(row(what, how, seconds, gflop / seconds, "GFLOP/s"))
    plain = found[0]["seconds"]
    for watched in found[1:3]:
        found.append(row(f"{what}, time", f"{watched['how']}, over plain", None, watched["seconds"] / plain, "times"))
    seconds = best(lambda: three_steps(q, k, v), repeats)
    found.append(row(what, "NumPy, three steps in float32", seconds, gflop / seconds, "GFLOP/s"))
    if all(importlib.util.find_spec(name) for name in ("torch", "triton")):
        with record.timed(f"{what}, Triton's interpreter"):
            seconds = triton_seconds(heads, seqlen)
        found.append(row(what, "Triton's interpreter", seconds, gflop / seconds, "GFLOP/s"))
    return found


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


def other_kernels(heads: int, seqlen: int, repeats: int) -> list[dict]:
    """Kernels of multiply-adds, and backwards."""
    found = []
    for dtype in (np.float16, np.float32, np.float64):
        q, k, v = problem(heads, seqlen, HEAD_DIM, dtype)
        out, lse = attention(q, k, v, return_lse=True)
        forward = functools.partial(attention, q, k, v)
        backward = functools.partial(attention_backward, q, q, k, v, out, lse)
        for name, call, products in (("forward", forward, 2), ("backward", backward, 7)):
            what = f"{np.dtype(dtype).name} {name} ({heads}, {seqlen}, {HEAD_DIM})"
            with record.timed(what):
                seconds = best(call, repeats)
            gflop = 2 * products * heads * seqlen**2 * HEAD_DIM / 1e9
            found.append(row(what, "cupyflash", seconds, gflop / seconds, "GFLOP/s"))
    return found


def scalar_kernels(repeats: int) -> list[dict]:
    """Time per instruction of one warp."""
    module = ptxsim.RawModule(code=SCALAR)
    found = []
    for name, dtype in SCALAR_TYPES.items():
        kernel = module.get_function(name)
        a = (np.arange(32) * 37 % 101).astype(dtype)
        arguments = (a, np.zeros_like(a), np.int32(STEPS))
        with ptxsim.profile() as counted:
            kernel((1,), (32,), arguments)
        instructions = counted.kernels[0].warp_instructions
        seconds = best(functools.partial(kernel, (1,), (32,), arguments), repeats)
        found.append(row(f"scalar kernel, {name}", "cupyflash", seconds, 1e6 * seconds / instructions, "us a step"))
    return found


def peak_memory(heads: int, seqlen: int) -> dict:
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


def draw(axes, found: list[dict]) -> None:
    """Bars of the rates, peers in the colours of what they are."""
    shown = [r for r in found if r["unit"] == "GFLOP/s"][::-1]
    for place, r in enumerate(shown):
        ours = r["how"].startswith("cupyflash")
        axes.barh(place, r["value"], color=record.OURS if ours else record.EXTRA)
        axes.annotate(f"{r['value']:.3g}", (r["value"], place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), [f"{r['what']}: {r['how']}" for r in shown], fontsize=9)
    axes.set_xscale("log")
    axes.set_xlabel("GFLOP/s")
    axes.set_title("Speed of the simulator on a CPU, and of its peers", loc="left")
    axes.grid(axis="y", visible=False)


def main() -> None:
    quick = {"heads": [1], "seqlens": [128], "repeats": [1]}
    args = record.arguments(__doc__, quick=quick, heads=[8], seqlens=[1024], repeats=[5])
    found = []
    for heads in args.heads:
        for seqlen in args.seqlens:
            found += forwards(heads, seqlen, args.repeats[0])
            found += other_kernels(max(heads // 4, 1), max(seqlen // 4, 64), args.repeats[0])
            found.append(peak_memory(heads, seqlen))
    found += scalar_kernels(args.repeats[0])
    for r in found:
        print(f"{r['value']:10.3g} {r['unit']:<10} {r['what']}: {r['how']}")
    record.write_csv(args.results / "simulator_speed.csv", found)
    with record.figure(args.results / "simulator_speed.png", size=(10.0, 4.5)) as axes:
        draw(axes, found)


if __name__ == "__main__":
    main()
