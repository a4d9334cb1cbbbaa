"""The ready checks accept attention written in NumPy, and each sees a fault of its kind."""

import configparser
import inspect
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import bounds, testing
from cupyflash.testing import AttentionBackwardProblem, AttentionProblem, ready
from tests import numpy_attention

DTYPES = ("float16", "bfloat16", "float32", "float64")
SMALL = {"dtypes": DTYPES, "seqlens": testing.seqlens(20), "head_dims": st.sampled_from([(4, 4), (7, 5)])}
MODERATE = {**SMALL, "families": ("normal", "peaked", "rising", "duplicates", "one sign")}
few = settings(max_examples=10)


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
            check(matmul_attention, problem, **only_rounded(check))


@few
@given(problem=testing.attention_problems(**SMALL), seed=st.integers(0, 2**32 - 1))
def test_results_that_differ_within_their_bounds_pass_every_check(problem, seed):
    """Each call is off by other random parts of the bound: no check asks for bits where none are promised."""
    rng = np.random.default_rng(seed)

    def noisy(q, k, v, **options):
        out, lse = numpy_attention.attention(q, k, v, **options)
        return moved(rng, out, bounds.attention(q, k, v, **options)[0]), lse

    testing.check_attention(noisy, problem, bitwise=False)


@few
@given(problem=testing.attention_backward_problems(**SMALL), seed=st.integers(0, 2**32 - 1))
def test_gradients_that_differ_within_their_bounds_pass_every_comparison(problem, seed):
    rng = np.random.default_rng(seed)

    def noisy(q, k, v, **options):
        (out, lse), pullback = numpy_attention.attention_vjp(q, k, v, **options)
        del options["return_lse"]

        def of(dout, dlse):
            allowed = bounds.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
            return tuple(moved(rng, x, bound) for x, bound in zip(pullback(dout, dlse), allowed, strict=True))

        return (out, lse), of

    for check in testing.VJP_CHECKS:
        if check not in (testing.check_vjp_identities, testing.check_lse_gradient):  # whose residuals are no bounds
            check(noisy, problem, **only_rounded(check))


def moved(rng, result, bound):
    """Off by up to a third of the bound, where there is one."""
    bound = np.where(np.isfinite(bound), bound, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        other = (result + rng.uniform(-0.3, 0.3, result.shape) * bound).astype(result.dtype)
        near = np.abs(other.astype(np.float64) - result.astype(np.float64)) <= bound / 3
    return np.where(near, other, result)


def only_rounded(check):
    return {"bitwise": False} if "bitwise" in inspect.signature(check).parameters else {}


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
    "vjp_causal_prefix": of_gradients(lambda dq, dk, dv, dout, _: (dq, dk + dout.sum(), dv)),
    "vjp_grouped_heads": of_gradients(lambda dq, dk, dv, *_: (dq, dk, dv / dv.shape[-3])),
    "vjp_identities": of_gradients(lambda dq, dk, dv, *_: (dq, dk, dv * 1.01)),
    "lse_gradient": of_gradients(lambda dq, dk, dv, dout, dlse: (dq if dlse is None else dq * 1.01, dk, dv)),
    "vjp_linearity": of_gradients(lambda dq, dk, dv, *_: (dq * np.abs(dq), dk, dv)),
    "vjp_constant_values": of_gradients(lambda dq, dk, dv, *_: (dq + 0.125, dk, dv)),
    "vjp_nonfinite_values_change_only_what_sees_them": of_gradients(
        lambda dq, dk, dv, *_: (dq if np.isfinite(dv).all() else dq * np.nan, dk, dv)
    ),
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out, *_: np.nan_to_num(out), "NaN of out"),
        (lambda out, q, k, v: out + np.where(np.isfinite(v).all(), 0, np.nan), "NaN of out"),
        (lambda out, q, k, v: out + np.where(np.isfinite(v).all(), 0, 0.01), "finite part of out"),
    ],
)
@pytest.mark.parametrize("bitwise", [True, False])
def test_where_nan_goes_is_seen_without_bits_too(change, said, bitwise):
    with pytest.raises(AssertionError, match=said):
        testing.check_nonfinite_values_reach_who_sees_them(of_out(change), PROBLEM, bitwise=bitwise)


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


