"""The error bounds with every option: above the errors of the kernels, and below those of faults."""

import math

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import Numerics, bounds, reference, testing

HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 2, 70, 140, 16
RNG = np.random.default_rng


def inputs(dtype, rng, peaked=False):
    q, k, v = (rng.standard_normal((HEADS, n, HEAD_DIM)) for n in (SEQLEN_Q, SEQLEN_K, SEQLEN_K))
    if peaked:
        q, v = 4 * q, np.abs(v) + 0.5
    return [x.astype(dtype) for x in (q, k, v)]


def scored(dtype, rng):
    """What changes scores, with a window and a sink."""
    return {
        "softcap": 5.0,
        "bias": 3 * rng.standard_normal((HEADS, SEQLEN_Q, SEQLEN_K)),
        "alibi_slopes": np.array([0.25, 0.03]).astype(dtype),
        "window_size": (60, 9),
        "align": "bottom-right",
        "attn_sink": np.array([9.0, -1.0]).astype(dtype),
    }


def removed(dtype, rng):
    """What removes pairs."""
    return {
        "mask": rng.random((SEQLEN_Q, SEQLEN_K)) < 0.7,
        "dropout_p": 0.5,
        "seed": 3,
        "seqlens_q": np.array(SEQLEN_Q - 6, np.int32),
        "seqlens_k": np.array(SEQLEN_K - 9, np.int32),
        "attn_sink": np.array([1.0, -math.inf]).astype(dtype),
    }


def written(dtype, rng):
    """A score_mod, and a bias that removes or all but removes pairs."""
    bias = rng.standard_normal((HEADS, 1, SEQLEN_K)).astype(np.float32)
    bias[:, :, ::3] = -math.inf
    bias[:, :, 1::7] = np.finfo(np.float32).min
    return {
        "score_mod": "tanh(score) * 3.0f + score * slope[h]",
        "aux": {"slope": np.array([0.5, 0.25], np.float32)},
        "bias": bias,
        "causal": True,
        "align": "bottom-right",
    }


OPTIONS = [scored, removed, written]


def worst(results, exact, allowed):
    """The largest error of each result, in units of its bound, which is finite."""
    ratios = []
    for result, value, bound in zip(results, exact, allowed, strict=True):
        assert np.isfinite(bound).all() and bound.shape == result.shape
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.where(result == value, 0, np.abs(result.astype(np.float64) - value))
            ratios.append(np.where(error == 0, 0, error / bound).max())
    return ratios


def all_results(attention, *arrays, **options):
    return attention(*arrays, return_lse=True, return_max=True, **options)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (np.float16, scored),
        (ml_dtypes.bfloat16, removed),
        (np.float16, written),
        (np.float32, scored),
        (float, removed),
    ],
)
def test_the_forward_stays_close_below_its_bound(dtype, options):
    for peaked in False, True:
        rng = RNG(peaked)
        arrays, chosen = inputs(dtype, rng, peaked), options(dtype, rng)
        results = all_results(cupyflash.attention, *arrays, **chosen)
        exact, allowed = (all_results(f, *arrays, **chosen) for f in (reference.attention, bounds.attention))
        ratios = worst(results, exact, allowed)
        assert max(ratios) <= 1
        # Worst cases of sums are 100 times their common errors in float32; in 16 bits a few roundings are all there is.
        assert ratios[0] > (0.2 if np.dtype(dtype).itemsize == 2 else 0.01) and min(ratios[1:]) > 0.003


@pytest.mark.parametrize(
    "options",
    [
        {"numerics": Numerics(exp="poly3", p_dtype="float32", rescale_threshold=8)},
        {"numerics": Numerics(exp="accurate", accumulate="two-level")},
        {"split_size": 128, "attn_sink": np.ones(HEADS, np.float32)},
    ],
    ids=["polynomial", "accurate", "split"],
)
def test_other_arithmetic_stays_below_its_bound(options):
    arrays = inputs(np.float16, RNG(5), peaked=True)
    results = all_results(cupyflash.attention, *arrays, **options)
    exact, allowed = (all_results(f, *arrays, **options) for f in (reference.attention, bounds.attention))
    assert 0.05 < worst(results, exact, allowed)[0] and max(worst(results, exact, allowed)) <= 1


