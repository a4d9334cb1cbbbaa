import numpy as np
import pytest

from experiments import record, reduction_order
from experiments.backends import Simulator
from experiments.reduction_order import OTHER, SAME
from tests.experiments.running import run


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run(
        "reduction_order", tmp_path_factory.mktemp("results"), "--quick", "--changes", "values", "splits", "order"
    )


def test_rows(measured):
    rows, found = measured
    assert {row["sums"] for row in rows} == {SAME, OTHER}
    for row in rows:
        assert row["out_of_bounds"] is None or row["out_of_bounds"] < 1
        assert (row["out_ulps"] == 0) == (row["out_equal"] == 1), row
    # Zeros are added in another kernel, which scales its scores elsewhere; nothing else may differ.
    assert set(reduction_order.exceptions(rows)) <= {"a bias of 0 (float16)", "4 v (float16)"}
    assert all(outcome.holds or outcome.note for outcome in found)


def test_outcomes():
    rows, _ = record.read_csv(record.RESULTS / "reduction_order.csv")
    found = reduction_order.outcomes(rows)
    assert [outcome.holds for outcome in found] == [False, *[True] * 5] and found[0].note

    def broken(name, **values):
        changed = [row | values if row["configuration"] == name else row for row in rows]
        holding = [outcome.holds for outcome in reduction_order.outcomes(changed)]
        return [outcome.what for outcome, holds in zip(found, holding, strict=True) if outcome.holds and not holds]

    assert len(broken("fixed split size: decoding", out_equal=0.9)) == 1
    assert len(broken("two parts: decoding", out_equal=1.0, lse_equal=1.0)) == 2
    assert len(broken("keys in another order", out_of_bounds=0.9)) == 1
    assert len(broken("keys in another order", out_equal=1.0)) == 1
    assert len(broken("keys in another order", out_ulps=9.0)) == 1
    assert len(broken("keys in another order within their tile", out_equal=0.5)) == 1


def test_difference():
    one = np.array([[1.5, 0.25]], np.float16)
    share, ulps = reduction_order.difference(one, one + np.array([[0, 2.0**-11]], np.float16))
    assert share == 0.5 and ulps == 0.5  # of 2^-10, the unit of the row's largest


def test_a_call_that_forgets_its_query_order_is_seen():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, length, 16)).astype(np.float16) for length in (16, 512, 512))
    of = {c.name: c for c in reduction_order.configurations(reduction_order.Side((q, k, v)))}
    one, other = (side.results(Simulator())[0] for side in of["queries in another order"].sides)
    assert (one == other).all() and not (one == other[..., ::-1, :]).all()
