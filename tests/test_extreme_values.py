"""Numbers at the ends of a type and NaN where options meet them, and what lies behind lengths."""

import numpy as np
import pytest

from cupyflash import bounds, dropout_mask, reference
from cupyflash.merge import merge
from cupyflash.testing import assert_same_bits
from tests.reports import normal, output_gradient

both = pytest.mark.parametrize("dtype", ["float16", "float32"])
LOWEST = float(np.finfo(np.float32).min)
# All scores of a row as low: in base 2 kept from overflow, rounded differently from their lse, and less far out.
HUGE = np.array([LOWEST, -3e38, -2.1e38, -1.7e38, -1e38, -3e37, -7e36, -1e31])


def finite(*arrays):
    return all(np.isfinite(np.asarray(x, float)).all() for x in arrays)


# NaN in parts of the keys


@both
@pytest.mark.parametrize("sink", [None, 1.0])
def test_a_nan_query_is_nan_in_parts_too(backend, dtype, sink):
    q, k, v = normal(dtype, (5, 16), (200, 16), (200, 16))
    options = {"split_size": 128, "return_max": True} | ({} if sink is None else {"attn_sink": np.float32(sink)[...]})
    clean = backend.attention(q, k, v, **options)
    q[1, 3] = np.nan
    for result, before in zip(backend.attention(q, k, v, **options), clean, strict=True):
        assert np.isnan(result[1]).all()
        assert_same_bits(np.delete(result, 1, axis=0), np.delete(before, 1, axis=0))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_merge_of_nan(dtype):
    outs = normal(dtype, (4, 3), (4, 3))
    lses = np.zeros((2, 4), np.float64 if dtype == "float64" else np.float32)
    lses[:, 0], lses[0, 1], lses[1, 2] = np.nan, np.nan, np.nan
    lses[1, 1] = -np.inf
    out, lse = merge(outs, lses)
    np.testing.assert_array_equal(np.isnan(lse), [True, True, True, False])
    np.testing.assert_array_equal(np.isnan(out), np.isnan(lse)[:, None] & np.ones((4, 3), bool))


# Doubles that are no floats, and what is so large that its logarithm in base 2 is none


@both
@pytest.mark.parametrize("lowest", [-1e39, float(np.finfo(np.float64).min)])
def test_a_double_as_a_mask_is_a_number(backend, dtype, lowest):
    inputs = q, k, v = normal(dtype, (4, 16), (6, 16), (6, 16))
    bias = np.zeros((4, 6))
    bias[1], bias[2, 2:] = lowest, lowest
    for options in {}, {"split_size": 128}:
        out, lse = backend.attention(*inputs, bias=bias, **options)
        np.testing.assert_allclose(out[1].astype(float), v.astype(float).mean(axis=0), atol=1e-3)
        np.testing.assert_allclose(out[2].astype(float), reference.attention(q[2:3], k[:2], v[:2])[0], atol=1e-3)
        assert finite(lse) and lse[1] < -2e38
    gradients = backend.attention_backward(output_gradient(out), *inputs, out, lse, bias=bias)
    assert finite(*gradients) and finite(gradients.dbias)


@both
def test_the_largest_double_is_a_number(backend, dtype):
    q, k, v = normal(dtype, (4, 16), (6, 16), (6, 16))
    bias = np.where(np.arange(6) == np.arange(4)[:, None], 1e39, 0.0)
    out, lse = backend.attention(q, k, v, bias=bias)
    assert_same_bits(out, v[:4])
    assert finite(lse) and (lse > 2e38).all()
    out, _ = backend.attention(q, k[:4], v[:4], alibi_slopes=np.array(1e39))
    assert_same_bits(out, v[:4])


@both
@pytest.mark.parametrize("sink", [3e38, -3e38, 1e39, -1e39])
@pytest.mark.parametrize("options", [{}, {"split_size": 128}], ids=["whole", "parts"])
def test_a_sink_of_any_size(backend, dtype, sink, options):
    """Above all scores it takes all weight, below them none; without keys it is all that there is."""
    inputs = q, k, v = normal(dtype, (4, 16), (6, 16), (6, 16))
    options = {"mask": np.arange(4)[:, None] != 1, "attn_sink": np.array(sink)} | options
    out, lse = backend.attention(*inputs, **options)
    assert finite(out, lse) and (out[1] == 0).all() and np.sign(lse[1]) == np.sign(sink) and abs(lse[1]) > 9e30
    if sink > 0:
        assert (out == 0).all()
    else:
        rows = [0, 2, 3]
        np.testing.assert_allclose(out[rows].astype(float), reference.attention(q[rows], k, v), atol=1e-3)
    gradients = backend.attention_backward(output_gradient(out), *inputs, out, lse, **options)
    assert finite(*gradients) and gradients.dattn_sink == 0
    if sink > 0:
        assert all((x == 0).all() for x in gradients)


