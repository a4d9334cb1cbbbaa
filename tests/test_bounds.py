"""The error bounds, against an independent emulation of the kernels' arithmetic in NumPy."""

import math

import ml_dtypes
import numpy as np
import pytest

from cupyflash import bounds, reference

BFLOAT16 = ml_dtypes.bfloat16
RNG = np.random.default_rng


def ex2_approx(x, rng):
    """2^x in float32, off by up to 2 ulp, subnormals flushed."""
    y = np.exp2(x.astype(np.float64))
    y = y.astype(np.float32) * (1 + rng.integers(-2, 3, x.shape) * np.float32(2**-23))
    return np.where(y < 2.0**-126, 0, y).astype(np.float32)


def flash_attention(q, k, v, scale, shift, rng, tile=64, rescale=True, weight_dtype=None, drop_last=False):
    """FlashAttention-2's forward with float32 accumulators, weights rounded to the dtype, ex2 and rcp perturbed."""
    dtype = q.dtype
    q32, k32, v32 = (x.astype(np.float32) for x in (q, k, v))
    seqlen_q, seqlen_k = len(q), len(k) - drop_last
    scale_log2 = np.float32(scale * math.log2(math.e))
    row_max = np.full((seqlen_q, 1), -np.inf, np.float32)
    row_sum = np.zeros((seqlen_q, 1), np.float32)
    acc = np.zeros((seqlen_q, v.shape[1]), np.float32)
    visible = np.arange(seqlen_k) <= np.arange(seqlen_q)[:, None] + shift
    with np.errstate(invalid="ignore", divide="ignore"):
        for start in range(0, seqlen_k, tile):
            keys = slice(start, min(start + tile, seqlen_k))
            scores = np.where(visible[:, keys], q32 @ k32[keys].T, -np.inf).astype(np.float32)
            new_max = np.maximum(row_max, scores.max(axis=1, keepdims=True))
            safe_max = np.where(new_max == -np.inf, np.float32(0), new_max)
            alpha = ex2_approx((row_max - safe_max) * scale_log2, rng)
            max_scaled = (safe_max * scale_log2).astype(np.float64)
            weights = ex2_approx((scores.astype(np.float64) * scale_log2 - max_scaled).astype(np.float32), rng)
            row_sum = row_sum * alpha + weights.sum(axis=1, keepdims=True, dtype=np.float32)
            rounded = weights.astype(weight_dtype or dtype).astype(np.float32)
            acc = (acc * alpha if rescale else acc) + rounded @ v32[keys]
            row_max = new_max
        inverse = (1 / row_sum) * (1 + rng.integers(-1, 2, row_sum.shape) * np.float32(2**-23))
        out = np.where(row_sum == 0, np.float32(0), acc * inverse.astype(np.float32)).astype(dtype)
        lse = (safe_max * scale_log2 + np.log2(row_sum)) * np.float32(math.log(2))
    return out, lse[:, 0]


def standard_attention(q, k, v, scale, shift):
    """Scores and weights rounded to the dtype."""
    dtype = q.dtype
    compute = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (x.astype(compute) for x in (q, k, v))
    visible = np.arange(len(k)) <= np.arange(len(q))[:, None] + shift
    scores = np.where(visible, compute(scale) * (q @ k.T), -np.inf).astype(dtype).astype(compute)
    row_max = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - row_max)
    row_sum = weights.sum(axis=1, keepdims=True)
    weights = (weights / row_sum).astype(dtype).astype(compute)
    return (weights @ v).astype(dtype), (row_max + np.log(row_sum))[:, 0]


