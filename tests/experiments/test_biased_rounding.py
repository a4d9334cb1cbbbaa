import numpy as np
import pytest

from experiments import biased_rounding
from experiments.biased_rounding import CASES, KERNEL, ROUNDED, chosen
from tests.experiments.running import run

TAIL = biased_rounding.TAIL_KEYS * biased_rounding.TAIL_WEIGHT  # its weight, beside those of the large keys
MEAN = 3.0  # of |values|


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run("biased_rounding", tmp_path_factory.mktemp("results"), "--batches", "20")


def check(row, expected):
    """The mean is what is expected, up to chance."""
    assert abs(row["mean"] - expected) < 5 * row["sd"] / np.sqrt(row["rows"]), (row, expected)


def test_biases_are_those_of_ties(results):
    """Half of the sums of two values lie between two numbers, a quarter of those of four; else the tail is lost."""
    rows, _ = results
    one_sign, four, mixed = (case.name for case in CASES[1:4])
    check(chosen(rows, one_sign, ROUNDED, "PV"), -(2.0**-5 / 4 - TAIL * MEAN))
    check(chosen(rows, four, ROUNDED, "PV"), -(2.0**-4 / 8 - TAIL * MEAN))
    check(chosen(rows, mixed, ROUNDED, "PV"), 0)
    # PV / 2 is a number of bfloat16, which the division by 2 + TAIL leaves by less than half an ulp.
    check(chosen(rows, one_sign, ROUNDED, "out"), -(2.0**-5 / 4) / 2)
    check(chosen(rows, mixed, ROUNDED, "out"), -MEAN * TAIL / 2)
    # The kernel rounds (v1 + v2) / (2 + TAIL): ties toward zero, all else away from it.
    check(chosen(rows, mixed, KERNEL, "out"), 2.0**-6 / 4 - MEAN * TAIL / 2)
    check(chosen(rows, one_sign, KERNEL, "out"), 0)


def test_row_sums_of_ds_are_minus_the_error_of_delta(results):
    rows, _ = results
    for case in CASES:
        for method in ROUNDED, KERNEL:
            left = chosen(rows, case.name, method, "dS row sum + error of delta")
            assert abs(left["mean"]) < 2e-3 and left["sd"] < 0.01
    for method, sign in (ROUNDED, -1), (KERNEL, 0):
        row = chosen(rows, CASES[1].name, method, "dS row sum")
        assert sign * row["z"] > 50 if sign else abs(row["z"]) < 5


def test_stochastic_rounding_goes_to_both_neighbours():
    rng, x = np.random.default_rng(0), np.full(4000, 1 + 2.0**-9)  # a quarter of the way to the next number
    rounded = biased_rounding.stochastically(rng, x)
    assert set(rounded) == {1.0, 1 + 2.0**-7}
    assert np.mean(rounded > 1) == pytest.approx(0.25, abs=0.03)


def test_outcomes_notice(results):
    rows, outcomes = results
    assert [o.what for o in outcomes if not o.holds] == [
        f"{CASES[1].name}, stochastic rounding: mean error of out in units of that without"
    ]
    for case, method, quantity, change in (
        (CASES[1].name, ROUNDED, "PV", {"z": -3.0}),
        (CASES[3].name, KERNEL, "out", {"mean": -2.7e-3}),
        (CASES[2].name, KERNEL, "out", {"z": 5.0}),
        (CASES[4].name, ROUNDED, "PV", {"mean": -1e-3}),
        (CASES[0].name, KERNEL, "dS row sum + error of delta", {"mean": 0.02}),
        (f"{CASES[1].name}: beta = 7", ROUNDED, "PV", {"mean": -2e-3}),
        ("the paper's sum", ROUNDED, "PV", {"mean": 0.0164905}),
    ):
        wrong = chosen(rows, case, method, quantity)
        changed = [{**row, **change} if row is wrong else row for row in rows]
        assert sum(not o.holds for o in biased_rounding.outcomes(changed)) == 2, (case, method, quantity)
