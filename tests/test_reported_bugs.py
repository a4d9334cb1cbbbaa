"""Inputs behind public bug reports of other attention kernels: where it was reported, what went wrong there.

FA is Dao-AILab/flash-attention, PT pytorch/pytorch. The reference gives what each result has to be, forward and
backward; where a report states the value, that is asserted of the reference too. How arrays lie in memory is in
test_reported_layouts.py.
"""

import numpy as np
import pytest

from cupyflash import reference
from cupyflash.testing import assert_same_bits, element_type
from tests.reports import BOTTOM_RIGHT, DTYPES, HALF_TYPES, TOP_LEFT, assert_same, checked, normal, output_gradient

MASKS = pytest.mark.parametrize("options", [{}, TOP_LEFT, BOTTOM_RIGHT], ids=["full", "top-left", "bottom-right"])
all_types = pytest.mark.parametrize("dtype", DTYPES)
wide_types = pytest.mark.parametrize("dtype", DTYPES[2:])
half_types = pytest.mark.parametrize("dtype", HALF_TYPES)  # many pairs


# Masked rows and keys


@all_types
def test_rows_without_keys_are_zero(backend, dtype):
    """PT#103963, cudnn-frontend#943: NaN in rows that see no key."""
    inputs = normal(dtype, (8, 8), (4, 8), (4, 8))
    for results in checked(backend, inputs, dlse=normal("float64", 8)[0].astype(lse_type(dtype)), **BOTTOM_RIGHT):
        assert (results.out[:4] == 0).all() and (results.lse[:4] == -np.inf).all() and (results.dq[:4] == 0).all()


def lse_type(dtype):
    return np.float64 if dtype == "float64" else np.float32


@all_types
def test_keys_that_no_row_sees_have_gradient_zero(backend, dtype):
    """PT#103963: NaN in their gradients."""
    for results in checked(backend, normal(dtype, (4, 8), (8, 8), (8, 8)), **TOP_LEFT):
        assert (results.dk[4:] == 0).all() and (results.dv[4:] == 0).all()


@all_types
def test_a_sequence_without_keys(backend, dtype):
    """cudnn-frontend#943, FA#1537, #1619: NaN rows, or an error, for an empty sequence beside others."""
    for results in checked(backend, normal(dtype, (3, 16), (0, 16), (0, 8))):
        assert (results.out == 0).all() and (results.lse == -np.inf).all() and (results.dq == 0).all()
    for results in checked(backend, normal(dtype, (1, 9, 0, 16), (1, 3, 5, 16), (1, 3, 5, 8))):
        assert (results.dk == 0).all() and (results.dv == 0).all()


@all_types
def test_as_many_rows_are_zero_as_see_no_key(backend, dtype):
    """FA#2199: whether rows of zeros are right, Lq = 129 and Lk = 10."""
    inputs = normal(dtype, (1, 2, 129, 16), (1, 2, 10, 16), (1, 2, 10, 16))
    for results in checked(backend, inputs, **BOTTOM_RIGHT):
        assert (results.out[..., :119, :] == 0).all() and (results.out[..., 119:, :] != 0).any(axis=-1).all()
        # The next row sees one key, whose weight is 1 whatever it is.
        assert (results.dq[..., :119, :] == 0).all() and (results.dq[..., 120:, :] != 0).any(axis=-1).all()


@all_types
def test_a_row_without_keys_leaves_the_others_alone(backend, dtype):
    """PT#103749: an appended row that sees nothing made NaN."""
    q, k, v, dout = normal(dtype, (6, 16), (5, 16), (5, 16), (6, 16))
    results, _ = checked(backend, (q, k, v), dout=dout, **BOTTOM_RIGHT)
    alone, _ = checked(backend, (q[1:], k, v), dout=dout[1:], **BOTTOM_RIGHT)
    for name in "out", "lse", "dq":
        assert_same_bits(getattr(results, name)[1:], getattr(alone, name))


