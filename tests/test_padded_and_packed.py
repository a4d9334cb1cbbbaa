"""Padded and packed batches through the kernels: each sequence is a call of its own, and what is beyond is nothing."""

import math

import numpy as np
import pytest

import cupyflash

LENGTHS_Q, LENGTHS_K = (5, 0, 70, 1, 20), (9, 4, 70, 0, 130)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom-right"},
    "window": {"window_size": (6, 3), "align": "top-left"},
    "everything": {"causal": True, "align": "bottom-right", "softcap": 2.0, "attn_sink": ..., "bias": ...},
}


def sequences(num_heads=4, num_kv_heads=2, head_dim=16):
    """q (num_heads, L, D), k and v of each."""
    rng = np.random.default_rng(0)
    return [
        tuple(
            rng.standard_normal((heads, length, head_dim)).astype(np.float16)
            for heads, length in ((num_heads, length_q), (num_kv_heads, length_k), (num_kv_heads, length_k))
        )
        for length_q, length_k in zip(LENGTHS_Q, LENGTHS_K, strict=True)
    ]


def options_of(name):
    """With arrays per head, and per pair as far as the longest sequences go."""
    rng = np.random.default_rng(1)
    made = {"attn_sink": rng.standard_normal(4), "bias": rng.standard_normal((4, max(LENGTHS_Q), max(LENGTHS_K)))}
    return {option: made[option] if value is ... else value for option, value in OPTIONS[name].items()}


def alone(q, k, v, options):
    """(num_heads, L, Dv) and (num_heads, L) of a sequence as a call of its own."""
    if "bias" in options:
        options = options | {"bias": options["bias"][:, : q.shape[1], : k.shape[1]]}
    out, lse = cupyflash.attention(q[None], k[None], v[None], return_lse=True, **options)
    return out[0], lse[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_padded(name):
    """Bit for bit, NaN beyond the lengths."""
    options = options_of(name)
    shapes = [(5, 4, max(LENGTHS_Q), 16), *[(5, 2, max(LENGTHS_K), 16)] * 2]
    arrays = [np.full(shape, np.nan, np.float16) for shape in shapes]
    for number, parts in enumerate(sequences()):
        for array, part in zip(arrays, parts, strict=True):
            array[number, :, : part.shape[1]] = part
    lengths = {"seqlens_q": np.array(LENGTHS_Q), "seqlens_k": np.array(LENGTHS_K)}
    out, lse = cupyflash.attention(*arrays, return_lse=True, **lengths, **options)
    for number, (q, k, v) in enumerate(sequences()):
        expected = alone(q, k, v, options)
        np.testing.assert_array_equal(out[number, :, : q.shape[1]], expected[0])
        np.testing.assert_array_equal(lse[number, :, : q.shape[1]], expected[1])
        assert (out[number, :, q.shape[1] :] == 0).all() and (lse[number, :, q.shape[1] :] == -math.inf).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_packed(name):
    """Bit for bit, NaN in rows of no sequence."""
    options = options_of(name)
    rows = [np.concatenate([np.swapaxes(x, 0, 1) for x in parts]) for parts in zip(*sequences(), strict=True)]
    q, k, v = (np.concatenate([x, np.full((3, *x.shape[1:]), np.nan, np.float16)]) for x in rows)
    offsets = [np.cumsum([0, *lengths]) for lengths in (LENGTHS_Q, LENGTHS_K)]
    out, lse = cupyflash.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
    for number, parts in enumerate(sequences()):
        begin, end = offsets[0][number : number + 2]
        expected = alone(*parts, options)
        np.testing.assert_array_equal(np.swapaxes(out[begin:end], 0, 1), expected[0])
        np.testing.assert_array_equal(lse[:, begin:end], expected[1])
    assert (out[sum(LENGTHS_Q) :] == 0).all() and (lse[:, sum(LENGTHS_Q) :] == -math.inf).all()
