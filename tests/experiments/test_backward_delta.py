import numpy as np
import pytest

from cupyflash import attention
from experiments import backward_delta, record
from experiments.backward_delta import DELTAS, FAMILIES, ROUNDED, UNROUNDED, WIDE
from tests.experiments.running import run

QUERIES, KEYS = 32, 128


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    sizes = "--queries", str(QUERIES), "--keys", str(KEYS), "--dtypes", "bfloat16"
    return run("backward_delta", tmp_path_factory.mktemp("results"), *sizes)


def test_rows(measured):
    rows, found = measured
    assert [(row["family"], row["delta"]) for row in rows] == [(f, d) for d in DELTAS for f in FAMILIES]
    assert all(outcome.holds or outcome.note for outcome in found)
    for family in FAMILIES:
        of = {row["delta"]: row for row in rows if row["family"] == family}
        assert of[WIDE]["row_sum"] < of[UNROUNDED]["row_sum"] < of[ROUNDED]["row_sum"]
        assert all(row["dq_of_bound"] < 1 for row in of.values())


def test_row_sums_by_the_definition(measured):
    rows, _ = measured
    for family in FAMILIES:
        dout, q, k, v = (
            x.astype(backward_delta.DTYPES["bfloat16"]) for x in backward_delta.inputs(family, QUERIES, KEYS)
        )
        out = attention(q, k, v).astype(np.float64)
        dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
        weights = np.exp(q @ k.T / 8)
        weights /= weights.sum(axis=-1, keepdims=True)
        ds = weights * (dout @ v.T - (dout * out).sum(axis=-1, keepdims=True))
        (row,) = (row for row in rows if (row["family"], row["delta"]) == (family, ROUNDED))
        assert row["row_sum"] == pytest.approx(np.sqrt(np.square(ds.sum(axis=-1)).mean()), rel=1e-3)
        exact = weights * (dout @ v.T - (dout * (weights @ v)).sum(axis=-1, keepdims=True))
        assert row["ds_error"] == pytest.approx(np.sqrt(np.square(ds - exact).mean()), rel=1e-3)


def test_outcomes(measured):
    rows, found = measured
    wrong = {
        "row_sum": ("row sums of dS with out", 1e-9, ROUNDED),
        "row_sum_and_delta_error": ("against", 1.0, ROUNDED),
        "ds_bound_from_possible": ("before out is known", 0.5, ROUNDED),
        "row_sum_in_units": ("unit roundoffs", 9.0, ROUNDED),
    }
    for column, (what, value, delta) in wrong.items():
        changed = [row | {column: value} if row["delta"] == delta else row for row in rows]
        (before,), (after,) = (
            [outcome for outcome in some if what in outcome.what] for some in (found, backward_delta.outcomes(changed))
        )
        assert before.holds and not after.holds, column


def test_float32_by_the_committed_results():
    rows, _ = record.read_csv(record.RESULTS / "backward_delta.csv")
    bound, errors = backward_delta.float32_outcomes(rows)
    assert bound.holds and not errors.holds and errors.note
    better = [row | {"dq_error": 1.0} for row in rows]
    assert backward_delta.float32_outcomes(better)[1].holds
