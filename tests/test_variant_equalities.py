"""Options that mean the same give the same: bit for bit where the arithmetic is one, otherwise within the bounds."""

from dataclasses import replace

import numpy as np
import pytest

from cupyflash import bounds, dropout_mask, testing
from cupyflash.testing import AttentionProblem as Problem
from cupyflash.testing import Operand, Variants, assert_same_bits, assert_within_bound, element_type

HEADS = ((1, 4), (1, 2), (1, 2))
#: One of each family of kernels; test_variants.py has all types.
both = pytest.mark.parametrize("dtype", ["float16", "float32"])
SEQLEN_Q, SEQLEN_K = 20, 150
SHIFT = SEQLEN_K - SEQLEN_Q
ALIGNMENTS = pytest.mark.parametrize("align", ["bottom-right", "top-left"])


def inputs_of(dtype, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K, **options):
    """q, k, v of 4 heads, two to a key head."""
    return Problem(dtype, *HEADS, seqlen_q, seqlen_k, seed=1, **options).inputs()


def assert_same(results, expected):
    for result, value in zip(results, expected, strict=True):
        assert_same_bits(result, value)


def assert_same_within_bounds(backend, inputs, options, other_inputs, other_options, expected=lambda *x: x):
    """Both calls may be off by the bounds of theirs."""
    results = backend.attention(*inputs, **options)
    others = expected(*backend.attention(*other_inputs, **other_options))
    allowed = bounds.attention(*inputs, return_lse=True, **options)
    more = expected(*bounds.attention(*other_inputs, return_lse=True, **other_options))
    for name, result, other, *errors in zip(("out", "lse"), results, others, allowed, more, strict=True):
        assert np.isfinite(sum(map(np.abs, errors))).all()
        assert_within_bound(result, other, sum(map(np.abs, errors)), name=name)


def distance(align):
    """j - (i + shift) of each pair."""
    query, key = np.ogrid[:SEQLEN_Q, :SEQLEN_K]
    return key - query - (SHIFT if align == "bottom-right" else 0)


# Windows


@both
@ALIGNMENTS
def test_an_open_window_is_none_and_one_without_future_is_causal(backend, dtype, align):
    inputs = inputs_of(dtype)
    assert_same(backend.attention(*inputs, window_size=(None, None), align=align), backend.attention(*inputs))
    causal = backend.attention(*inputs, causal=True, align=align)
    assert_same(backend.attention(*inputs, window_size=(None, 0), align=align), causal)
    assert_same(backend.attention(*inputs, window_size=(None, 7), causal=True, align=align), causal)
    assert_same(backend.attention(*inputs, window_size=(10**9, 0), align=align), causal)


@both
@ALIGNMENTS
@pytest.mark.parametrize("window", [(5, 3), (0, 0), (70, None), (None, 64)])
def test_a_window_is_a_mask(backend, dtype, align, window):
    inputs = inputs_of(dtype)
    left, right = (np.inf if side is None else side for side in window)
    mask = (distance(align) >= -left) & (distance(align) <= right)
    windowed = {"window_size": window, "align": align}
    assert_same_within_bounds(backend, inputs, windowed, inputs, {"mask": mask})


# Masks and biases


@both
def test_a_mask_is_a_bias_of_minus_infinity(backend, dtype):
    inputs, mask = inputs_of(dtype), np.random.default_rng(0).random((4, SEQLEN_Q, SEQLEN_K)) < 0.2
    mask[:, 5] = False
    expected = backend.attention(*inputs, mask=mask, bias=np.zeros((), np.float32))
    assert_same(backend.attention(*inputs, bias=np.where(mask, 0, -np.inf).astype(np.float32)), expected)
    assert_same(backend.attention(*inputs, mask=mask), expected)


@both
def test_a_bias_of_each_row_moves_lse_alone(backend, dtype):
    inputs, bias = inputs_of(dtype), np.random.default_rng(0).standard_normal((SEQLEN_Q, 1)).astype(np.float32)
    (out, lse), (plain, plain_lse) = backend.attention(*inputs, bias=bias), backend.attention(*inputs)
    allowed, plain_allowed = (bounds.attention(*inputs, return_lse=True, **options) for options in ({"bias": bias}, {}))
    assert_within_bound(out, plain, allowed[0] + plain_allowed[0], name="out")
    assert_within_bound(lse, plain_lse.astype(np.float64) + bias[:, 0], allowed[1] + plain_allowed[1], name="lse")


