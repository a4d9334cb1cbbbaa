import numpy as np
import pytest

from experiments import accumulators
from tests.experiments.running import run

SEQLEN = 9216


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    sizes = "--models", "hopper", "--seqlens", str(SEQLEN), "--attention-seqlen", "64"
    return run("accumulators", tmp_path_factory.mktemp("results"), *sizes)


def value(rows, part, model, sums, quantity, n):
    return accumulators.numbers(rows, part, quantity)[model, sums, n]


def test_drift_of_the_kernel_is_that_of_whole_numbers(results):
    """On an H100's model sums of 8192 and more lose the last bit of values, at 2^-11, every 16 keys."""
    values = np.random.default_rng(SEQLEN).uniform(0.5, 1.5, (SEQLEN, accumulators.DRIFT_COLUMNS)).astype(np.float16)
    units = (values.astype(float) * 2048).astype(np.int64)
    total = np.zeros(accumulators.DRIFT_COLUMNS, np.int64)
    for step in units.reshape(-1, 16, accumulators.DRIFT_COLUMNS):
        total = total + step.sum(axis=0)
        total = np.where(total >= 8192 * 2048, total // 2 * 2, total)
    exact = units.sum(axis=0)
    drift = np.mean((total - exact) / exact)
    assert drift < -1e-6
    assert abs(value(results[0], "drift", "hopper", "one-level", "relative error", SEQLEN) - drift) < 3e-7
    for model, sums in ("hopper", "two-level"), ("exact", "one-level"):
        assert abs(value(results[0], "drift", model, sums, "relative error", SEQLEN)) < 3e-7


def test_dot_products(results):
    rows, _ = results
    unlike = {
        (model, n): value(rows, "dot products", model, "normal", "share unlike exact", n)
        for model in ("exact", "hopper")
        for n in (16, 64, 256)
    }
    assert unlike["exact", 16] == 0  # one instruction, rounded once
    assert 0.3 < unlike["hopper", 16] < unlike["hopper", 64] < unlike["hopper", 256] < 1
    assert 0.2 < unlike["exact", 64] < unlike["hopper", 64]
    bias = [
        value(rows, "dot products", "hopper", "positive", "mean relative error / 2^-24", n) for n in (64, 256, 1024)
    ]
    assert 0 > bias[0] > bias[1] > bias[2] > -0.625 * 1024  # the worst case of 16 products and two bits more
    assert bias[2] == pytest.approx(-0.09 * 1024, rel=0.15)


def test_fp8_sums():
    """13 bits below the largest product are kept, and 13 bits of a sum."""

    def of(*products):
        a = np.zeros((1, 32))
        a[0, : len(products)] = products
        return accumulators.fp8_sums(a, np.ones_like(a), 32)[0]

    small = 2.0**-13
    assert of(1, *[small] * 31) == 1 + 31 * small
    assert of(1, *[small / 2] * 31) == 1
    assert of(*[small / 2] * 32) == 32 * small / 2
    assert of(*[1] * 31, small) == 31  # as large as its last bit at 1, but not at 31
    assert of(-1, *[-1.5 * small] * 4) == -1 - 4 * small
    a = np.array([[1.0] * 32 + [small / 2] * 32])
    assert accumulators.in_parts(a, np.ones_like(a), 32, 64)[0] == 32
    assert accumulators.in_parts(a, np.ones_like(a), 32, 32)[0] == 32 + 16 * small


def test_outcomes_notice(results):
    rows, outcomes = results
    differing = {o.what for o in outcomes if "lse" in o.what or "published: DeepSeek" in o.expected}
    assert {o.what for o in outcomes if not o.holds} <= differing
    for part, quantity, wrong in (
        ("drift", "relative error", 1e-5),
        ("dot products", "share equal to the model", 0.999),
        ("dot products", "mean relative error / 2^-24", -150),
        ("attention", "largest error / bound", 1.01),
        ("fp8, positive", "mean relative error", -0.01),
        ("fp8, normal", "largest |error| / sum |ab|", 1e-3),
    ):
        changed = [
            {**row, "value": wrong} if (row["part"], row["quantity"]) == (part, quantity) else row for row in rows
        ]
        failed = [o for o in accumulators.outcomes(changed) if not (o.holds or o.what in differing)]
        assert failed, (part, quantity)


def test_the_formula_of_what_is_cut_off():
    loss = accumulators.computed_loss
    # 8 steps of 4 products of 1: sums from 8 on lose half of what is below their grid, 2^-20, and 16 on of 2^-19.
    ends = np.arange(4, 33, 4)
    grid = 2.0 ** (np.floor(np.log2(ends)) - 23)
    assert loss("volta", 32, 1.0, (0.0,)) == pytest.approx(-(4 * grid / 2).sum() / 32)
    assert loss("volta", 32, 1.0, (2.0**-18,)) == 0
    # With two bits more products lose a quarter, and the sum the two bits.
    assert loss("hopper", 16, 1.0, (0.0,)) == pytest.approx(-(16 / 2 * 2.0**-21 + 0.75 / 2 * 2.0**-19) / 16)


def test_drift_against_the_formula():
    def rows(drift):
        values = {("hopper", "one-level"): drift, ("hopper", "two-level"): 1e-8, ("exact", "one-level"): 1e-8}
        return [
            accumulators.row("drift", *how, 16384, "kernel", "relative error", error) for how, error in values.items()
        ]

    for drift, holds in (-7.5e-6, True), (7.5e-6, False), (-1.5e-5, False):
        assert accumulators.drift_outcomes(rows(drift))[0].holds == holds
