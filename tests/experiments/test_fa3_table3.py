import numpy as np
import pytest

from cupyflash import attention
from experiments import fa3_table3
from tests.experiments.running import run


def softmax_attention(q, k, v):
    scores = q.astype(np.float64) @ k.astype(np.float64).T / np.sqrt(128)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v.astype(np.float64)


def test_small(tmp_path):
    rows, _ = run("fa3_table3", tmp_path, "--seqlen", "1024", "--queries", "16", "--seeds", "5")
    found = {row["method"]: row for row in rows}
    assert list(found) == list(fa3_table3.PUBLISHED)
    q, k, v = fa3_table3.inputs(5, 1024)
    queries, _ = fa3_table3.sampled(q, 16, 5)
    outlying = np.abs(q).max(axis=1) > 5
    assert outlying[queries].sum() == 8
    halves = np.where(outlying[queries], outlying.mean(), 1 - outlying.mean()) / 8

    halved = [x.astype(np.float16) for x in (q[queries], k, v)]
    error = attention(*halved) - softmax_attention(q[queries], k, v)
    own_error = attention(*halved) - softmax_attention(*halved)
    for column, squares in ("rmse", error**2), ("rmse_of_rounded_inputs", own_error**2):
        expected = np.sqrt(halves @ squares.mean(axis=1))
        assert found["FlashAttention-2 FP16"][column] == pytest.approx(expected, rel=0.02)
    assert found["baseline FP16"]["rmse_of_rounded_inputs"] > 2 * np.sqrt(halves @ (own_error**2).mean(axis=1))
    assert found["baseline FP8"]["rmse"] > 1.2 * found["FlashAttention-3 FP8"]["rmse"]


def test_outcomes_notice_a_wrong_row():
    rows = [
        {"method": method, "by": "", "queries": 2, "seed": 0, "rmse": rmse, "rmse_of_rounded_inputs": rmse / 4}
        for method, rmse in fa3_table3.PUBLISHED.items()
    ]
    rows[0]["rmse_of_rounded_inputs"] = rows[3]["rmse_of_rounded_inputs"] = 2e-4
    assert all(outcome.holds for outcome in fa3_table3.outcomes(rows))
    for method, own in (0, 8e-5), (3, 3e-3):
        changed = [{**row, "rmse_of_rounded_inputs": own} if row is rows[method] else row for row in rows]
        (wrong,) = (outcome for outcome in fa3_table3.outcomes(changed) if not outcome.holds)
        assert "own error" in wrong.what and wrong.note
    changed = [{**row, "rmse": 2.8e-4} if row is rows[0] else row for row in rows]  # 1.47 times FlashAttention's
    (wrong,) = (outcome for outcome in fa3_table3.outcomes(changed) if not outcome.holds)
    assert wrong.found == "1.47; by seed 1.47"
    rows[3]["rmse"] *= 1.4
    wrong = [outcome for outcome in fa3_table3.outcomes(rows) if not outcome.holds]
    assert [outcome.what.split(",")[0] for outcome in wrong] == ["baseline FP8", "FP8"] and wrong[0].note


def test_quantised():
    x = np.random.default_rng(0).standard_normal((256, 8)).astype(np.float32)
    x[200, 3] = 50
    for block in 128, 256:
        rounded = fa3_table3.quantised(x, block)
        for rows in np.arange(256).reshape(-1, block):
            scale = np.abs(x[rows]).max() / 448
            half_spacing = np.maximum(np.abs(x[rows]) * 2**-4, scale * 2**-10)
            assert (np.abs(rounded[rows] - x[rows]) <= half_spacing * (1 + 1e-6)).all()
            assert np.abs(rounded[rows]).max() == pytest.approx(np.abs(x[rows]).max())
    assert np.count_nonzero(fa3_table3.quantised(x, 128) != fa3_table3.quantised(x, 256)) > 300


def test_incoherent_is_orthogonal_and_spreads():
    rotation = fa3_table3.incoherent(1)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(128), atol=1e-6)
    np.testing.assert_allclose(np.abs(rotation), 128**-0.5, rtol=1e-6)
