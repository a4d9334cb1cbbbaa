import pytest

from experiments import host_time
from tests.experiments.running import run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("host_time", tmp_path_factory.mktemp("host_time"), "--quick")


def test_quick(found):
    rows, _ = found
    launches = {row["call"]: row["launches"] for row in rows if row["function"] == host_time.FORWARD}
    assert launches == {
        "decoding": 1, "decoding, causal, lse": 1, "decoding, out given": 1, "decoding, keys in parts": 2,
        "bias, slopes, softcap": 1, "score_mod": 1, "rows of 196 bytes, misaligned": 5,
    }  # fmt: skip
    assert all(0 < row["repeated_us"] < row["planned_us"] for row in rows)


@pytest.mark.parametrize(
    ("function", "column", "factor", "missed"),
    [
        (host_time.FORWARD, "repeated_us", 2.5, ["repeated calls of attention, longest, us"]),
        (host_time.BACKWARD, "repeated_us", 2.9, ["repeated calls of attention_backward, longest, us"]),
        (host_time.FORWARD, "planned_us", 0.2, ["a call that is planned over a repeated one, least"]),
    ],
)
def test_slower_is_noticed(found, function, column, factor, missed):
    rows = [row | {"planned_us": 400.0, "repeated_us": 45.0} for row in found[0]]
    assert all(outcome.holds for outcome in host_time.outcomes(rows))
    for row in rows:
        row[column] *= factor if row["function"] == function else 1
    if column == "repeated_us":
        for row in rows:
            row["planned_us"] = 10 * row["repeated_us"]
    assert [outcome.what for outcome in host_time.outcomes(rows) if not outcome.holds] == missed