@all_types
def test_a_masked_key_holds_nan_and_infinity(backend, dtype):
    """PT#101967: a NaN in a masked key reached the output."""
    q, k, v, dout = normal(dtype, (2, 4), (2, 4), (2, 4), (2, 4))
    k[1, 0], v[1] = np.nan, np.inf
    out, lse = backend.attention(q, k, v, **TOP_LEFT)
    exact = reference.attention(q, k, v, **TOP_LEFT)
    assert (exact[0] == v[0]).all() and (out[0] == v[0]).all()
    assert not np.isfinite(out[1]).any()
    # The second query sees it, and with it the first key; the first query sees its own key, of weight 1.
    results, _ = checked(backend, (q[:1], k, v), dout=dout[:1], **TOP_LEFT)
    assert_same_bits(results.dv[0], dout[0])
    assert (results.dk[1] == 0).all() and (results.dv[1] == 0).all()
    both = backend.attention_backward(dout, q, k, v, out, lse, **TOP_LEFT)
    assert_same_bits(both.dq[0], results.dq[0])
    assert not np.isfinite(both.dq[1].astype(np.float64)).any()


@all_types
def test_very_negative_scores_are_data(backend, dtype):
    """flashinfer#4267: all scores below -5e4 gave zeros."""
    q, k = (np.zeros((n, 4), element_type(dtype)) for n in (1, 20))
    q[:, 0], k[:, 0] = -500, 500
    results, exact = checked(backend, (q, k, *normal(dtype, (20, 64))), softmax_scale=1.0)
    np.testing.assert_allclose(exact.lse, -250000 + np.log(20))
    np.testing.assert_allclose(results.lse, exact.lse, rtol=1e-6)
    dout = output_gradient(results.out).astype(np.float64)
    np.testing.assert_allclose(exact.dv, np.broadcast_to(dout / 20, exact.dv.shape), rtol=1e-9)


@all_types
@MASKS
def test_scores_below_the_smallest_exponent(backend, dtype, options):
    """PT#196678: NaN in dq for 64 more queries than a multiple of 128, all scores -100."""
    for length in (64, 704) if dtype in HALF_TYPES else (64,):
        q, k, v = normal(dtype, (length, 16), (length, 16), (length, 16))
        q[...], k[...] = -2.5, 2.5
        _, exact = checked(backend, (q, k, v), softmax_scale=1.0, **options)
        np.testing.assert_allclose(exact.dq, 0, atol=1e-12)


@all_types
@pytest.mark.parametrize("seqlen_q", [1, 17])
def test_one_key(backend, dtype, seqlen_q):
    """flashinfer#4451: NaN for rows with one key."""
    inputs = normal(dtype, (2, seqlen_q, 16), (2, 1, 16), (2, 1, 16))
    results, exact = checked(backend, inputs)
    assert (results.out == inputs[2]).all() and (exact.out == inputs[2]).all()
    dout = output_gradient(results.out).astype(np.float64)
    np.testing.assert_allclose(exact.dv, dout.sum(axis=1, keepdims=True), rtol=1e-12, atol=1e-12)


@all_types
def test_keys_that_are_all_equal(backend, dtype):
    """PT#127055: NaN where the first key tiles of a row are masked, q = k = v = 1, L = 600."""
    ones = np.ones((600 if dtype in HALF_TYPES else 70, 16), element_type(dtype))
    for options in TOP_LEFT, {}:
        results, exact = checked(backend, (ones, ones, ones), **options)
        np.testing.assert_allclose(exact.out, 1)
        np.testing.assert_allclose(exact.dq, 0, atol=1e-12)
        np.testing.assert_allclose(results.out.astype(np.float64), 1, atol=2.0**-7)


@all_types
@MASKS
def test_awkward_lengths(backend, dtype, options):
    """cudnn-frontend#160: NaN in the backward at some lengths."""
    for length in (1, 7, 63, 64, 65, 127, 129, 191) if dtype in HALF_TYPES else (7, 65):
        checked(backend, normal(dtype, (length, 16), (length, 16), (length, 16)), **options)


# Causal alignment