@both
@pytest.mark.parametrize("options", [{}, {"split_size": 128}], ids=["whole", "parts"])
def test_a_sink_of_nan(backend, dtype, options):
    """NaN in every row, but for the values of one without keys, of which there are none."""
    q, k, v = normal(dtype, (4, 16), (6, 16), (6, 16))
    sink = np.array(np.nan, np.float32)
    out, lse = backend.attention(q, k, v, mask=np.arange(4)[:, None] != 1, attn_sink=sink, **options)
    assert np.isnan(lse).all() and np.isnan(out[[0, 2, 3]]).all() and (out[1] == 0).all()


@both
def test_rows_of_huge_scores(backend, dtype):
    """No weight is infinite where a row's scores are as low as floats are; without dout nothing comes of the row."""
    inputs = *_, v = normal(dtype, (9, 16), (10, 16), (10, 16))
    bias = np.append(HUGE, 0)[:, None].astype(np.float32) + np.zeros((9, 10), np.float32)
    out, lse = backend.attention(*inputs, bias=bias)
    assert finite(out, lse)
    mean = np.broadcast_to(v.astype(float).mean(axis=0), (8, 16))
    np.testing.assert_allclose(out[:8].astype(float), mean, atol=1e-3)
    dout = output_gradient(out)
    gradients = backend.attention_backward(dout, *inputs, out, lse, bias=bias)
    assert finite(*gradients) and finite(gradients.dbias)
    assert all(np.abs(x.astype(float)).max() < 20 * np.abs(dout.astype(float)).sum() for x in gradients)

    dout[:8] = 0
    padded = backend.attention_backward(dout, *inputs, out, lse, bias=bias)
    assert (padded.dq[:8] == 0).all() and (padded.dbias[:8] == 0).all()
    masked = {"bias": bias, "mask": np.arange(9)[:, None] == 8}
    alone = backend.attention_backward(dout, *inputs, *backend.attention(*inputs, **masked), **masked)
    for name in "dq", "dk", "dv", "dbias":
        np.testing.assert_array_equal(getattr(padded, name), getattr(alone, name))


# What lies behind lengths


@both
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_behind_lengths(backend, dtype, causal):
    """0 there, and each batch what it is alone, at lengths that end within tiles and between them."""
    lengths = [(150, 70), (128, 130), (1, 128), (0, 5), (3, 0)]
    inputs = q, k, v = normal(dtype, (5, 1, 150, 16), (5, 1, 130, 16), (5, 1, 130, 16))
    options = {"causal": True, "align": "bottom-right"} if causal else {}
    lens = {name: np.array(x) for name, x in zip(("seqlens_q", "seqlens_k"), zip(*lengths, strict=True), strict=True)}
    out, lse = backend.attention(*inputs, **lens, **options)
    dout = output_gradient(out)
    gradients = backend.attention_backward(dout, *inputs, out, lse, **lens, **options)
    for b, (m, n) in enumerate(lengths):
        dq, dk, dv = (x[b, 0] for x in gradients)
        assert (dq[m:] == 0).all() and (dk[n:] == 0).all() and (dv[n:] == 0).all()
        one = q[b, 0, :m], k[b, 0, :n], v[b, 0, :n]
        alone = backend.attention_backward(dout[b, 0, :m], *one, out[b, 0, :m], lse[b, 0, :m], **options)
        for x, expected in zip((dq[:m], dk[:n], dv[:n]), alone, strict=True):
            assert_same_bits(x, expected)


@both
def test_the_gradient_of_a_sink_takes_the_queries_that_count(backend, dtype):
    inputs = normal(dtype, (2, 3, 40, 16), (2, 3, 20, 16), (2, 3, 20, 16))
    sink, lengths = np.array([0.5, -1.0, 2.0], np.float32), np.array([33, 7])
    options = {"attn_sink": sink, "seqlens_q": lengths}
    out, lse = backend.attention(*inputs, **options)
    arguments = [output_gradient(out), *inputs, out, lse]
    exact, allowed = (
        f(*arguments, **options).dattn_sink for f in (reference.attention_backward, bounds.attention_backward)
    )
    for b, length in enumerate(lengths):
        for x in (arguments[i] for i in (0, 1, 4, 5)):
            x[b, :, length:] = np.nan
    dsink = backend.attention_backward(*arguments, **options).dattn_sink
    assert (abs(dsink - exact) <= allowed).all() and (allowed < 0.02 * abs(exact)).all()


# Dropout


@both
def test_each_weight_is_kept_where_the_mask_says(backend, dtype):
    """Values that are one-hot show every weight of 12 matrices."""
    q, k = normal(dtype, (3, 4, 40, 16), (3, 4, 64, 16))
    v = np.broadcast_to(np.eye(64, dtype=q.dtype), (3, 4, 64, 64))
    out, _ = backend.attention(q, k, v, dropout_p=0.4, seed=11)
    np.testing.assert_array_equal(out > 0, dropout_mask((3, 4, 40, 64), 0.4, 11))
