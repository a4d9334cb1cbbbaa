import pytest

from experiments import memory
from tests.experiments.running import run


def test_memory(tmp_path):
    rows, outcomes = run("memory", tmp_path, "--seqlens", "256", "1024")
    for row in rows:
        assert row["device_bytes"] == row["seqlen"] * (64 * 2 + 4)
        assert row["standard_scores_bytes"] == 2 * row["seqlen"] ** 2
        assert row["traced_peak_bytes"] >= row["device_bytes"]
    assert rows[0]["device_per_doubling"] is None
    assert rows[1]["device_per_doubling"] == pytest.approx(2)
    assert 0 < rows[1]["traced_peak_per_doubling"] <= 2.2
    assert all(outcome.holds for outcome in outcomes)
    assert len(memory.outcomes(rows[:1])) == len(outcomes) - 2  # one length does not grow
    rows[1]["device_bytes"] += 2 * 1024**2  # as if the scores were stored
    rows[1]["traced_peak_per_doubling"] = 4.0
    assert [outcome.holds for outcome in memory.outcomes(rows)] == [False, False, True]
