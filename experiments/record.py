"""What every experiment writes: a CSV that says where it comes from, and a figure in one style."""

from __future__ import annotations

import contextlib
import csv
import datetime
import functools
import io
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash
from experiments.experiment import Row

RESULTS = Path(__file__).resolve().parent / "results"

# Colours that colour-blind readers and black-and-white prints tell apart: the standard method, cupyflash, all else.
STANDARD, OURS, EXTRA = "#b8442f", "#1f6f8b", "#7a7a7a"
COLOURS = (OURS, STANDARD, "#c79a2b", "#5b4a8a", "#3f8f5f", EXTRA, "#000000")

_STYLE = {
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "font.size": 11,
    "savefig.dpi": 150,
    "svg.hashsalt": "cupyflash",  # the same figure is the same file
}


def nvrtc_version() -> str:
    """Version of the compiler in use."""
    from cupy_backends.cuda.libs import nvrtc

    return ".".join(str(part) for part in nvrtc.getVersion())


def _processor() -> str:
    """As the system names it, where it does."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """Its processor and system."""
    return f"{_processor()} x {os.cpu_count()}, {platform.system()}"


@functools.cache
def environment(backend: str, sizes: str) -> Row:
    """The first columns of every CSV: when, where, with what, and with which sizes ("full", "quick" or as given)."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "nvrtc": nvrtc_version(),
        "cupyflash": cupyflash.__version__,
        "backend": backend,
        "sizes": sizes,
    }


def joined(environments: Sequence[Row]) -> Row:
    """One of several: in each column what they have in common, or what each has.

    >>> joined([{"python": "3.11", "numpy": "2.4"}, {"python": "3.11", "numpy": "2.5"}])
    {'python': '3.11', 'numpy': '2.4; 2.5'}
    """
    return {name: "; ".join(dict.fromkeys(row[name] for row in environments)) for name in environments[0]}


ENVIRONMENT = ("date", "machine", "python", "numpy", "nvrtc", "cupyflash", "backend", "sizes")


def write_csv(path: Path, rows: Sequence[Row], environment: Row) -> None:
    """Rows of one set of columns, each after the columns of the environment; all of them or nothing."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*environment, *rows[0]])
    writer.writeheader()
    for row in rows:
        writer.writerow({**environment, **{name: _written(value) for name, value in row.items()}})
    partial = path.with_suffix(".csv.partial")
    partial.write_text(text.getvalue(), newline="", encoding="utf-8")
    partial.replace(path)


def _written(value: Any) -> Any:
    return f"{float(value):.6g}" if isinstance(value, float | np.floating) else value


def read_csv(path: Path, columns: Sequence[str] = ENVIRONMENT) -> tuple[list[Row], Row]:
    """Rows without the columns of the environment, values as they were written; and the environment of the first.

    Raises ValueError, with the path, for what no experiment has written.
    """
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))
    if not rows or not rows[0].keys() >= {*columns} or any(None in (*row, *row.values()) for row in rows):
        raise ValueError(f"{path}: not a whole table of an experiment")
    environment = {name: rows[0][name] for name in columns}
    return [{name: _read(text) for name, text in row.items() if name not in columns} for row in rows], environment


def _read(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    for kind in int, float:
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


_WORDS = {"": None, "True": True, "False": False}


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """An empty ``matplotlib.figure.Figure``, saved as PNG and SVG beside ``path`` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        new = pyplot.figure(figsize=size, layout="constrained")
        yield new
        new.savefig(path.with_suffix(".png"))
        svg = io.StringIO()
        new.savefig(svg, format="svg", metadata={"Date": None})
        path.with_suffix(".svg").write_text(_numbered(svg.getvalue()), encoding="utf-8")
        pyplot.close(new)


def _numbered(svg: str) -> str:
    """With clip paths by number: matplotlib names them by addresses, which differ from run to run."""
    names = {name: f"clip{n}" for n, name in enumerate(dict.fromkeys(re.findall(r'"(p[0-9a-f]{10})"', svg)))}
    return re.sub(r"\bp[0-9a-f]{10}\b", lambda found: names.get(found[0], found[0]), svg)
