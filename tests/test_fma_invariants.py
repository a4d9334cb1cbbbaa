"""float32 and float64: changes of the arguments that must not change a bit of results and gradients, or change them
exactly, and identities; small problems, since a multiplication of the simulator is worth much here.
"""

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned, test_backward_identities, test_invariants
from tests.backends import Simulator

few = settings(max_examples=2)
all_wide = pytest.mark.parametrize("dtype", ["float32", "float64"])
SMALL = {
    "scales": [None, None, -0.3],
    "seqlens": st.sampled_from([1, 15, 33, 64, 65]),  # of one tile and of several
    "head_dims": st.sampled_from([(16, 24), (13, 16)]),
    "leading_dims": st.just(((), (), ())),
}
BACKWARD_CHECKS = [
    testing.check_vjp_two_runs,
    testing.check_vjp_causal_prefix,
    testing.check_vjp_grouped_heads,
    testing.check_vjp_powers_of_two,
    testing.check_vjp_query_permutation,
    testing.check_vjp_key_permutation,
    testing.check_vjp_linearity,
    testing.check_vjp_constant_values,
    testing.check_vjp_nonfinite_values_change_only_what_sees_them,
]


def forward_problems(dtype, families=("normal", "rising"), **options):
    return testing.attention_problems([dtype], families, **{"views": ["plain"], **SMALL, **options})


def backward_problems(dtype, families=("normal", "duplicates", "one sign"), **options):
    options = {"views": ["plain"], **SMALL, **options}
    return testing.attention_backward_problems(dtypes=[dtype], families=families, **options)


@all_wide
@pytest.mark.parametrize("check", [check for check, _ in test_invariants.CHECKS], ids=lambda check: check.__name__)
@few
@given(data=st.data())
def test_forward_checks(backend, check, dtype, data):
    check(backend.attention, data.draw(forward_problems(dtype)))


@all_wide
@pytest.mark.parametrize("check", BACKWARD_CHECKS, ids=lambda check: check.__name__)
@few
@given(data=st.data())
def test_backward_checks(backend, check, dtype, data):
    check(backend.attention_vjp, data.draw(backward_problems(dtype)))


@all_wide
@few
@given(data=st.data())
def test_a_head_does_not_depend_on_the_others(backend, dtype, data):
    leading_dims = st.just(((2,), (2,), (2,)))
    testing.check_batch_independence(backend.attention, data.draw(forward_problems(dtype, leading_dims=leading_dims)))
    problem = data.draw(backward_problems(dtype, leading_dims=leading_dims))
    testing.check_vjp_batch_independence(backend.attention_vjp, problem)


@all_wide
@few
@given(data=st.data())
def test_strides_do_not_matter(backend, dtype, data):
    """Of all arguments, lse among them, and of the gradients, between which nothing is written."""
    leading_dims = testing.leading_dims(max_count=3)
    problem = data.draw(backward_problems(dtype, views=testing.VIEWS, leading_dims=leading_dims))
    arguments, options, gradients = poisoned.attention_backward(backend, problem)
    copies = [np.array(array, order="C") for array in arguments]
    dlse = options.pop("dlse")
    dlse = None if dlse is None else dlse.copy()
    test_backward_identities.assert_same(backend.attention_backward(*copies, dlse=dlse, **options), gradients)


@all_wide
def test_one_key_receives_the_sum_of_the_output_gradients(backend, dtype):
    """Its weight is exp(0) = 1 exactly, and sums of small integers are exact."""
    rng = np.random.default_rng(0)
    dout, v = (rng.integers(-8, 9, shape).astype(dtype) for shape in ((3, 70, 24), (3, 1, 24)))
    q, k = (rng.standard_normal(shape).astype(dtype) for shape in ((3, 70, 16), (3, 1, 16)))
    out, lse = backend.attention(q, k, v)
    dq, dk, dv = backend.attention_backward(dout, q, k, v, out, lse)
    np.testing.assert_array_equal(dv, dout.sum(axis=1, keepdims=True))
    assert (dq == 0).all() and (dk == 0).all()


@settings(max_examples=4)
@given(
    problem=backward_problems("float32", views=testing.VIEWS) | backward_problems("float64", views=testing.VIEWS),
    places=testing.hostile_values(["dout", "q", "k", "v"]),
)
@example(
    problem=BackwardProblem(Problem("float32", (), (), (), 6, 90, causal=True, align="bottom-right")),
    places=[("k", 90 * 16 - 1, np.inf)],
)
@example(
    problem=BackwardProblem(Problem("float64", (), (), (), 5, 10, causal=True, align="top-left"), with_dlse=True),
    places=[("k", 7 * 16, np.nan), ("v", 8 * 16, np.inf)],  # keys that no query sees
)
@example(
    problem=BackwardProblem(Problem("float64", (), (), (), 70, 70, causal=True, align="top-left")),
    places=[("dout", 40 * 16, -np.inf), ("q", 50 * 16, np.nan)],
)
def test_a_non_finite_value_changes_only_what_sees_it(backend, problem, places):
    assume(problem.forward.seqlen_q and problem.forward.seqlen_k)
    poisoned.assert_a_non_finite_value_changes_only_what_sees_it(backend, problem, places)


@all_wide
@pytest.mark.parametrize(
    ("leading_q", "leading_k", "spoilt", "arch"),
    [
        ((), (2,), False, "sm_80"),  # dq is summed, over several passes through all keys
        ((2,), (), False, "sm_80"),
        ((), (), True, "sm_75"),
        ((), (), True, "sm_80"),
    ],
)
def test_the_order_of_warps_does_not_matter(dtype, leading_q, leading_k, spoilt, arch):
    """No warp reads what another has yet to write, or writes what another still reads."""
    simulator = Simulator()
    forward = Problem(dtype, leading_q, leading_k, leading_k, 40, 70, 16, 24, True, "top-left", seed=7)
    inputs = forward.inputs()
    dout, _ = BackwardProblem(forward).cotangents()
    if spoilt:  # they are taken out of the shared tiles
        dout[-1, 3], inputs[0][-2, 5], inputs[1][[2, 36], 7] = np.inf, np.nan, -np.inf

    def results():
        out, lse = simulator.attention(*inputs, arch=arch, **forward.options)
        return out, lse, *simulator.attention_backward(dout, *inputs, out, lse, arch=arch, **forward.options)

    expected = results()
    with ptxsim.settings(schedule="random", seed=1):
        test_backward_identities.assert_same(results(), expected)


@all_wide
@few
@given(data=st.data(), lanes=st.sampled_from([1, 256, 1024]))
def test_how_blocks_are_simulated_together_does_not_matter(dtype, data, lanes):
    simulator = Simulator()
    problem = data.draw(backward_problems(dtype))
    arguments, options = problem.arguments(simulator.attention)
    expected = simulator.attention_backward(*arguments, **options)
    with ptxsim.settings(chunk_lanes=lanes):
        test_backward_identities.assert_same(simulator.attention_backward(*arguments, **options), expected)
