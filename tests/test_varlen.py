"""Packed sequences: gradients of each are its own, and those of what they share are sums."""

import numpy as np
import pytest

from cupyflash import (
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
    bounds,
    reference,
    testing,
)

DTYPES = [np.float16, np.float32, np.float64]
SINK = np.array([1, 2, -3, -np.inf], np.float32)
BOTTOM_RIGHT = {"causal": True, "align": "bottom-right"}
NAMES = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dattn_sink")


def packed(dtype, lengths_q, lengths_k, slack=2, head_dim=20):
    """Arrays with NaN behind the last sequence, and their offsets."""
    rng = np.random.default_rng(sum(lengths_q))
    offsets = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in (lengths_q, lengths_k)]
    sizes = (4, head_dim), (2, head_dim), (2, 11)
    arrays = [
        rng.standard_normal((n[-1] + slack, *size)).astype(dtype)
        for n, size in zip((offsets[0], offsets[1], offsets[1]), sizes, strict=True)
    ]
    for array, ends in zip(arrays, (offsets[0], offsets[1], offsets[1]), strict=True):
        array[ends[-1] :] = np.nan
    return arrays, offsets


def gradients(dtype, lengths_q, lengths_k, **options):
    """Arguments of the backward call, its options, and its results."""
    (q, k, v), offsets = packed(dtype, lengths_q, lengths_k)
    out, lse = attention_varlen(q, k, v, *offsets, return_lse=True, **options)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(dtype)
    dout[offsets[0][-1] :] = np.nan
    arguments = dout, q, k, v, out, lse, *offsets
    return arguments, attention_varlen_backward(*arguments, **options)


OPTIONS = {
    "plain": {},
    "causal": {**BOTTOM_RIGHT, "attn_sink": SINK},
    "window and dropout": {"window_size": (20, 9), "align": "top-left", "dropout_p": 0.3, "seed": 77},
    "bias of each sequence": {
        "bias": np.random.default_rng(2).standard_normal((3, 4, 1, 70)).astype(np.float32),
        "alibi_slopes": np.full((3, 4), 0.1, np.float32),
        "align": "bottom-right",
    },
    "shared bias": {
        "bias": np.random.default_rng(3).standard_normal((4, 40, 1)).astype(np.float32),
        "softcap": 3.0,
        "score_mod": "score * 0.5 + 0.1 * h - 0.2 * b",
        "mask_mod": "(i + j + b) % 4 != 0",
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(dtype, options):
    arguments, found = gradients(dtype, (40, 0, 33), (7, 5, 70), **options)
    exact = reference.attention_varlen_backward(*arguments, **options)
    allowed = bounds.attention_varlen_backward(*arguments, **options)
    for name in NAMES:
        results = [getattr(gradients, name) for gradients in (found, exact, allowed)]
        if results[1] is None:
            assert results[0] is None
        else:
            testing.assert_within_bound(*results, name=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_sequence_has_the_bits_of_a_call_of_its_own(dtype):
    (dout, q, k, v, out, lse, *offsets), found = gradients(dtype, (40, 0, 33), (70, 5, 9), **BOTTOM_RIGHT)
    for begin, end, first, last in zip(offsets[0], offsets[0][1:], offsets[1], offsets[1][1:], strict=False):
        queries, keys = slice(begin, end), slice(first, last)
        rows = [x[s].swapaxes(0, 1) for x, s in ((dout, queries), (q, queries), (k, keys), (v, keys), (out, queries))]
        alone = attention_backward(
            *(x[None] for x in rows), np.ascontiguousarray(lse[None, :, queries]), **BOTTOM_RIGHT
        )
        for packed_gradient, gradient, s in zip(found, alone, (queries, keys, keys), strict=True):
            np.testing.assert_array_equal(packed_gradient[s], gradient[0].swapaxes(0, 1))
    assert all((gradient[-2:] == 0).all() for gradient in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_a_nan_has_no_maximum(dtype):
    (q, k, v), offsets = packed(dtype, (6, 3), (6, 3), slack=0)
    k[2, 0, 0] = np.nan
    _, row_max = attention_varlen(q, k, v, *offsets, return_max=True)
    np.testing.assert_array_equal(np.isnan(row_max), np.broadcast_to(np.arange(9) < 6, (4, 9)) & [[1], [1], [0], [0]])


def test_the_pullback_is_the_backward_of_the_call():
    options = {**OPTIONS["bias of each sequence"], "attn_sink": SINK}
    (dout, q, k, v, out, lse, *offsets), expected = gradients(np.float32, (6, 0, 3), (5, 2, 70), **options)
    found_out, pullback = attention_varlen_vjp(q, k, v, *offsets, **options)
    np.testing.assert_array_equal(found_out, out)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(pullback(dout), name), getattr(expected, name))
    (_, found_lse, row_max), pullback = attention_varlen_vjp(
        q, k, v, *offsets, return_lse=True, return_max=True, **options
    )
    np.testing.assert_array_equal(found_lse, lse)
    assert row_max.shape == lse.shape
    dlse = np.random.default_rng(4).standard_normal(lse.shape).astype(np.float32)
    with_dlse = attention_varlen_backward(dout, q, k, v, out, lse, *offsets, dlse=dlse, **options)
    np.testing.assert_array_equal(pullback(dout, dlse).dq, with_dlse.dq)
    assert (with_dlse.dq != expected.dq).any()
    with pytest.raises(TypeError, match="out: attention_varlen_vjp makes the array"):
        attention_varlen_vjp(q, k, v, *offsets, out=out, **options)
