"""Functions as their authors wrote them: what is asked of them, what is left out and said, which errors they get."""

import functools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import bounds, reference, testing
from cupyflash.testing import AttentionProblem
from tests import numpy_attention

SMALL = {"seqlens": st.integers(1, 20), "head_dims": st.just((8, 8))}
NONE = {"causal": False, "align": None}


def plain(q, k, v):
    """What a stranger has: no options, no lse."""
    return numpy_attention.attention(q, k, v, softmax_scale=None, **NONE, return_lse=True)[0]


def scaled(q, k, v, softmax_scale):
    return numpy_attention.attention(q, k, v, softmax_scale=softmax_scale, **NONE, return_lse=True)


def causal(q, k, v, *, causal=False, align="top-left"):
    return numpy_attention.attention(q, k, v, softmax_scale=None, causal=causal, align=align, return_lse=True)[0]


def top_left(q, k, v, causal):
    options = {"causal": causal, "align": "top-left", "softmax_scale": None}
    return numpy_attention.attention(q, k, v, **options, return_lse=True)[0]


def bottom_right(q, k, v, causal):
    options = {"causal": causal, "align": "bottom-right", "softmax_scale": None}
    return numpy_attention.attention(q, k, v, **options, return_lse=True)[0]


def plain_vjp(q, k, v):
    (out, _), pullback = numpy_attention.attention_vjp(q, k, v, softmax_scale=None, **NONE, return_lse=True)
    return out, lambda dout: pullback(dout, None)


def masked(q, k, v, mask=None):
    """With a convention of its own: True is what is removed, and it is there for each pair of each head."""
    k, v = (numpy_attention.with_heads(x, q).astype(np.float64) for x in (k, v))
    scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        removed = np.broadcast_to(~mask, scores.shape)
        scores = np.where(removed, -np.inf, scores)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True) @ v).astype(q.dtype)


# Which checks apply


@pytest.mark.parametrize("fn", [plain, scaled, causal, top_left, bottom_right])
def test_what_a_signature_lacks_is_not_asked(fn):
    align = fn.__name__.replace("_", "-") if "_" in fn.__name__ else None
    found = testing.report(testing.adapt(fn, ["float32"], align=align, **SMALL), examples=6)
    assert not found.failures, str(found)
    left_out = {x.check for x in found.findings if x.verdict == testing.LEFT_OUT}
    of_lse = {"check_lse_range"} if fn is not scaled else set()
    needs_causal = {
        "check_masked_keys_have_no_influence", "check_causal_prefix", "check_alignments", "check_decoding",
        "check_nonfinite_values_reach_who_sees_them",
    }  # fmt: skip
    assert left_out == of_lse | (needs_causal if fn in (plain, scaled) else set())
    asked_no_scale = "softmax_scale: not taken" in found.left_out
    assert asked_no_scale == (fn is not scaled)


def test_causal_problems_are_square_where_the_alignment_is_not_known():
    seen = set()

    def fn(q, k, v, causal):
        seen.add((causal, q.shape[-2] == k.shape[-2]))
        return top_left(q, k, v, causal)

    testing.report(testing.adapt(fn, ["float32"], **SMALL), examples=20)
    assert seen == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize(("fn", "align"), [(top_left, "bottom-right"), (bottom_right, "top-left")])
def test_the_wrong_alignment_is_seen(fn, align):
    with pytest.raises(AssertionError, match=f"align='{align}'"):
        testing.check_within_bound(testing.adapt(fn, ["float32"], align=align, **SMALL))


@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
def test_one_alignment_alone_of_a_function_that_takes_it(align):
    """Also where no causal mask, but a window depends on it."""
    aligns = set()

    def fn(q, k, v, causal, align, window_size=None):
        if causal or window_size:
            aligns.add(align)
        return reference.attention(q, k, v, causal=causal, align=align, window_size=window_size).astype(q.dtype)

    adapted = testing.adapt(fn, ["float32"], align=align, variants=["window_size"], **SMALL)
    assert not testing.report(adapted, examples=10, checks=[testing.check_within_bound]).failures
    assert aligns == {align} and f"align: {align} alone" in adapted.left_out