@all_types
def test_decoding_one_query(backend, dtype):
    """PT#144858, onnx#8054: a single query saw the first key only."""
    inputs = normal(dtype, (1, 2, 1, 16), (1, 2, 16, 16), (1, 2, 16, 16))
    results, exact = checked(backend, inputs, **BOTTOM_RIGHT)
    full, full_exact = checked(backend, inputs)
    np.testing.assert_array_equal(exact.out, full_exact.out)
    assert_same(results, full)
    results, _ = checked(backend, inputs, **TOP_LEFT)
    assert (results.out == inputs[2][..., :1, :]).all()
    assert_same_bits(results.dv[..., :1, :], output_gradient(results.out))
    assert (results.dk[..., 1:, :] == 0).all() and (results.dv[..., 1:, :] == 0).all()


@all_types
@pytest.mark.parametrize("seqlen_k", [4, 16])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_alignments_differ_unless_lengths_are_equal(backend, dtype, seqlen_q, seqlen_k):
    """executorch#22426, mlx#2835: two libraries align differently, without a word."""
    inputs = normal(dtype, (seqlen_q, 32), (seqlen_k, 32), (seqlen_k, 32))
    top, _ = checked(backend, inputs, **TOP_LEFT)
    bottom, _ = checked(backend, inputs, **BOTTOM_RIGHT)
    for name in "out", "lse", "dk", "dv":
        assert (getattr(top, name) == getattr(bottom, name)).all() == (seqlen_q == seqlen_k)


# Heads


@all_types
def test_key_heads_are_repeated_not_tiled(backend, dtype):
    """onnx PR 7274: query heads 0, 1, 2, 3 used key heads 0, 1, 0, 1."""
    q, k = normal(dtype, (1, 4, 3, 16), (1, 2, 5, 16))
    heads = np.array([1, 2, 4, 8], element_type(dtype)).reshape(1, 4, 1, 1)
    v = np.broadcast_to(heads[:, :2], (1, 2, 5, 16))
    for results in checked(backend, (q, k, v), dout=np.broadcast_to(heads, q.shape)):
        out, dv = (x.astype(np.float64) for x in (results.out, results.dv))
        np.testing.assert_allclose(out.mean(axis=(0, 2, 3)), [1, 1, 2, 2], rtol=2.0**-7)
        # Every query hands its dout to the keys of its head: 3 queries of 1 + 2, and of 4 + 8.
        np.testing.assert_allclose(dv.sum(axis=2).mean(axis=(0, 2)), [9, 36], rtol=2.0**-6)


@all_types
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_six_query_heads(backend, dtype, num_kv_heads):
    """XunhaoLai/native-sparse-attention-triton#27: the head index was divided by the wrong count."""
    q, k, v = normal(dtype, (2, 6, 20, 16), (2, num_kv_heads, 30, 16), (2, num_kv_heads, 30, 16))
    results, _ = checked(backend, (q, k, v))
    dout = output_gradient(results.out)
    for head in range(6) if dtype in HALF_TYPES else (1, 5):
        kv_head = head // (6 // num_kv_heads)
        alone, _ = checked(backend, (q[:, head], k[:, kv_head], v[:, kv_head]), dout=dout[:, head])
        for name in ("out", "lse", "dq") if num_kv_heads < 6 else alone._fields:
            assert_same_bits(getattr(results, name)[:, head], getattr(alone, name))


@all_types
def test_single_queries_of_grouped_heads(backend, dtype):
    """FA#1537, #1619: an error for one query, nine heads over three and sequences of different lengths."""
    for seqlen_k in 3, 5:
        inputs = normal(dtype, (1, 9, 1, 16), (1, 3, seqlen_k, 16), (1, 3, seqlen_k, 16))
        checked(backend, inputs, **BOTTOM_RIGHT)


@all_types
def test_a_few_channels_are_large(backend, dtype):
    """TransformerEngine#3216: wrong for head_dim 256, batch 2 and grouped heads, which Gaussian inputs did not show."""
    seqlen_q, seqlen_k = (40, 70) if dtype in HALF_TYPES else (5, 20)
    inputs = normal(dtype, (2, 16, seqlen_q, 256), (2, 2, seqlen_k, 256), (2, 2, seqlen_k, 256))
    for x in inputs[:2]:
        x[..., [3, 100, 255]] *= 30
    checked(backend, inputs)


# Head dimensions and lengths


