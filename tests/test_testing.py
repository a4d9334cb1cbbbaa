"""The ready checks accept attention written in NumPy, and each sees a fault of its kind."""

import inspect
import itertools
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from cupyflash import reference, testing
from cupyflash.testing import AttentionBackwardProblem, AttentionProblem
from tests import numpy_attention

DTYPES = ("float16", "bfloat16", "float32", "float64")
SMALL = {"dtypes": DTYPES, "seqlens": testing.seqlens(20), "head_dims": st.sampled_from([(4, 4), (7, 5)])}
MODERATE = {**SMALL, "families": ("normal", "peaked", "rising", "duplicates", "one sign")}
few = settings(max_examples=15)


@pytest.mark.parametrize("check", testing.FORWARD_CHECKS)
@few
@given(problem=testing.attention_problems(**SMALL))
def test_attention_by_definition_passes(check, problem):
    check(numpy_attention.attention, problem)


@pytest.mark.parametrize("check", testing.VJP_CHECKS)
@few
@given(problem=testing.attention_backward_problems(**SMALL))
def test_gradients_by_definition_pass(check, problem):
    check(numpy_attention.attention_vjp, problem)


@few
@given(problem=testing.attention_problems(**{**SMALL, "dtypes": ("float32",)}))
def test_sums_in_any_order_pass_where_bits_are_not_asked_for(problem):
    """float32 with NumPy's matmul, whose sums are ordered by shape and layout; 0 * NaN gets through its mask."""
    for check in testing.FORWARD_CHECKS:
        if not re.search("masked|nonfinite", check.__name__):
            options = {"bitwise": False} if "bitwise" in inspect.signature(check).parameters else {}
            check(matmul_attention, problem, **options)


