"""Changes of the inputs that must not change a bit of the result, or change it exactly."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim, testing
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned
from tests.backends import Simulator

few = settings(max_examples=10)


def single_heads(families=("normal", "rising", "peaked", "duplicates"), dtypes=("float16", "bfloat16")):
    """One head of moderate values in a small number of specialisations."""
    return testing.attention_problems(
        dtypes,
        families,
        scales=[None, None, 1.0, -0.3],
        views=["plain"],
        leading_dims=st.just(((), (), ())),
        head_dims=st.sampled_from([(16, 16), (64, 64), (57, 48), (128, 128)]),
    )


def assert_same(results, expected):
    """Both out and lse, bit for bit."""
    for result, value in zip(results, expected, strict=True):
        testing.assert_same_bits(result, value)


@few
@given(problem=testing.attention_problems())
def test_the_same_call_twice(backend, problem):
    testing.check_two_runs(backend.attention, problem)


@few
@given(problem=testing.attention_problems())
def test_strides_do_not_matter(backend, problem):
    """Of the inputs and of out, between which nothing is written."""
    _, out, lse = poisoned.attention(backend, problem)
    copies = [np.array(array, order="C") for array in problem.inputs()]
    assert_same((out, lse), backend.attention(*copies, **problem.options))


@few
@given(problem=testing.attention_problems(views=("plain", "rows before heads")))
def test_a_head_does_not_depend_on_the_others(backend, problem):
    testing.check_batch_independence(backend.attention, problem)


CHECKS = [
    (testing.check_query_independence, single_heads(("normal", "rising", "rising to tiny values"))),
    (testing.check_query_permutation, single_heads()),
    (testing.check_value_column_permutation, single_heads()),
    (testing.check_causal_prefix, single_heads()),
    (testing.check_value_powers_of_two, single_heads()),
    (testing.check_query_key_powers_of_two, single_heads()),
    (testing.check_signs, single_heads()),
    (testing.check_grouped_heads, single_heads()),
    (testing.check_masked_keys_have_no_influence, single_heads()),
    (testing.check_alignments, single_heads(("normal",))),
    (testing.check_decoding, single_heads()),
    (testing.check_one_key, single_heads()),
    (testing.check_constant_values, single_heads()),
    (testing.check_value_linearity, single_heads()),
    (testing.check_convexity, single_heads()),
    (testing.check_lse_range, single_heads()),
]


@pytest.mark.parametrize(("check", "problems"), CHECKS, ids=[check.__name__ for check, _ in CHECKS])
@few
@given(data=st.data())
def test_ready_checks(backend, check, problems, data):
    check(backend.attention, data.draw(problems))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_at_rest_do_not_see_that_others_are_rescaled(backend, dtype):
    """A multiplication by 1 keeps even sums that are subnormal."""
    q, k, v = Problem(dtype, (), (), (), 64, 500, 64, 40, values="rising to tiny values").inputs()
    q[::2] = 0
    out, lse = backend.attention(q, k, v)
    assert (out[::2] != 0).any()
    q[:] = 0
    at_rest, at_rest_lse = backend.attention(q, k, v)
    assert_same((at_rest[::2], at_rest_lse[::2]), (out[::2], lse[::2]))


@pytest.mark.parametrize(
    "check", [testing.check_key_permutation, testing.check_head_dim_permutation], ids=lambda check: check.__name__
)
@few
@given(problem=single_heads(families=("integers",)))
def test_permutations_where_sums_are_exact(backend, check, problem):
    """The tensor cores may add in any order."""
    check(backend.attention, replace(problem, softmax_scale=testing.EXACT_SCALE), bitwise=True)


@few
@given(problem=single_heads(families=("integers",), dtypes=("float16",)))
def test_tile_sizes_where_sums_are_exact(problem):
    """Architectures have tiles, and tensor core instructions, of their own."""
    problem = replace(problem, softmax_scale=testing.EXACT_SCALE)
    inputs = problem.inputs()
    simulator = Simulator()
    assert_same(
        simulator.attention(*inputs, arch="sm_75", **problem.options),
        simulator.attention(*inputs, arch="sm_80", **problem.options),
    )


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@settings(max_examples=10)
@given(problem=single_heads(dtypes=("float16",)), seed=st.integers(0, 1000))
def test_the_order_of_warps_does_not_matter(arch, problem, seed):
    """No warp reads what another has yet to write, or writes what another still reads."""
    problem = replace(problem, seqlen_k=problem.seqlen_k + 128)
    results = []
    for schedule in "lockstep", "random":
        with ptxsim.settings(schedule=schedule, seed=seed):
            results.append(Simulator().attention(*problem.inputs(), arch=arch, **problem.options))
    assert_same(*results)


@few
@given(
    problem=testing.attention_problems(families=("normal",)),
    lanes=st.sampled_from([1, 256, 1024]),
)
def test_how_blocks_are_simulated_together_does_not_matter(problem, lanes):
    inputs = problem.inputs()
    expected = Simulator().attention(*inputs, **problem.options)
    with ptxsim.settings(chunk_lanes=lanes):
        assert_same(Simulator().attention(*inputs, **problem.options), expected)
