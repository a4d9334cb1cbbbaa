import pytest

import cupyflash
from cupyflash.demo.traffic import of_kernels
from experiments import io_traffic, record
from tests.experiments.running import run

SWEEP_SEQLEN = 256


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    arguments = f"--seqlens 64 256 512 --head-dims 64 --counted-to 64 --sweep-seqlen {SWEEP_SEQLEN}".split()
    return run("io_traffic", tmp_path_factory.mktemp("io_traffic"), *arguments)


def test_bytes(found):
    rows, outcomes = found
    for row in rows:
        square, operand = 2 * row["seqlen"] ** 2, 2 * row["seqlen"] * row["head_dim"]
        if row["direction"] == "forward":
            assert row["standard_formula"] == 4 * square + 4 * operand
            assert row["ours_least"] == 4 * operand
        else:
            assert row["standard_formula"] == 10 * square + 10 * operand
            assert row["ours_least"] == 13 * operand + 28 * row["seqlen"]
        assert row["ours_requested"] == row["ours_requested_formula"]
        assert row["standard_least"] in (row["standard_formula"], None)
    assert [row["seqlen"] for row in rows if row["standard_least"] is not None] == [64, 64]
    assert all(outcome.holds for outcome in outcomes)


def test_blocks(found):
    blocks = [row for row in found[0] if row["sweep"] == "block"]
    operand = 2 * SWEEP_SEQLEN * 64
    forward = {row["block_m"]: row for row in blocks if row["direction"] == "forward"}
    # Q is read and O written once; K and V are read for each tile of queries.
    assert {rows: row["ours_requested"] for rows, row in forward.items()} == {
        rows: (2 + 2 * SWEEP_SEQLEN // rows) * operand for rows in (32, 64, 128, 256)
    }
    # N^2 d^2 / M, with M = 64 * 32 numbers
    assert forward[32]["theorem"] == SWEEP_SEQLEN**2 * 64**2 / (64 * 32)
    older, newer = (row["ours_repeated"] for row in blocks if row["direction"] == "backward")
    assert older == 2 * newer  # 64 queries and 64 keys a tile, and 128 and 128


def test_wrong_rows_are_noticed(found):
    rows = [dict(row) for row in found[0]]
    rows[0]["ours_least"] += 32
    for row in rows:
        if row["sweep"] == "block":
            row["ours_repeated"] *= 1.2
        if row["sweep"] == "length" and row["seqlen"] == 512:
            row["ours_least"] *= 2
            row["standard_formula"] /= 2
        if row["sweep"] == "head_dim":
            row["ours_requested"] *= 2
    holds = [outcome.holds for outcome in io_traffic.outcomes(rows)]
    assert holds == [False] * 9


def test_reads_that_do_not_grow_with_the_square_of_head_dim_are_noticed():
    rows, _ = record.read_csv(record.RESULTS / "io_traffic.csv")
    assert all(outcome.holds for outcome in io_traffic.outcomes(rows))
    for row in rows:
        if row["head_dim"] == 256:
            row["ours_repeated"] *= 1.01
    assert [outcome.holds for outcome in io_traffic.outcomes(rows)][-3:] == [False, True, True]


def test_the_largest_head_dim_moves_no_more():
    traffic = of_kernels(io_traffic.profiled(cupyflash, "backward", 64, 256))
    formulas = io_traffic.formulas("backward", 64, 256)
    assert traffic.least == formulas["ours_least_formula"] == 2 * 13 * 64 * 256 + 28 * 64
    assert traffic.requested == formulas["ours_requested_formula"]