def family(name, rng, seqlen_q, seqlen_k, head_dim):
    """Inputs that stress one error term each."""
    q, k, v = (rng.standard_normal((n, head_dim)) for n in (seqlen_q, seqlen_k, seqlen_k))
    if name == "outliers":
        q, k, v = (x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.01) for x in (q, k, v))
    elif name == "peaked":
        q *= 8
    elif name == "duplicates":
        k[:] = k[0]
    elif name == "one sign":
        v = np.abs(v) + 0.5
    elif name == "ramp":
        q, k = np.abs(q), np.abs(k) * np.linspace(0.1, 4, seqlen_k)[:, None]
    elif name == "offset":
        k += 20 * rng.standard_normal(head_dim)
    elif name == "cancellation":
        k[1::2], v[1::2] = k[: seqlen_k // 2 * 2 : 2][: len(k[1::2])], -v[: seqlen_k // 2 * 2 : 2][: len(k[1::2])]
    elif name == "underflow":
        q[:] = 1
        k[:] = -17.7 / np.sqrt(head_dim)
        k[0] = 0
        v[:] = 6e4
        v[0] = 0
    elif name == "tiny values":
        v *= 1e-7
    elif name == "small scores":
        q *= 1e-6
    return q, k, v


FAMILIES = [
    "normal",
    "outliers",
    "peaked",
    "duplicates",
    "one sign",
    "ramp",
    "offset",
    "cancellation",
    "underflow",
    "tiny values",
    "small scores",
]


def problem(name, dtype, seed, seqlen_q=33, seqlen_k=200, head_dim=32):
    rng = RNG(seed)
    return [x.astype(dtype) for x in family(name, rng, seqlen_q, seqlen_k, head_dim)], rng


def ratios(out, lse, inputs, bound=bounds.attention, **options):
    exact, exact_lse = reference.attention(*inputs, return_lse=True, **options)
    allowed, allowed_lse = bound(*inputs, return_lse=True, **options)
    assert np.isfinite(allowed).all() and np.isfinite(allowed_lse).all()
    return (np.abs(out.astype(np.float64) - exact) / allowed).max(), (np.abs(lse - exact_lse) / allowed_lse).max()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tiled_algorithm_stays_below_its_bound(name, dtype):
    for seed, causal in (0, False), (1, True):
        inputs, rng = problem(name, dtype, seed)
        shift = 200 - 33 if causal else 200
        out, lse = flash_attention(*inputs, 32**-0.5, shift, rng)
        worst, worst_lse = ratios(out, lse, inputs, causal=causal, align="bottom-right")
        assert worst <= 1 and worst_lse <= 1


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "offset"])
def test_the_standard_method_stays_below_its_bound(name, dtype):
    inputs, _ = problem(name, dtype, 2)
    if name in ("peaked", "ramp", "outliers") and dtype == BFLOAT16:
        inputs[0] = (inputs[0] / 8).astype(dtype)  # scores stored in bfloat16 are too coarse for any bound
    out, lse = standard_attention(*inputs, 32**-0.5, 200)
    worst, worst_lse = ratios(out, lse, inputs, bounds.attention_naive)
    assert worst <= 1 and worst_lse <= 1


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize(
    ("name", "fault", "factor"),
    [
        ("ramp", {"rescale": False}, 50),
        ("one sign", {"drop_last": True}, 3),
        ("peaked", {"weight_dtype": ml_dtypes.float8_e4m3fn}, 2),
    ],
    ids=["no rescale", "last key dropped", "8-bit weights"],
)
def test_a_wrong_algorithm_exceeds_the_bound(name, fault, factor, dtype):
    inputs, rng = problem(name, dtype, 3)
    out, lse = flash_attention(*inputs, 32**-0.5, 200, rng, **fault)
    assert ratios(out, lse, inputs)[0] > factor


def test_a_wrong_scale_exceeds_the_bound_of_out_and_lse():
    inputs, rng = problem("peaked", np.float16, 4)
    out, lse = flash_attention(*inputs, 1.005 * 32**-0.5, 200, rng)
    assert min(ratios(out, lse, inputs)) > 2


def test_constant_values_leave_only_the_roundings_of_the_weights_and_the_result():
    (q, k, v), _ = problem("peaked", np.float16, 5)
    v[:] = 1
    assert (bounds.attention(q, k, v) < 2.2 * 2.0**-11).all()


