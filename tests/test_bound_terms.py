"""The terms of a bound sum to it, and the source of an error that is planted is the term that grows."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import bounds, reference, testing
from cupyflash.testing import AttentionProblem as Problem

DTYPES = ("float16", "bfloat16", "float32", "float64")
SMALL = {"dtypes": DTYPES, "seqlens": testing.seqlens(20), "head_dims": st.sampled_from([(16, 16), (7, 5)])}


def assert_sums(terms, bound, dtype):
    """To first order, but for results so small that each term is rounded to a subnormal, or flushed, on its own."""
    for term in terms:
        assert term.shape == bound.shape
        assert (np.isinf(term) == np.isinf(bound)).all() and (term >= 0).all()
    claimed, smallest = np.isfinite(bound), float(ml_dtypes.finfo(dtype).smallest_subnormal)
    total = sum(term[claimed] for term in terms)
    np.testing.assert_allclose(total, bound[claimed], rtol=0.05, atol=8 * max(smallest, 2.0**-126))


def given_results(q, k, v, return_lse=True, **options):
    """out and lse, rounded."""
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    with np.errstate(over="ignore"):
        return out.astype(q.dtype), lse.astype(np.float64 if q.dtype == np.float64 else np.float32)


@settings(max_examples=40)
@given(problem=testing.attention_problems(**SMALL))
def test_terms_of_attention(problem):
    inputs = problem.inputs()
    terms = bounds.attention_terms(*inputs, **problem.options)
    for each, bound in zip(
        zip(*terms.values(), strict=True), bounds.attention(*inputs, return_lse=True, **problem.options), strict=True
    ):
        assert_sums(each, bound, testing.element_type(getattr(problem, "forward", problem).dtype))


@settings(max_examples=40)
@given(problem=testing.attention_backward_problems(**SMALL))
def test_terms_of_gradients(problem):
    arguments, options = problem.arguments(given_results)
    terms = bounds.attention_backward_terms(*arguments, **options)
    for each, bound in zip(
        zip(*terms.values(), strict=True), bounds.attention_backward(*arguments, **options), strict=True
    ):
        assert_sums(each, bound, testing.element_type(getattr(problem, "forward", problem).dtype))


@pytest.mark.parametrize(
    ("name", "change_out", "change_lse", "gradient"), [("delta", 0.5, 0, "dq"), ("given lse", 0, 0.01, "dv")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_planted_error_is_the_largest_term(dtype, name, change_out, change_lse, gradient):
    q, k, v = Problem(dtype, seqlen_q=20, seqlen_k=20).inputs()
    out, lse = given_results(q, k, v)
    out, lse = out + out.dtype.type(change_out), lse + lse.dtype.type(change_lse)
    terms = bounds.attention_backward_terms(np.ones_like(v), q, k, v, out, lse)
    sizes = {key: getattr(term, gradient).sum() for key, term in terms.items()}
    assert max(sizes, key=sizes.get) == name


def test_large_scores_are_the_largest_term():
    q, k, v = Problem("float32", seqlen_q=20, seqlen_k=20, values="peaked").inputs()
    terms = bounds.attention_terms(32 * q, k, v)
    assert max(terms, key=lambda name: np.max(terms[name][1])) == "scores"