def test_nothing_is_asked_of_sums_of_gradients_that_overflow():
    """Those of float16 may rightly be infinite, and inf - inf is no fault; those of float32 are finite here."""
    forward = AttentionProblem(
        leading_q=(1, 1), leading_k=(1, 1), leading_v=(1, 1), seqlen_q=15, seqlen_k=15, head_dim=128, head_dim_v=128,
        causal=True, align="bottom-right", softmax_scale=3.0,
    )  # fmt: skip
    problem = AttentionBackwardProblem(forward, dout_values="large")
    arguments = *problem.cotangents(), *forward.inputs()
    gradients = ready.gradients(numpy_attention.attention_vjp, arguments, problem.options)
    assert not all(np.isfinite(x).all() for x in gradients)
    testing.check_vjp_identities(numpy_attention.attention_vjp, problem)
    wrong = VJP_FAULTS["vjp_identities"]
    with pytest.raises(AssertionError, match="sum of the rows of dv"):
        testing.check_vjp_identities(wrong, replace(problem, forward=replace(forward, dtype="float32")))
    with pytest.raises(AssertionError, match="sum of the rows of dv"):
        testing.check_vjp_identities(wrong, replace(problem, dout_values="normal"))


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
    assert_repeated(first.value, fn=fault)


def assert_repeated(error, **names):
    """The line at the end of the error's message, or in a note, makes a call that raises it again."""
    line = said(error).splitlines()[-1]
    assert line.startswith("to repeat, with names of cupyflash.testing")
    with pytest.raises(type(error)) as again:
        eval(line.split(": ", 1)[1], {**vars(testing), **names})
    assert said(again.value) == said(error)


def said(error):
    return "\n".join([str(error), *(x for x in getattr(error, "__notes__", ()) if x.startswith("to repeat"))])


def wide_bound(q, k, v, **options):
    return bounds.attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "seed=2))"),
        ({"bitwise": False}, "seed=2))"),  # the first check compares with the reference
        ({"bound": bounds.attention_naive}, "bound=bounds.attention_naive)"),
        ({"bound": wide_bound}, "and with your bound: check_within_bound("),
    ],
)
def test_a_failure_of_all_checks_can_be_repeated(options, expected):
    fault = FORWARD_FAULTS["within_bound"]
    with pytest.raises(AssertionError) as raised:
        testing.check_attention(fault, PROBLEM, **options)
    assert expected in str(raised.value)
    assert_repeated(raised.value, fn=fault, bound=wide_bound)


@pytest.mark.parametrize("name", ["vjp_identities", "vjp_linearity", "vjp_grouped_heads"])
def test_a_failure_of_all_gradient_checks_can_be_repeated(name):
    for options in {}, {"bitwise": False}, {"bound": bounds.attention_naive_backward}:
        with pytest.raises(AssertionError) as raised:
            testing.check_vjp(VJP_FAULTS[name], BACKWARD_PROBLEM, **options)
        assert_repeated(raised.value, fn=VJP_FAULTS[name])


def test_places_that_are_not_finite_can_be_pasted():
    fault = FORWARD_FAULTS["nonfinite_values_change_only_rows_that_see_them"]
    with pytest.raises(
        AssertionError, match=re.escape("places=[('k', 17, float('nan')), ('v', 3, float('-inf'))])")
    ) as e:
        testing.check_nonfinite_values_change_only_rows_that_see_them(
            fault, PROBLEM, places=[("k", 17, np.nan), ("v", 3, -np.inf)]
        )
    assert_repeated(e.value, fn=fault)


def test_any_error_is_told_with_the_call_that_repeats_it():
    def fails(q, k, v, **options):
        raise IndexError("no such tile")

    with pytest.raises(IndexError, match="no such tile") as raised:
        testing.check_attention(fails, PROBLEM, bitwise=False)
    assert len(raised.value.__notes__) == 1
    assert_repeated(raised.value, fn=fails)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        testing.check_signs(numpy_attention.attention, PROBLEM, nothing=1)


@pytest.mark.parametrize("name", ["key_permutation", "masked_keys_have_no_influence", "one_key"])
def test_a_failure_says_what_the_check_is_about(name):
    check = getattr(testing, f"check_{name}")
    with pytest.raises(AssertionError) as raised:
        check(FORWARD_FAULTS[name], PROBLEM)
    about = f"{name.replace('_', ' ')}: {check.__doc__.splitlines()[0]}"
    assert about in str(raised.value).splitlines()


def test_a_failure_names_the_largest_terms_of_the_bound():
    half = replace(PROBLEM, dtype="float16")
    with pytest.raises(AssertionError, match=r"of the bound there: rounding of P \d+%, rounding of out \d+%"):
        testing.check_within_bound(of_out(lambda out, *_: out * 1.1), half)
    with pytest.raises(AssertionError, match=r"^dv.*\nof the bound there: scores and exponential \d+%"):
        testing.check_gradients_within_bound(VJP_FAULTS["gradients_within_bound"], BACKWARD_PROBLEM)


def test_the_version_of_hypothesis_that_is_asked_for_is_that_of_the_extra():
    setup = configparser.ConfigParser()
    setup.read(Path(testing.__file__).parents[2] / "setup.cfg")
    (wanted,) = setup["options.extras_require"]["testing"].split("\n")[1:]
    code = "import sys; sys.modules['hypothesis'] = None; import cupyflash.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"ImportError: cupyflash.testing needs {wanted}: pip install" in done.stderr
