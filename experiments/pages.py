"""The tables of README.md and the page of figures, written from the CSVs."""

from __future__ import annotations

import importlib
from pathlib import Path

from experiments import record
from experiments.experiment import CATALOGUE, Outcome, load

FOLDER = Path(__file__).parent
README, GALLERY = FOLDER / "README.md", FOLDER / "gallery.md"
BAR = r"\|"  # a bar that does not end a cell
_BEGIN, _END = "<!-- written by python -m experiments: begin -->", "<!-- end -->"


def rewrite() -> None:
    """Both pages, from the results of all experiments."""
    before, _, rest = README.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    README.write_text(f"{before}{_BEGIN}\n\n{tables()}\n{_END}{after}", encoding="utf-8")
    GALLERY.write_text(gallery(), encoding="utf-8")


def committed_outcomes(name: str) -> list[Outcome]:
    """Of the experiment's CSV in ``results``."""
    return load(name).outcomes(record.read_csv(record.RESULTS / f"{name}.csv")[0])


def tables() -> str:
    """For each part of the catalogue a table of the experiments; then the outcomes of each."""
    parts = []
    for part, names in CATALOGUE.items():
        parts += [f"## {part}", "", "| claim | command | table | figure | outcome |", "|---|---|---|---|---|"]
        parts += [_summary(name) for name in names] + [""]
    parts += ["## Outcomes", ""]
    for names in CATALOGUE.values():
        for name in names:
            parts += _details(name)
    return "\n".join(parts)


def _summary(name: str) -> str:
    outcomes = committed_outcomes(name)
    holding = sum(outcome.holds for outcome in outcomes)
    said = "as expected" if holding == len(outcomes) else f"{holding} of {len(outcomes)} as expected"
    cells = (
        load(name).claim,
        f"`python -m experiments run {name}`",
        f"[{name}.csv](results/{name}.csv)",
        f"[png](results/{name}.png), [svg](results/{name}.svg)",
        f"[{said}](#{name})",
    )
    return f"| {' | '.join(cells)} |"


def _details(name: str) -> list[str]:
    _, environment = record.read_csv(record.RESULTS / f"{name}.csv")
    question = importlib.import_module(f"experiments.{name}").__doc__.splitlines()[0]
    versions = f"Python {environment['python']}, NumPy {environment['numpy']}, NVRTC {environment['nvrtc']}"
    lines = [
        f"### {name}",
        "",
        f"{question} ([source]({name}.py); {environment['date']}, {environment['machine']}, {versions}, backend "
        f"{environment['backend']})",
        "",
        "| what | expected | found | |",
        "|---|---|---|---|",
    ]
    for outcome in committed_outcomes(name):
        cells = outcome.what, outcome.expected, outcome.found, outcome.verdict
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return [*lines, ""]


def gallery() -> str:
    """Every figure with one sentence."""
    lines = [
        "# Gallery",
        "",
        "Each figure is drawn by `python -m experiments run NAME` from the CSV of the same name. What was expected, "
        "and what came out: [README.md](README.md).",
        "",
    ]
    for part, names in CATALOGUE.items():
        lines += [f"## {part}", ""]
        for name in names:
            lines += [f"**[{name}]({name}.py).** {load(name).caption}", "", f"![{name}](results/{name}.png)", ""]
    return "\n".join(lines)
