"""What assertions accept and say, which arguments problems take, and what they shrink to."""

import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from cupyflash import reference, testing
from cupyflash.testing import AttentionBackwardProblem, AttentionProblem
from tests import numpy_attention

few = settings(max_examples=15)
PROBLEM = AttentionProblem("float32", seqlen_q=3, seqlen_k=4)
BACKWARD_PROBLEM = AttentionBackwardProblem(PROBLEM)


def test_the_element_furthest_beyond_its_bound_is_named():
    exact, bound = np.zeros((2, 3)), np.full((2, 3), 0.5)
    result = np.array([[0.5, 0.6, 0], [0, 2, np.inf]])
    with pytest.raises(AssertionError, match=re.escape("x[1, 2] is inf, exact 0.0: error inf is inf times")):
        testing.assert_within_bound(result, exact, bound, name="x")
    result[1, 2] = 0
    with pytest.raises(AssertionError, match=re.escape("x[1, 1] is 2.0, exact 0.0: error 2 is 4 times")) as raised:
        testing.assert_within_bound(result, exact, bound, name="x")
    assert "2 of 6 elements are wrong" in str(raised.value)


@pytest.mark.parametrize(
    ("result", "exact", "bound", "right"),
    [
        (1.0, 1.0, 0.0, True),
        (np.nan, 1.0, 0.5, False),
        (-np.inf, -np.inf, 0.0, True),
        (np.inf, -np.inf, 0.0, False),
        (5.0, 1.0, np.inf, True),  # not claimed
        (5.0, np.nan, np.inf, False),  # should not be finite
        (np.inf, np.nan, np.inf, True),
    ],
)
def test_what_is_within_a_bound(result, exact, bound, right):
    arrays = [np.array([x]) for x in (result, exact, bound)]
    if right:
        testing.assert_within_bound(*arrays)
        return
    with pytest.raises(AssertionError):
        testing.assert_within_bound(*arrays)


@pytest.mark.parametrize("bound", [np.nan, -1.0])
def test_what_is_no_bound_is_refused(bound):
    with pytest.raises(ValueError, match="out: a bound is negative or NaN"):
        testing.assert_within_bound(np.ones(2), np.ones(2), [1.0, bound], name="out")


@pytest.mark.parametrize("bound", [0.5, [0.5, 0.5, 0.5], np.full((1, 1), 0.5), [[1], [0.5]]])
@pytest.mark.parametrize("exact", [0, [0, 0, 0], np.zeros((2, 3))])
def test_bounds_and_exact_values_are_broadcast(exact, bound):
    result = np.array([[0.5, 0, 0], [0, 2, 0]])
    testing.assert_within_bound(result / 4, exact, bound)
    with pytest.raises(AssertionError, match=re.escape("x[1, 1] is 2.0, exact 0.0: error 2 is 4 times its bound 0.5;")):
        testing.assert_within_bound(result, exact, bound, name="x", terms=lambda: {"rounding": 0.5})


def test_shapes_that_do_not_broadcast_are_refused():
    for exact, bound in (np.zeros(2), 0.5), (0, [1, 1]), (np.zeros((1, 2, 3)), 1):
        with pytest.raises(ValueError, match=re.escape("x: shape (2, 3), to which exact of shape (")):
            testing.assert_within_bound(np.zeros((2, 3)), exact, bound, name="x")


def test_bits_shapes_and_dtypes_are_compared():
    zero = np.zeros(3, np.float16)
    testing.assert_same_bits(zero, zero.copy())
    for other in -zero, zero.astype(np.float32), zero[:2], zero + np.float16(6e-8):
        with pytest.raises(AssertionError):
            testing.assert_same_bits(other, zero)
    with pytest.raises(AssertionError, match="mean error"):
        testing.assert_unbiased(np.full(9, 1, np.float16), np.full(9, 1 + 2.0**-12))


# Problems and arrays


