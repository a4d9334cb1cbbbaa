"""Gradients under any combination of options: within their bounds, and what their sums are."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyflash import dropout_mask, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from cupyflash.testing import Operand, Variants, assert_within_bound
from tests import poisoned

HEADS = ((2, 4), (2, 2), (2, 2))
VARIANTS = testing.VARIANTS
half_problems = testing.attention_backward_problems(
    ("float16", "bfloat16"), seqlens=testing.seqlens(140), variants=VARIANTS
)
# Register tiles are slow to simulate.
wide_problems = testing.attention_backward_problems(
    ("float32", "float64"), seqlens=testing.seqlens(40), variants=VARIANTS
)


def check(backend, problem):
    """Of every operand that has one, through out and lse."""
    arguments, options, gradients = poisoned.attention_backward(backend, problem)
    testing.assert_gradients_within_bound(gradients, *arguments, **options)


@settings(max_examples=5)
@given(problem=half_problems)
def test_half_types(backend, problem):
    check(backend, problem)


#: dP of a dropped pair is beyond float32.
DROPPED_OVERFLOW = BackwardProblem(
    Problem(
        *("float32", (1, 3), (3,), (), 8, 2, 136, 32),
        values="huge values",
        seed=6395,
        variants=Variants(attn_sink=Operand("large", "number", "float64"), dropout_p=0.5),
    )
)


@settings(max_examples=3)
@given(problem=wide_problems)
@example(problem=DROPPED_OVERFLOW)
def test_wide_types(backend, problem):
    check(backend, problem)


@pytest.mark.deep
@settings(max_examples=2000)
@given(problem=half_problems)
def test_half_types_deep(backend, problem):
    check(backend, problem)


@pytest.mark.deep
@settings(max_examples=500)
@given(problem=wide_problems)
def test_wide_types_deep(backend, problem):
    check(backend, problem)


@settings(max_examples=4)
@given(
    data=st.data(),
    problem=testing.attention_backward_problems(
        families=["normal", "one sign"], scales=[None, -0.5], seqlens=testing.seqlens(70), variants=VARIANTS
    ),
)
def test_checks_of_gradients_hold(backend, data, problem):
    data.draw(st.sampled_from(testing.VJP_CHECKS))(backend.attention_vjp, problem)


@pytest.mark.deep
@pytest.mark.parametrize("check", testing.VJP_CHECKS)
@given(problem=testing.attention_backward_problems(variants=VARIANTS))
def test_checks_of_gradients_hold_deep(backend, check, problem):
    check(backend.attention_vjp, problem)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_rows_of_the_gradient_of_a_bias_sum_to_dlse(backend, dtype, with_dlse):
    """Moving a row's scores together moves lse alone; the sink is one of them."""
    variants = Variants(bias=Operand("normal", "all", "float32"), attn_sink=Operand("normal", "heads", "float32"))
    problem = BackwardProblem(Problem(dtype, *HEADS, 20, 70, variants=variants), "one sign", with_dlse)
    dout, dlse = problem.cotangents()
    _, pullback = backend.attention_vjp(*problem.forward.inputs(), **problem.options)
    gradients = pullback(dout, dlse)
    total = gradients.dbias.sum(axis=(0, 2, 3), dtype=np.float64) + gradients.dattn_sink
    expected = np.zeros(4) if dlse is None else dlse.sum(axis=(0, 2), dtype=np.float64)
    unit = 2.0**-9 if dtype == "float16" else 2.0**-18
    magnitude = np.abs(gradients.dbias).sum(axis=(0, 2, 3)) + np.abs(gradients.dattn_sink)
    assert_within_bound(total, expected, unit * magnitude, name="sum of all")
    assert (np.abs(gradients.dattn_sink) > 0.01).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_gradient_of_slopes_is_that_of_a_bias_times_distances(backend, dtype):
    slopes = 2.0 ** -np.arange(1, 5, dtype=np.float32)
    q, k, v = Problem(dtype, *HEADS, 20, 70).inputs()
    dout = np.random.default_rng(0).standard_normal((2, 4, 20, 16)).astype(q.dtype)
    distance = np.abs(np.arange(70) - np.arange(20)[:, None] - 50)
    bias = (-slopes[:, None, None] * distance).astype(np.float32)
    _, of_slopes = backend.attention_vjp(q, k, v, alibi_slopes=slopes, align="bottom-right")
    _, of_bias = backend.attention_vjp(q, k, v, bias=bias)
    products = -of_bias(dout, None).dbias.astype(np.float64) * distance
    allowed = (2.0**-9 if dtype == "float16" else 2.0**-18) * np.abs(products).sum(axis=(1, 2))
    assert_within_bound(of_slopes(dout, None).dalibi_slopes, products.sum(axis=(1, 2)), allowed, name="dalibi_slopes")


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 16), ("float16", 64), ("bfloat16", 128), ("float32", 16)])
def test_the_backward_drops_what_the_forward_drops(backend, dtype, head_dim):
    """Weights are equal and columns of dout are queries: one of dv is not 0 where the pair is kept."""
    q, k = (np.zeros((2, 3, n, head_dim), testing.element_type(dtype)) for n in (70, 40))
    v = np.ones((2, 3, 40, 70), q.dtype)
    dout = np.broadcast_to(np.eye(70, dtype=q.dtype), (2, 3, 70, 70))
    _, pullback = backend.attention_vjp(q, k, v, dropout_p=0.3, seed=2**40 + 7)
    kept = dropout_mask((2, 3, 70, 40), 0.3, 2**40 + 7)
    np.testing.assert_array_equal(pullback(dout, None).dv != 0, kept.swapaxes(-1, -2))
