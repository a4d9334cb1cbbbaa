"""How fast is attention on this GPU, beside others? ``python -m experiments.gpu.speed forward|backward --head-dim 128``

FlashAttention-2's setting: 16,384 tokens in sequences of L = 512 to 16,384, and one of 32,768, hidden size 2048, hence
2048 / head_dim heads, causal or not. All that is installed takes turns, round by round, with a large matrix product of
CuPy in the same dtype, of whose TFLOP/s the others' are also given in percent; what stores all scores comes after them.
A time is the median of ten rounds (fewer where they are slow), each after a flush of the L2 cache, between events on
the GPU; two rounds before them do not count.

What fails says so in its cell, as does what was left out because it took too long for shorter sequences. The first head
of each result is compared with this library's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.experiment import Row
from experiments.gpu import card, tables
from experiments.gpu.contenders import OURS, Contender, contenders, free_memory, on_host
from experiments.gpu.problems import DIRECTIONS, Problem, Shape, normal
from experiments.gpu.stopwatch import Call, Stopwatch, Times, interleaved, reason

TOKENS, HIDDEN = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
MATMUL, MATMUL_SIZE = "CuPy matmul", 8192
TOO_SLOW = 150.0  # ms: not measured at longer sequences
AGREEMENT = 0.02  # of the largest number: some units in the last place of bfloat16


def shape_of(seqlen: int, head_dim: int, causal: bool, dtype: str) -> Shape:
    """16,384 tokens, or one longer sequence."""
    heads = HIDDEN // head_dim
    return Shape(max(TOKENS // seqlen, 1), heads, heads, seqlen, seqlen, head_dim, causal, dtype)


def measure(
    cupy: Any, direction: str, head_dim: int, dtype: str, seqlens: Sequence[int] = SEQLENS, size: int = MATMUL_SIZE
) -> Iterator[list[Row]]:
    """The rows of each length, causal or not."""
    watch, product = Stopwatch(cupy), matmul(cupy, dtype, size)
    slow: dict[tuple[str, bool], float] = {}
    for seqlen in seqlens:
        for causal in False, True:
            problem = Problem(shape_of(seqlen, head_dim, causal, dtype), cupy)
            left_out = {name: ms for (name, of), ms in slow.items() if of == causal}
            times, apart = measure_problem(watch, problem, direction, contenders(), left_out, {MATMUL: product})
            slow |= {(name, causal): x.median for name, x in times.items() if x.median and x.median > TOO_SLOW}
            yield list(rows(problem.shape, direction, times, apart, 2 * size**3))


def matmul(cupy: Any, dtype: str, size: int) -> Call:
    """A product of square matrices."""
    a, b = (cupy.asarray(normal(seed, (size, size), dtype)) for seed in range(2))
    return lambda: cupy.matmul(a, b)


def measure_problem(
    watch: Callable[[Call], float],
    problem: Problem,
    direction: str,
    known: Mapping[str, Contender],
    left_out: Mapping[str, float],
    others: Mapping[str, Call],
) -> tuple[dict[str, Times], dict[str, float]]:
    """Times of everything, and how far each result is from ours.

    What stores all scores is measured after the others and alone, and its memory given back: nobody's allocations wait
    for another's.
    """
    times = {name: Times(error=f"left out: {ms:.0f} ms for shorter sequences") for name, ms in left_out.items()}
    apart: dict[str, float] = {}
    taking_turns = [name for name, contender in known.items() if not contender.stores_scores]
    groups = [taking_turns, *([name] for name, contender in known.items() if contender.stores_scores)]
    own = None
    for group in groups:
        calls = dict(others) if group is taking_turns else {}
        for name in group:
            if name not in times:
                try:
                    calls[name] = known[name].prepare(problem, direction)
                except Exception as error:  # out of memory, no kernel for the shape: a result
                    times[name] = Times(error=reason(error))
        times |= interleaved(watch, calls)
        results = {name: _heads(call) for name, call in calls.items() if name in known and not times[name].error}
        own = own or results.get(OURS)
        apart |= {name: difference(heads, own) for name, heads in results.items() if own and heads}
        del calls
        free_memory(problem.module)
    return {name: times[name] for name in (*others, *known)}, apart


def _heads(call: Call) -> list[np.ndarray]:
    """The first head of each result; none where memory has run out since it was timed."""
    try:
        return [on_host(x) for x in call()]
    except Exception:
        return []


def difference(found: Sequence[np.ndarray], own: Sequence[np.ndarray]) -> float:
    """The largest, over the largest number of ours."""
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(found, own, strict=True))


def rows(
    shape: Shape, direction: str, times: Mapping[str, Times], apart: Mapping[str, float], matmul_flops: float
) -> Iterator[Row]:
    """Of one problem."""
    peak = _tflops(matmul_flops, times[MATMUL].median)
    own = times[OURS].median
    for name, taken in times.items():
        tflops = peak if name == MATMUL else _tflops(shape.flops(direction), taken.median)
        yield {
            "direction": direction,
            "dtype": shape.dtype,
            "head_dim": shape.head_dim,
            "causal": shape.causal,
            "seqlen": shape.seqlen_q,
            "batch": shape.batch,
            "heads": shape.heads,
            "what": name,
            **taken.columns,
            "tflops": tflops,
            "percent_of_matmul": tflops and peak and 100 * tflops / peak,
            "times_ours": taken.median and own and taken.median / own,
            **agreement(apart.get(name)),
        }


def agreement(apart: float | None) -> Row:
    """Of a result with ours."""
    return {"difference_from_ours": apart, "agrees": None if apart is None else apart <= AGREEMENT}


def _tflops(flops: float, milliseconds: float | None) -> float | None:
    return milliseconds and flops / milliseconds / 1e9


def summary(found: Sequence[Row]) -> str:
    """Our best rate, and each other's time over ours where both have one."""
    own = max((row for row in found if row["what"] == OURS), key=lambda row: row["tflops"] or 0)
    lines = [
        f"{own['direction']}, head_dim {own['head_dim']}: at most {own['tflops'] or 0:.0f} TFLOP/s, "
        f"{own['percent_of_matmul'] or 0:.0f} % of {MATMUL}, at L = {own['seqlen']} {own['error']}".rstrip()
    ]
    for name in dict.fromkeys(row["what"] for row in found if row["what"] not in (OURS, MATMUL)):
        ratios = [row["times_ours"] for row in found if row["what"] == name and row["times_ours"]]
        errors = dict.fromkeys(row["error"] for row in found if row["what"] == name and row["error"])
        said = [f"{min(ratios):.2f} to {max(ratios):.2f} times our time"] if ratios else []
        wrong = any(row["agrees"] is False for row in found if row["what"] == name)
        lines.append(f"  {name}: {'; '.join([*said, *errors, *['results differ'] * wrong])}")
    return "\n".join(lines)


def default_dtype() -> str:
    """The first that the card's tensor cores have."""
    return DTYPES[0] if int(card.environment()["arch"].removeprefix("sm_")) >= 80 else DTYPES[1]


def main(arguments: list[str] | None = None) -> int:
    """Write a row for each contender and problem."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.speed", description=__doc__.splitlines()[0])
    parser.add_argument("direction", choices=DIRECTIONS)
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=128)
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 where the card has it")
    return tables.main(
        parser,
        arguments,
        lambda args: f"speed_{args.direction}_{args.head_dim}.csv",
        lambda cupy, args: measure(cupy, args.direction, args.head_dim, args.dtype or default_dtype()),
        summary,
    )


if __name__ == "__main__":
    sys.exit(main())
