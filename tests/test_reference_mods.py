"""Where a score_mod and a mask_mod enter the reference: whatever evaluates them, against the definition."""

from unittest import mock

import mpmath
import numpy as np
import pytest

from cupyflash import reference
from tests import attention_by_definition

ANY_EXPRESSION = {"score_mod": "score", "mask_mod": "true"}


def indices(problem):
    """b, h, i, j, to broadcast."""
    shape = (*problem.leading_shape, problem.seqlen_q, problem.seqlen_k)
    b, h, i, j = np.ogrid[tuple(slice(size) for size in shape)]
    return b + problem.first_batch, h, i, j


def evaluate(problem, scores):
    """score^2 / 4 + score (b - h) + j, and its derivative; pairs (0, 0) are removed."""
    assert scores.dtype == np.float64 and isinstance(scores, np.ndarray)
    assert scores.shape == (*problem.leading_shape, problem.seqlen_q, problem.seqlen_k)
    b, h, i, j = indices(problem)
    removed = (i + j == 0) & (b + h >= 0)
    value = np.where(removed, -np.inf, scores**2 / 4 + scores * (b - h) + j)
    return value, np.where(removed, np.nan, scores / 2 + (b - h))


def score(s, b, h, i, j, length_q, length_k):
    return mpmath.mpf("-inf") if i + j == 0 else s**2 / 4 + s * (b - h) + j


def evaluate_mask(problem):
    b, h, i, j = indices(problem)
    return (b + h + i + j) % 4 != 3


def sees(b, h, i, j, length_q, length_k):
    return (b + h + i + j) % 4 != 3


@pytest.fixture
def evaluated():
    with (
        mock.patch("cupyflash.reference.scores.evaluate", evaluate),
        mock.patch("cupyflash.reference.masks.evaluate_mask", evaluate_mask),
    ):
        yield


def drawn(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, 4)).astype(dtype) for n in (3, 5, 5))
    options = {"softcap": 2.0, "bias": rng.standard_normal((3, 3, 5)), "attn_sink": rng.standard_normal(3)}
    return q, k, v, options | {"seqlens_k": np.array([5, 4]), "window_size": (2, None), "align": "top-left"}


def test_scores_are_handed_over_for_every_head_of_the_result(evaluated):
    q, k, v, _ = drawn(np.float64)
    out = reference.attention(q[0, 0], k[0, 0], v, **ANY_EXPRESSION)
    full = reference.attention(
        np.broadcast_to(q[0, 0], q.shape), np.broadcast_to(k[0, 0], k.shape), v, **ANY_EXPRESSION
    )
    np.testing.assert_array_equal(out, full)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_they_stand_between_softcap_and_bias(evaluated, dtype):
    q, k, v, options = drawn(dtype)
    results = reference.attention(q, k, v, return_lse=True, return_max=True, **options, **ANY_EXPRESSION)
    expected = attention_by_definition.attention(q, k, v, score=score, sees=sees, **options)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, right.astype(float), rtol=1e-13, atol=1e-14)


def test_their_derivative_enters_before_that_of_the_softcap(evaluated):
    q, k, v, options = drawn(np.float64)
    options |= ANY_EXPRESSION
    rng = np.random.default_rng(1)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert all(np.isfinite(x).all() for x in vars(gradients).values() if x is not None)
    operands = {"q": q, "k": k, "v": v, "bias": options["bias"], "attn_sink": options["attn_sink"]}
    for name, operand in operands.items():
        direction = rng.standard_normal(operand.shape)

        def along(step, name=name, direction=direction):
            changed = {**operands, name: operands[name] + step * direction}
            three = [changed.pop(x) for x in "qkv"]
            out, lse = reference.attention(*three, return_lse=True, **{**options, **changed})
            return (dout * out).sum() + (dlse * lse).sum()

        difference = (along(1e-5) - along(-1e-5)) / 2e-5
        expected = (getattr(gradients, f"d{name}") * direction).sum()
        np.testing.assert_allclose(difference, expected, rtol=1e-7, atol=1e-8)


def test_what_they_remove_may_be_anything(evaluated):
    q, k, v, options = drawn(np.float64)
    options["bias"] = np.broadcast_to(options["bias"], (2, 3, 3, 5)).copy()
    options |= ANY_EXPRESSION

    def results():
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
        gradients = reference.attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
        return [out, lse, *(x for x in vars(gradients).values() if x is not None)]

    clean = results()
    b, h, i, j = np.indices(options["bias"].shape)
    removed = (i + j == 0) | ((b + h + i + j) % 4 == 3)
    options["bias"][removed] = np.nan
    for result, right in zip(results(), clean, strict=True):
        np.testing.assert_array_equal(result, right)


def test_a_sequence_of_a_packed_batch_keeps_its_number(evaluated):
    q, k, v, options = drawn(np.float64)
    del options["seqlens_k"]
    options |= ANY_EXPRESSION
    packed = [x.swapaxes(1, 2).reshape(-1, *x.shape[1::2]) for x in (q, k, v)]
    out = reference.attention_varlen(*packed, np.array([0, 3, 6]), np.array([0, 5, 10]), **options)
    padded = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, padded.swapaxes(1, 2).reshape(out.shape), rtol=1e-14, atol=1e-15)
