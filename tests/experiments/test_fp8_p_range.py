import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from experiments import fp8_p_range
from tests.experiments.running import run


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    arguments = ("--seqlen", "1024", "--queries", "16", "--sink-queries", "32", "--deviations", "2")
    return run("fp8_p_range", tmp_path_factory.mktemp("fp8"), *arguments)


def ones(rows, order):
    found = fp8_p_range.selected(rows, part="range", by=fp8_p_range.EMULATED, order=order)
    assert len(found) == 25
    return {(row["offset"], row["threshold"]): row for row in found}


def test_saturates_beyond_448(measured):
    for order in fp8_p_range.ORDERS:
        for (offset, threshold), row in ones(measured[0], order).items():
            may_saturate = 2.0 ** (offset + threshold) > 448 and order != "falling"
            assert may_saturate or row["saturated"] == 0
            assert bool(row["saturated"]) == may_saturate or order == "as drawn"
    assert ones(measured[0], "rising")[8, 8]["ones_min"] < 0.9


def test_falling_logits_have_one_maximum(measured):
    q, k, _ = fp8_p_range.range_inputs(2.0, 1024, 16)
    logits = q.astype(float) @ k.astype(float).T / np.sqrt(128)
    for (offset, _), row in ones(measured[0], "falling").items():
        weights = np.exp(logits - logits.max(axis=1, keepdims=True)) * 2**offset
        sums = weights.astype(float8_e4m3fn).astype(float).sum(axis=1) / weights.sum(axis=1)
        assert row["ones_min"] == pytest.approx(sums.min(), abs=2e-3)
        assert row["zeroed"] == pytest.approx((weights < 2**-10).mean(), abs=1e-3)


def test_float16_has_room(measured):
    kernel = fp8_p_range.selected(measured[0], by=fp8_p_range.KERNEL)
    assert [row["threshold"] for row in kernel] == [0, 8]
    assert all(abs(row["ones_min"] - 1) <= 2**-11 and row["relative_error"] < 2e-3 for row in kernel)


def test_sinks(measured):
    rows, outcomes = measured
    last = fp8_p_range.selected(rows, part="sinks", order="last", sink_delta=6)
    first = fp8_p_range.selected(rows, part="sinks", order="first", sink_delta=6)
    assert first[0]["mse"] > 3 * last[0]["mse"] and first[1]["mse"] < 1.1 * last[0]["mse"]
    assert 0.4 < first[0]["zeroed"] == pytest.approx(first[0]["zeroed_predicted"], abs=5e-3)
    assert last[0]["zeroed"] < 0.03
    assert fp8_p_range.normal_below(-1.959964) == pytest.approx(0.025, rel=1e-5)
    assert outcomes[-1].holds


def test_outcomes_notice_a_wrong_row(measured):
    rows = [dict(row) for row in measured[0]]
    rule = [outcome.what.endswith("beyond 448") for outcome in measured[1]].index(True)
    assert measured[1][rule].holds
    ones(rows, "as drawn")[4, 4]["saturated"] = 0.01
    first = fp8_p_range.selected(rows, part="sinks", order="first", sink_delta=6)[0]
    first["zeroed"] += 0.02
    outcomes = fp8_p_range.outcomes(rows)
    assert not outcomes[rule].holds and not outcomes[-1].holds
