import numpy as np
import pytest

from cupyflash import attention, bounds, reference
from cupyflash.demo import activations
from experiments import real_activations
from tests.experiments.running import run


def test_quick(tmp_path):
    rows, outcomes = run("real_activations", tmp_path, "--quick")
    heads = [row for row in rows if row["head"] is not None]
    texts, number = (1, 3), 12
    assert len(heads) == len(texts) * number * (2 * 5 + 2)  # both layers with gradients; layer 0 once more, forward
    assert outcomes[0].what == f"largest error / bound of {len(heads)} heads and results"
    assert all(0 < row["largest_ratio"] <= 1 and 0 < row["its_share"] <= 1 for row in heads)
    assert all(row["median_ratio"] < row["largest_ratio"] for row in heads)
    for row in heads:
        if row["result"] == "out":
            assert row["leading_term"] == "rounding of P"
            assert row["casts_share"] > 0.8 and row["casts_share"] + row["scores_share"] < 1

    # Queries of all heads and texts, each counted once.
    for scale, layer in ((real_activations.ENCODERS, 0), (real_activations.ENCODERS, 5), (real_activations.LARGER, 0)):
        own = [r for r in rows if r["head"] is None and (r["softmax_scale"], r["layer"]) == (scale, layer)]
        assert sum(row["rows"] for row in own) == number * (27 + 9)
        largest = max(r["largest_ratio"] for r in real_activations.of_heads(rows, scale) if is_out(r, layer))
        assert max(row["largest_ratio"] for row in own) == pytest.approx(largest)

    # One head, computed here.
    x = next(x for x in activations.load() if (x.layer, x.text) == (5, 1))
    arrays = [array[7:8] for array in (x.q, x.k, x.v)]
    error = np.abs(attention(*arrays).astype(np.float64) - reference.attention(*arrays))
    (row,) = (r for r in real_activations.of_heads(rows) if is_out(r, 5) and (r["text"], r["head"]) == (1, 7))
    assert row["largest_error"] == pytest.approx(error.max(), rel=1e-5)
    assert row["largest_ratio"] == pytest.approx((error / bounds.attention(*arrays)).max(), rel=1e-5)

    assert outcomes[0].holds and all(outcome.note for outcome in outcomes if not outcome.holds)
    row["largest_ratio"], row["casts_share"] = 1.5, 0.1
    wrong = real_activations.outcomes(rows)
    assert not wrong[0].holds and "layer 5, text 1, head 7" in wrong[0].found and not wrong[1].holds
    assert "least 10%" in wrong[3].found


def is_out(row, layer) -> bool:
    return row["result"] == "out" and row["layer"] == layer


def test_the_larger_scale_takes_scores_to_111():
    largest = max(
        float(np.abs(x.q.astype(np.float64) @ x.k.astype(np.float64).swapaxes(-1, -2)).max())
        for x in activations.load()
        if x.layer == 0
    )
    assert largest * 32**-0.5 == pytest.approx(40.74, abs=0.01)
    assert largest * real_activations.SCALES[real_activations.LARGER] == pytest.approx(111, abs=0.5)
