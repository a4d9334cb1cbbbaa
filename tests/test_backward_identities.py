"""What the gradients must satisfy, without a reference: sums, and changes of the inputs that change no bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned
from tests.backends import Simulator
from tests.test_invariants import single_heads

few = settings(max_examples=5)
HALF_TYPES = ("float16", "bfloat16")
IDENTITIES = [testing.check_vjp_identities, testing.check_lse_gradient]
INVARIANTS = [
    testing.check_vjp_batch_independence,
    testing.check_vjp_causal_prefix,
    testing.check_vjp_grouped_heads,
    testing.check_vjp_powers_of_two,
    testing.check_vjp_query_permutation,
    testing.check_vjp_key_permutation,
    testing.check_vjp_linearity,
    testing.check_vjp_constant_values,
    testing.check_vjp_nonfinite_values_change_only_what_sees_them,
]


@st.composite
def single_head_problems(draw, dtypes):
    return BackwardProblem(
        forward=draw(single_heads(("normal", "duplicates", "one sign"), dtypes)),
        dout_values=draw(st.sampled_from(["normal", "one sign"])),
        with_dlse=draw(st.booleans()),
    )


@pytest.mark.parametrize("check", IDENTITIES, ids=lambda check: check.__name__)
@settings(max_examples=8)
@given(problem=single_head_problems(HALF_TYPES))
def test_identities(backend, check, problem):
    check(backend.attention_vjp, problem)


@pytest.mark.parametrize("check", IDENTITIES, ids=lambda check: check.__name__)
@settings(max_examples=4)
@given(problem=single_head_problems(("float32", "float64")))
def test_identities_in_float32_and_float64(backend, check, problem):
    check(backend.attention_vjp, problem)


@pytest.mark.parametrize("check", INVARIANTS, ids=lambda check: check.__name__)
@few
@given(problem=single_head_problems(HALF_TYPES))
def test_invariants(backend, check, problem):
    check(backend.attention_vjp, problem)


@few
@given(problem=testing.attention_backward_problems())
def test_the_same_call_twice_and_strides(backend, problem):
    """Of all arguments, lse among them, and of the gradients, between which nothing is written."""
    arguments, options, gradients = poisoned.attention_backward(backend, problem)
    assert_same(backend.attention_backward(*arguments, **options), gradients)
    copies = [np.array(array, order="C") for array in arguments]
    dlse = options.pop("dlse")
    dlse = None if dlse is None else dlse.copy()
    assert_same(backend.attention_backward(*copies, dlse=dlse, **options), gradients)


def assert_same(gradients, expected):
    for gradient, value in zip(gradients, expected, strict=True):
        testing.assert_same_bits(gradient, value)


@pytest.mark.parametrize("simulated", ["sm_75", "sm_80"])
@settings(max_examples=8)
@given(problem=single_heads(dtypes=("float16",)), seed=st.integers(0, 1000))
def test_the_order_of_warps_does_not_matter(simulated, problem, seed):
    """No warp reads what another has yet to write, or writes what another still reads."""
    simulator = Simulator()
    problem = BackwardProblem(replace(problem, seqlen_q=problem.seqlen_q + 64))
    arguments, options = problem.arguments(simulator.attention)
    results = []
    for schedule in "lockstep", "random":
        with ptxsim.settings(schedule=schedule, seed=seed):
            results.append(simulator.attention_backward(*arguments, arch=simulated, **options))
    assert_same(*results)


@pytest.mark.parametrize("simulated", [pytest.param("sm_75", marks=pytest.mark.deep), "sm_80"])
@pytest.mark.parametrize(
    ("leading_q", "leading_k", "name", "position"),
    [
        ((), (3,), None, 0),  # dq is summed, over several passes through all keys
        ((3,), (), None, 0),
        ((), (), "dout", 70 * 64),  # values that are taken out of the shared tiles
        ((), (), "q", 70 * 64),
        ((), (), "k", 70 * 64),
    ],
)
def test_the_order_of_warps_does_not_matter_in_passes_and_beside_non_finite_values(
    simulated, leading_q, leading_k, name, position
):
    simulator = Simulator()
    forward = Problem("float16", leading_q, leading_k, leading_k, 150, 170, 64, 64, True, "top-left", seed=7)
    arguments, options = BackwardProblem(forward).arguments(simulator.attention)
    if name is not None:
        {"dout": arguments[0], "q": arguments[1], "k": arguments[2]}[name].reshape(-1)[position] = np.inf
    expected = simulator.attention_backward(*arguments, arch=simulated, **options)
    for seed in range(2):
        with ptxsim.settings(schedule="random", seed=seed):
            assert_same(simulator.attention_backward(*arguments, arch=simulated, **options), expected)


@few
@given(problem=testing.attention_backward_problems(families=("normal",)), lanes=st.sampled_from([1, 256, 1024]))
def test_how_blocks_are_simulated_together_does_not_matter(problem, lanes):
    simulator = Simulator()
    arguments, options = problem.arguments(simulator.attention)
    expected = simulator.attention_backward(*arguments, **options)
    with ptxsim.settings(chunk_lanes=lanes):
        assert_same(simulator.attention_backward(*arguments, **options), expected)


def test_many_queries_and_keys(backend):
    """More tiles than any of the drawn problems has."""
    forward = Problem("float16", (), (), (), 700, 900, 64, 64, causal=True, align="bottom-right", seed=6)
    arguments, options, gradients = poisoned.attention_backward(backend, BackwardProblem(forward, with_dlse=True))
    testing.assert_gradients_within_bound(gradients, *arguments, **options)