@pytest.mark.parametrize(
    ("left_out", "bad"),
    [
        ({"empty": False}, lambda q, k, v: not all(x.size for x in (q, k, v))),
        ({"nonfinite": False}, lambda q, k, v: not all(np.isfinite(x).all() for x in (q, k, v))),
        ({"grouped": False}, lambda q, k, v: q.ndim > 2 and k.ndim > 2 and 1 < k.shape[-3] < q.shape[-3]),
        ({"views": ["plain"]}, lambda q, k, v: not all(x.flags.c_contiguous for x in (q, k, v))),
    ],
)
def test_what_is_left_out_is_never_asked(left_out, bad):
    seen = []

    def fn(q, k, v, **options):
        seen.append(bad(q, k, v))
        return numpy_attention.attention(q, k, v, **options)

    sizes = {**SMALL, "seqlens": st.integers(0, 20)}
    assert not testing.report(testing.adapt(fn, ["float32"], **sizes, **left_out), examples=10).failures
    assert len(seen) > 100 and not any(seen)
    seen.clear()
    testing.report(testing.adapt(fn, ["float32"], **sizes), examples=10)
    assert any(seen)  # they are asked unless they are left out


def test_where_nan_is_left_out_no_check_hands_it_to_gradients_or_passes_without_it():
    def vjp(q, k, v, **options):
        results, pullback = numpy_attention.attention_vjp(q, k, v, **options)

        def finite(dout, dlse):
            assert np.isfinite(dout).all() and (dlse is None or np.isfinite(dlse).all())
            return pullback(dout, dlse)

        return results, finite

    domain = {"seqlens": st.integers(0, 20), "head_dims": st.just((8, 8)), "nonfinite": False}
    forward, backward = (
        [x for x in checks if re.search("nonfinite|masked", x.__name__)]
        for checks in (testing.FORWARD_CHECKS, testing.VJP_CHECKS)
    )
    adapted, vjp = testing.adapt(numpy_attention.attention, **domain), testing.adapt_vjp(vjp, **domain)
    for fn, checks in (adapted, forward), (vjp, [testing.check_vjp_causal_prefix, *backward]):
        found = testing.report(fn, examples=6, checks=checks)
        assert not found.failures, str(found)
        said = {x.check: x.said for x in found.findings if x.verdict == testing.LEFT_OUT}
        assert said == {x.__name__: "NaN and infinity" for x in checks if "prefix" not in x.__name__}


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts(layout):
    """The function sees its own, the checks their usual one; gradients too."""
    swapped, shapes = layout in ("LHD", "BLHD"), set()

    def usual(x):
        return np.swapaxes(x, -2, -3) if swapped else x

    def vjp(q, k, v):
        shapes.add(tuple(map(np.ndim, (q, k, v))))
        out, pullback = plain_vjp(*map(usual, (q, k, v)))
        return usual(out), lambda dout: [usual(x) for x in pullback(usual(dout))]

    found = testing.report(testing.adapt_vjp(vjp, ["float32"], layout=layout, **SMALL), examples=4)
    assert not found.failures, str(found)
    forward = testing.report(
        testing.adapt(lambda q, k, v: vjp(q, k, v)[0], ["float32"], layout=layout, **SMALL), examples=4
    )
    assert not forward.failures, str(forward)
    assert shapes == {(len(layout),) * 3}
    if swapped:
        wrong = testing.report(
            testing.adapt(lambda q, k, v: plain(q, k, v), ["float32"], layout=layout, **SMALL),
            checks=[testing.check_within_bound],
        )
        assert wrong.failures


def test_gradients_without_lse():
    found = testing.report(testing.adapt_vjp(plain_vjp, ["float32"], **SMALL), examples=6)
    assert not found.failures, str(found)
    assert found["check_lse_gradient"].said == "dlse: the pullback does not take it"
    wrong = testing.adapt_vjp(
        lambda q, k, v: (plain(q, k, v), lambda dout: [2 * x for x in plain_vjp(q, k, v)[1](dout)]),
        ["float32"],
        **SMALL,
    )
    assert testing.report(wrong, checks=[testing.check_gradients_within_bound]).failures


def test_a_mask_of_ones_own_convention():
    domain = {**SMALL, "variants": ["mask"], "nonfinite": False}
    checks = [testing.check_within_bound, testing.check_key_permutation, testing.check_query_permutation]
    found = testing.report(testing.adapt(masked, ["float32"], empty_rows=False, **domain), examples=30, checks=checks)
    assert not found.failures, str(found)
    (failure,) = testing.report(testing.adapt(masked, ["float32"], **domain), checks=checks[:1]).failures
    assert "is nan, exact 0.0" in failure.said  # a query that sees no key


