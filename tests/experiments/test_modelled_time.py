import pytest

from experiments import modelled_time as modelled
from tests.experiments.running import run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("modelled_time", tmp_path_factory.mktemp("modelled_time"), "--quick")


def test_counts_are_what_polynomials_and_formulas_say(found):
    rows, outcomes = found
    assert all(outcome.holds for outcome in outcomes)
    counted = modelled.of(rows, seqlen=256)
    assert [row["method"] for row in counted if row["bytes_counted"]] == [modelled.SCALAR, modelled.TILED]


def test_a_length_that_no_polynomial_went_through():
    for method in modelled.CALLS:
        time, _ = modelled.milliseconds(method, 16, 512, "A100")
        assert time == pytest.approx(modelled.milliseconds_counted(method, 16, 512, "A100"), rel=1e-9)
        assert modelled.peak_bytes(method, 16, 80) == modelled.peak_bytes_counted(method, 16, 80)


def test_bounds(found):
    long = {row["method"]: row for row in modelled.of(found[0], seqlen=4096)}
    square, operand = 32 * 4096**2, 32 * 4096 * 64
    # Two products on the tensor cores of an A100, 1024 multiply-adds in a cycle of each of 108 SMs.
    tensor = 2 * square * 64 / (1024 * 108 * 1.41e6)
    assert long[modelled.TILED]["milliseconds"] == pytest.approx(tensor, rel=0.03)  # 1024 blocks, a bit more than N^2
    assert long[modelled.TILED]["limited_by"] == "tensor"
    moved = 2 * (4 * square + 4 * operand) / 2039e6
    assert long[modelled.TENSOR_CORES]["milliseconds"] == pytest.approx(moved, rel=1e-4)
    assert long[modelled.SCALAR]["milliseconds"] > 2 * square * 64 / (64 * 108 * 1.41e6)
    assert long[modelled.SCALAR]["peak_bytes"] == 2 * (square + 4 * operand)
    assert long[modelled.TILED]["peak_bytes"] == 2 * 4 * operand


def test_weights_are_written_where_scores_were_read():
    (softmax,) = [kernel for kernel in modelled.profiled(modelled.SCALAR, 16, 128, "sm_80") if kernel.name == "softmax"]
    dram_bytes = modelled.DEVICES["A100"].dram_bytes
    assert modelled.Work(softmax, "A100").cycles[modelled.DRAM] * dram_bytes == pytest.approx(2 * 2 * 128**2)


def test_more_blocks_than_multiprocessors_take_turns_and_fewer_leave_some_idle():
    cycles = {"tensor": 100.0, modelled.DRAM: 3.0}
    assert modelled.least_cycles(2, cycles, 1, "A100") == (50, "tensor")
    assert modelled.least_cycles(2, cycles, 54, "A100") == (54 * 3, modelled.DRAM)
    assert modelled.least_cycles(200, {"tensor": 1080.0}, 1, "A100") == (10, "tensor")


def test_a_polynomial():
    at = modelled.polynomial((1, 2, 4), [n**2 - 3 * n + 5 for n in (1, 2, 4)])
    assert at(10) == pytest.approx(75) and at(2) == pytest.approx(3)


@pytest.mark.parametrize(
    ("which", "change", "first"),
    [
        ({"method": modelled.TILED, "seqlen": 256}, {"milliseconds_counted": 1.0}, "time, bytes and memory"),
        ({"method": modelled.SCALAR, "seqlen": 256}, {"bytes": 32}, "time, bytes and memory"),
        ({"method": modelled.SCALAR, "seqlen": 256}, {"peak_bytes_counted": 32}, "time, bytes and memory"),
        (
            {"method": modelled.TENSOR_CORES, "seqlen": 4096},
            {"limited_by": "scores: tensor"},
            "standard method, tensor",
        ),
        ({"method": modelled.TILED, "seqlen": 4096}, {"limited_by": "issue"}, "cupyflash"),
        ({"method": modelled.TILED, "seqlen": 4096}, {"milliseconds": 1e3}, "head_dim 64"),
        ({"method": modelled.TILED, "seqlen": 4096}, {"peak_bytes": 1}, "memory of the standard method"),
    ],
)
def test_wrong_rows_are_noticed(found, which, change, first):
    rows = [dict(row) for row in found[0]]
    (wrong,) = modelled.of(rows, **which)
    wrong.update(change)
    (missed,) = [outcome for outcome in modelled.outcomes(rows) if not outcome.holds]
    assert missed.what.startswith(first)
