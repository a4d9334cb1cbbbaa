"""Any combination of options, forward: every element of out, lse and max is within its bound of the reference."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyflash import testing
from cupyflash.testing import AttentionProblem as Problem
from cupyflash.testing import Lengths, Operand, Variants
from tests import poisoned

VARIANTS = testing.VARIANTS
ALIGNMENTS = ["bottom-right", "top-left", -200, -1, 3, 64, 130]  # names, and the key that query 0 is at
half_problems = testing.attention_problems(("float16", "bfloat16"), alignments=ALIGNMENTS, variants=VARIANTS)
# Register tiles are slow to simulate.
wide_problems = testing.attention_problems(
    ("float32", "float64"), alignments=ALIGNMENTS, seqlens=testing.seqlens(80), variants=VARIANTS
)


def check(backend, problem, return_max):
    return_max = {"return_max": True} if return_max else {}
    inputs, out, lse, *row_max = poisoned.attention(backend, problem, **return_max)
    testing.assert_attention_within_bound(out, lse, *inputs, row_max=row_max[0] if row_max else None, **problem.options)


@settings(max_examples=12)
@given(problem=half_problems, return_max=st.booleans())
@example(  # a window's tiles begin behind those of a part
    problem=Problem(
        seqlen_q=70, seqlen_k=300, align="bottom-right", variants=Variants(window_size=(20, None), split_size=128)
    ),
    return_max=True,
)
@example(  # no sequence has a query
    problem=Problem(leading_q=(2,), seqlen_q=3, seqlen_k=5, variants=Variants(seqlens_q=Lengths("short"))),
    return_max=True,
)
def test_half_types(backend, problem, return_max):
    check(backend, problem, return_max)


@pytest.mark.deep
@settings(max_examples=3000)
@given(problem=half_problems, return_max=st.booleans())
def test_half_types_deep(backend, problem, return_max):
    check(backend, problem, return_max)


@settings(max_examples=5)
@given(problem=wide_problems, return_max=st.booleans())
@example(  # matrices without a batch
    problem=Problem("float32", seqlen_q=2, seqlen_k=3, variants=Variants(score_mod="distance")), return_max=False
)
def test_wide_types(backend, problem, return_max):
    check(backend, problem, return_max)


@pytest.mark.deep
@settings(max_examples=1000)
@given(problem=wide_problems, return_max=st.booleans())
def test_wide_types_deep(backend, problem, return_max):
    check(backend, problem, return_max)


@pytest.mark.parametrize("form", testing.PAIR_FORMS)
def test_each_form_of_a_mask_and_a_bias(backend, form):
    leading = ((2, 2), (2, 1), (2, 1))
    operands = Variants(mask=Operand("random", form), bias=Operand("normal", form, "float32", "reversed axes"))
    check(backend, Problem("float16", *leading, 20, 150, variants=operands), True)


@pytest.mark.parametrize("values", testing.MASK_FAMILIES)
def test_each_family_of_masks(backend, values):
    problem = Problem("float16", (2,), (2,), (2,), 70, 150, variants=Variants(mask=Operand(values)))
    check(backend, problem, True)


@pytest.mark.parametrize("values", testing.BIAS_FAMILIES)
@pytest.mark.parametrize("dtype", testing.OPERAND_TYPES)
def test_each_family_of_biases(backend, values, dtype):
    problem = Problem("bfloat16", (2,), (2,), (2,), 20, 150, variants=Variants(bias=Operand(values, "all", dtype)))
    check(backend, problem, True)


@settings(max_examples=6)
@given(
    data=st.data(),
    problem=testing.attention_problems(
        families=["normal", "one sign", "rising"],
        scales=[None, -0.5],
        seqlens=testing.seqlens(140),
        variants=VARIANTS,
    ),
)
def test_checks_of_attention_hold(backend, data, problem):
    """What changes nothing in a plain call changes nothing with options."""
    data.draw(st.sampled_from(testing.FORWARD_CHECKS))(backend.attention, problem)


@pytest.mark.deep
@pytest.mark.parametrize("check", testing.FORWARD_CHECKS)
@given(problem=testing.attention_problems(variants=VARIANTS))
def test_checks_of_attention_hold_deep(backend, check, problem):
    check(backend.attention, problem)
