"""What the reference answers where conventions differ between libraries, and what masks keep out."""

import math

import numpy as np
import pytest

from cupyflash import reference
from cupyflash.dropout import dropout_mask

INF, NAN = math.inf, math.nan
BOTTOM_RIGHT, TOP_LEFT = {"align": "bottom-right"}, {"align": "top-left"}
PER_QUERY = {"return_lse": True, "return_max": True}


def drawn(shape_q=(2, 2, 3, 4), shape_k=(2, 2, 5, 4), head_dim_v=2, seed=0):
    rng = np.random.default_rng(seed)
    return *map(rng.standard_normal, (shape_q, shape_k, (*shape_k[:-1], head_dim_v))), rng


def all_results(q, k, v, dout, dlse, **options):
    """out, lse and max, and the gradients that there are."""
    results = reference.attention(q, k, v, **PER_QUERY, **options)
    gradients = reference.attention_backward(dout, q, k, v, *results[:2], dlse=dlse, **options)
    return [*results, *(x for x in vars(gradients).values() if x is not None)]


def assert_same(results, expected):
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("align", [BOTTOM_RIGHT, TOP_LEFT])
def test_windows_that_are_no_window_or_causal(align):
    q, k, v, _ = drawn()
    plain = reference.attention(q, k, v, **PER_QUERY)
    assert_same(reference.attention(q, k, v, window_size=(None, None), **PER_QUERY), plain)
    assert_same(reference.attention(q, k, v, window_size=(10, 10), **align, **PER_QUERY), plain)
    causal = reference.attention(q, k, v, causal=True, **align, **PER_QUERY)
    assert_same(reference.attention(q, k, v, window_size=(None, 0), **align, **PER_QUERY), causal)
    assert_same(reference.attention(q, k, v, causal=True, window_size=(None, 3), **align, **PER_QUERY), causal)
    assert (causal[0] != plain[0]).any()


@pytest.mark.parametrize(
    ("window_size", "align", "shape", "sees"),
    [
        ((1, 0), BOTTOM_RIGHT, (2, 5), ["..xx.", "...xx"]),
        ((1, 0), TOP_LEFT, (2, 5), ["x....", "xx..."]),
        ((0, 1), BOTTOM_RIGHT, (3, 2), ["x.", "xx", ".x"]),
        ((0, 0), TOP_LEFT, (3, 2), ["x.", ".x", ".."]),
        ((None, 1), TOP_LEFT, (2, 4), ["xx..", "xxx."]),
        ((1, None), BOTTOM_RIGHT, (2, 4), [".xxx", "..xx"]),
    ],
)
def test_the_keys_of_a_window(window_size, align, shape, sees):
    """The values are the columns of the identity, so that out has the weights."""
    seqlen_q, seqlen_k = shape
    weights = reference.attention(
        np.zeros((seqlen_q, 1)), np.zeros((seqlen_k, 1)), np.eye(seqlen_k), window_size=window_size, **align
    )
    assert ["".join(".x"[int(weight > 0)] for weight in row) for row in weights] == sees


def test_a_row_without_keys():
    q, k, v, rng = drawn()
    mask = rng.random((3, 5)) < 0.5
    mask[1] = False
    out, lse, row_max = reference.attention(q, k, v, mask=mask, **PER_QUERY)
    assert (out[..., 1, :] == 0).all() and (lse[..., 1] == -INF).all() and (row_max[..., 1] == -INF).all()
    assert np.isfinite(lse[..., [0, 2]]).all()


def test_the_maximum_is_that_of_the_final_scores():
    q, k, v = np.ones((1, 1)), np.array([[1.0], [3.0]]), np.ones((2, 1))
    bias, slopes = np.array([0.5, -4.0]), np.array(0.25)
    _, _, row_max = reference.attention(
        q, k, v, bias=bias, alibi_slopes=slopes, attn_sink=np.array(9.0), **TOP_LEFT, **PER_QUERY
    )
    assert row_max == max(1 + 0.5, 3 - 4 - 0.25)


def test_a_sink_alone():
    q, k, v, rng = drawn()
    sink = rng.standard_normal(2)
    options = {"attn_sink": sink, "mask": np.zeros((1, 1), bool)}
    dlse = rng.standard_normal((2, 2, 3))
    dout = np.full((2, 2, 3, 2), NAN)
    out, lse, row_max, dq, dk, dv, dsink = all_results(q, k, v, dout, dlse, **options)
    assert (out == 0).all() and (row_max == -INF).all()
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None], lse.shape))
    assert not dq.any() and not dk.any() and not dv.any()
    np.testing.assert_allclose(dsink, dlse.sum(axis=(0, 2)), rtol=1e-14)