@all_types
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 32), (128, 64), *(pytest.param(*dims, marks=pytest.mark.deep) for dims in ((32, 16), (64, 128)))],
)
def test_values_are_wider_or_narrower_than_keys(backend, dtype, head_dim, head_dim_v):
    """native-sparse-attention-triton#27: v was loaded under the mask of k, or dv under that of dk."""
    checked(backend, normal(dtype, (1, 2, 20, head_dim), (1, 2, 30, head_dim), (1, 2, 30, head_dim_v)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@MASKS
@pytest.mark.parametrize(
    "head_dim", [16, 64, 256, *(pytest.param(head_dim, marks=pytest.mark.deep) for head_dim in (32, 128))]
)
def test_head_dims_and_short_lengths(backend, dtype, head_dim, options):
    """triton#621, #4541, #2059, #1975: a part of D = 128, an ignored mask, wrong for short lengths."""
    if dtype not in HALF_TYPES:
        lengths, seqlen_k = (17,), 20
    else:
        lengths, seqlen_k = ((1, 2, 15, 16, 17, 63, 64, 65, 130), 130) if head_dim <= 64 else ((1, 17, 65), 70)
    for length in lengths:
        checked(backend, normal(dtype, (length, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim)), **options)


@all_types
@pytest.mark.parametrize("seqlen_k", [10, 43, 77])
def test_lengths_need_no_alignment(backend, dtype, seqlen_k):
    """xformers#813, #808, #683: key lengths that are not a multiple of 8 were refused."""
    checked(backend, normal(dtype, (1, 2, 20, 16), (1, 2, seqlen_k, 16), (1, 2, seqlen_k, 16)))


@all_types
def test_every_length_of_a_cache(backend, dtype):
    """torchtitan#3235: NaN at some lengths of the cache."""
    q, k, v = normal(dtype, (1, 16), (600, 16), (600, 16))
    around_tiles = [n + d for n in (64, 128, 512) for d in (-1, 0, 1)]
    for seqlen_k in [*range(1, 600, 53), *around_tiles] if dtype in HALF_TYPES else (1, 17, 64, 65):
        checked(backend, (q, k[:seqlen_k], v[:seqlen_k]))


@half_types
def test_one_more_key_than_a_power_of_two(backend, dtype):
    """PT#153799: NaN in the backward for L = 1025 under a causal mask."""
    checked(backend, normal(dtype, (1025, 16), (1025, 16), (1025, 16)), **TOP_LEFT)


# The gradient through lse


@all_types
@MASKS
def test_the_sum_of_lse_has_a_gradient(backend, dtype, options):
    """FA#1817, #1137, #889, #141, #404: it was zero without a word. dq = scale P K, dk = scale P^T Q and dv = 0."""
    q, k, v = normal(dtype, (2, 40, 16), (2, 40, 16), (2, 40, 24))
    dout, dlse = np.zeros((2, 40, 24), q.dtype), np.ones((2, 40), lse_type(dtype))
    results, exact = checked(backend, (q, k, v), dout=dout, dlse=dlse, **options)
    np.testing.assert_allclose(exact.dq, 0.25 * reference.attention(q, k, k, **options), rtol=1e-12, atol=1e-14)
    assert (results.dv == 0).all() and (exact.dv == 0).all()
    assert (results.dk != 0).all()


@half_types
def test_a_loss_of_lse_at_a_length_of_no_tile(backend, dtype):
    """PT#136232: NaN gradients for a loss with lse, L = 1000."""
    inputs = normal(dtype, (1000, 16), (1000, 16), (1000, 16))
    checked(backend, inputs, dlse=normal("float32", (1000,))[0], **TOP_LEFT)


# Precision


@wide_types
def test_wide_types_stay_wide(backend, dtype):
    """FA#13, #109: float32 wanted; jax PR 34114: a mask's constant overflowed when float64 was cast to float32."""
    q, k, v, dout = normal(dtype, (20, 16), (20, 16), (20, 16), (20, 16))
    large = v.dtype.type(1e30 if dtype == "float32" else 1e200)
    q, k, v, dout = q / large, k * large, v * large, dout / large
    for options in TOP_LEFT, BOTTOM_RIGHT:
        checked(backend, (q, k, v), dout=dout, **options)
