from experiments import dask_chunks
from tests.experiments.running import run


def test_quick(tmp_path):
    sizes = "--causal-seqlen", "320", "--window-seqlen", "2500", "--workers", "2"
    rows, outcomes = run("dask_chunks", tmp_path, *sizes)
    causal, window = rows
    assert causal["pairs"] == 16 * 17 / 2 and causal["joins"] == causal["pairs"] - 16
    assert window["chunk"] == 157 and window["pairs"] < 16 * 9  # a window of 1024 touches 7 or 8 chunks
    for row in rows:
        assert row["moved_bytes"] > 0 and 0 < row["error_over_bound"] < 1
    # What moves and is held when depends on how quick the workers are, at these sizes more than on the model.
    assert [outcome.holds for outcome in outcomes if "(computed)" in outcome.expected] == [True, False, True, True]
    rows[0]["moved_bytes"] = rows[0]["moved_most"] + 1
    assert not dask_chunks.outcomes(rows)[1].holds


def test_speed_is_judged_where_both_numbers_of_workers_are():
    row = {"workers": 1, "seconds": 3.8}
    assert dask_chunks._speedup("causal", [row]) == []
    (faster,) = dask_chunks._speedup("causal", [row, {**row, "workers": 2, "seconds": 2.0}])
    (slower,) = dask_chunks._speedup("causal", [row, {**row, "workers": 2, "seconds": 3.0}])
    assert faster.holds and not slower.holds and len(slower.note) > 40