def test_a_sink_alone_that_is_no_number_spoils_no_value():
    x = np.ones((1, 1))
    out, lse = reference.attention(x, x, x, attn_sink=np.array(NAN), mask=np.zeros((), bool), return_lse=True)
    assert out == 0 and np.isnan(lse)


def test_a_sink_far_above_the_scores():
    q, k, v = np.zeros((1, 1)), np.zeros((3, 1)), np.full((3, 1), 8.0)
    out, lse, row_max, *gradients, dsink = all_results(
        q, k, v, np.ones((1, 1)), np.array([3.0]), attn_sink=np.array(2000.0)
    )
    assert out == 0 and lse == 2000 and row_max == 0 and dsink == 3 and not any(x.any() for x in gradients)


def test_a_sink_takes_its_part_of_the_weight():
    q, k, v = np.zeros((1, 1)), np.zeros((3, 1)), np.full((3, 1), 8.0)
    out, lse = reference.attention(q, k, v, attn_sink=np.array(math.log(5)), return_lse=True)
    np.testing.assert_allclose(out, 8 * 3 / (3 + 5), rtol=1e-15)
    np.testing.assert_allclose(lse, math.log(8), rtol=1e-15)


def test_a_sink_of_minus_infinity_is_none():
    q, k, v, rng = drawn()
    dout, dlse = rng.standard_normal((2, 2, 3, 2)), rng.standard_normal((2, 2, 3))
    *results, dsink = all_results(q, k, v, dout, dlse, attn_sink=np.full((2, 1), -INF), causal=True, **TOP_LEFT)
    assert_same(results, all_results(q, k, v, dout, dlse, causal=True, **TOP_LEFT))
    assert dsink.shape == (2, 1) and not dsink.any()


def test_a_mask_is_a_bias_of_minus_infinity():
    q, k, v, rng = drawn()
    dout, dlse = rng.standard_normal((2, 2, 3, 2)), rng.standard_normal((2, 2, 3))
    mask = rng.random((2, 3, 5)) < 0.6
    *results, dbias = all_results(q, k, v, dout, dlse, bias=np.where(mask, 0, -INF))
    assert_same(results, all_results(q, k, v, dout, dlse, mask=mask))
    assert not dbias[~mask].any() and dbias[mask].all()


def test_a_very_negative_bias_is_data():
    q, k, v = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3.0]])
    out, lse = reference.attention(q, k, v, bias=np.full(2, -1e30), return_lse=True)
    assert out == 2 and lse == -1e30


def test_distances_of_alibi():
    q, k, v = np.zeros((2, 1)), np.zeros((4, 1)), np.zeros((4, 1))
    for align, distances in (BOTTOM_RIGHT, [[2, 1, 0, 1], [3, 2, 1, 0]]), (TOP_LEFT, [[0, 1, 2, 3], [1, 0, 1, 2]]):
        lse = reference.attention(q, k, v, alibi_slopes=np.array(0.5), return_lse=True, **align)[1]
        np.testing.assert_allclose(lse, np.log(np.exp(-0.5 * np.array(distances)).sum(axis=-1)), rtol=1e-15)


def test_softcap_comes_before_bias_and_after_the_scale():
    q, k, v = np.ones((1, 1)), np.full((1, 1), 6.0), np.ones((1, 1))
    options = {"softmax_scale": 0.5, "softcap": 2.0, "bias": np.array(7.0), "return_lse": True}
    np.testing.assert_allclose(reference.attention(q, k, v, **options)[1], 2 * math.tanh(3 / 2) + 7, rtol=1e-15)


@pytest.mark.parametrize("score", [1e4, -1e4])
def test_a_score_far_beyond_the_cap_moves_nothing(score):
    q, k, v = np.full((1, 1), score), np.array([[1.0], [0.0]]), np.array([[1.0], [3.0]])
    _, lse, _, dq, dk, _ = all_results(q, k, v, np.ones((1, 1)), np.ones(1), softcap=1.0)
    np.testing.assert_allclose(lse, math.log(math.exp(math.copysign(1, score)) + 1), rtol=1e-15)
    assert dq == 0 and dk[0] == 0 and dk[1] != 0


def test_an_infinite_score_is_capped():
    q, k, v = np.ones((1, 1)), np.array([[INF], [-INF]]), np.array([[1.0], [3.0]])
    out, lse = reference.attention(q, k, v, softcap=2.0, return_lse=True)
    np.testing.assert_allclose(out, (math.exp(2) + 3 * math.exp(-2)) / (math.exp(2) + math.exp(-2)), rtol=1e-15)
    np.testing.assert_allclose(lse, math.log(math.exp(2) + math.exp(-2)), rtol=1e-15)


