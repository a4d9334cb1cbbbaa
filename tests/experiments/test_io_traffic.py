import pytest

from tests.experiments.running import run

ARGUMENTS = "--seqlens 64 192 --head-dims 32 16 --counted-to 64 --sweep-seqlen 256".split()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("io_traffic", tmp_path_factory.mktemp("io_traffic"), *ARGUMENTS)


def test_bytes(found):
    rows, outcomes = found
    for row in rows:
        square, operand = 2 * row["seqlen"] ** 2, 2 * row["seqlen"] * row["head_dim"]
        if row["direction"] == "forward":
            assert row["standard_formula"] == 4 * square + 4 * operand
            assert row["ours_least_formula"] == 4 * operand
        else:
            assert row["standard_formula"] == 10 * square + 10 * operand
            assert row["ours_least_formula"] == 13 * operand + 28 * row["seqlen"]
        for counted in "ours_least", "ours_requested", "standard_least":
            formula = "standard_formula" if counted == "standard_least" else f"{counted}_formula"
            assert row[counted] in (row[formula], None), row
    assert sum(row["standard_least"] is not None for row in rows) == 2
    assert all(outcome.holds for outcome in outcomes)
