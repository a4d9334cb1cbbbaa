"""Figures of a card's tables: ``python -m experiments.gpu.figures [FOLDER ...]``, which needs no GPU.

Without folders, those of every card under experiments/results/gpu. What there is no table of is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import record
from experiments.experiment import Row
from experiments.gpu import tables
from experiments.gpu.contenders import OURS
from experiments.gpu.decode import COPY
from experiments.gpu.problems import DIRECTIONS
from experiments.gpu.speed import HEAD_DIMS, MATMUL

MARKERS = "osD^v<>pXP*h"


def draw_speed(figure: Any, rows: Sequence[Row]) -> None:
    """TFLOP/s over L; a column of panels for each head_dim, a row without and one with a causal mask."""
    head_dims = [head_dim for head_dim in HEAD_DIMS if any(row["head_dim"] == head_dim for row in rows)]
    panels = figure.subplots(2, len(head_dims), squeeze=False, sharex=True, sharey=True)
    names = [name for name in _names(rows) if name != MATMUL]
    for line, causal in zip(panels, (False, True), strict=True):
        for axes, head_dim in zip(line, head_dims, strict=True):
            here = [row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)]
            _lines(axes, here, names, "seqlen", "tflops")
            peaks = [row["tflops"] for row in here if row["what"] == MATMUL and row["tflops"]]
            if peaks:
                axes.axhline(max(peaks), color="black", linewidth=0.8, linestyle=":")
            axes.set_title(f"head_dim {head_dim}{', causal' if causal else ''}")
    for axes in panels[-1]:
        axes.set_xlabel("sequence length L")
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    shown = f"{rows[0]['direction']}, {rows[0]['dtype']}"
    figure.suptitle(f"Attention {shown}, 16,384 tokens, hidden size 2048; dotted: {MATMUL}")


def draw_decode(figure: Any, rows: Sequence[Row]) -> None:
    """Percent of the copy's bandwidth over S, for the fewest and the most queries."""
    queries = sorted({row["seqlen_q"] for row in rows})
    shown = dict.fromkeys((queries[0], queries[-1]))
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    names = [name for name in _names(rows) if name != COPY]
    for axes, seqlen_q in zip(panels, shown, strict=True):
        _lines(axes, [row for row in rows if row["seqlen_q"] == seqlen_q], names, "seqlen_k", "percent_of_copy")
        axes.set_title(f"L = {seqlen_q}")
        axes.set_xlabel("keys S")
    panels[0].set_ylabel("bytes a second, % of a copy's")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Few queries, 64 heads over 8 key heads of head_dim 128, {rows[0]['dtype']}")


def draw_memory(figure: Any, rows: Sequence[Row]) -> None:
    """Bytes beyond the inputs over L, forward and backward."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        here = [
            {**row, "mebibytes": (row["call_bytes"] + row["kept_from_forward_bytes"]) / 2**20}
            for row in rows
            if row["direction"] == direction and row["call_bytes"] is not None
        ]
        _lines(axes, here, _names(rows), "seqlen", "mebibytes")
        axes.set_yscale("log", base=4)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(direction)
        axes.set_xlabel("sequence length L")
    panels[0].set_ylabel("MiB beyond the inputs")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Device memory of a call, {rows[0]['heads']} heads of head_dim {rows[0]['head_dim']}")


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["what"] for row in rows))


def _lines(axes: Any, rows: Sequence[Row], names: Sequence[str], x: str, y: str) -> None:
    """One for each name, in the same style everywhere; ours is thicker."""
    for number, name in enumerate(names):
        points = sorted((row[x], row[y]) for row in rows if row["what"] == name and row[y] is not None)
        axes.plot(
            *(zip(*points, strict=True) if points else ([], [])),
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            linewidth=2.4 if name == OURS else 1.2,
            color=record.COLOURS[number % len(record.COLOURS)],
            label=name,
        )
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    axes.minorticks_off()


FIGURES = {  # name -> how it is drawn, size in inches, and the tables that it is drawn from
    **{f"speed_{way}": (draw_speed, (13.0, 7.5), [f"speed_{way}_{d}" for d in HEAD_DIMS]) for way in DIRECTIONS},
    "decode": (draw_decode, (11.0, 5.0), ["decode"]),
    "memory": (draw_memory, (11.0, 5.0), ["memory"]),
}


def draw(folder: Path) -> list[str]:
    """Names of the figures that were drawn in a card's folder."""
    drawn = []
    for name, (function, size, sources) in FIGURES.items():
        paths = [folder / f"{source}.csv" for source in sources]
        rows = [row for path in paths if path.exists() for row in tables.read(path)[0]]
        if rows:
            with record.figure(folder / f"{name}.csv", size) as figure:
                function(figure, rows)
            drawn.append(name)
    return drawn


def main(arguments: list[str] | None = None) -> int:
    """Draw what there are tables of; the status is 1 where there is nothing."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.figures", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    folders = parser.parse_args(arguments).folders or sorted(tables.RESULTS.glob("*/"))
    if not folders:
        print(f"no tables under {tables.RESULTS}")
    drawn = {folder: draw(folder) for folder in folders}
    for folder, names in drawn.items():
        print(f"{folder}: {', '.join(names) or ('no tables' if folder.is_dir() else 'no such folder')}")
    return int(not any(drawn.values()))


if __name__ == "__main__":
    sys.exit(main())
