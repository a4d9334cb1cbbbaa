"""The error bounds of float32 and float64, against an independent emulation of the kernels' arithmetic in NumPy."""

import numpy as np
import pytest

import cupyflash
from cupyflash import bounds, naive, reference
from tests.test_bounds import FAMILIES, RNG, family

DTYPES = [np.float32, np.float64]
SHAPES = [(33, 200, 32), (64, 65, 64), (3, 5, 4), (1, 1, 1)]  # seqlen_q, seqlen_k, head_dim
TILE = 16


def exp_2_ulp(x, rng):
    """e^x, off by up to 2 ulp; float32 subnormals flushed."""
    with np.errstate(under="ignore"):
        y = np.exp(x) * (1 + rng.integers(-2, 3, x.shape) * (np.finfo(x.dtype).eps * x.dtype.type(0.99)))
    return np.where(y < np.finfo(x.dtype).tiny, 0, y).astype(x.dtype)


def product(a, b, columns=slice(None)):
    """a @ b, one term after the other from zero."""
    acc = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for i in range(a.shape[1])[columns]:
        acc += a[:, i, None] * b[i]
    return acc


def by_tiles(a, b):
    """a @ b, each tile of terms by itself."""
    acc = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for start in range(0, a.shape[1], TILE):
        acc += product(a, b, slice(start, start + TILE))
    return acc


def row_sum(x):
    """By 32 lanes, each of which first sums every 32nd column."""
    lanes = np.zeros((len(x), 32), x.dtype)
    for start in range(0, x.shape[1], 32):
        lanes[:, : x.shape[1] - start] += x[:, start : start + 32]
    while lanes.shape[1] > 1:
        lanes = lanes[:, ::2] + lanes[:, 1::2]
    return lanes


def visible_keys(seqlen_q, seqlen_k, causal):
    shift = seqlen_k - seqlen_q if causal else seqlen_k
    return np.arange(seqlen_k) <= np.arange(seqlen_q)[:, None] + shift


def forward(q, k, v, scale, causal, rng, fault=None):
    """Online softmax in base e over key tiles, the running maximum starting from a finite number."""
    dtype = q.dtype.type
    row_max = np.full((len(q), 1), np.finfo(dtype).min)
    row_sum, acc = np.zeros_like(row_max), np.zeros((len(q), v.shape[1]), dtype)
    scores = np.where(visible_keys(len(q), len(k), causal), product(q, k.T) * dtype(scale), dtype(-np.inf))
    for start in range(0, len(k) - (fault == "last key"), TILE):
        keys = slice(start, min(start + TILE, len(k) - (fault == "last key")))
        new_max = np.maximum(row_max, scores[:, keys].max(axis=1, keepdims=True))
        alpha, weights = exp_2_ulp(row_max - new_max, rng), exp_2_ulp(scores[:, keys] - new_max, rng)
        row_sum = row_sum * alpha + weights.sum(axis=1, keepdims=True)
        acc = (acc if fault == "rescale" else acc * alpha) + product(weights, v[keys])
        row_max = new_max
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(row_sum == 0, 0, acc / row_sum).astype(dtype), (row_max + np.log(row_sum))[:, 0]


def backward(dout, q, k, v, out, lse, dlse, scale, causal, rng, fault=None):
    """Recomputation from lse; sums over keys and queries tile by tile."""
    dtype = q.dtype.type
    delta = row_sum(dout * out) - dlse[:, None]
    if fault == "delta":
        delta *= dtype(1 + 10000 * np.finfo(dtype).eps)
    with np.errstate(invalid="ignore"):
        scores = product(q, k.T) * dtype(scale * (1 + 1000 * np.finfo(dtype).eps * (fault == "scale"))) - lse[:, None]
    visible = visible_keys(len(q), len(k), causal)
    if fault == "last key":
        visible = visible & (np.arange(len(k)) < len(k) - 1)
    weights = np.where(visible, exp_2_ulp(np.where(visible, scores, dtype(0)), rng), dtype(0))
    dscores = weights * (product(dout, v.T) - delta)
    return dtype(scale) * by_tiles(dscores, k), dtype(scale) * by_tiles(dscores.T, q), by_tiles(weights.T, dout)