def test_a_row_without_keys_is_exact():
    (q, k, v), _ = problem("normal", np.float16, 6, seqlen_q=5, seqlen_k=3)
    bound, lse_bound = bounds.attention(q, k, v, causal=True, align="bottom-right", return_lse=True)
    assert (bound[:2] == 0).all() and (lse_bound[:2] == 0).all()
    assert (bound[2:] > 0).all() and (lse_bound[2:] > 0).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_non_finite_input_frees_the_rows_that_see_it_only(where):
    (q, k, v), _ = problem("normal", np.float16, 7, seqlen_q=6, seqlen_k=6)
    clean = bounds.attention(q, k, v, causal=True)
    {"q": q, "k": k, "v": v}[where][3, 1] = np.nan
    bound, lse_bound = bounds.attention(q, k, v, causal=True, return_lse=True)
    sees = np.arange(6) == 3 if where == "q" else np.arange(6) >= 3
    assert np.isinf(bound[sees]).all() and np.isinf(lse_bound[sees]).all()
    np.testing.assert_array_equal(bound[~sees], clean[~sees])


def test_overflow_frees_the_row():
    large = np.full((2, 4), 3e38).astype(BFLOAT16)
    one = np.ones((2, 4), BFLOAT16)
    assert np.isinf(bounds.attention(large, large, one)).all()  # q . k
    assert np.isinf(bounds.attention(one, one, large)).all()  # sum of p v before the division
    assert np.isinf(bounds.attention_naive(*(np.full((2, 4), x, np.float16) for x in (300, 300, 1)))).all()  # stored
    assert np.isfinite(bounds.attention(*(np.full((2, 4), x, np.float16) for x in (30, 30, 1)))).all()


def test_scores_too_large_for_float32_to_tell_apart_are_called_ill_conditioned():
    q, k = np.full((1, 4), 2.0**14, BFLOAT16), np.full((3, 4), 2.0**12, BFLOAT16)
    assert np.isinf(bounds.attention(q, k, np.eye(3, 4, dtype=BFLOAT16))).all()


def test_bounds_broadcast_like_attention():
    rng = RNG(8)
    q = rng.standard_normal((2, 6, 5, 8)).astype(np.float16)
    k = rng.standard_normal((2, 2, 7, 8)).astype(np.float16)
    v = rng.standard_normal((1, 2, 7, 3)).astype(np.float16)
    bound, lse_bound = bounds.attention(q, k, v, return_lse=True)
    assert bound.shape == (2, 6, 5, 3) and lse_bound.shape == (2, 6, 5)
    single = bounds.attention(q[1, 4], k[1, 1], v[0, 1])
    np.testing.assert_allclose(bound[1, 4], single, rtol=1e-12)


def test_out_receives_the_bound():
    (q, k, v), _ = problem("normal", np.float16, 9)
    out = np.empty((33, 32))
    assert bounds.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, bounds.attention(q, k, v))
    with pytest.raises(TypeError, match="out: dtype <f2, expected float64"):
        bounds.attention(q, k, v, out=out.astype(np.float16))


def test_a_bound_that_overflows_claims_nothing():
    """A sum of keys beyond float64, times 0, is no number, and no bound may be that."""
    q, k, v = np.full((5, 8), 1e-38), np.full((3, 8), 8e307), np.ones((3, 8))
    assert (bounds.attention(q, k, v, softmax_scale=0.0) == np.inf).all()
    assert (bounds.attention_naive(q, k, v, softmax_scale=0.0) == np.inf).all()
    out, lse = reference.attention(q, k, v, softmax_scale=0.0, return_lse=True)
    for gradient_bounds in bounds.attention_backward, bounds.attention_naive_backward:
        for bound in gradient_bounds(out, q, k, v, out, lse, softmax_scale=0.0):
            assert (bound == np.inf).all()
