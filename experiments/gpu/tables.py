"""Tables of a card: where they are, and how a command fills one, row by row."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments import record
from experiments.experiment import Row
from experiments.gpu import card

RESULTS = record.RESULTS / "gpu"
NO_GPU = 2  # status of a command


def folder(out: Path, name: str) -> Path:
    """Of a card's tables.

    >>> folder(Path("gpu"), "NVIDIA GeForce RTX 4090").as_posix()
    'gpu/nvidia-geforce-rtx-4090'
    """
    return out / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write(path: Path, rows: Sequence[Row]) -> None:
    """Rows after the columns of the environment."""
    record.write_csv(path, rows, card.environment())


def read(path: Path) -> tuple[list[Row], Row]:
    """Rows, and the environment of the first."""
    return record.read_csv(path, card.COLUMNS)


def main(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    name: Callable[[argparse.Namespace], str],
    measure: Callable[[Any, argparse.Namespace], Iterable[list[Row]]],
    summary: Callable[[Sequence[Row]], str],
    failed: Callable[[Sequence[Row]], bool] = lambda rows: False,
) -> int:
    """Run a command: ``measure(cupy, args)`` gives rows a few at a time, which are in the table at once.

    The status is 1 where ``failed`` says so of all rows, and 2 without a GPU.
    """
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: in the card's folder of results/gpu")
    args = parser.parse_args(arguments)
    try:
        path = args.out or folder(RESULTS, card.environment()["card"]) / name(args)
        cupy = card.usable_cupy()
    except card.NoGpu as error:
        print(error, file=sys.stderr)
        return NO_GPU
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for found in tqdm(measure(cupy, args), unit="problem"):
        rows += found
        write(path, rows)
    print(summary(rows))
    return int(failed(rows))