@given(problem=testing.attention_backward_problems())
def test_a_repr_makes_the_problem_again(problem):
    assert eval(repr(problem), vars(testing)) == problem
    assert len(repr(AttentionProblem(seqlen_q=3))) == len("AttentionProblem(seqlen_q=3)")
    infinite = AttentionProblem(softmax_scale=np.inf)
    assert eval(repr(infinite), vars(testing)) == infinite


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: AttentionProblem(values="nromal"), ValueError, "values: 'nromal' is none of 'normal', 'heavy-tailed'"),
        (lambda: AttentionProblem("flot32"), ValueError, "dtype: 'flot32' is none of 'float16', 'bfloat16', 'float32'"),
        (lambda: AttentionProblem(views=("plain",)), ValueError, "views: ('plain',) are not 4 names"),
        (lambda: AttentionProblem(views=("plan",) * 4), ValueError, "views: 'plan' is none of 'plain', 'rows before"),
        (lambda: AttentionProblem(views=("one row",) * 4), ValueError, "views: 'one row' is none of 'plain'"),
        (lambda: AttentionBackwardProblem(PROBLEM, "nromal"), ValueError, "dout_values: 'nromal' is none of 'normal',"),
        (lambda: AttentionBackwardProblem(PROBLEM, dout_view="plan"), ValueError, "dout_view: 'plan' is none of"),
        (lambda: AttentionBackwardProblem(PROBLEM, grad_views=("plan",) * 3), ValueError, "grad_views: 'plan' is none"),
        (lambda: AttentionBackwardProblem(BACKWARD_PROBLEM), TypeError, "forward: an AttentionProblem, not"),
        (lambda: testing.attention_problems("float32"), TypeError, "dtypes: a sequence to choose from, such as ['floa"),
        (lambda: testing.attention_problems(scales=1.0), TypeError, "scales: a sequence to choose from, such as [1.0]"),
        (lambda: testing.attention_problems(alignments=5), TypeError, "alignments: a sequence to choose from, such as"),
        (lambda: testing.attention_problems(alignments=[5, 1.0]), ValueError, "alignments: 1.0 is"),
        (lambda: testing.attention_problems(alignments=[True]), ValueError, "alignments: True is"),
        (lambda: testing.attention_problems(seqlens=40), TypeError, "seqlens: a strategy, such as st.just(40), not 40"),
        (
            lambda: testing.attention_problems(causal=False),
            TypeError,
            "causal: a strategy, such as st.just(False), not",
        ),
        (lambda: testing.attention_backward_problems("float32"), TypeError, "dtypes: a sequence to choose from"),
        (lambda: testing.attention_backward_problems(causal=True), TypeError, "causal: a strategy"),
    ],
)
def test_arguments_of_problems_are_checked(make, error, said):
    with pytest.raises(error, match=re.escape(said)):
        make()


def test_problems_of_the_other_pass_are_refused():
    with pytest.raises(
        TypeError, match="check_within_bound: one AttentionProblem or a strategy of them, not Attention"
    ):
        testing.check_attention(numpy_attention.attention, BACKWARD_PROBLEM)
    with pytest.raises(TypeError, match="check_gradients_within_bound: one AttentionBackwardProblem or a strategy"):
        testing.check_vjp(numpy_attention.attention_vjp, PROBLEM)
    with pytest.raises(TypeError, match="check_signs: one AttentionProblem or a strategy of them, not Attention"):
        testing.check_signs(numpy_attention.attention, st.just(BACKWARD_PROBLEM))


@few
@given(problem=testing.attention_backward_problems(["float32"], ["peaked"], [0.5], ["plain"], causal=st.just(False)))
def test_backward_problems_take_what_forward_ones_do(problem):
    forward = problem.forward
    assert (forward.dtype, forward.values, forward.softmax_scale) == ("float32", "peaked", 0.5)
    assert forward.views == ("plain",) * 4 and problem.grad_views == ("plain",) * 3 and not forward.causal


