"""How much device memory does a call take beyond its inputs? ``python -m experiments.gpu.memory``

One batch of 16 heads of head_dim 128, over L, forward and backward, for all that is installed: what CuPy's memory pool
grows by during a call that begins with no free blocks, or what PyTorch's allocator reaches. The call before it has
loaded and compiled everything. Of a backward, out, lse and (for the standard method) P of its forward are inputs, and
are given apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.experiment import Row
from experiments.gpu import tables
from experiments.gpu.contenders import Contender, contenders, free_memory
from experiments.gpu.problems import DIRECTIONS, Problem, Shape
from experiments.gpu.speed import default_dtype
from experiments.gpu.stopwatch import reason

HEADS, HEAD_DIM = 16, 128
TOO_SLOW = 3.0  # seconds, two calls and their compilation: not measured for longer sequences
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def measure(cupy: Any, dtype: str, seqlens: Sequence[int] = SEQLENS) -> Iterator[list[Row]]:
    """The rows of each length."""
    slow = set()
    for seqlen in seqlens:
        shape = Shape(1, HEADS, HEADS, seqlen, seqlen, HEAD_DIM, dtype=dtype)
        found = []
        for direction in DIRECTIONS:
            for name, contender in contenders().items():
                kept, taken, error = None, None, "left out: too slow for shorter sequences"
                if (name, direction) not in slow:
                    begin = time.perf_counter()
                    try:
                        (kept, taken), error = of_call(cupy, contender, Problem(shape, cupy), direction), ""
                    except Exception as failure:  # out of memory is a result
                        error = reason(failure)
                    if time.perf_counter() - begin > TOO_SLOW:
                        slow.add((name, direction))
                free_memory(cupy)
                found.append(
                    {
                        "direction": direction,
                        "dtype": dtype,
                        "head_dim": HEAD_DIM,
                        "heads": HEADS,
                        "seqlen": seqlen,
                        "what": name,
                        "inputs_bytes": shape.input_bytes(direction),
                        "kept_from_forward_bytes": kept,
                        "call_bytes": taken,
                        "error": error,
                    }
                )
        yield found


def of_call(cupy: Any, contender: Contender, problem: Problem, direction: str) -> tuple[int, int]:
    """Bytes that the preparation keeps beyond the inputs, and that a call takes beyond both."""
    problem.load(contender.package)
    held, peak = _gauges(cupy, contender.package)
    before = held()
    call = contender.prepare(problem, direction)
    call()
    free_memory(cupy)
    results = held() - before, peak(call)
    cupy.cuda.Device().synchronize()
    return results


def _gauges(cupy: Any, package: str) -> tuple[Callable[[], int], Callable[[Callable], int]]:
    """What is held of device memory, and how much more a call reaches."""
    if package == "torch":
        import torch

        def peak_of_allocator(call):
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            return torch.cuda.max_memory_allocated() - held

        return torch.cuda.memory_allocated, peak_of_allocator
    pool = cupy.get_default_memory_pool()

    def growth_of_pool(call):
        held = pool.total_bytes()
        call()
        return pool.total_bytes() - held

    return pool.used_bytes, growth_of_pool


def summary(rows: Sequence[Row]) -> str:
    """Of the greatest length, a line for each."""
    most = max(row["seqlen"] for row in rows)
    lines = []
    for row in rows:
        if row["seqlen"] == most:
            said = row["error"] or f"{row['call_bytes'] / 2**20:.0f} MiB"
            lines.append(f"{row['direction']}, L = {most}, {row['what']}: {said}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Write a row for each contender, direction and length."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.memory", description=__doc__.splitlines()[0])
    return tables.main(
        parser, arguments, lambda args: "memory.csv", lambda cupy, args: measure(cupy, default_dtype()), summary
    )


if __name__ == "__main__":
    sys.exit(main())
