"""The error bounds of the gradients, against an independent emulation of the kernels' arithmetic in NumPy."""

import math

import ml_dtypes
import numpy as np
import pytest

from cupyflash import bounds, reference
from tests.test_bounds import BFLOAT16, FAMILIES, RNG, ex2_approx, flash_attention, problem

SCALE = 32**-0.5


def flash_backward(dout, q, k, v, out, lse, dlse, scale, shift, rng, tile=64, fault=None):
    """Recomputation from lse with float32 accumulators, ex2 perturbed, P and dS rounded to the dtype."""
    dtype = q.dtype
    dout32, q32, k32, v32, out32 = (x.astype(np.float32) for x in (dout, q, k, v, out))
    scale = np.float32(scale * (1.003 if fault == "scale" else 1))
    scale_log2 = np.float32(scale * math.log2(math.e))
    delta = (dout32 * out32).sum(axis=1, dtype=np.float32) - (np.float32(0) if dlse is None else dlse)
    if fault == "delta":
        delta = np.zeros_like(delta)
    with np.errstate(invalid="ignore"):
        lse_log2 = np.where(lse == -np.inf, np.float32(np.inf), lse * np.float32(math.log2(math.e)))
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    visible = np.arange(len(k)) <= np.arange(len(q))[:, None] + shift
    for start in range(0, len(k) - (fault == "last key"), tile):
        keys = slice(start, min(start + tile, len(k) - (fault == "last key")))
        scores = (q32 @ k32[keys].T).astype(np.float64) * scale_log2 - lse_log2[:, None]
        weights = np.where(visible[:, keys], ex2_approx(scores.astype(np.float32), rng), np.float32(0))
        dweights = dout32 @ v32[keys].T
        dscores = weights * (dweights - delta[:, None])
        stored = ml_dtypes.float8_e4m3fn if fault == "8-bit weights" else dtype
        weights, dscores = weights.astype(stored).astype(np.float32), dscores.astype(dtype).astype(np.float32)
        dv[keys] = weights.T @ dout32
        dk[keys] = scale * (dscores.T @ q32)
        dq += dscores @ k32[keys]
    return tuple(x.astype(dtype) for x in (scale * dq, dk, dv))


def made(name, dtype, seed, causal=False, with_dlse=True):
    """Arguments of a backward call after the emulated forward, dlse, the causal shift and the generator."""
    (q, k, v), rng = problem(name, dtype, seed)
    shift = len(k) - len(q) if causal else len(k)
    out, lse = flash_attention(q, k, v, SCALE, shift, rng)
    dout = rng.standard_normal(out.shape).astype(dtype)
    dlse = rng.standard_normal(lse.shape).astype(np.float32) if with_dlse else None
    return (dout, q, k, v, out, lse), dlse, shift, rng


def ratios(gradients, arguments, dlse, **options):
    exact = reference.attention_backward(*arguments, dlse=dlse, **options)
    allowed = bounds.attention_backward(*arguments, dlse=dlse, **options)
    worst = []
    for gradient, value, bound in zip(gradients, exact, allowed, strict=True):
        assert np.isfinite(bound).all()
        error = np.abs(gradient.astype(np.float64) - value)
        worst.append((error / np.maximum(bound, 1e-300))[error > 0].max(initial=0))
    return worst


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tiled_algorithm_stays_below_its_bound(name, dtype):
    for seed, causal, with_dlse in (0, False, True), (1, True, False), (2, True, True):
        arguments, dlse, shift, rng = made(name, dtype, seed, causal, with_dlse)
        gradients = flash_backward(*arguments, dlse, SCALE, shift, rng)
        assert max(ratios(gradients, arguments, dlse, causal=causal, align="bottom-right")) <= 1


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize(
    ("name", "fault", "which", "factor"),
    [
        ("one sign", "delta", (0, 1), 100),
        ("normal", "last key", (0, 1, 2), 8),
        ("peaked", "scale", (0, 1, 2), 6),
        ("peaked", "8-bit weights", (2,), 50),
    ],
)
def test_a_wrong_algorithm_exceeds_the_bound(name, fault, which, factor, dtype):
    arguments, dlse, shift, rng = made(name, dtype, 3)
    worst = ratios(flash_backward(*arguments, dlse, SCALE, shift, rng, fault=fault), arguments, dlse)
    assert all(worst[i] > factor for i in which)


def test_what_nothing_is_summed_into_is_exact():
    rng = RNG(4)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in ((5, 8), (3, 8), (3, 8)))
    out, lse = flash_attention(q, k, v, SCALE, -2, rng)
    options = {"causal": True, "align": "bottom-right"}
    bound = bounds.attention_backward(out, q, k, v, out, lse, **options)
    assert (bound.dq[:2] == 0).all() and (bound.dq[2:] > 0).all() and (bound.dk > 0).all()
    bound = bounds.attention_backward(*(x[:0] for x in (out, q)), k, v, out[:0], lse[:0])
    assert (bound.dk == 0).all() and (bound.dv == 0).all()


@pytest.mark.parametrize("where", ["dout", "q", "k", "v", "out"])
def test_a_non_finite_input_frees_what_sees_it_only(where):
    (q, k, v), rng = problem("normal", np.float16, 7, seqlen_q=6, seqlen_k=6)
    out, lse = flash_attention(q, k, v, SCALE, 0, rng)
    arguments = {"dout": out.copy(), "q": q, "k": k, "v": v, "out": out, "lse": lse}
    clean = bounds.attention_backward(**arguments, causal=True)
    arguments[where][3, 1] = np.nan
    bound = bounds.attention_backward(**arguments, causal=True)
    rows = np.arange(6) >= 3 if where in "kv" else np.arange(6) == 3
    keys = np.arange(6) <= np.flatnonzero(rows).max()
    for which, freed in ("dq", rows), ("dk", keys), ("dv", keys):
        assert np.isinf(getattr(bound, which)[freed]).all()
        np.testing.assert_array_equal(getattr(bound, which)[~freed], getattr(clean, which)[~freed])


def test_overflow_frees_the_gradient():
    ones = np.ones((3, 4), np.float16)
    v = np.array([[1, 1, 1, 1], [-1, 1, 1, 1], [1, 1, -1, 1]], np.float16)
    out, lse = flash_attention(ones, ones, v, 0.5, 3, RNG(0))
    assert np.isfinite(bounds.attention_backward(ones, ones, ones, v, out, lse).dq).all()
    large = ones * np.float16(60000)
    bound = bounds.attention_backward(large, ones, ones, v * np.float16(100), out * np.float16(100), lse)
    assert np.isinf(bound.dq).all() and np.isinf(bound.dk).all()  # dS beyond 65504
    assert np.isinf(bounds.attention_backward(large, ones, ones[:1], v[:1], ones, lse).dv).all()  # 3 * 60000


def test_sums_over_broadcast_dimensions_add_bounds():
    rng = RNG(8)
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in ((3, 5, 8), (7, 8), (7, 8)))
    out, lse = (np.stack(x) for x in zip(*(flash_attention(head, k, v, SCALE, 7, rng) for head in q), strict=True))
    whole = bounds.attention_backward(out, q, k, v, out, lse)
    parts = [bounds.attention_backward(out[i], q[i], k, v, out[i], lse[i]) for i in range(3)]
    assert whole.dk.shape == (7, 8) and whole.dq.shape == (3, 5, 8)
    np.testing.assert_allclose(whole.dq, [part.dq for part in parts], rtol=1e-12)
    assert (whole.dk <= 1.01 * sum(part.dk for part in parts)).all()
    assert (whole.dk >= np.max([part.dk for part in parts], axis=0) / 2).all()
