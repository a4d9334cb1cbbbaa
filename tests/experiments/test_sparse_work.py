from experiments import sparse_work
from tests.experiments.running import run


def test_quick(tmp_path):
    rows, outcomes = run("sparse_work", tmp_path, "--seqlens", "150", "300")
    assert len(rows) == 2 * len(sparse_work.MASKS)
    for row in rows:
        for direction in "forward", "backward":
            assert row[f"{direction}_flops"] == row[f"{direction}_formula"], row
    causal, everything = (
        next(row["forward_flops"] for row in rows if row["mask"] == mask and row["seqlen"] == 300)
        for mask in ("causal", "all keys")
    )
    assert 0.5 < causal / everything < 0.7
    assert outcomes[0].holds
    rows[3]["backward_flops"] += 1
    assert not sparse_work.outcomes(rows)[0].holds
