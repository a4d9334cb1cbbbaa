import pytest

from cupyflash.ptxsim.devices import DEVICES
from experiments import intensity
from tests.experiments.running import run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    arguments = "--seqlens 128 512 4096 --counted-to 128 --standard-to 128".split()
    return run("intensity", tmp_path_factory.mktemp("intensity"), *arguments)


def test_counts(found):
    rows, outcomes = found
    assert all(outcome.holds for outcome in outcomes)
    counted = [row for row in rows if row["flops"] is not None]
    assert len(counted) == len(rows) / 3
    product = {head_dim: 2 * 128**2 * head_dim for head_dim in intensity.HEAD_DIMS}
    for row in counted:
        # Forward S and P V; standard backward S, dP, dQ, dK, dV; tiled backward S and dP twice.
        products = 2 if row["direction"] == "forward" else 5 if row["method"] == "standard method" else 7
        assert row["flops"] == pytest.approx(products * product[row["head_dim"]], rel=0.01), row
        assert row["flops"] / row["bytes"] == pytest.approx(row["intensity"], rel=1e-5)


def test_nothing_is_said_of_counts_where_there_are_none(found):
    rows = [row | {"flops": None, "bytes": None} for row in found[0]]
    assert len(intensity.outcomes(rows)) == len(found[1]) - 1


def test_intensity(found):
    for row in found[0]:
        if row["direction"] == "forward" and row["method"] == "tiled":
            assert row["intensity"] == pytest.approx(row["seqlen"] / 2)
        if row["method"] == "standard method":
            expected = row["head_dim"] / 2 / (1 + row["head_dim"] / row["seqlen"])
            assert row["intensity"] == pytest.approx(expected, rel=0.01)
            assert row["compute_bound_on"] is None
    bound = {
        (row["seqlen"], row["method"]): row["compute_bound_on"]
        for row in found[0]
        if (row["direction"], row["head_dim"]) == ("forward", 64)
    }
    assert bound[128, "tiled"] is None
    assert "A100" in bound[512, "tiled"] and "H100" not in bound[512, "tiled"]
    assert bound[4096, "tiled"].split("; ") == list(DEVICES)
    assert bound[4096, "tiled, no cache"] == "RTX 5090"


def test_ridge_points_are_those_of_data_sheets():
    # dense float16 TFLOP/s, accumulated in float32, over TB/s
    for name, sheet in ("T4", 65 / 0.32), ("A100", 312 / 2.039), ("H100", 989.4 / 3.35), ("RTX 5090", 209.5 / 1.792):
        assert intensity.ridge_point(DEVICES[name]) == pytest.approx(sheet, rel=0.02)


def test_wrong_rows_are_noticed(found):
    rows = [dict(row) for row in found[0]]
    rows[0]["bytes"] += 32
    rows[1]["intensity"] = 70.0
    rows[1]["compute_bound_on"] = "A100"
    for row in rows:
        if row["method"] == "tiled":
            row["compute_bound_on"] = None
    rows[-1]["intensity"] = 130.0
    holds = [outcome.holds for outcome in intensity.outcomes(rows)]
    assert holds == [False, True, False, True, False, True]
