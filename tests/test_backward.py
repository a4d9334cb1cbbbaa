"""Every element of dq, dk and dv is within its bound of the float64 reference, over the whole space of problems."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, event, example, given, settings

import cupyflash
from cupyflash import _launch, bounds, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import backward_checks, poisoned

ALIGNMENTS = ["bottom-right", "top-left", -70, 5, 100]  # names, and the key that query 0 is at


def check(backend, problem, arch="sm_80"):
    arguments, options, gradients = poisoned.attention_backward(backend, problem, arch)
    exact, bound = testing.assert_gradients_within_bound(gradients, *arguments, **options)
    return arguments, options, gradients, exact, bound


@settings(max_examples=8)
@given(problem=testing.attention_backward_problems(alignments=ALIGNMENTS))
@example(problem=BackwardProblem(Problem(seqlen_q=0, seqlen_k=3, leading_q=(2,))))
@example(problem=BackwardProblem(Problem(seqlen_q=5, seqlen_k=0, head_dim_v=13), with_dlse=True))
@example(problem=BackwardProblem(Problem(seqlen_q=130, seqlen_k=3, causal=True, align="bottom-right"), with_dlse=True))
@example(problem=BackwardProblem(Problem(seqlen_q=3, seqlen_k=300, causal=True, align="top-left")))
@example(problem=BackwardProblem(Problem("float16", (0, 2), (2,), (1, 2), 5, 7)))
@example(problem=BackwardProblem(Problem("float16", (), (3, 2), (2,), 5, 7, 9, 20), dout_view="one column"))
def test_stays_within_bounds(backend, arch, problem):
    if arch == "sm_75":  # which has no bfloat16
        problem = replace(problem, forward=replace(problem.forward, dtype="float16"))
    *_, bound = check(backend, problem, arch)
    event("bound finite everywhere" if all(np.isfinite(x).all() for x in bound) else "bound infinite somewhere")


@pytest.mark.parametrize("values", testing.FAMILIES)
def test_each_family_of_values(backend, arch, values):
    for dtype in ("float16",) if arch == "sm_75" else ("float16", "bfloat16"):
        forward = Problem(
            dtype, (2,), (2,), (2,), 70, 200, 64, 48, causal=True, align="bottom-right", values=values, seed=1
        )
        *_, bound = check(backend, BackwardProblem(forward, with_dlse=True), arch)
        assert values == "huge values" or all(np.isfinite(x).all() for x in bound)


@pytest.mark.parametrize("dout_values", sorted(set(testing.DOUT_FAMILIES)))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_family_of_output_gradients(backend, dout_values, dtype):
    check(backend, BackwardProblem(Problem(dtype, (), (), (), 40, 150, 64, 64, seed=1), dout_values))


def of_head_dims(head_dims):
    forward = Problem("float16", (2,), (2,), (2,), 70, 140, *head_dims, causal=True, align="bottom-right", seed=2)
    return BackwardProblem(forward, with_dlse=True)


@pytest.mark.parametrize("head_dims", [(80, 96), (255, 249)])
def test_tiles_of_each_architecture(backend, arch, head_dims):
    check(backend, of_head_dims(head_dims), arch)


@pytest.mark.parametrize("head_dims", [(1, 1), (7, 100), (128, 128), (7, 256), (160, 160)])
def test_head_dims(backend, head_dims):
    check(backend, of_head_dims(head_dims))


@pytest.mark.parametrize("softmax_scale", dict.fromkeys(testing.SCALES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales(backend, softmax_scale, dtype):
    forward = Problem(dtype, (), (), (), 20, 150, 64, 64, softmax_scale=softmax_scale, seed=3)
    check(backend, BackwardProblem(forward))


@pytest.mark.parametrize(
    ("leading_q", "leading_k", "leading_v"),
    [
        ((2, 6), (2, 3), (2, 3)),
        ((2, 6), (3,), (2, 3)),
        ((2, 6), (1, 1), (2, 3)),
        ((3,), (1, 3), (2, 1)),
        ((), (2, 3), (3,)),
        ((4, 1, 2), (3, 1), (1, 1, 2)),
        ((2, 3, 1, 2), (3, 1, 2), (2, 1, 2, 2)),
    ],
)
def test_sums_over_broadcast_dimensions_and_grouped_heads(backend, leading_q, leading_k, leading_v):
    forward = Problem("float16", leading_q, leading_k, leading_v, 33, 65, 24, 16, values="one sign", seed=4)
    check(backend, BackwardProblem(forward, "one sign"))


def test_more_batch_dimensions_than_the_kernel_holds_are_merged(backend):
    dims = (1, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2)
    check(backend, BackwardProblem(Problem("float16", dims, dims, dims[3:], 3, 5, seed=4)))


@settings(max_examples=8)
@given(
    problem=testing.attention_backward_problems(families=["normal", "one sign", "rising"], scales=[None, -0.5]),
    places=testing.hostile_values(["dout", "q", "k", "v"]),
)
@example(
    problem=BackwardProblem(Problem("float16", (), (), (), 6, 200, 64, 64, causal=True, align="bottom-right")),
    places=[("k", 200 * 64 - 1, np.inf)],
)
@example(
    problem=BackwardProblem(Problem("float16", (), (), (), 5, 10, 16, 16, causal=True, align="top-left")),
    places=[("k", 7 * 16, np.nan), ("v", 8 * 16, np.inf)],  # keys that no query sees
)
def test_a_non_finite_value_changes_only_what_sees_it(backend, problem, places):
    assume(all(array.size for array in problem.forward.inputs()))
    poisoned.assert_a_non_finite_value_changes_only_what_sees_it(backend, problem, places)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_errors_have_no_bias(backend, dtype):
    problem = BackwardProblem(Problem(dtype, (2,), (2,), (2,), 128, 128, 64, 64, values="one sign", seed=5), "one sign")
    *_, gradients, exact, _ = check(backend, problem)
    for gradient, values in zip(gradients, exact, strict=True):
        backward_checks.assert_unbiased(gradient, values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dims", [(16, 16), (80, 64)])
def test_nonfinite_rows_reach_who_sees_them(backend, dtype, head_dims):
    forward = Problem(dtype, (), (), (), 150, 150, *head_dims, causal=True, align="bottom-right", seed=6)
    backward_checks.assert_nonfinite_rows_reach_who_sees_them(
        backend, BackwardProblem(forward, with_dlse=True), "sm_80"
    )


def test_a_row_without_keys_and_a_key_without_rows_have_gradient_zero(backend):
    forward = Problem("float16", (2,), (2,), (2,), 130, 40, causal=True, align="bottom-right", values="one sign")
    _, _, (dq, _, _) = poisoned.attention_backward(backend, BackwardProblem(forward, with_dlse=True))
    assert (dq[:, :90] == 0).all() and (dq[:, 91:] != 0).any()
    forward = replace(forward, seqlen_q=40, seqlen_k=130, align="top-left")
    _, _, (_, dk, dv) = poisoned.attention_backward(backend, BackwardProblem(forward, with_dlse=True))
    assert (dk[:, 40:] == 0).all() and (dv[:, 40:] == 0).all() and (dv[:, :40] != 0).all()


def test_gradients_are_made_where_none_are_given(backend):
    problem = BackwardProblem(Problem("float16", (2, 6), (3,), (2, 3), 9, 20), grad_views=("rows before heads",) * 3)
    arguments, options, gradients = poisoned.attention_backward(backend, problem)
    for given_dk in None, problem.empty_grads()[1]:
        made = backend.attention_backward(*arguments, grads_out=(None, given_dk, None), **options)
        assert given_dk is None or made.dk is given_dk
        for gradient, expected in zip(made, gradients, strict=True):
            testing.assert_same_bits(gradient, expected)
        assert made.dq.flags.c_contiguous and made.dv.flags.c_contiguous


def test_a_view_that_repeats_an_operand_has_a_full_gradient(backend):
    problem = BackwardProblem(
        Problem("float16", (3,), (3,), (3,), 9, 20, views=("one matrix", "one matrix", "one matrix", "plain"))
    )
    arguments, _, gradients, *_ = check(backend, problem)
    assert arguments[2].strides[0] == 0 and gradients.dk.shape == (3, 20, 16)
    assert not np.array_equal(gradients.dk[0], gradients.dk[1])


def test_vjp_is_the_backward(backend):
    arguments, options = BackwardProblem(Problem(seqlen_q=9, seqlen_k=20), with_dlse=True).arguments(backend.attention)
    dout, q, k, v, out, lse = arguments
    dlse = options.pop("dlse")
    made, pullback = cupyflash.attention_vjp(q, k, v, **options)
    (made_too, made_lse), pullback_both = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    for x in made, made_too:
        testing.assert_same_bits(x, out)
    testing.assert_same_bits(made_lse, lse)
    for gradients, given_dlse in (
        (pullback(dout), None),
        (pullback_both(dout), None),
        (pullback(dout, dlse), dlse),
        (pullback_both(dout, dlse=dlse), dlse),
    ):
        expected = cupyflash.attention_backward(*arguments, dlse=given_dlse, **options)
        for gradient, value in zip(gradients, expected, strict=True):
            testing.assert_same_bits(gradient, value)


@pytest.mark.parametrize(
    ("dtype", "numbers"), [("float16", 2), ("bfloat16", 2), ("float32", 1), ("float64", 1)]
)  # delta, and lse in base 2
def test_workspace_is_few_numbers_per_query(monkeypatch, dtype, numbers):
    """What is allocated beside the results, where no operand has to be packed."""
    allocated = []

    class Simulator(_launch.Simulator):
        def __init__(self):
            super().__init__()
            self.empty = lambda *args: allocated.append(np.empty(*args)) or allocated[-1]
            self.zeros = None

    dout, q, k, v = np.random.default_rng(0).standard_normal((4, 2, 20, 16)).astype(testing.element_type(dtype))
    _, pullback = cupyflash.attention_vjp(q, k, v)
    monkeypatch.setattr(_launch, "Simulator", Simulator)
    gradients = pullback(dout)
    size = 8 if dtype == "float64" else 4
    assert sum(array.nbytes for array in allocated) == sum(x.nbytes for x in gradients) + numbers * 2 * 20 * size


def test_bounds_of_a_wrong_out_or_lse_are_not_claimed_small():
    """What a wrong forward adds to the gradients' error is part of the bound."""
    rng = np.random.default_rng(0)
    dout, q, k, v = rng.standard_normal((4, 20, 16)).astype(np.float16)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    right = bounds.attention_backward(dout, q, k, v, out, lse)
    off = bounds.attention_backward(dout, q, k, v, (out + np.float16(0.5)), lse)
    assert (off.dq > 5 * right.dq).all() and np.array_equal(off.dv, right.dv)
    assert (bounds.attention_backward(dout, q, k, v, out, lse + np.float32(0.01)).dv > 3 * right.dv).all()
    assert np.isinf(bounds.attention_backward(dout, q, k, v, out, lse - np.float32(np.inf)).dv).all()