@pytest.mark.parametrize("align", [BOTTOM_RIGHT, TOP_LEFT])
def test_lengths_cut_each_batch(align):
    """As calls without padding; what is behind the lengths may be anything."""
    q, k, v, rng = drawn()
    dout, dlse = rng.standard_normal((2, 2, 3, 2)), rng.standard_normal((2, 2, 3))
    bias, slopes, sink = rng.standard_normal((3, 5)), rng.standard_normal(2), rng.standard_normal(2)
    lengths_q, lengths_k = (2, 3), (5, 1)
    options = {"causal": True, "window_size": (2, None), "alibi_slopes": slopes, "attn_sink": sink, **align}
    for b, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        q[b, :, length_q:], dout[b, :, length_q:], dlse[b, :, length_q:] = NAN, NAN, NAN
        k[b, :, length_k:], v[b, :, length_k:] = NAN, NAN
    *results, dbias, dslopes, dsink = all_results(
        q, k, v, dout, dlse, bias=bias, seqlens_q=np.array(lengths_q), seqlens_k=np.array(lengths_k), **options
    )
    sums = [np.zeros(x.shape) for x in (bias, slopes, sink)]
    for b, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(length_q), slice(length_k)
        expected = all_results(
            q[b, None, :, rows], k[b, None, :, keys], v[b, None, :, keys], dout[b, None, :, rows],
            dlse[b, None, :, rows], bias=bias[rows, keys], **options,
        )  # fmt: skip
        parts = [
            results[0][b, None, :, rows], *(x[b, None, :, rows] for x in results[1:4]),
            *(x[b, None, :, keys] for x in results[4:6]),
        ]  # fmt: skip
        assert_same(parts, expected[:6])
        for total, part in zip((sums[0][rows, keys], *sums[1:]), expected[6:], strict=True):
            total += part
        out, lse, row_max, dq, dk, dv = (x[b] for x in results)
        assert not out[:, length_q:].any() and not dq[:, length_q:].any()
        assert (lse[:, length_q:] == -INF).all() and (row_max[:, length_q:] == -INF).all()
        assert not dk[:, length_k:].any() and not dv[:, length_k:].any()
    for gradient, total in zip((dbias, dslopes, dsink), sums, strict=True):
        np.testing.assert_allclose(gradient, total, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("leading", [(), (3,), (2, 2), (2, 3, 2)])
def test_every_matrix_is_a_call_of_its_own(leading):
    """Lengths have the leading dimensions without heads, of which there are some from two dimensions on."""
    q, k, v, rng = drawn((*leading, 3, 4), (*leading, 5, 4))
    lengths = rng.integers(0, 6, leading[:-1] if len(leading) >= 2 else leading)
    slopes, sink, lengths = map(np.asarray, (*rng.standard_normal((2, *leading)), lengths))
    bias, mask = rng.standard_normal((*leading, 1, 5)), rng.random((*leading, 3, 1)) < 0.7
    options = {"softcap": 2.0, "window_size": (1, 2), **BOTTOM_RIGHT, **PER_QUERY}
    results = reference.attention(
        q, k, v, seqlens_k=lengths, alibi_slopes=slopes, attn_sink=sink, bias=bias, mask=mask, **options
    )
    for index in np.ndindex(*leading):
        length = np.asarray(lengths[index[: lengths.ndim]])
        own = {"alibi_slopes": slopes[index], "attn_sink": sink[index], "bias": bias[index], "mask": mask[index]}
        own = {name: np.asarray(x) for name, x in own.items()}
        expected = reference.attention(q[index], k[index], v[index], seqlens_k=length, **own, **options)
        assert_same([x[index] for x in results], expected)


def test_dropout_keeps_lse_and_scales_what_it_keeps():
    q, k, _, _ = drawn((2, 3, 4, 2), (2, 3, 6, 2))
    plain, plain_lse, plain_max = reference.attention(q, k, np.eye(6), **PER_QUERY)
    weights, lse, row_max = reference.attention(q, k, np.eye(6), dropout_p=0.3, seed=11, **PER_QUERY)
    assert_same((lse, row_max), (plain_lse, plain_max))
    keep = dropout_mask((2, 3, 4, 6), 0.3, 11)
    assert 0.5 < keep.mean() < 0.9
    np.testing.assert_allclose(weights, plain * keep / 0.7, rtol=1e-15)


def test_a_dropped_pair_is_seen():
    """0 times infinity is not a number, unless the pair is masked."""
    q, k, v = np.zeros((1, 1)), np.zeros((8, 1)), np.ones((8, 1))
    dropped = int(np.flatnonzero(~dropout_mask((1, 8), 0.5, 3)[0])[0])
    v[dropped] = INF
    options = {"dropout_p": 0.5, "seed": 3}
    assert np.isnan(reference.attention(q, k, v, **options))
    mask = np.arange(8) != dropped
    assert np.isfinite(reference.attention(q, k, v, mask=mask, **options))


MASKS = {
    "causal, more keys": ((3, 5), {"causal": True, **TOP_LEFT}),
    "causal, more queries": ((5, 3), {"causal": True, **BOTTOM_RIGHT}),
    "window": ((5, 3), {"window_size": (0, 0), **TOP_LEFT}),
    "mask": ((3, 4), {"mask": np.array([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)}),
    "bias": ((3, 4), {"bias": np.array([[0, -INF, 1, -INF], [1, -INF, -INF, -INF], [-INF] * 4])}),
    "seqlens_q": ((3, 4), {"seqlens_q": np.array(2)}),
    "seqlens_k": ((3, 4), {"seqlens_k": np.array(2)}),
    "lengths": ((4, 4), {"seqlens_q": np.array(3), "seqlens_k": np.array(1), "causal": True, **BOTTOM_RIGHT}),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", MASKS)
def test_nothing_behind_a_mask_reaches_anything(name, bad, dtype):
    (seqlen_q, seqlen_k), options = MASKS[name]
    rng = np.random.default_rng(0)
    shapes = (seqlen_q, 3), (seqlen_k, 3), (seqlen_k, 2), (seqlen_q, 2), (seqlen_q,)
    q, k, v, dout, dlse = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    bias = rng.standard_normal((seqlen_q, seqlen_k))
    if "bias" in options:
        bias = bias + options["bias"]
    options = {**options, "bias": bias, "softcap": 3.0, "dropout_p": 0.2, "seed": 1}
    weights = reference.attention(q, k, np.eye(seqlen_k, dtype=dtype), **{**options, "dropout_p": 0.0})
    seen = weights > 0
    assert seen.any() and not seen.all()
    unseen_key, unseen_query = ~seen.any(axis=0), ~seen.any(axis=1)
    assert unseen_key.any() or unseen_query.any()

    def results():
        out, lse, row_max = reference.attention(q, k, v, **PER_QUERY, **options)
        given = out.astype(dtype), lse.astype(dtype)
        gradients = reference.attention_backward(dout, q, k, v, *given, dlse=dlse, **options)
        return [out, lse, row_max, *(x for x in vars(gradients).values() if x is not None)]

    clean = results()
    assert all(np.isfinite(x).all() for x in (clean[0], *clean[3:]))
    q[unseen_query] = dout[unseen_query] = dlse[unseen_query] = bad
    k[unseen_key] = v[unseen_key] = bad
    bias[~seen & (bias != -INF)] = bad
    assert_same(results(), clean)
    assert not clean[-1][~seen].any()


@pytest.mark.parametrize("lengths", [{}, {"seqlens_q": np.array([2, 4]), "seqlens_k": np.array([5, 3])}])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_whole_number_aligns_some_queries_and_keys_as_in_all_of_them(first, lengths):
    """The key that query 0 is at: of queries from `first` on and keys from 2 on, it is first - 2."""
    q, k, v = np.random.default_rng(first).standard_normal((3, 2, 2, 9, 4))
    slopes = np.array([0.5, 0.25])
    rows, keys = slice(first, first + 4), slice(2, 7)
    seen = np.zeros((9, 9), bool)
    seen[rows, keys] = True
    options = {"window_size": (2, 1), "alibi_slopes": slopes}
    if lengths:
        beyond = {name: lengths[name][:, None] + start for name, start in (("seqlens_q", first), ("seqlens_k", 2))}
        seen = seen & (np.arange(9) < beyond["seqlens_q"])[:, None, :, None]
        seen = seen & (np.arange(9) < beyond["seqlens_k"])[:, None, None, :]
    out, lse = reference.attention(q, k, v, return_lse=True, mask=seen, **options)
    part = reference.attention(
        q[..., rows, :], k[..., keys, :], v[..., keys, :], return_lse=True, align=first - 2, **options, **lengths
    )
    np.testing.assert_allclose(part[0], out[..., rows, :], rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(part[1], lse[..., rows], rtol=1e-14)
