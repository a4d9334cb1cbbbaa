import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from cupyflash import attention
from experiments import emulation, exp_models, record
from experiments.exp_models import ROUNDED
from tests.experiments.running import run


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run with few keys, in 16 tiles."""
    kernels = ROUNDED, exp_models.NOISY, "degree 3"
    sizes = "--quick", "--samples", "65536", "--kernels", *kernels
    return run("exp_models", tmp_path_factory.mktemp("results"), *sizes)


def test_powers_of_2(measured):
    rows, _ = measured
    of = exp_models.powers(rows)
    assert set(of) == set(exp_models.MODELS) - {"accurate"}
    assert of[ROUNDED]["error"] <= 2.0**-24  # of a correctly rounded number
    assert of[ROUNDED]["differ_bfloat16"] == of[ROUNDED]["differ_float16"] == 0
    assert 2.0**-24 < of[exp_models.NOISY]["error"] <= 2.5 * 2.0**-23
    assert of["degree 3"]["same_bits"] == 1 and of["degree 5"]["computed_by"] == "NumPy"
    x = np.random.default_rng(1).random(4096, np.float32)
    by_kernel, name = exp_models.evaluate("degree 5", x)
    assert name == "kernel" and (by_kernel == exp_models.polynomial(x, 5)).all()
    errors = [of[f"degree {degree}"]["error"] for degree in (5, 4, 3, 2)]
    assert errors == sorted(errors) and errors[2] == pytest.approx(8.77e-5, rel=0.01)
    for row in of.values():
        assert 2.0**-9 < row["error_bfloat16"] < 2.0**-8 + row["error"] + 1e-5


def test_polynomial_by_fractions():
    x = np.random.default_rng(3).uniform(-30, 4, 50).astype(np.float32)
    for degree, coefficients in exp_models.POLYNOMIALS.items():
        for argument, found in zip(x, exp_models.polynomial(x, degree), strict=True):
            whole = math.floor(argument)
            fraction = Fraction(float(argument)) - whole
            exact = 1 + sum(Fraction(c) * fraction ** (i + 1) for i, c in enumerate(coefficients))
            assert abs(float(found) / float(exact * Fraction(2) ** whole) - 1) < 3e-7


def test_emulation_is_the_kernel():
    for dtype, allowed in ("bfloat16", 2.0**-8), ("float32", 2e-6):
        q, k, v = exp_models.inputs("rising", 32, 512, exp_models.DTYPES[dtype])
        out, lse = attention(q, k, v, return_lse=True)
        emulated = emulation.as_kernel(q, k, v, tile=exp_models.KEY_TILE[dtype])
        np.testing.assert_allclose(emulated.out, out.astype(np.float32), rtol=allowed, atol=allowed)
        np.testing.assert_allclose(emulated.lse, lse, rtol=1e-6)


def test_rescales(measured):
    rows, _ = measured
    for threshold in 0, 8:
        of = exp_models.runs(rows, ROUNDED, threshold=threshold)
        counted = {row["groups_counted"] for (dtype, _), row in of.items() if dtype == "bfloat16"}
        by_scores = [of["bfloat16", scores]["groups_rescaled"] for scores in exp_models.SCORES]
        assert len(counted) == 1 and counted.pop() == pytest.approx(np.mean(by_scores), abs=1e-3)
    assert exp_models.runs(rows, ROUNDED)["bfloat16", "rising"]["rescales_per_row"] == pytest.approx(15, abs=1)
    # Scores that grow by 10 powers of 2 each tile pass a threshold of 8 every time, those that grow by 3 every third.
    for growth, rescales in (10, 7), (3, 2):
        scores = np.repeat(np.arange(8) * growth * math.log(2), 16)[:, None].astype(np.float32)
        rows = np.repeat(scores.T, 16, axis=0)
        tiled = emulation.tiled(rows, np.ones_like(scores), tile=16, weights_to=emulation.exact, threshold=8)
        assert (tiled.rescaled.sum(axis=0) == rescales).all()
        np.testing.assert_allclose(tiled.out, 1, rtol=1e-6)


def test_outcomes():
    rows, _ = record.read_csv(record.RESULTS / "exp_models.csv")
    found = exp_models.outcomes(rows)
    failing = [outcome for outcome in found if not outcome.holds]
    assert len(failing) == 2 and all(outcome.note for outcome in failing)

    def wrong(index, **values):
        changed = [row | values if at == index else row for at, row in enumerate(rows)]
        holding = {outcome.what for outcome in exp_models.outcomes(changed) if outcome.holds}
        return {outcome.what for outcome in found if outcome.holds} - holding

    keys = "part", "model", "computed_by", "dtype", "scores", "threshold"
    places = {tuple(row[key] for key in keys): at for at, row in enumerate(rows)}
    assert wrong(places["2^x", "degree 3", "kernel", None, None, None], error=9.9e-5)
    assert wrong(places["2^x", "degree 5", "kernel", None, None, None], same_bits=0.99)
    assert wrong(places["attention", "degree 3", "kernel", "bfloat16", "peaked", 0], out_of_plain_bound=0.9)
    assert wrong(places["attention", "degree 2", "NumPy", "float16", "peaked", 0], out_of_plain_bound=0.9)
    assert wrong(places["attention", ROUNDED, "kernel", "bfloat16", "rising", 0], groups_counted=2.5)


def test_tile_of_few_queries_changes_no_bit():
    case = exp_models.Case(ROUNDED, "kernel", "float16", 0, 32, 2048)
    assert case.tile == (32, 128) and replace(case, queries=128).tile == (128, 128)
    assert replace(case, keys=512).tile == (32, 32)
    q, k, v = exp_models.inputs("normal", 32, 256, np.dtype(np.float16))
    small = attention(q, k, v, numerics=replace(case.numerics, tile=case.tile))
    assert (small == attention(q, k, v)).all()
