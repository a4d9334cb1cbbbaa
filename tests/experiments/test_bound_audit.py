import math

import numpy as np
import pytest

from experiments import bound_audit, record
from tests.experiments.running import run


def test_quick(tmp_path):
    rows, outcomes = run("bound_audit", tmp_path, "--quick")
    assert [(r["dtype"], r["seqlen_q"], r["seqlen_k"], r["head_dim"], r["result"], r["family"]) for r in rows] == [
        (dtype, *lengths, 16, result, family)
        for dtype in ("float16", "float32")
        for many, results in bound_audit.RESULTS.items()
        for lengths in [(16, 32) if many == "keys" else (32, 16)]
        for family in bound_audit.FAMILIES
        for result in results
    ]
    for row in rows:
        if row["unbounded"] == 1:
            assert row["largest"] is row["median"] is row["row"] is row["leading_term"] is None
        else:
            assert 0 <= row["median"] <= row["largest"] <= 1
            assert (row["column"] is None) == (row["result"] == "lse")
            assert 0 < row["its_share"] <= 1
        if row["family"] == "normal" and row["result"] in ("out", "dv"):
            assert (row["leading_term"] == "rounding of P") == (row["dtype"] == "float16")
    normal = [row["largest"] for row in rows if row["family"] == "normal" and row["dtype"] == "float16"]
    assert min(normal) > 1e-3  # errors are not compared with themselves

    assert all(outcome.holds for outcome in outcomes[:2])
    assert all(outcome.note for outcome in outcomes if not outcome.holds)
    next(row for row in rows if row["dtype"] == "float32")["largest"] = 1.01
    assert not bound_audit.outcomes(rows)[1].holds
    of_one = bound_audit.outcomes([row for row in rows if row["dtype"] == "float32"])
    assert [outcome.what for outcome in of_one] == [
        "float32: largest error / bound",
        "float32, out: largest error / bound",
    ]


def test_the_largest_ratio_is_found():
    exact, bound = np.zeros((2, 3)), np.array([[1.0, 4, np.inf], [2, 0, 1]])
    found = np.array([[0.5, -3, np.nan], [-1, 0, 0]])
    assert bound_audit.summary(found, exact, bound) == pytest.approx(
        {"largest": 0.75, "median": 0.5, "unbounded": 1 / 6, "row": 0, "column": 1}
    )
    found[1, 1] = 1e-300
    assert bound_audit.summary(found, exact, bound)["largest"] == math.inf
    assert bound_audit.summary(found[0], exact[0], bound[0])["column"] is None
    assert bound_audit.summary(found, exact, np.full((2, 3), np.inf))["largest"] is None


def test_the_estimate_is_that_of_independent_roundings():
    """Roundings of P and out as they are, of many random rows: 0.18 is the mean of (rounding / u x)^2."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((400, 16)), rng.standard_normal((64, 16)), rng.standard_normal((64, 16))
    weights = np.exp(q @ k.T / 4)
    exact = weights @ v / weights.sum(axis=-1, keepdims=True)
    rounded = weights.astype(np.float16) @ v / weights.sum(axis=-1, keepdims=True)
    ratio = bound_audit.rms_over_estimate(2.0**-11, q, k, v, rounded.astype(np.float16), exact)
    assert ratio == pytest.approx(1, abs=0.15)


def test_the_page_on_the_bound_shows_what_was_measured():
    rows, _ = record.read_csv(record.RESULTS / "bound_audit.csv")
    lines = (record.RESULTS.parent / "error_bound.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("| | out | lse | dq | dk | dv |") + 2 :][:4]
    for line in table:
        dtype, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        for result, text in zip(("out", "lse", "dq", "dk", "dv"), shown, strict=True):
            row = bound_audit.worst([row for row in rows if (row["dtype"], row["result"]) == (dtype, result)])
            assert float(text) == pytest.approx(row["largest"], rel=0.05), (dtype, result)
    assert len(table) == len(bound_audit.DTYPES)