# Checks alone


def test_all_checks_return_what_they_left_out():
    left_out = testing.check_attention(plain, AttentionProblem("float32", (2,), (2,), (2,), 3, 4))
    assert left_out["check_causal_prefix"] == "causal: not taken" and "check_within_bound" not in left_out
    left_out = testing.check_vjp(plain_vjp, testing.AttentionBackwardProblem(AttentionProblem("float32", seqlen_k=3)))
    assert left_out["check_lse_gradient"] == "dlse: the pullback does not take it"


def test_one_problem_that_a_function_is_not_for_is_an_error():
    with pytest.raises(testing.NotApplicable, match="softmax_scale: not taken"):
        testing.check_within_bound(plain, AttentionProblem(softmax_scale=2.0))
    with pytest.raises(testing.NotApplicable, match="causal: not taken"):
        testing.check_causal_prefix(plain)


def report_of(**domain):
    return testing.report(testing.adapt(plain, **domain), checks=[testing.check_within_bound])


@settings(max_examples=20)
@given(problem=testing.attention_problems(["float32"], scales=[None, None, None, 2.0], **SMALL))
def test_in_a_test_of_ones_own_it_is_passed_over(problem):
    testing.check_within_bound(plain, problem)
    assert problem.softmax_scale is None and not problem.causal


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: testing.adapt(3), TypeError, "fn: a function of q, k and v, not 3"),
        (lambda: testing.adapt(lambda q, k: q), TypeError, "takes 2 arguments by position, and is called with q, k"),
        (lambda: testing.adapt(lambda q, k, v, scale: q), TypeError, "needs scale, which no problem has; wrap it in"),
        (lambda: testing.adapt(plain, layout="BHDL"), ValueError, "layout: 'BHDL' is none of 'LD', 'HLD'"),
        (lambda: testing.adapt(plain, align="left"), ValueError, "align: 'left' is none of 'bottom-right', 'top-left'"),
        (lambda: testing.adapt(plain, empty="no"), TypeError, "empty: True or False, not 'no'"),
        (lambda: testing.adapt(plain, "float32"), TypeError, "dtypes: a sequence to choose from"),
        (lambda: testing.adapt(plain, seqlens=40), TypeError, "seqlens: a strategy, such as st.just(40)"),
        (lambda: testing.adapt(plain, variants=["mask"]), TypeError, "plain: does not take mask, which variants asks"),
        (lambda: testing.adapt(plain, []), ValueError, "dtypes: nothing to choose from"),
        (lambda: testing.adapt(plain, ["float8"]), ValueError, "dtypes: 'float8' is none of 'float16', 'bfloat16'"),
        (lambda: testing.adapt(plain, [np.float32]), ValueError, "dtypes: <class 'numpy.float32'> is none of"),
        (lambda: testing.adapt(plain, families=["nope"]), ValueError, "families: 'nope' is none of 'normal'"),
        (lambda: testing.adapt(plain, views=["nope"]), ValueError, "views: 'nope' is none of 'plain'"),
        (lambda: testing.adapt(plain, views=["one row"]), ValueError, "for out, not ['one row'] alone"),
        (lambda: testing.adapt(plain, scales=["x"]), TypeError, "scales: None or a finite number, not 'x'"),
        (lambda: testing.adapt_vjp(plain_vjp, views=[]), ValueError, "views: nothing to choose from"),
        (lambda: testing.adapt(lambda q, k, v, causal, /: q), TypeError, "needs causal by position; wrap it"),
        (lambda: testing.adapt(min), TypeError, "min: has no signature; wrap it in a function of q, k, v"),
        (lambda: report_of(head_dims=st.just(64)), ValueError, "head_dims: a strategy of pairs (head_dim, head_dim_v)"),
        (lambda: report_of(seqlens=st.just(-3)), ValueError, "seqlens: a strategy of lengths, 0 or more; it drew -3"),
        (lambda: report_of(seqlens=st.just(0), empty=False), ValueError, "nothing was drawn: no length of seqlens"),
        (lambda: report_of(leading_dims=st.just(((3,), (2,), (2,)))), ValueError, "leading_dims: a strategy of sizes"),
        (lambda: testing.report(plain, examples=0), ValueError, "examples: 1 or more, not 0"),
        (lambda: testing.report(plain, examples=None), TypeError, "examples: how many, not None"),
        (lambda: testing.report(plain, checks=[]), ValueError, "checks: none given"),
        (lambda: testing.report(plain, checks=testing.check_signs), TypeError, "checks: a sequence of them, such as ["),
        (lambda: testing.report(plain, checks=[testing.check_lse_gradient]), ValueError, "checks: check_lse_gradient"),
        (
            lambda: testing.report(plain, problems=AttentionProblem()),
            TypeError,
            "problems: a strategy, such as st.just(",
        ),
        (lambda: testing.report(plain, bound=1), TypeError, "bound: a function like bounds.attention, not 1"),
        (lambda: testing.adapt_vjp(plain_vjp, layout=3), ValueError, "layout: 3 is none of"),
        (lambda: testing.adapt_vjp(plain_vjp, nothing=3), TypeError, "unexpected keyword argument 'nothing'"),
    ],
)
def test_wrong_arguments_are_named(make, error, said):
    with pytest.raises(error, match=re.escape(said)):
        make()