@both
@ALIGNMENTS
def test_alibi_is_a_bias(backend, dtype, align):
    """Bit for bit: slopes are powers of two, so that their products with distances are exact."""
    inputs, slopes = inputs_of(dtype), 2.0 ** -np.arange(1, 5)
    bias = (-slopes[:, None, None] * np.abs(distance(align))).astype(np.float32)
    expected = backend.attention(*inputs, bias=bias)
    assert_same(backend.attention(*inputs, alibi_slopes=slopes.astype(np.float32), align=align), expected)


# Scores


@both
def test_a_large_softcap_is_none(backend, dtype):
    inputs = inputs_of(dtype)
    assert_same_within_bounds(backend, inputs, {"softcap": 1e9}, inputs, {})


@both
def test_score_mods_are_the_built_in_options(backend, dtype):
    inputs, rng = inputs_of(dtype), np.random.default_rng(0)
    bias = rng.standard_normal((SEQLEN_Q, SEQLEN_K)).astype(np.float32)
    slopes = rng.random(4).astype(np.float32)
    for expression, aux, options in (
        ("score + table[i * S + j]", {"table": bias}, {"bias": bias}),
        (
            "score - slopes[h] * abs(i + S - L - j)",
            {"slopes": slopes},
            {"alibi_slopes": slopes, "align": "bottom-right"},
        ),
        ("1.5f * tanh(score / 1.5f)", None, {"softcap": 1.5}),
    ):
        assert_same_within_bounds(backend, inputs, {"score_mod": expression, "aux": aux}, inputs, options)


@both
def test_mask_mods_are_masks(backend, dtype):
    inputs, mask = inputs_of(dtype), np.random.default_rng(0).random((1, 4, SEQLEN_Q, SEQLEN_K)) < 0.3
    expected = backend.attention(*inputs, mask=mask)
    table = "table[((b * 4 + h) * L + i) * S + j]"
    assert_same(backend.attention(*inputs, mask_mod=table, aux={"table": mask}), expected)
    removed = backend.attention(*inputs, score_mod=f"{table} ? score : -INFINITY", aux={"table": mask})
    for result, value in zip(removed, expected, strict=True):
        np.testing.assert_array_equal(result, value)


# Sinks


@both
def test_a_sink_of_minus_infinity_is_none(backend, dtype):
    inputs = inputs_of(dtype)
    sink = np.full(4, -np.inf, np.float32)
    for options in {}, {"causal": True, "align": "bottom-right"}, {"window_size": (3, 3), "align": "top-left"}:
        assert_same(backend.attention(*inputs, attn_sink=sink, **options), backend.attention(*inputs, **options))


@both
def test_a_sink_is_a_key_of_that_score_without_value(backend, dtype):
    q, k, v = inputs_of(dtype)
    sink = np.array([0.5, 3.0, -2.0, 10.0], np.float32)
    one_more = tuple(np.concatenate([x, np.zeros_like(x[..., :1, :])], axis=-2) for x in (k, v))
    bias = np.zeros((4, 1, SEQLEN_K + 1), np.float32)
    bias[..., -1] = sink[:, None]
    assert_same_within_bounds(backend, (q, k, v), {"attn_sink": sink}, (q, *one_more), {"bias": bias})


# Dropout


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 16), ("float16", 64), ("bfloat16", 128), ("float32", 16), ("float64", 64)]
)
@pytest.mark.parametrize("options", [{}, {"split_size": 128}], ids=["whole", "parts"])
def test_the_dropout_mask_is_that_of_the_host_whatever_the_tiles_are(backend, dtype, head_dim, options):
    """Weights are equal and columns of v are keys: one of out is not 0 where its key is kept."""
    seqlen_q, seqlen_k = 70 if dtype == "float16" else 20, 200
    q, k = (np.zeros((2, 3, n, head_dim), element_type(dtype)) for n in (seqlen_q, seqlen_k))
    v = np.eye(seqlen_k, dtype=q.dtype)
    out, _ = backend.attention(q, k, v, dropout_p=0.3, seed=2**40 + 7, **options)
    kept = dropout_mask((2, 3, seqlen_q, seqlen_k), 0.3, 2**40 + 7)
    np.testing.assert_array_equal(out != 0, kept)
    np.testing.assert_allclose(out[kept].astype(float), 1 / 0.7 / seqlen_k, rtol=1e-2)


