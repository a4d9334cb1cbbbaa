import pytest

from experiments import recomputation
from tests.experiments.running import run

SEQLEN, HEAD_DIM = 128, recomputation.HEAD_DIM


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    arguments = "--seqlens 128 1024 --counted-to 128".split()
    return run("recomputation", tmp_path_factory.mktemp("recomputation"), *arguments)


def test_counts(found):
    rows, outcomes = found
    counted = {row["way"]: row for row in rows if row["flops"] is not None}
    product, square, operand = 2 * SEQLEN**2 * HEAD_DIM, SEQLEN**2, SEQLEN * HEAD_DIM
    for way, products in ("P kept", 6), ("P stored again", 7), ("rebuilt in tiles", 9):
        assert counted[way]["flops"] == pytest.approx(products * product, rel=0.01)
    # FlashAttention's algorithms 0 and 3; the same with S and P computed and stored again.
    assert counted["P kept"]["bytes"] == 2 * (11 * square + 12 * operand)
    assert counted["P stored again"]["bytes"] == 2 * (14 * square + 14 * operand)
    assert counted["rebuilt in tiles"]["bytes"] == 2 * 17 * operand + 28 * SEQLEN
    assert [counted[way]["kept_bytes"] for way in recomputation.WAYS] == [2 * square, 0, 4 * SEQLEN]
    # The published ratio of FLOP is that of one backward kernel; here are two.
    assert [outcome.holds for outcome in outcomes] == [True, True, False, True, True, True, True]


def test_what_is_published_of_one_length_is_said_of_that_length(found):
    rows = [row for row in found[0] if row["seqlen"] != recomputation.TABLE_SEQLEN]
    assert not any("published" in outcome.expected for outcome in recomputation.outcomes(rows))


def test_least_time(found):
    # The standard method waits for memory, 2039 GB/s; the tiled kernels at N = 1024 for 312 TFLOP/s.
    microseconds = {(row["way"], row["seqlen"]): row["least_microseconds"] for row in found[0]}
    kept = 2 * (11 * 1024**2 + 12 * 1024 * HEAD_DIM) / 2039e9
    assert microseconds["P kept", 1024] == pytest.approx(1e6 * kept, rel=1e-4)
    rebuilt = 9 * 2 * 1024**2 * HEAD_DIM / 312e12
    assert microseconds["rebuilt in tiles", 1024] == pytest.approx(1e6 * rebuilt, rel=1e-3)


def test_wrong_rows_are_noticed(found):
    rows = [dict(row) for row in found[0]]
    rows[0]["flops"] += 1
    rows[1]["bytes_formula"] *= 2  # P kept, N = 1024
    rows[1]["least_microseconds"] /= 10
    rows[1]["kept_bytes"] += 2
    holds = [outcome.holds for outcome in recomputation.outcomes(rows)]
    assert holds == [False, True, False, False, False, False, False]
