import pytest

import cupyflash
from cupyflash import naive
from experiments import io_table, io_traffic
from tests.experiments.running import run

SEQLEN = 128


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("io_table", tmp_path_factory.mktemp("io_table"), "--seqlen", str(SEQLEN))


def test_bytes(found):
    rows, outcomes = found
    gigabytes = {(row["method"], row["source"]): row["total_gb"] for row in rows}
    for method in "naive", "cupyflash":
        formula = gigabytes[method, "by formula, each launch once"]
        counted = gigabytes[method, "counted on one head, times 1024, each launch once"]
        assert abs(counted - formula) * 1e9 / 1024 <= 1  # the table has six digits
    assert gigabytes["naive", "by formula, each launch once"] == pytest.approx(
        1024 * 14 * 2 * SEQLEN * (SEQLEN + 64) / 1e9, rel=1e-5
    )
    for row in rows:
        assert row["forward_gb"] + row["backward_gb"] == pytest.approx(row["total_gb"], rel=1e-5)
    assert all(outcome.holds for outcome in outcomes)


def test_products_are_those_of_the_kernels(found):
    gflop = {row["method"]: row["gflop"] for row in found[0]}
    ours = [kernel for way in io_traffic.DIRECTIONS for kernel in io_traffic.profiled(cupyflash, way, SEQLEN, 64)]
    assert gflop["cupyflash"] == pytest.approx(1024 * sum(kernel.mma_flops for kernel in ours) / 1e9, rel=1e-5)
    standard = [kernel for way in io_traffic.DIRECTIONS for kernel in io_traffic.profiled(naive, way, SEQLEN, 64)]
    product = 2 * SEQLEN**2 * 64
    products = sum(round(sum(kernel.flops.values()) / product) for kernel in standard if "softmax" not in kernel.name)
    assert gflop["naive"] == pytest.approx(1024 * products * product / 1e9, rel=1e-5)


def test_a_wrong_row_is_noticed(found):
    rows = [dict(row) for row in found[0]]
    rows[-1]["total_gb"] *= 1.001
    rows[0]["gflop"] *= 2  # of the standard algorithm
    assert [outcome.holds for outcome in io_table.outcomes(rows)] == [False, True]


def test_formulas_of_the_published_table():
    standard, with_passes, flash = (row["total_gb"] for row in io_table.algorithms(1024))
    # N x N numbers are 2.147 GB, N x D are 0.134.
    assert standard == pytest.approx(11 * 2.147 + 12 * 0.1342, rel=1e-3)
    assert with_passes == pytest.approx(17 * 2.147 + 12 * 0.1342, rel=1e-3)
    assert flash == pytest.approx((2 + 3 * 4 + 4 + 5 * 4) * 0.1342, rel=1e-3)
