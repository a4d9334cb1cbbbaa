"""The reference for float64 inputs against mpmath, before and after its last rounding."""

import mpmath
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import reference
from cupyflash._problem import attention_problem
from cupyflash.reference.arrays import wide
from cupyflash.reference.backward import exact_gradients
from cupyflash.reference.forward import exact_attention

BITS = 100
FAMILIES = ["normal", "cancelling", "far apart", "close", "huge", "subnormal", "mixed"]


def inputs(name, rng, seqlen_q, seqlen_k, head_dim, head_dim_v):
    """q, k, v and dout."""
    q, k = rng.standard_normal((seqlen_q, head_dim)), rng.standard_normal((seqlen_k, head_dim))
    v, dout = rng.standard_normal((seqlen_k, head_dim_v)), rng.standard_normal((seqlen_q, head_dim_v))
    if name == "cancelling":
        k[1::2], v[1::2] = k[: len(k) // 2 * 2 : 2], -v[: len(v) // 2 * 2 : 2] * (1 + 2.0**-45)
    elif name == "far apart":
        q *= 40
    elif name == "close":
        k[:] = k[0] * (1 + 1e-14 * rng.standard_normal(k.shape))
        v[:] = v[0] * (1 + 1e-14 * rng.standard_normal(v.shape))
    elif name == "huge":
        v, dout = v * 2.0**1018, dout * 2.0**-500
        q, k = q * 2.0**400, k * 2.0**-400
    elif name == "subnormal":
        v, k, dout = v * 2.0**-1070, k * 2.0**-1068, dout * 2.0**10
    elif name == "mixed":
        v, dout, k = (x * 2.0 ** rng.integers(-60, 60, x.shape) for x in (v, dout, k))
        k /= 2.0**58
    return q, k, v, dout


def multiprecision(x):
    return np.vectorize(mpmath.mpf, otypes=[object])(x)


def attention(q, k, v, dout, dlse, scale, visible):
    """(out, lse, dq, dk, dv) of one head in mpmath, and what errors are relative to: the terms' magnitudes.

    An error of a score, relative to its terms, is one of its weight; hence the largest score's size is a factor.
    """
    q, k, v, dout, dlse, scale = map(multiprecision, (q, k, v, dout, dlse, scale))
    scores = scale * (q @ k.T)
    weights = np.where(visible, np.vectorize(mpmath.exp, otypes=[object])(scores), mpmath.mpf(0))
    row_sum = weights.sum(axis=1)
    lse = np.array([mpmath.log(x) if x else mpmath.mpf("-inf") for x in row_sum], object)
    weights = weights / np.where(row_sum == 0, mpmath.mpf(1), row_sum)[:, None]

    def results(weights, v, dlse, dout, q, k, scale, sign):
        dweights = dout @ v.T
        delta = (weights * dweights).sum(axis=1) - sign * dlse
        dscores = scale * weights * (dweights - sign * delta[:, None])
        return weights @ v, lse, dscores @ k, dscores.T @ q, weights.T @ dout

    exact = results(weights, v, dlse, dout, q, k, scale, 1)
    size = 1 + (abs(scale) * (np.abs(q) @ np.abs(k).T)).max(axis=1, keepdims=True)
    magnitudes = results(weights * size, *map(np.abs, (v, dlse, dout, q, k, scale)), -1)
    return exact, (magnitudes[0], size[:, 0] + np.where(row_sum == 0, 0, np.abs(lse)), *magnitudes[2:])


@settings(max_examples=60)
@given(
    name=st.sampled_from(FAMILIES),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3)),
    align=st.sampled_from([None, "top-left", "bottom-right"]),
    scale=st.sampled_from([None, 1.0, -0.7, 0.0, 2.0**-100]),
    seed=st.integers(0, 2**32 - 1),
)
def test_results_are_those_of_mpmath_but_for_one_rounding(name, sizes, align, scale, seed):
    rng = np.random.default_rng(seed)
    q, k, v, dout = inputs(name, rng, *sizes)
    dlse = rng.standard_normal(len(q))
    options = {"softmax_scale": scale, "causal": align is not None, "align": align}
    problem = attention_problem(q, k, v, **options)
    visible = np.arange(len(k)) <= np.arange(len(q))[:, None] + (problem.causal_shift if align else len(k))
    wide_q, wide_k, wide_v, wide_dout = wide(problem.dtype, q, k, v, dout)
    unrounded = (
        *exact_attention(problem, wide_q, wide_k, wide_v)[:2],
        *exact_gradients(problem, wide_dout, wide_q, wide_k, wide_v, dlse),
    )
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    rounded = (out, lse, *reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options))

    with mpmath.workprec(1200):
        exact, magnitudes = attention(q, k, v, dout, dlse, problem.softmax_scale, visible)
        # What is lost below float64's range, times any other factor.
        lost = 8 * mpmath.mpf(2) ** -1074 * (1 + sum(mpmath.mpf(float(np.abs(x).sum())) for x in (q, k, v, dout)))
        for x, result, right, magnitude in zip(unrounded, rounded, exact, magnitudes, strict=True):
            has_value = np.vectorize(mpmath.isfinite, otypes=[bool])(right)
            np.testing.assert_array_equal(result[~has_value], -np.inf)
            right, allowed = right[has_value], magnitude[has_value] * mpmath.mpf(2) ** -BITS + lost
            before = multiprecision(x.high[has_value]) + multiprecision(x.low[has_value])
            assert (np.abs(before - right) <= allowed).all()
            assert (np.abs(multiprecision(result[has_value]) - right) <= np.abs(right) * 2.0**-53 + allowed).all()


def test_sums_over_broadcast_dimensions_are_rounded_once():
    """Two heads whose terms differ in their last bit only, and cancel: gradients are linear in dout."""
    rng = np.random.default_rng(0)
    q, k, v, dout = inputs("normal", rng, 5, 7, 4, 3)
    other = -np.nextafter(dout, np.inf)
    out, lse = reference.attention(q, k, v, return_lse=True)
    difference = reference.attention_backward(dout + other, q, k, v, out, lse)
    douts, qs, outs, lses = (np.stack(pair) for pair in ((dout, other), (q, q), (out, out), (lse, lse)))
    summed = reference.attention_backward(douts, qs, k, v, outs, lses)
    assert 0 < np.abs(difference.dk).max() < 1e-14
    np.testing.assert_allclose(summed.dk, difference.dk, rtol=2.0**-52, atol=1e-28)
    np.testing.assert_allclose(summed.dv, difference.dv, rtol=2.0**-52, atol=1e-28)


def test_a_scale_multiplies_the_sums_not_the_terms():
    """As in the kernels: 1e18 times a term overflows here, and its product with a key of 1e-160 does not."""
    q, k = np.full((1, 8), 1e-300), np.linspace(1, 2, 16).reshape(2, 8) * 1e-160
    v, dout, dlse = np.ones((2, 8)), np.ones((1, 8)), np.array([-2e294])
    out, lse = reference.attention(q, k, v, softmax_scale=1e18, return_lse=True)
    dq = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, softmax_scale=1e18).dq
    np.testing.assert_allclose(dq, -2e294 * k.mean(axis=0, keepdims=True) * 1e18, rtol=1e-14)
