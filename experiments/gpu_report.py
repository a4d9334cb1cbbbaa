"""Everything that a GPU owner should run once: ``python -m experiments.gpu_report``, at most nine minutes.

Simulator against hardware, tests, and times beside other libraries, in small tables under experiments/results/gpu, in a
folder of the card's name; the first columns say card, driver and date. They are meant to be committed. What is not done
in time, or was interrupted, is done by a second start: finished steps are skipped as long as driver and code are the
same. A step that fails is recorded, and the others go on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.experiment import Row
from experiments.gpu import card, steps, tables
from experiments.gpu.contenders import contenders
from experiments.gpu.hardware import COMPARISONS
from experiments.gpu.problems import DIRECTIONS
from experiments.gpu.speed import HEAD_DIMS
from experiments.gpu.steps import DONE, Step

SECONDS = 540
CARD, STEPS = "card.csv", "steps.csv"
_SAME = ("driver", "nvrtc", "code")  # or else everything is done again


def report_steps(folder: Path) -> list[Step]:
    """The most important first."""

    def step(seconds: float, module: str, table: str, *arguments: str) -> Step:
        command = ("-m", f"experiments.gpu.{module}", *arguments, "--out", str(folder / f"{table}.csv"))
        return Step(table, command, seconds)

    compared = [
        step(40 if what == "instructions" else 150, "hardware", f"hardware_{what}", what) for what in COMPARISONS
    ]
    first, *others = sorted(HEAD_DIMS, key=lambda head_dim: head_dim != 128)
    speeds = [
        step(75, "speed", f"speed_{direction}_{head_dim}", direction, "--head-dim", str(head_dim))
        for head_dim in (first, *others)
        for direction in DIRECTIONS
    ]
    return [
        *compared,
        step(120, "suite", "tests_first", "first"),
        *speeds[:2],
        step(60, "decode", "decode"),
        *speeds[2:],
        step(60, "memory", "memory"),
        step(30, "launches", "launches"),
        Step("figures", ("-m", "experiments.gpu.figures", str(folder)), 30),
        step(300, "suite", "tests_rest", "rest"),
    ]


def card_row() -> Row:
    """What is known of the card beside the first columns, and what else is installed that takes part."""
    properties = card.properties()
    return {
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "l2_bytes": properties["l2CacheSize"],
        **{name.replace(".", "_"): value for name, value in card.state().items() if name != "driver_version"},
        "contenders": "; ".join(contenders()),
    }


def earlier_rows(path: Path) -> Sequence[Row]:
    """Of an earlier start with this driver, compiler and code."""
    try:
        rows, environment = tables.read(path)
    except (OSError, ValueError):
        return []
    return rows if all(environment[name] == card.environment()[name] for name in _SAME) else []


def main(arguments: list[str] | None = None) -> int:
    """The status is 1 where a step failed or is left, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tables.RESULTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default %(default)s")
    args = parser.parse_args(arguments)
    try:
        environment = card.environment()
    except card.NoGpu as error:
        print(f"{error}: nothing to report", file=sys.stderr)
        return tables.NO_GPU
    folder = tables.folder(args.out.resolve(), environment["card"])
    folder.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{name} {value}" for name, value in environment.items()), flush=True)
    tables.write(folder / CARD, [card_row()])
    path = folder / STEPS
    rows = steps.run(report_steps(folder), earlier_rows(path), args.seconds, lambda rows: tables.write(path, rows))
    left = [row for row in rows if row["outcome"] != DONE]
    print(f"{len(rows) - len(left)} of {len(rows)} steps done; results in {folder}")
    if left:
        print("\n".join(f"  {row['step']}: {row['outcome']} {row['said'] or ''}".rstrip() for row in left))
        print("the same command goes on with these")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