@pytest.mark.parametrize(
    ("fn", "error", "said"),
    [
        (lambda q, k, v: None, TypeError, "out: NoneType is no NumPy array"),
        (lambda q, k, v: (q, k, v), TypeError, "returned 3 results, expected out or (out, lse)"),
        (lambda q, k, v: plain(q, k, v).astype(np.float64), AssertionError, "out: dtype float64, expected float32"),
        (lambda q, k, v: plain(q, k, v)[..., :2], AssertionError, "out: shape (2, 3, 2), expected (2, 3, 16)"),
        (lambda q, k, v: (plain(q, k, v), q), AssertionError, "lse: shape (2, 3, 16), expected (2, 3)"),
    ],
)
def test_wrong_results_are_named(fn, error, said):
    with pytest.raises(error, match=re.escape(said)):
        testing.check_within_bound(fn, AttentionProblem("float32", (2,), (2,), (2,), 3, 4))


@pytest.mark.parametrize(
    ("vjp", "said"),
    [
        (plain, "must return out or (out, lse), and the pullback"),
        (lambda q, k, v: (plain(q, k, v), lambda dout: (q, k)), "the pullback returned 2 results, expected dq, dk and"),
    ],
)
def test_wrong_results_of_gradients_are_named(vjp, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        testing.check_gradients_within_bound(vjp, testing.AttentionBackwardProblem(AttentionProblem("float32")))


# What a function may not do


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_a_function_that_changes_its_arguments_is_told_so(name):
    """Though its result is right, or the reference's of what is left: both are zeros."""

    def of_what_is_left(q, k, v, mask):
        {"q": q, "k": k, "v": v, "mask": mask}[name][...] = 0
        return numpy_attention.attention(q, k, v, softmax_scale=None, **NONE, return_lse=True)[0]

    mask = testing.Variants(mask=testing.Operand("all"))
    with pytest.raises(AssertionError, match=f"^{name}: changed by the call, which may only read it"):
        testing.check_within_bound(of_what_is_left, AttentionProblem("float32", seqlen_k=3, variants=mask))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
def test_gradients_that_change_their_arguments_are_told_so(name):
    def vjp(q, k, v):
        results, _ = numpy_attention.attention_vjp(q, k, v, softmax_scale=None, **NONE, return_lse=True)

        def zeros(dout, dlse):
            {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}[name][...] = 0
            return [np.zeros_like(x) for x in (q, k, v)]

        return results, zeros

    problem = testing.AttentionBackwardProblem(AttentionProblem("float32", seqlen_k=3), with_dlse=True)
    with pytest.raises(AssertionError, match=f"^{name}: changed by the call, which may only read it"):
        testing.check_gradients_within_bound(vjp, problem)


def test_results_in_a_buffer_that_is_used_again_are_compared_as_they_were():
    buffer, calls = np.empty((1, 16), np.float32), []

    def by_turns(q, k, v):
        calls.append(1)
        buffer[...] = plain(q, k, v)
        return np.nextafter(buffer, np.inf if len(calls) % 2 else -np.inf, out=buffer)

    with pytest.raises(AssertionError, match="expected the bits of"):
        testing.check_two_runs(by_turns, AttentionProblem("float32"))


# Reports


def test_a_report_goes_on_after_failures_and_says_how_to_repeat_them():
    wrong = testing.adapt(lambda q, k, v: 1.01 * plain(q, k, v), ["float64"], **SMALL)
    checks = [testing.check_constant_values, testing.check_signs, testing.check_decoding, testing.check_within_bound]
    found = testing.report(wrong, examples=10, checks=checks)
    assert [x.verdict for x in found.findings] == ["failed", "passed", "not applicable", "failed"]
    assert found["check_signs"].examples == 10
    text = str(found)
    for failure in found.failures:
        assert failure.examples <= 10 and failure.said in text.replace("\n  ", "\n")
        with pytest.raises(AssertionError):
            eval(failure.repeat.split(": ", 1)[1], {**vars(testing), "fn": wrong})
        assert repr(failure.problem) in failure.repeat and np.all([x.shape for x in failure.problem.inputs()])


def test_what_holds_within_bounds_alone_is_told_apart():
    calls = []

    def noisy(q, k, v):
        calls.append(1)
        return plain(q, k, v) * (1 + 2e-8 * (len(calls) % 2) * np.float64(3))

    noisy_float32 = testing.adapt(lambda q, k, v: noisy(q, k, v).astype(q.dtype), ["float32"], **SMALL)
    (finding,) = testing.report(noisy_float32, examples=20, checks=[testing.check_two_runs]).findings
    assert finding.verdict == testing.ROUNDED and "expected the bits of" in finding.said


def test_errors_of_the_function_are_failures():
    def fails(q, k, v):
        raise IndexError("no such tile")

    (finding,) = testing.report(fails, checks=[testing.check_signs]).failures
    assert finding.said == "IndexError: no such tile" and "check_signs(fn, AttentionProblem(" in finding.repeat


def test_an_error_that_is_not_raised_each_time_is_told_as_it_was():
    calls = []

    def at_times(q, k, v):
        calls.append(1)
        if len(calls) % 4 == 0:
            raise RuntimeError("no kernel image")
        return plain(q, k, v)

    fn = testing.adapt(at_times, ["float32"], **SMALL)
    (finding,) = testing.report(fn, examples=20, checks=[testing.check_within_bound]).failures
    assert finding.said == "RuntimeError: no kernel image\nnot each time that the same is asked"
    assert finding.repeat.endswith(f"check_within_bound(fn, {finding.problem!r})")


def test_seeds_give_other_problems_and_the_same_ones_again():
    def problems(seed):
        seen = []
        fn = testing.adapt(lambda q, k, v: seen.append(q.shape) or plain(q, k, v), ["float32"], **SMALL)
        testing.report(fn, examples=20, seed=seed, checks=[testing.check_within_bound])
        return seen

    assert problems(None) == problems(None) and problems(1) == problems(1)
    assert len({tuple(problems(seed)) for seed in (None, 1, 2)}) == 3


def test_kernels_that_round_scores_and_weights_are_judged_by_the_bound_of_the_standard_method():
    def three_steps(q, k, v):
        """Each written in the inputs' dtype, as frameworks do it."""
        scores = (q.astype(np.float32) @ np.swapaxes(k, -1, -2).astype(np.float32)).astype(q.dtype).astype(np.float32)
        scores *= np.float32(q.shape[-1] ** -0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(q.dtype).astype(np.float32)
        return (weights @ v.astype(np.float32)).astype(q.dtype)

    domain = {**SMALL, "layout": "HLD", "grouped": False, "nonfinite": False}
    fn = testing.adapt(three_steps, ["float16", "bfloat16"], **domain)
    with np.errstate(all="ignore"):
        report = functools.partial(testing.report, fn, checks=[testing.check_within_bound])
        assert report().failures
        assert not report(bound=bounds.attention_naive).failures


def test_adapted_calls_give_the_reference():
    q, k, v = AttentionProblem("float64", (1, 2), (1, 2), (1, 2), 3, 4).inputs()
    fn = testing.adapt(
        lambda q, k, v: np.swapaxes(plain(*(np.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2), layout="BLHD"
    )
    out, lse = fn(*(x for x in (q, k, v)))
    np.testing.assert_allclose(out, reference.attention(q, k, v), rtol=1e-12)
    assert lse is None
