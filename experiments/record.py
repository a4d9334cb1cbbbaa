"""What every experiment writes: a CSV that says where it comes from, and a figure in one style."""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cupyflash

RESULTS = Path(__file__).parent / "results"

STANDARD, OURS, EXTRA = "#b8442f", "#1f6f8b", "#7a7a7a"  # colours: the standard method, cupyflash, all else

_STYLE = {
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "font.size": 11,
    "savefig.dpi": 150,
}


def arguments(
    description: str, *, quick: Mapping[str, list[int]] | None = None, **sizes: list[int]
) -> argparse.Namespace:
    """Parse the command line: lists of sizes with their defaults, smaller ones for ``--quick``, and where to write."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in sizes.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, nargs="+", default=default, metavar="N", help=f"default {default}"
        )
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=f"small sizes instead: {quick}")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"directory to write to, default {RESULTS}")
    args = parser.parse_args()
    if quick is not None and args.quick:
        vars(args).update(quick)
    args.results.mkdir(parents=True, exist_ok=True)
    return args


def nvrtc_version() -> str:
    """Version of the compiler in use."""
    from cupy_backends.cuda.libs import nvrtc

    return ".".join(str(part) for part in nvrtc.getVersion())


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of one set of columns, below comments on date, machine, versions and command.

    ``pandas.read_csv(path, comment="#")`` reads it.
    """
    rows = list(rows)
    command = f"python -m experiments.{path.stem} {' '.join(sys.argv[1:])}".rstrip()
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(f"# date: {datetime.date.today().isoformat()}\n")
        file.write(f"# machine: {platform.platform()}, {platform.machine()}, {os.cpu_count()} cores\n")
        file.write(
            f"# Python {platform.python_version()}, NVRTC {nvrtc_version()}, cupyflash {cupyflash.__version__}\n"
        )
        file.write(f"# command: {command}\n")
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
        )
    print(f"wrote {path}")


@contextlib.contextmanager
def figure(path: Path, *shape: int, size: tuple[float, float], **options) -> Iterator[Any]:
    """A new figure and its axes (``matplotlib.pyplot.subplots``), saved to ``path`` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        new, axes = pyplot.subplots(*shape, figsize=size, layout="constrained", **options)
        yield axes
        new.savefig(path)
        pyplot.close(new)
    print(f"wrote {path}")


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what is being done and how long it took."""
    print(f"{what} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s")
