"""Each experiment runs small, and its CSV holds what experiments/README.md claims."""

import csv
import itertools
import math
import sys

import numpy as np
import pytest

from experiments import (
    bound_audit,
)

PNG = b"\x89PNG"


def run(experiment, folder, monkeypatch, *arguments, figures=("",)):
    """Run an experiment as its command does; returns the rows of the one CSV that it writes."""
    monkeypatch.setattr(sys, "argv", [experiment.__name__, *arguments, "--results", str(folder)])
    experiment.main()
    name = experiment.__name__.rpartition(".")[2]
    pictures = [f"{name}{figure}.png" for figure in figures]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.csv", *pictures]
    assert all((folder / picture).read_bytes()[:4] == PNG for picture in pictures)
    comments, rows = read(folder / f"{name}.csv")
    said = "\n".join(comments)
    assert "date: 20" in said and "cores" in said and "NVRTC 1" in said
    assert f"python -m experiments.{name} {' '.join(arguments)}" in said
    return rows


def read(path):
    """Comments and rows of a CSV."""
    lines = path.read_text().splitlines()
    comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    return comments, list(csv.DictReader(lines[len(comments) :]))


def test_bound_audit(tmp_path, monkeypatch):
    monkeypatch.setattr(bound_audit, "SEQLEN", 48)
    rows = run(bound_audit, tmp_path, monkeypatch, "--seqlens", "48", "--head-dims", "16")
    assert [(r["dtype"], r["seqlen_q"], r["seqlen_k"], r["head_dim"], r["result"], r["family"]) for r in rows] == [
        (dtype, *lengths, "16", result, family)
        for dtype in bound_audit.DTYPES
        for many, results in bound_audit.RESULTS.items()
        for lengths in [("16", "48") if many == "keys" else ("48", "16")]
        for family in bound_audit.FAMILIES
        for result in results
    ]
    for row in rows:
        if row["unbounded"] == "1":
            assert row["largest"] == row["median"] == row["row"] == row["leading_term"] == ""
        else:
            assert 0 <= float(row["median"]) <= float(row["largest"]) <= 1
            assert (row["column"] == "") == (row["result"] == "lse")
            assert 0 < float(row["its_share"]) <= 1
        if row["family"] == "normal" and row["result"] in ("out", "dv"):
            assert (row["leading_term"] == "rounding of P") == row["dtype"].endswith("float16")
    normal = [float(row["largest"]) for row in rows if row["family"] == "normal" and row["dtype"].endswith("float16")]
    assert min(normal) > 1e-3  # errors are not compared with themselves


def test_bound_audit_finds_the_largest_ratio():
    exact, bound = np.zeros((2, 3)), np.array([[1.0, 4, np.inf], [2, 0, 1]])
    found = np.array([[0.5, -3, np.nan], [-1, 0, 0]])
    assert bound_audit.summary(found, exact, bound) == pytest.approx(
        {"largest": 0.75, "median": 0.5, "unbounded": 1 / 6, "row": 0, "column": 1}
    )
    found[1, 1] = 1e-300
    assert bound_audit.summary(found, exact, bound)["largest"] == math.inf
    assert bound_audit.summary(found[0], exact[0], bound[0])["column"] is None
    assert bound_audit.summary(found, exact, np.full((2, 3), np.inf))["largest"] is None


@pytest.mark.parametrize("module", [bound_audit])
def test_unknown_options_are_refused(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__name__, "--wrong"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert "--wrong" in capsys.readouterr().err
