"""The float64 reference, against hand-computed cases and an independent formula."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from cupyflash import reference

INF, NAN = math.inf, math.nan


def by_definition(q, k, v, scale, sees):
    """Attention of one head in exact sums of Python floats, key by key."""
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -INF)
    for i in range(len(q)):
        scores = {
            j: scale * math.fsum(a * b for a, b in zip(q[i], k[j], strict=True)) for j in range(len(k)) if sees(i, j)
        }
        if scores:
            lse[i] = max(scores.values()) + math.log(
                math.fsum(math.exp(s - max(scores.values())) for s in scores.values())
            )
            for c in range(v.shape[1]):
                out[i, c] = math.fsum(math.exp(s - lse[i]) * v[j, c] for j, s in scores.items())
    return out, lse


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 4), (2, 5), (5, 2), (1, 1), (3, 0), (0, 3)])
def test_equals_the_definition(seqlen_q, seqlen_k, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((seqlen_q, 3), (seqlen_k, 3), (seqlen_k, 2)))
    shift = seqlen_k - seqlen_q
    for options, scale, sees in (
        ({}, 3**-0.5, lambda i, j: True),
        ({"softmax_scale": -2}, -2, lambda i, j: True),
        ({"softmax_scale": 0}, 0, lambda i, j: True),
        ({"causal": True, "align": "top-left"}, 3**-0.5, lambda i, j: j <= i),
        ({"causal": True, "align": "bottom-right"}, 3**-0.5, lambda i, j: j <= i + shift),
    ):
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
        expected_out, expected_lse = by_definition(*(x.astype(float) for x in (q, k, v)), scale, sees)
        assert out.dtype == lse.dtype == np.float64 and out.flags.c_contiguous
        np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)


def test_hand_computed_weights():
    q, k = np.array([[1.0]]), np.array([[0.0], [math.log(3)]])
    v = np.array([[4.0], [8.0]])
    out, lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, [[7]])  # weights 1/4 and 3/4
    np.testing.assert_allclose(lse, [math.log(4)])


def test_very_negative_scores_are_data():
    q, k, v = np.full((1, 1), -500.0), np.full((4, 1), 500.0), np.arange(4.0)[:, None]
    out, lse = reference.attention(q, k, v, softmax_scale=1, return_lse=True)
    assert out == 1.5 and lse == -250000 + math.log(4)


def test_what_masked_keys_hold_does_not_matter():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 4, 2))
    clean, clean_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    for bad in NAN, INF, -INF:
        k[3], v[3] = bad, bad
        out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
        np.testing.assert_array_equal(out[:3], clean[:3])
        np.testing.assert_array_equal(lse[:3], clean_lse[:3])
        assert not np.isfinite(out[3]).any()


@pytest.mark.parametrize("values", list(itertools.product([1.0, INF, -INF, NAN], repeat=2)))
def test_non_finite_values_add_as_in_ieee_arithmetic(values):
    v = np.array([[x, 1.0] for x in values])
    out = reference.attention(np.zeros((1, 1)), np.zeros((2, 1)), v)
    np.testing.assert_array_equal(out, [[sum(0.5 * x for x in values), 1]])


def test_a_score_of_minus_infinity_removes_its_key():
    q, k, v = np.ones((1, 1)), np.array([[-INF], [0.0]]), np.array([[NAN], [5.0]])
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out == 5 and lse == 0
    out, lse = reference.attention(q, k[:1], v[:1], return_lse=True)
    assert out == 0 and lse == -INF


@pytest.mark.parametrize("score", [INF, NAN])
def test_a_score_of_infinity_or_nan_spoils_its_row(score):
    out = reference.attention(np.ones((1, 1)), np.array([[score], [0.0]]), np.ones((2, 1)))
    assert not np.isfinite(out).any()


def test_query_heads_share_key_heads_in_order():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(s) for s in ((2, 6, 3, 4), (2, 3, 5, 4), (3, 5, 2)))
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 6, 3, 2) and lse.shape == (2, 6, 3)
    for b, h in np.ndindex(2, 6):
        np.testing.assert_allclose(out[b, h], reference.attention(q[b, h], k[b, h // 2], v[h // 2]), rtol=1e-14)


def test_out_receives_the_result():
    q, k, v = np.random.default_rng(3).standard_normal((3, 4, 2))
    out = np.empty((2, 4)).T
    assert reference.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, reference.attention(q, k, v))
    with pytest.raises(ValueError, match=r"out: shape \(4, 3\), expected \(4, 2\)"):
        reference.attention(q, k, v, out=np.empty((4, 3)))
