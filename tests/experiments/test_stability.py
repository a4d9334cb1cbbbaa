import numpy as np
import pytest
from ml_dtypes import bfloat16

from cupyflash import bounds, reference
from experiments import stability
from tests.experiments.running import run


def test_small(tmp_path):
    arguments = ("--seqlens", "256", "512", "--tile-seqlen", "256", "--queries", "64", "--seeds", "2")
    rows, _ = run("stability", tmp_path, *arguments)
    assert len(rows) == 2 * 2 * 4 + 2 * (1 + 4 + 5 + 5)
    found = {(r["method"], r["sweep"], r["seqlen"], r["keys_per_tile"], r["seed"]): r["max_error"] for r in rows}
    for seqlen in 256, 512:
        arrays = stability.inputs(seqlen, 64, 0)
        exact = reference.attention(*arrays)
        assert found[stability.KERNEL, "N", seqlen, 64, 0] <= bounds.attention(*arrays).max()
        for method, normalise in (stability.STATE_1, True), (stability.STATE_2, False):
            out = kept_in_bfloat16(*arrays, 64, normalise)
            assert found[method, "N", seqlen, 64, 0] == pytest.approx(np.abs(out - exact).max(), rel=0.05)
    assert all(outcome.note for outcome in stability.outcomes(rows))

    wrong = [{**row, "max_error": row["max_error"] * (3 if row["method"] == stability.KERNEL else 1)} for row in rows]
    assert stability.outcomes(rows)[2].what.startswith("kernel, float32 state, over")
    assert stability.outcomes(rows)[2].holds and not stability.outcomes(wrong)[2].holds

    # One length has no growth, one tile no other to be compared with.
    one = [row for row in rows if row["seqlen"] == 256 and row["keys_per_tile"] in (None, 64)]
    assert [outcome.what.split(",")[0] for outcome in stability.outcomes(one)] == [
        "bfloat16 state (emulated) over the standard method",
        "kernel",
    ]


def kept_in_bfloat16(q, k, v, tile, normalise):
    """Query by query, with arrays of bfloat16 where the experiment rounds float32."""
    rows = []
    for scores in (q.astype(np.float32) @ k.astype(np.float32).T / np.float32(8)).astype(bfloat16).astype(np.float32):
        largest, total, out = -np.inf, 0.0, np.zeros(64)
        for first in range(0, len(scores), tile):
            part = scores[first : first + tile]
            before, largest = largest, max(largest, float((part.max() * np.float32(np.log2(np.e))).astype(bfloat16)))
            factor = 2.0 ** (before - largest)
            weights = 2 ** (part * np.log2(np.e) - largest)
            products = weights.astype(bfloat16).astype(float) @ v[first : first + tile].astype(float)
            old, total = total, float(np.array(total * factor + weights.sum()).astype(bfloat16))
            out = (out * old * factor + products) / total if normalise else out * factor + products
            out = out.astype(bfloat16).astype(float)
        rows.append(out if normalise else out / total)
    return np.array(rows).astype(bfloat16).astype(float)