def test_a_coarser_exponential_has_a_larger_bound():
    arrays = inputs(np.float16, RNG(6))
    sizes = [
        np.median(bounds.attention(*arrays, numerics=Numerics(exp=exp, p_dtype="float32")))
        for exp in ("accurate", "ex2.approx", "poly3")
    ]
    assert sizes == sorted(sizes) and sizes[2] > 3 * sizes[0]


def backward_arguments(dtype, rng, options, peaked=False):
    q, k, v = inputs(dtype, rng, peaked)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout = rng.standard_normal(out.shape).astype(dtype)
    lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
    return (dout, q, k, v, out.astype(dtype), lse), rng.standard_normal(lse.shape).astype(lse.dtype)


def test_gradients_stay_close_below_their_bounds():
    for peaked in False, True:
        rng = RNG(8 + peaked)
        options = scored(np.float16, rng) | {"dropout_p": 0.5, "seed": 3}
        arguments, dlse = backward_arguments(np.float16, rng, options, peaked)
        gradients = cupyflash.attention_backward(*arguments, dlse=dlse, **options)
        exact = reference.attention_backward(*arguments, dlse=dlse, **options)
        allowed = bounds.attention_backward(*arguments, dlse=dlse, **options)
        ratios = worst(*(vars(x).values() for x in (gradients, exact, allowed)))
        assert max(ratios) <= 1 and min(ratios) > 0.02


def test_gradients_of_float32_operands_of_a_float64_call_are_flushed_where_subnormal():
    rng = RNG(19)
    q, k, v = (rng.standard_normal((n, HEAD_DIM)) for n in (5, 30, 30))
    options = {"bias": np.linspace(-95, 0, 30, dtype=np.float32) * np.ones((5, 1), np.float32)}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    arguments = np.ones_like(out), q, k, v, out, lse
    gradients = cupyflash.attention_backward(*arguments, **options)
    exact, allowed = (f(*arguments, **options) for f in (reference.attention_backward, bounds.attention_backward))
    assert (gradients.dbias == 0).any() and (exact.dbias != 0).all()
    assert worst([gradients.dbias], [exact.dbias], [allowed.dbias])[0] <= 1


def packed(dtype, rng):
    """Arguments of attention_varlen, an empty sequence and slack rows among them."""
    q = rng.standard_normal((60, 2, HEAD_DIM)).astype(dtype)
    k, v = (rng.standard_normal((80, 1, HEAD_DIM)).astype(dtype) for _ in range(2))
    offsets = np.array([0, 1, 30, 30, 55], np.int32), np.array([0, 20, 50, 50, 77], np.int32)
    return (q, k, v, *offsets), {
        "causal": True,
        "align": "bottom-right",
        "alibi_slopes": np.array([0.5, 0.1], np.float32),
        "attn_sink": rng.standard_normal((4, 2)).astype(dtype),
        "bias": rng.standard_normal((2, 29, 30)).astype(dtype),
    }


def test_packed_sequences_stay_below_their_bounds():
    arrays, options = packed(np.float16, RNG(10))
    results = all_results(cupyflash.attention_varlen, *arrays, **options)
    exact, allowed = (all_results(f, *arrays, **options) for f in (reference.attention_varlen, bounds.attention_varlen))
    assert 0.1 < worst(results, exact, allowed)[0] and max(worst(results, exact, allowed)) <= 1
    assert (allowed[0][55:] == 0).all() and (allowed[1][:, 55:] == 0).all()


