"""Every element of out and lse is within its bound of the float64 reference, over the whole space of problems."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import event, example, given, settings

from cupyflash import testing
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned


def check(backend, problem, arch="sm_80"):
    """Inputs, results and what is known of them, every element compared."""
    inputs, out, lse = poisoned.attention(backend, problem, arch=arch)
    exact, bound = testing.assert_attention_within_bound(out, lse, *inputs, **problem.options)
    return inputs, out, lse, exact, bound


@settings(max_examples=14)
@given(problem=testing.attention_problems())
@example(problem=Problem(seqlen_q=0, seqlen_k=3, leading_q=(2,)))
@example(problem=Problem(seqlen_q=5, seqlen_k=0, head_dim_v=13))
@example(problem=Problem(seqlen_q=130, seqlen_k=3, causal=True, align="bottom-right"))
@example(problem=Problem(seqlen_q=3, seqlen_k=300, causal=True, align="top-left"))
def test_stays_within_bounds(backend, arch, problem):
    if arch == "sm_75":  # which has no bfloat16
        problem = replace(problem, dtype="float16")
    *_, bound = check(backend, problem, arch)
    event("bound finite everywhere" if np.isfinite(bound).all() else "bound infinite somewhere")


@pytest.mark.parametrize("values", testing.FAMILIES)
def test_each_family_of_values(backend, arch, values):
    """Several key tiles, so that the maximum moves between them; and the bound says something."""
    for dtype in ("float16",) if arch == "sm_75" else ("float16", "bfloat16"):
        problem = Problem(
            dtype, (2,), (2,), (2,), 40, 300, 64, 48, causal=True, align="bottom-right", values=values, seed=1
        )
        *_, bound = check(backend, problem, arch)
        assert values == "huge values" or np.isfinite(bound).all()


def of_head_dims(head_dims):
    return Problem("float16", (2,), (2,), (2,), 70, 140, *head_dims, causal=True, align="bottom-right", seed=2)


@pytest.mark.parametrize("head_dims", [(80, 96), (192, 128), (255, 249)])
def test_tiles_of_each_architecture(backend, arch, head_dims):
    check(backend, of_head_dims(head_dims), arch)


@pytest.mark.parametrize("head_dims", [(1, 1), (7, 256), (256, 3), (160, 160)])
def test_head_dims(backend, head_dims):
    check(backend, of_head_dims(head_dims))


@pytest.mark.parametrize("softmax_scale", dict.fromkeys(testing.SCALES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales(backend, softmax_scale, dtype):
    problem = Problem(dtype, (), (), (), 20, 150, 64, 64, softmax_scale=softmax_scale, seed=3)
    check(backend, problem)


def test_more_batch_dimensions_than_the_kernel_holds_are_merged(backend):
    dims = (1, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2)
    problem = Problem("float16", dims, dims, dims[3:], 3, 5, seed=4)
    check(backend, problem)


@settings(max_examples=14)
@given(
    problem=testing.attention_problems(families=["normal", "one sign", "rising"], scales=[None, -0.5]),
    places=testing.hostile_values(),
)
@example(
    problem=Problem("float16", (), (), (), 6, 200, 64, 64, causal=True, align="bottom-right"),
    places=[("v", 200 * 64 - 1, np.inf)],
)
def test_a_non_finite_value_changes_only_the_rows_that_see_it(backend, problem, places):
    testing.check_nonfinite_values_change_only_rows_that_see_them(
        poisoned.into_views(backend, problem), problem, places=places
    )


@pytest.mark.parametrize("head_dims", [(16, 16), (64, 64), (48, 128), (16, 256)])
def test_a_nan_spoils_the_queries_that_see_it_wherever_it_is_in_a_tile(backend, arch, head_dims):
    problem = Problem("float16", (), (), (), 150, 150, *head_dims, causal=True)
    testing.check_nonfinite_values_reach_who_sees_them(partial(backend.attention, arch=arch), problem)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_errors_have_no_bias(backend, dtype):
    """A weight or a result that is truncated instead of rounded stays within its bound, but errs to one side."""
    problem = Problem(dtype, (2,), (2,), (2,), 128, 128, 64, 64, values="one sign", seed=5)
    _, out, _, exact, _ = check(backend, problem)
    testing.assert_unbiased(out, exact)


def test_a_row_without_keys_is_zero(backend):
    problem = Problem("float16", (2,), (2,), (2,), 130, 40, causal=True, align="bottom-right", values="one sign")
    _, out, lse = poisoned.attention(backend, problem)
    assert (out[:, :90] == 0).all() and (lse[:, :90] == -np.inf).all()
    assert (out[:, 90:] > 0).all() and np.isfinite(lse[:, 90:]).all()


def test_out_is_made_where_none_is_given(backend):
    problem = Problem("float16", (2, 6), (3,), (2, 3), 9, 20, views=("rows before heads",) * 4)
    inputs, out, lse = poisoned.attention(backend, problem)
    made, made_lse = backend.attention(*inputs)
    assert made.flags.c_contiguous and made_lse.flags.c_contiguous
    testing.assert_same_bits(made, out)
    testing.assert_same_bits(made_lse, lse)