def test_problems_shrink_to_the_plainest():
    nothing = settings(max_examples=2000, suppress_health_check=list(HealthCheck))
    assert find(testing.attention_problems(), lambda _: True, settings=nothing) == AttentionProblem(seqlen_q=1)
    plain = find(testing.attention_backward_problems(), lambda _: True, settings=nothing)
    assert plain == AttentionBackwardProblem(AttentionProblem())


def drawn(strategy, count=200):
    """The problems that a check without a seed of its own would be run with."""
    problems = []

    @settings(max_examples=count, database=None, derandomize=True, phases=[Phase.generate])
    @given(strategy)
    def draw(problem):
        problems.append(getattr(problem, "forward", problem))

    draw()
    return problems


def features(problem):
    """What faults may depend on, of one problem."""
    if 0 in problem.leading or problem.seqlen_q == 0:
        yield "empty result"
        return
    if problem.seqlen_k == 0:
        yield "no keys"
        return
    if min(max(leading[:-1], default=1) for leading in (problem.leading_k, problem.leading_v)) > 1:
        yield "batches of k and v"
    if problem.seqlen_k > 1 and problem.softmax_scale is None and problem.head_dim > 128:
        yield "default scale of more than 128"
    if problem.seqlen_k > 1 and problem.softmax_scale == 0:
        yield "scale 0"
    if 1 in (problem.head_dim, problem.head_dim_v):
        yield "head_dim 1"
    if problem.leading == ():
        yield "no leading dimensions"
    if problem.group > 1:
        yield "grouped heads"
    if problem.seqlen_q == problem.seqlen_k:
        yield "square"
    if problem.seqlen_k > 64:
        yield "several tiles"


@pytest.mark.parametrize(
    "strategy",
    [
        testing.attention_problems(),
        testing.attention_backward_problems(),
        testing.adapt(reference.attention, layout="BHLD").problems(),
    ],
    ids=["forward", "backward", "BHLD"],
)
def test_what_is_drawn_often_enough(strategy):
    problems = drawn(strategy)
    shares = Counter(feature for problem in problems for feature in features(problem))
    least = {  # well below what is usual: Hypothesis draws others with every module that is imported
        "no keys": 1, "batches of k and v": 30, "default scale of more than 128": 4, "scale 0": 1,
        "head_dim 1": 1, "grouped heads": 15, "square": 4, "several tiles": 30,
    }  # fmt: skip
    assert {feature: shares[feature] for feature in least if shares[feature] < least[feature]} == {}
    assert shares["empty result"] <= 25
    assert len(set(map(repr, problems))) >= 170


@few
@given(problem=testing.attention_problems(), data=st.data())
def test_shapes_are_those_of_attention(problem, data):
    q, k, v = problem.inputs()
    out = reference.attention(q, k, v, **problem.options)
    assert out.shape == problem.empty_out().shape
    grads = testing.AttentionBackwardProblem(problem).empty_grads()
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    places = data.draw(testing.hostile_values())
    if all(x.size for x in (q, k, v)):
        spoilt = testing.with_values({"q": q, "k": k, "v": v}, places)
        assert not all(np.isfinite(x).all() for x in spoilt)


@given(x=testing.strided_arrays((2, 3, 5), np.float32, testing.OUT_VIEWS))
def test_strided_arrays_lie_between_nans(x):
    assert x.shape == (2, 3, 5) and x.dtype == np.float32 and np.isfinite(x).all()
    before = testing.surroundings(x)
    x[...] = 0
    np.testing.assert_array_equal(testing.surroundings(x), before)


def test_hypothesis_is_imported_by_testing_alone():
    program = """
import sys
from dataclasses import replace
import cupyflash
assert "hypothesis" not in sys.modules
sys.modules["hypothesis"] = None
import cupyflash.testing
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert 'pip install "cupyflash[testing]"' in result.stderr.splitlines()[-1]
