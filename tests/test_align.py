"""A whole number as ``align``: what kernels make of it."""

import numpy as np

import cupyflash
from cupyflash import testing

FURTHEST = 2**31 - 1


def arrays(seed, dtype, seqlen_q=9, seqlen_k=70):
    rng = np.random.default_rng(seed)
    shapes = (2, 2, seqlen_q, 8), (2, 2, seqlen_k, 8), (2, 2, seqlen_k, 8)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_with_a_window_alibi_and_lengths():
    q, k, v = arrays(0, np.float16, seqlen_q=70)
    options = {
        "window_size": (70, 3),
        "alibi_slopes": np.array([0.5, 0.125], np.float32),
        "seqlens_q": np.array([70, 66]),
        "seqlens_k": np.array([68, 70]),
        "align": 130,
    }
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    testing.assert_attention_within_bound(out, lse, q, k, v, **options)


def test_as_far_as_it_goes():
    q, k, v = arrays(1, np.float16)
    everything, nothing = (
        cupyflash.attention(q, k, v, causal=True, align=align, return_lse=True) for align in (FURTHEST, -FURTHEST)
    )
    for result, expected in zip(everything, cupyflash.attention(q, k, v, return_lse=True), strict=True):
        testing.assert_same_bits(result, expected)
    assert not nothing[0].any() and (nothing[1] == -np.inf).all()
    for align, (out, lse) in (FURTHEST, everything), (-FURTHEST, nothing):
        gradients = cupyflash.attention_backward(q, q, k, v, out, lse, causal=True, align=align)
        testing.assert_gradients_within_bound(gradients, q, q, k, v, out, lse, causal=True, align=align)