def test_bounds_of_packed_sequences_are_those_of_each():
    (q, k, v, offsets_q, offsets_k), options = packed(np.float32, RNG(11))
    q_heads, k_heads, v_heads = (x.swapaxes(0, 1) for x in (q, k, v))
    out, lse = (x.astype(np.float32) for x in reference.attention_varlen(
        q, k, v, offsets_q, offsets_k, return_lse=True, **options))  # fmt: skip
    dout, rows, keys = np.ones_like(out), slice(30, 55), slice(50, 77)
    whole = bounds.attention_varlen(q, k, v, offsets_q, offsets_k, **options)
    gradients = bounds.attention_varlen_backward(dout, q, k, v, out, lse, offsets_q, offsets_k, **options)
    alone = options | {"bias": options["bias"][:, :25, :27], "attn_sink": options["attn_sink"][3]}
    part = q_heads[:, rows], k_heads[:, keys], v_heads[:, keys]
    np.testing.assert_array_equal(whole[rows], bounds.attention(*part, **alone).swapaxes(0, 1))
    rest = out.swapaxes(0, 1)[:, rows], lse[:, rows]
    of_part = bounds.attention_backward(dout.swapaxes(0, 1)[:, rows], *part, *rest, **alone)
    np.testing.assert_array_equal(gradients.dk[keys], of_part.dk.swapaxes(0, 1))
    # Sums over queries have the roundings that those of the longest sequence have.
    assert (gradients.dattn_sink[3] >= of_part.dattn_sink).all()
    np.testing.assert_allclose(gradients.dattn_sink[3], of_part.dattn_sink, rtol=0.1)
    assert (gradients.dbias[:, :25, :27] >= of_part.dbias).all()
    assert (gradients.dalibi_slopes > of_part.dalibi_slopes).all()
    assert (gradients.dq[55:] == 0).all() and (gradients.dk[77:] == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_joined_parts_stay_below_their_bounds(dtype):
    rng = RNG(12)
    outs = (10 * rng.standard_normal((5, 40, 8))).astype(dtype)
    lses = (rng.standard_normal((5, 40)) * [[1], [5], [30], [1], [1]]).astype(
        float if dtype == np.float64 else np.float32
    )
    outs[2, 1], lses[2, 1] = np.nan, -np.inf  # saw no key
    ratios = worst(cupyflash.merge(outs, lses), reference.merge(outs, lses), bounds.merge(outs, lses))
    assert max(ratios) <= 1 and min(ratios) > 0.1
    lses[:, 3], lses[1, 4], outs[1, 5, 0] = -np.inf, np.nan, np.inf
    bound, lse_bound = bounds.merge(outs, lses)
    assert (bound[3] == 0).all() and lse_bound[3] == 0
    assert np.isinf(bound[4]).all() and np.isinf(lse_bound[4])
    assert np.isinf(bound[5, 0]) and np.isfinite(bound[5, 1:]).all() and np.isfinite(lse_bound[5])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("choose", OPTIONS)
def test_terms_sum_to_the_bound(choose, dtype):
    rng = RNG(13)
    arrays, options = inputs(dtype, rng), choose(dtype, rng)
    terms = bounds.attention_terms(*arrays, **options)
    assert ("score function" in terms) == (choose is not removed) and ("sink" in terms) == (choose is not written)
    assert ("dropout" in terms) == (choose is removed) and "split" not in terms
    for each, bound in zip(
        zip(*terms.values(), strict=True), bounds.attention(*arrays, return_lse=True, **options), strict=True
    ):
        np.testing.assert_allclose(sum(each), bound, rtol=0.05, atol=1e-30)
    arguments, dlse = backward_arguments(dtype, rng, options)
    terms = bounds.attention_backward_terms(*arguments, dlse=dlse, **options)
    allowed = bounds.attention_backward(*arguments, dlse=dlse, **options)
    for gradient, bound in vars(allowed).items():
        if bound is not None:
            assert all((getattr(term, gradient) >= 0).all() for term in terms.values())
            total = sum(getattr(term, gradient) for term in terms.values())
            assert 0.8 < total.sum() / bound.sum() <= 1.05


FAULTS = {
    "cap forgotten": (scored, lambda o: o | {"softcap": None}),
    "bias in base 2": (scored, lambda o: o | {"bias": o["bias"] * math.log2(math.e)}),
    "ALiBi to the right only": (scored, lambda o: o | {"alibi_slopes": -o["alibi_slopes"]}),
    "diagonal off by one": (scored, lambda o: o | {"window_size": (59, 10)}),
    "window off by one": (scored, lambda o: o | {"window_size": (59, 9)}),
    "sink in base 2": (scored, lambda o: o | {"attn_sink": o["attn_sink"] * np.float16(1.4427)}),
    "no sink": (scored, lambda o: o | {"attn_sink": None}),
    "other seed": (removed, lambda o: o | {"seed": 4}),
    "length off by one": (removed, lambda o: o | {"seqlens_k": np.array(SEQLEN_K - 10, np.int32)}),
    "row of the mask": (removed, lambda o: o | {"mask": np.roll(o["mask"], 1, axis=0)}),
    "bias of another head": (written, lambda o: o | {"bias": o["bias"][::-1]}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_option_exceeds_the_bounds(name):
    options, fault = FAULTS[name]
    rng = RNG(14)
    arrays, right = inputs(np.float16, rng), options(np.float16, rng)
    out = reference.attention(*arrays, **fault(right)).astype(np.float16)
    assert worst([out], [reference.attention(*arrays, **right)], [bounds.attention(*arrays, **right)])[0] > 10
    arguments, dlse = backward_arguments(np.float16, rng, right)
    wrong, exact = (reference.attention_backward(*arguments, dlse=dlse, **o) for o in (fault(right), right))
    assert max(worst(wrong, exact, bounds.attention_backward(*arguments, dlse=dlse, **right))) > 10


def test_a_missing_scale_of_dropout_exceeds_the_bounds():
    rng = RNG(15)
    arrays, options = inputs(np.float16, rng), removed(np.float16, rng) | {"dropout_p": 0.01}
    exact, allowed = reference.attention(*arrays, **options), bounds.attention(*arrays, **options)
    assert worst([0.99 * exact], [exact], [allowed])[0] > 5
    assert worst([exact], [exact], [allowed])[0] == 0


@pytest.mark.parametrize(
    ("gradient", "wrong"),
    [
        ("dbias", lambda exact: 1.01 * exact.dbias),
        ("dalibi_slopes", lambda exact: -exact.dalibi_slopes),
        ("dattn_sink", lambda exact: exact.dattn_sink * math.log(2)),
        ("dq", lambda exact: exact.dq * 1.02),
    ],
)
def test_a_wrong_option_gradient_exceeds_its_bound(gradient, wrong):
    rng = RNG(16)
    options = scored(np.float16, rng)
    arguments, dlse = backward_arguments(np.float16, rng, options)
    exact = reference.attention_backward(*arguments, dlse=dlse, **options)
    allowed = bounds.attention_backward(*arguments, dlse=dlse, **options)
    assert worst([wrong(exact)], [getattr(exact, gradient)], [getattr(allowed, gradient)])[0] > 5


def test_what_an_option_makes_unbounded():
    """A bias or a sink that is no number, slopes beyond float32, and rows of which all scores are hugely negative."""
    q, k, v = (np.ones((2, 3, 4), np.float16) for _ in range(3))
    bias, lowest = np.zeros((2, 3, 3), np.float32), np.finfo(np.float32).min
    bias[0, 0, 1], bias[0, 1] = np.nan, lowest
    bias[1, 0, 1], bias[1, 1, 1], bias[1, 2] = lowest, np.inf, -np.inf
    bound, lse_bound = bounds.attention(q, k, v, bias=bias, return_lse=True)
    unbounded = np.array([[True, True, False], [False, True, False]])
    np.testing.assert_array_equal(np.isinf(bound).all(axis=-1), unbounded)
    np.testing.assert_array_equal(np.isinf(lse_bound), unbounded)
    assert (bound[1, 2] == 0).all() and lse_bound[1, 2] == 0
    assert np.isinf(bounds.attention(q, k, v, attn_sink=np.array([np.nan, np.inf], np.float32))).all()
    assert np.isinf(bounds.attention(q, k, v, alibi_slopes=np.array([1e300, -1e39]))).all()


def test_a_row_with_a_sink_alone():
    q, k, v = (np.ones((2, 3, 4), np.float32) for _ in range(3))
    options = {"attn_sink": np.array([3.0, -np.inf], np.float32), "mask": np.zeros((3, 3), bool)}
    bound, lse_bound, max_bound = all_results(bounds.attention, q, k, v, **options)
    assert (bound == 0).all() and (max_bound == 0).all()
    assert (0 < lse_bound[0]).all() and (lse_bound[0] < 1e-5).all() and (lse_bound[1] == 0).all()


def test_dout_of_a_row_without_keys_does_not_reach_the_gradient_of_its_sink():
    ones = np.ones((2, 3, 4), np.float32)
    options = {"attn_sink": np.zeros(2, np.float32), "mask": np.arange(3)[:, None] > np.zeros(3)}
    out, lse = (x.astype(np.float32) for x in reference.attention(ones, ones, ones, return_lse=True, **options))
    dout = ones.copy()
    dout[:, 0] = np.nan
    clean = bounds.attention_backward(ones, ones, ones, ones, out, lse, **options)
    bound = bounds.attention_backward(dout, ones, ones, ones, out, lse, **options)
    assert np.isfinite(clean.dattn_sink).all()
    np.testing.assert_array_equal(bound.dattn_sink, clean.dattn_sink)
    dout[1, 1] = np.nan
    bound = bounds.attention_backward(dout, ones, ones, ones, out, lse, **options)
    np.testing.assert_array_equal(np.isinf(bound.dattn_sink), [False, True])


def test_a_removed_pair_frees_nothing_and_has_no_gradient():
    """NaN behind masks."""
    rng = RNG(17)
    q, k, v = inputs(np.float16, rng)
    bias = rng.standard_normal((SEQLEN_Q, SEQLEN_K)).astype(np.float32)
    bias[:, 5] = -np.inf
    clean = bounds.attention(q, k, v, bias=bias)
    k[:, 5], v[:, 5] = np.nan, np.inf
    np.testing.assert_array_equal(bounds.attention(q, k, v, bias=bias), clean)
    arguments, _ = backward_arguments(np.float16, RNG(17), {"bias": bias})
    arguments = (arguments[0], q, k, v, *arguments[4:])
    gradients = bounds.attention_backward(*arguments, bias=bias)
    assert np.isfinite(gradients.dq).all() and (gradients.dk[:, 5] == 0).all()
    assert (gradients.dbias[:, 5] == 0).all() and (np.delete(gradients.dbias, 5, axis=1) > 0).all()


def test_assertions_name_what_is_wrong():
    rng = RNG(18)
    (q, k, v), options = inputs(np.float16, rng), scored(np.float16, rng)
    out, lse, row_max = all_results(reference.attention, q, k, v, **options)
    out, lse, row_max = out.astype(np.float16), lse.astype(np.float32), row_max.astype(np.float32)
    testing.assert_attention_within_bound(out, lse, q, k, v, row_max=row_max, **options)
    with pytest.raises(AssertionError, match=r"max\[1, 3\] is"):
        row_max[1, 3] += 1
        testing.assert_attention_within_bound(out, lse, q, k, v, row_max=row_max, **options)
    dout = np.ones_like(out)
    exact = reference.attention_backward(dout, q, k, v, out, lse, **options)
    operands = {"q": q, "k": k, "v": v, **options}
    gradients = cupyflash.Gradients(**{name: x.astype(operands[name[1:]].dtype) for name, x in vars(exact).items()})
    testing.assert_gradients_within_bound(gradients, dout, q, k, v, out, lse, **options)
    with pytest.raises(AssertionError, match=r"dalibi_slopes\[0\] is .*(?s:.*)delta"):
        gradients.dalibi_slopes[0] *= 2
        testing.assert_gradients_within_bound(gradients, dout, q, k, v, out, lse, **options)