def matmul_attention(q, k, v, *, softmax_scale, causal, align, return_lse):
    k, v = (numpy_attention.with_heads(x, q) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    shift = k.shape[-2] - q.shape[-2] if align == "bottom-right" else 0
    queries, keys = np.ogrid[: q.shape[-2], : k.shape[-2]]
    seen = (keys <= queries + shift) | (not causal)
    with np.errstate(all="ignore"):
        scores = np.where(seen, q @ np.swapaxes(k, -1, -2) * np.float32(scale), -np.inf)
        row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.where(seen, np.exp(scores - np.where(row_max == -np.inf, 0, row_max)), 0)
        row_sum = weights.sum(axis=-1, keepdims=True)
        out = (weights / np.where(row_sum == 0, 1, row_sum)) @ v
        lse = np.broadcast_to((row_max + np.log(row_sum))[..., 0], out.shape[:-1])
        return out.astype(np.float32), lse.astype(np.float32)


# Attention with a fault


def of_inputs(change):
    """In what is read."""
    return lambda q, k, v, **options: numpy_attention.attention(*change(q, k, v), **options)


def of_out(change):
    """In what is written: of out and the inputs."""

    def attention(q, k, v, **options):
        out, lse = numpy_attention.attention(q, k, v, **options)
        return change(out, q, k, v).astype(out.dtype), lse

    return attention


def of_lse(change):
    def attention(q, k, v, **options):
        out, lse = numpy_attention.attention(q, k, v, **options)
        return out, change(lse).astype(lse.dtype)

    return attention


def of_gradients(change):
    """In what is written: of dq, dk, dv and the arguments dout and dlse."""

    def attention_vjp(q, k, v, **options):
        results, pullback = numpy_attention.attention_vjp(q, k, v, **options)

        def broken(dout, dlse):
            gradients = pullback(dout, dlse)
            changed = change(*gradients, dout, dlse)
            return tuple(x.astype(gradient.dtype) for x, gradient in zip(changed, gradients, strict=True))

        return results, broken

    return attention_vjp


def top_left(q, k, v, *, align, **options):
    return numpy_attention.attention(q, k, v, align=align and "top-left", **options)


def tiled_heads(q, k, v, **options):
    """Query heads 0, 1, 2, 3 use key heads 0, 1, 0, 1."""
    if q.ndim > 2 and 1 < k.shape[-3] < q.shape[-3]:
        k, v = (np.concatenate([x] * (q.shape[-3] // x.shape[-3]), axis=-3) for x in (k, v))
    return numpy_attention.attention(q, k, v, **options)


def along(axis, x):
    """1, 1.5, 2, ... along the axis."""
    return np.expand_dims(1 + np.arange(x.shape[axis]) / 2, tuple(range(1, -axis)))


calls = itertools.count()
FORWARD_FAULTS = {
    "within_bound": of_out(lambda out, *_: out * 1.001),
    "two_runs": of_out(lambda out, *_: out + next(calls)),
    "strides": of_out(lambda out, q, *_: out if q.flags.c_contiguous else out + 1),
    "batch_independence": of_out(lambda out, *_: out * (1 + out.size)),
    "query_independence": of_out(lambda out, q, *_: out + q.mean()),
    "query_permutation": of_out(lambda out, *_: out * along(-2, out)),
    "value_column_permutation": of_out(lambda out, *_: out * along(-1, out)),
    "key_permutation": of_inputs(lambda q, k, v: (q, k, (v * along(-2, v)).astype(v.dtype))),
    "head_dim_permutation": of_inputs(lambda q, k, v: ((q * along(-1, q)).astype(q.dtype), k, v)),
    "value_powers_of_two": of_out(lambda out, *_: out + 0.125),
    "query_key_powers_of_two": of_inputs(lambda q, k, v: (np.rint(q), k, v)),
    "signs": of_inputs(lambda q, k, v: (np.abs(q), k, v)),
    "grouped_heads": tiled_heads,
    "masked_keys_have_no_influence": of_out(lambda out, q, k, v: out * (1 + np.isfinite(v).all())),
    "causal_prefix": of_out(lambda out, q, k, v: out * (1 + k.shape[-2])),
    "alignments": top_left,
    "decoding": top_left,
    "one_key": of_out(lambda out, *_: out * 1.001),
    "constant_values": of_out(lambda out, *_: out * 1.001),
    "value_linearity": of_out(lambda out, *_: out * out),
    "convexity": of_out(lambda out, *_: out * 8),
    "lse_range": of_lse(lambda lse: lse / np.log(2)),
    "nonfinite_values_change_only_rows_that_see_them": of_out(lambda out, q, k, v: out * (1 + np.isfinite(v).all())),
    "nonfinite_values_reach_who_sees_them": of_out(lambda out, *_: np.nan_to_num(out)),
}
VJP_FAULTS = {
    "gradients_within_bound": of_gradients(lambda dq, dk, dv, *_: (dq, dk, dv * 1.001)),
    "vjp_two_runs": of_gradients(lambda dq, dk, dv, *_: (dq, dk, dv + next(calls))),
    "vjp_strides": of_gradients(
        lambda dq, dk, dv, dout, _: (dq, dk, dv if dout.flags.c_contiguous else dv + 1),
    ),
    "vjp_batch_independence": of_gradients(lambda dq, dk, dv, *_: (dq * dq.size, dk, dv)),
    "vjp_query_permutation": of_gradients(lambda dq, dk, dv, *_: (dq * along(-2, dq), dk, dv)),
    "vjp_key_permutation": of_gradients(lambda dq, dk, dv, *_: (dq, dk * along(-2, dk), dv)),
    "vjp_powers_of_two": of_gradients(lambda dq, dk, dv, *_: (dq, dk, np.abs(dv))),
    "vjp_causal_prefix": of_gradients(lambda dq, dk, dv, dout, _: (dq, dk + 0 * dout.sum(), dv)),
    "vjp_grouped_heads": of_gradients(lambda dq, dk, dv, *_: (dq, dk, dv / dv.shape[-3])),
    "vjp_identities": of_gradients(lambda dq, dk, dv, *_: (dq, dk, dv * 1.01)),
    "lse_gradient": of_gradients(lambda dq, dk, dv, dout, dlse: (dq if dlse is None else dq * 1.01, dk, dv)),
    "vjp_linearity": of_gradients(lambda dq, dk, dv, *_: (dq * np.abs(dq), dk, dv)),
    "vjp_constant_values": of_gradients(lambda dq, dk, dv, *_: (dq + 0.125, dk, dv)),
}
PROBLEM = AttentionProblem(
    "float32",
    (2, 4),
    (2, 2),
    (2, 2),
    9,
    12,
    7,
    5,
    causal=True,
    align="bottom-right",
    views=("columns first",) * 4,
    seed=2,
)
BACKWARD_PROBLEM = AttentionBackwardProblem(PROBLEM, with_dlse=True, dout_view="columns first")


def test_each_check_has_its_fault():
    assert [f"check_{name}" for name in FORWARD_FAULTS] == [check.__name__ for check in testing.FORWARD_CHECKS]
    assert [f"check_{name}" for name in VJP_FAULTS] == [check.__name__ for check in testing.VJP_CHECKS]


@pytest.mark.parametrize("name", FORWARD_FAULTS)
def test_a_fault_in_attention_is_seen(name):
    check = getattr(testing, f"check_{name}")
    check(numpy_attention.attention, PROBLEM)
    with pytest.raises(AssertionError, match="to repeat"):
        check(FORWARD_FAULTS[name], PROBLEM)


@pytest.mark.parametrize("name", VJP_FAULTS)
def test_a_fault_in_gradients_is_seen(name):
    check = getattr(testing, f"check_{name}")
    check(numpy_attention.attention_vjp, BACKWARD_PROBLEM)
    with pytest.raises(AssertionError, match="to repeat"):
        check(VJP_FAULTS[name], BACKWARD_PROBLEM)


@pytest.mark.parametrize(
    "change",
    [
        lambda dq, dk, dv, *_: (dq, dk + 0.01 * np.abs(dk).max(), dv),
        lambda dq, dk, dv, *_: (dq + 0.01 * np.abs(dq).max(), dk, dv),
        lambda dq, dk, dv, *_: (dq * 1.01, dk, dv),
        lambda dq, dk, dv, *_: (dq, dk * 1.01, dv),
        lambda dq, dk, dv, *_: (dq, dk, dv + 0.01 * np.abs(dv).max()),
        lambda dq, dk, dv, *_: (dq, dk, dv[..., ::-1]),
    ],
)
def test_the_identities_see_every_gradient(change):
    with pytest.raises(AssertionError, match="to repeat"):
        testing.check_vjp_identities(of_gradients(change), BACKWARD_PROBLEM)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_our_own_kernels_pass_all_checks(backend, dtype):
    problem = replace(PROBLEM, dtype=dtype)
    testing.check_attention(backend.attention, problem)
    testing.check_vjp(backend.attention_vjp, replace(BACKWARD_PROBLEM, forward=problem))


# What a failure says


def test_a_failure_is_shrunk_and_can_be_repeated():
    """The line at the end of the message makes the same call again."""
    fault = FORWARD_FAULTS["convexity"]
    with pytest.raises(AssertionError) as first:
        testing.check_convexity(fault, testing.attention_problems(**MODERATE))
    line = str(first.value).splitlines()[-1]
    call = "check_convexity(fn, AttentionProblem(head_dim=4, head_dim_v=4))"
    assert line == f"to repeat, with names of cupyflash.testing: {call}"
    with pytest.raises(AssertionError) as again:
        eval(call, {**vars(testing), "fn": fault})
    assert str(again.value) == str(first.value)


def test_a_failure_names_the_largest_terms_of_the_bound():
    half = replace(PROBLEM, dtype="float16")
    with pytest.raises(AssertionError, match=r"of the bound there: rounding of P \d+%, rounding of out \d+%"):
        testing.check_within_bound(of_out(lambda out, *_: out * 1.1), half)
    with pytest.raises(AssertionError, match=r"^dv.*\nof the bound there: scores and exponential \d+%"):
        testing.check_gradients_within_bound(VJP_FAULTS["gradients_within_bound"], BACKWARD_PROBLEM)


@given(problem=testing.attention_backward_problems())
def test_a_repr_makes_the_problem_again(problem):
    assert eval(repr(problem), vars(testing)) == problem
    assert len(repr(AttentionProblem(seqlen_q=3))) == len("AttentionProblem(seqlen_q=3)")


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
        (1.0, 1.0, np.nan, True),
    ],
)
def test_what_is_within_a_bound(result, exact, bound, right):
    arrays = [np.array([x]) for x in (result, exact, bound)]
    if right:
        testing.assert_within_bound(*arrays)
        return
    with pytest.raises(AssertionError):
        testing.assert_within_bound(*arrays)


def test_bits_shapes_and_dtypes_are_compared():
    zero = np.zeros(3, np.float16)
    testing.assert_same_bits(zero, zero.copy())
    for other in -zero, zero.astype(np.float32), zero[:2], zero + np.float16(6e-8):
        with pytest.raises(AssertionError):
            testing.assert_same_bits(other, zero)
    with pytest.raises(AssertionError, match="mean error"):
        testing.assert_unbiased(np.full(9, 1, np.float16), np.full(9, 1 + 2.0**-12))


# Problems and arrays


def test_problems_shrink_to_the_plainest():
    nothing = settings(max_examples=2000, suppress_health_check=list(HealthCheck))
    assert find(testing.attention_problems(), lambda _: True, settings=nothing) == AttentionProblem(seqlen_q=1)
    plain = find(testing.attention_backward_problems(), lambda _: True, settings=nothing)
    assert plain == AttentionBackwardProblem(AttentionProblem())


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
