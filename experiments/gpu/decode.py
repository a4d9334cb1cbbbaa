"""How fast are few queries over many keys? ``python -m experiments.gpu.decode``

One sequence, 64 query heads that share 8 key heads of head_dim 128, L = 1 to 8 queries and S to 131,072 keys, no mask.
Such a call does little but read K and V: its bytes (K, V, q and out, each once) by its time, beside a copy of a large
array in the same rounds, whose bytes count twice, read and written. With ``split_size`` parts of the keys are computed
at the same time.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.experiment import Row
from experiments.gpu import tables
from experiments.gpu.contenders import OURS, Contender, contenders, ours
from experiments.gpu.problems import BACKWARD, FORWARD, Problem, Shape
from experiments.gpu.speed import agreement, default_dtype, measure_problem
from experiments.gpu.stopwatch import Stopwatch, Times

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
QUERIES = (1, 2, 4, 8)
KEYS = (4096, 16384, 32768, 65536, 131072)
SPLITS = (512, 2048)
COPY, COPY_BYTES = "copy", 2**30


def shape_of(queries: int, keys: int, dtype: str) -> Shape:
    """One sequence."""
    return Shape(1, HEADS, KV_HEADS, queries, keys, HEAD_DIM, dtype=dtype)


def least_bytes(shape: Shape) -> int:
    """q, k, v and out, each once; out is as large as dout."""
    return shape.input_bytes(BACKWARD)


def known() -> dict[str, Contender]:
    """All that is installed, and this library with split keys."""
    split = {f"{OURS}, split_size {size}": Contender(functools.partial(ours, split_size=size)) for size in SPLITS}
    found = contenders()
    return {OURS: found.pop(OURS), **split, **found}


def measure(
    cupy: Any, dtype: str, queries: Sequence[int] = QUERIES, keys: Sequence[int] = KEYS, copied: int = COPY_BYTES
) -> Iterator[list[Row]]:
    """The rows of each pair of lengths."""
    watch = Stopwatch(cupy)
    source, target = (cupy.empty(copied, np.uint8) for _ in range(2))
    source.fill(1)
    for seqlen_k in keys:
        for seqlen_q in queries:
            problem = Problem(shape_of(seqlen_q, seqlen_k, dtype), cupy)
            copy = {COPY: lambda: cupy.copyto(target, source)}
            times, apart = measure_problem(watch, problem, FORWARD, known(), {}, copy)
            yield list(rows(problem.shape, times, apart, 2 * copied))


def rows(shape: Shape, times: Mapping[str, Times], apart: Mapping[str, float], copied: int) -> Iterator[Row]:
    """Of one problem; ``copied`` is what the copy reads and writes."""
    copy, own = (times[name].median for name in (COPY, OURS))
    bandwidth = copy and copied / copy / 1e6
    for name, taken in times.items():
        gigabytes = bandwidth if name == COPY else taken.median and least_bytes(shape) / taken.median / 1e6
        yield {
            "dtype": shape.dtype,
            "seqlen_q": shape.seqlen_q,
            "seqlen_k": shape.seqlen_k,
            "what": name,
            **taken.columns,
            "gigabytes_per_second": gigabytes,
            "percent_of_copy": gigabytes and bandwidth and 100 * gigabytes / bandwidth,
            "times_ours": taken.median and own and taken.median / own,
            **agreement(apart.get(name)),
        }


def summary(found: Sequence[Row]) -> str:
    """Percent of the copy's bandwidth at the most keys, a line for each."""
    most = max(row["seqlen_k"] for row in found)
    lines = [f"bytes a second over {most} keys, percent of a copy's, for {', '.join(map(str, QUERIES))} queries:"]
    for name in dict.fromkeys(row["what"] for row in found):
        shown = [row for row in found if row["what"] == name and row["seqlen_k"] == most]
        said = [f"{row['percent_of_copy']:.0f}" if row["percent_of_copy"] else row["error"] for row in shown]
        lines.append(f"  {name}: {', '.join(said)}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Write a row for each contender and pair of lengths."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.decode", description=__doc__.splitlines()[0])
    return tables.main(
        parser, arguments, lambda args: "decode.csv", lambda cupy, args: measure(cupy, default_dtype()), summary
    )


if __name__ == "__main__":
    sys.exit(main())