def ratios(results, exact, allowed):
    worst = []
    for result, value, bound in zip(results, exact, allowed, strict=True):
        assert result.dtype in DTYPES and np.isfinite(bound).all()
        error = np.abs(result.astype(np.float64) - value)
        worst.append((error / np.maximum(bound, 1e-300))[error > 0].max(initial=0))
    return worst


def worst_ratios(name, dtype, shape, seed, fault=None):
    """Of out and lse, and of dq, dk and dv from those without a fault."""
    rng, causal, scale = RNG(seed), bool(seed % 2), shape[2] ** -0.5
    q, k, v = (x.astype(dtype) for x in family(name, rng, *shape))
    options = {"causal": causal, "align": "bottom-right"}
    results = out, lse = forward(q, k, v, scale, causal, rng)
    if fault:
        results = forward(q, k, v, scale, causal, rng, fault)
    exact = reference.attention(q, k, v, return_lse=True, **options)
    of_forward = ratios(results, exact, bounds.attention(q, k, v, return_lse=True, **options))

    dout, dlse = rng.standard_normal(out.shape).astype(dtype), rng.standard_normal(lse.shape).astype(dtype)
    arguments, options = (dout, q, k, v, out, lse), {"dlse": dlse, **options}
    gradients = backward(*arguments, dlse, scale, causal, rng, fault)
    exact = reference.attention_backward(*arguments, **options)
    return of_forward, ratios(gradients, exact, bounds.attention_backward(*arguments, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tiled_algorithm_stays_below_its_bounds(name, dtype):
    for shape in SHAPES:
        for seed in 0, 1:
            of_forward, of_backward = worst_ratios(name, dtype, shape, seed)
            assert max(of_forward + of_backward) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "fault", "which", "factor"),
    [
        ("ramp", "rescale", ("out",), 100),
        ("normal", "last key", ("out", "lse", "dq", "dk", "dv"), 100),
        ("peaked", "scale", ("dq", "dk", "dv"), 10),
        ("one sign", "delta", ("dq", "dk"), 20),
    ],
)
def test_a_wrong_algorithm_exceeds_the_bounds(name, fault, which, factor, dtype):
    of_forward, of_backward = worst_ratios(name, dtype, SHAPES[0], 2, fault)
    worst = dict(zip(("out", "lse", "dq", "dk", "dv"), of_forward + of_backward, strict=True))
    assert all(worst[result] > factor for result in which)


@pytest.mark.parametrize("case", ["scores", "dweights", "sums"])
def test_flushed_operands_are_in_the_bounds(case):
    """float32 kernels read a subnormal number as 0, also where it is multiplied with a huge one."""
    rng, tiny, huge, scale = RNG(9), 2.0**-128, 2.0**90, None
    q, k, v, dout = (rng.standard_normal((5, 8)) for _ in range(4))
    if case == "scores":
        q, k, scale = tiny * q, huge * k, 1e9
    elif case == "dweights":
        dout, v = huge * dout, tiny * v
    else:
        dout, k = huge * dout, tiny * k
    dout, q, k, v = (x.astype(np.float32) for x in (dout, q, k, v))
    for module, bound, bound_backward in (
        (cupyflash, bounds.attention, bounds.attention_backward),
        (naive, bounds.attention_naive, bounds.attention_naive_backward),
    ):
        results = module.attention(q, k, v, return_lse=True, softmax_scale=scale)
        exact = reference.attention(q, k, v, return_lse=True, softmax_scale=scale)
        worst = ratios(results, exact, bound(q, k, v, return_lse=True, softmax_scale=scale))
        arguments = (dout, q, k, v, *results)
        gradients = naive.attention_backward(*arguments, softmax_scale=scale)
        exact = reference.attention_backward(*arguments, softmax_scale=scale)
        worst += ratios(gradients, exact, bound_backward(*arguments, softmax_scale=scale))
        assert max(worst) <= 1