@both
def test_dropout_leaves_lse_and_the_mean(backend, dtype):
    """The mean over seeds comes close to the result without dropout: within 5 deviations of the mean of 32."""
    inputs = inputs_of(dtype, 16, 32, values="one sign")
    out, lse = backend.attention(*inputs)
    results = [backend.attention(*inputs, dropout_p=0.5, seed=seed) for seed in range(32)]
    for _, other in results:
        assert_same_bits(other, lse)
    outs = np.stack([x.astype(np.float64) for x, _ in results])
    error, deviation = np.abs(outs.mean(axis=0) - out.astype(np.float64)), outs.std(axis=0) / 32**0.5
    assert (error <= 5 * deviation).all() and error.max() > 0
    assert (deviation > 0).all()


# What is removed has no influence


def removals(seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K):
    """By name: options, and which keys no query is left with, which queries no key."""
    query, key = np.arange(seqlen_q), np.arange(seqlen_k)
    some_keys, some_queries = key % 5 == 2, query % 7 == 3
    kept = ~(some_keys[None, :] | some_queries[:, None])
    none = np.zeros(seqlen_q, bool)
    seqlens = {"seqlens_q": np.array([seqlen_q - 9]), "seqlens_k": np.array([seqlen_k - 22])}
    table = {"table": kept}
    return {
        "mask": ({"mask": kept}, some_queries, some_keys),
        "bias": ({"bias": np.where(kept, 1, -np.inf).astype(np.float32)}, some_queries, some_keys),
        "causal": ({"causal": True, "align": "top-left"}, none, key >= seqlen_q),
        "window": ({"window_size": (3, 2), "align": "bottom-right"}, none, key < seqlen_k - seqlen_q - 3),
        "left": ({"window_size": (3, None), "align": "bottom-right"}, none, key < seqlen_k - seqlen_q - 3),
        "lengths": (seqlens, query >= seqlen_q - 9, key >= seqlen_k - 22),
        "mask_mod": ({"mask_mod": "table[i * S + j]", "aux": table}, some_queries, some_keys),
        "score_mod": (
            {"score_mod": "table[i * S + j] ? score : -INFINITY", "aux": table},
            some_queries,
            some_keys,
        ),
    }


@pytest.mark.parametrize("kind", removals())
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("more", [{}, {"split_size": 128}], ids=["whole", "parts"])
def test_nan_behind_every_kind_of_mask(backend, dtype, kind, more):
    options, queries, keys = removals()[kind]
    clean = inputs_of(dtype)
    spoilt = tuple(np.array(x) for x in clean)
    for array, rows in zip(spoilt, (queries, keys, keys), strict=True):
        array[..., rows, :] = np.nan
    assert keys.any()
    out, lse = backend.attention(*spoilt, **options, **more)
    assert np.isfinite(out.astype(np.float64)).all() and not np.isnan(lse).any()
    assert_same((out, lse), backend.attention(*clean, **options, **more))
    assert (out[..., queries, :] == 0).all() and (lse[..., queries] == -np.inf).all()


@pytest.mark.parametrize("kind", ["mask", "causal", "lengths", "mask_mod"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nan_of_a_bias_behind_a_mask(backend, dtype, kind):
    options, queries, keys = removals()[kind]
    inputs, bias = inputs_of(dtype), np.random.default_rng(0).standard_normal((SEQLEN_Q, SEQLEN_K)).astype(np.float32)
    spoilt = bias.copy()
    spoilt[queries], spoilt[:, keys] = np.nan, np.nan
    assert_same(backend.attention(*inputs, bias=spoilt, **options), backend.attention(*inputs, bias=bias, **options))


# Parts of the keys


@both
def test_parts_of_the_keys_are_the_whole(backend, dtype):
    everything = Variants(
        bias=Operand("some -inf"),
        attn_sink=Operand("normal", "heads"),
        softcap=2.0,
        dropout_p=0.2,
        mask=Operand("random"),
    )
    problem = Problem(dtype, *HEADS, 20, 300, causal=True, align="bottom-right", variants=everything)
    inputs = problem.inputs()
    parts = replace(problem, variants=replace(everything, split_size=128)).options
    assert_same_within_bounds(backend, inputs, parts, inputs, problem.options)


@both
def test_shared_heads_are_repeated_ones(backend, dtype):
    everything = Variants(
        bias=Operand("normal", "pairs of heads"),
        attn_sink=Operand("normal", "heads"),
        alibi_slopes=Operand("geometric", "heads"),
        dropout_p=0.2,
        mask_mod="checkered",
    )
    testing.check_grouped_heads(
        backend.attention, Problem(dtype, seqlen_q=20, seqlen_k=70, align="top-left", variants=everything)
    )
