"""Inputs behind public bug reports of other attention kernels: where it was reported, what went wrong there.

FA is Dao-AILab/flash-attention, PT pytorch/pytorch. The reference gives what each result has to be; where a report
states the value, that is asserted of the reference too.
"""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import reference, testing
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned

BOTTOM_RIGHT = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}


def normal(*shapes, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def checked(backend, inputs, **options):
    """out and lse, within bounds of the reference, and the reference's."""
    out, lse = backend.attention(*inputs, **options)
    testing.assert_attention_within_bound(out, lse, *inputs, **options)
    return out, lse, *reference.attention(*inputs, return_lse=True, **options)


# Masked rows and keys


def test_rows_without_keys_are_zero(backend):
    """PT#103963, cudnn-frontend#943: NaN in rows that see no key."""
    out, lse, exact, exact_lse = checked(backend, normal((8, 8), (4, 8), (4, 8)), **BOTTOM_RIGHT)
    assert (exact[:4] == 0).all() and (exact_lse[:4] == -np.inf).all()
    assert (out[:4] == 0).all() and (lse[:4] == -np.inf).all()


def test_as_many_rows_are_zero_as_see_no_key(backend):
    """FA#2199: whether rows of zeros are right, Lq = 129 and Lk = 10."""
    out, _, exact, _ = checked(backend, normal((1, 2, 129, 64), (1, 2, 10, 64), (1, 2, 10, 64)), **BOTTOM_RIGHT)
    for result in out, exact:
        assert (result[..., :119, :] == 0).all() and (result[..., 119:, :] != 0).any(axis=-1).all()


def test_a_row_without_keys_leaves_the_others_alone(backend):
    """PT#103749: an appended row that sees nothing made NaN."""
    q, k, v = normal((6, 16), (5, 16), (5, 16))
    out, lse, *_ = checked(backend, (q, k, v), **BOTTOM_RIGHT)
    alone, alone_lse, *_ = checked(backend, (q[1:], k, v), **BOTTOM_RIGHT)
    testing.assert_same_bits(out[1:], alone)
    testing.assert_same_bits(lse[1:], alone_lse)


def test_a_masked_key_holds_nan_and_infinity(backend):
    """PT#101967: a NaN in a masked key reached the output."""
    q, k, v = normal((2, 4), (2, 4), (2, 4))
    k[1, 0], v[1] = np.nan, np.inf
    out, _ = backend.attention(q, k, v, **TOP_LEFT)
    exact = reference.attention(q, k, v, **TOP_LEFT)
    assert (exact[0] == v[0]).all() and (out[0] == v[0]).all()
    assert not np.isfinite(out[1]).any()


def test_padding_of_a_cache_holds_nan(backend):
    """FA#1745: NaN in the padding of a key-value cache reached the output, lengths 1 and 3 of 3."""
    q, k, v = normal((2, 1, 1, 64), (2, 1, 3, 64), (2, 1, 3, 64))
    k[0, :, 1:], v[0, :, 1:] = np.nan, np.nan
    for batch, length in enumerate((1, 3)):
        out, *_ = checked(backend, (q[batch], k[batch, :, :length], v[batch, :, :length]))
        assert batch == 1 or (out == v[0, :, :1]).all()


def test_very_negative_scores_are_data(backend):
    """flashinfer#4267: all scores below -5e4 gave zeros."""
    q, k, v = np.zeros((1, 64), np.float16), np.zeros((20, 64), np.float16), normal((20, 64))[0]
    q[:, 0], k[:, 0] = -500, 500
    _, lse, exact, exact_lse = checked(backend, (q, k, v), softmax_scale=1.0)
    np.testing.assert_allclose(exact[0], v.astype(np.float64).mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(exact_lse, -250000 + np.log(20))
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("seqlen_q", [1, 17])
def test_one_key(backend, seqlen_q):
    """flashinfer#4451: NaN for rows with one key."""
    q, k, v = normal((2, seqlen_q, 64), (2, 1, 64), (2, 1, 64))
    out, *_ = checked(backend, (q, k, v))
    assert (out == v).all()


def test_keys_that_are_all_equal(backend):
    """PT#127055: NaN where the first key tiles of a row are masked, q = k = v = 1, L = 600."""
    ones = np.ones((600, 16), np.float16)
    for options in TOP_LEFT, {}:
        out, _, exact, _ = checked(backend, (ones, ones, ones), **options)
        np.testing.assert_allclose(exact, 1)
        np.testing.assert_allclose(out.astype(np.float64), 1, atol=2.0**-10)


# Causal alignment


def test_decoding_one_query(backend):
    """PT#144858: a single query saw the first key only."""
    inputs = normal((1, 2, 1, 64), (1, 2, 16, 64), (1, 2, 16, 64))
    out, _, exact, _ = checked(backend, inputs, **BOTTOM_RIGHT)
    np.testing.assert_array_equal(exact, reference.attention(*inputs))
    testing.assert_same_bits(out, checked(backend, inputs)[0])
    out, *_ = checked(backend, inputs, **TOP_LEFT)
    assert (out == inputs[2][..., :1, :]).all()


@pytest.mark.parametrize("seqlen_k", [4, 16])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
def test_alignments_differ_unless_lengths_are_equal(backend, seqlen_q, seqlen_k):
    """executorch#22426, mlx#2835: two libraries align differently, without a word."""
    inputs = normal((seqlen_q, 32), (seqlen_k, 32), (seqlen_k, 32))
    top, *_ = checked(backend, inputs, **TOP_LEFT)
    bottom, *_ = checked(backend, inputs, **BOTTOM_RIGHT)
    assert (top == bottom).all() == (seqlen_q == seqlen_k)


# Heads


def test_key_heads_are_repeated_not_tiled(backend):
    """onnx PR 7274: query heads 0, 1, 2, 3 used key heads 0, 1, 0, 1."""
    q, k, _ = normal((1, 4, 3, 16), (1, 2, 5, 16), (1,))
    v = np.broadcast_to(np.array([1, 2], np.float16).reshape(1, 2, 1, 1), (1, 2, 5, 16))
    out, _, exact, _ = checked(backend, (q, k, v))
    for result in out.astype(np.float64), exact:
        np.testing.assert_allclose(result.mean(axis=(0, 2, 3)), [1, 1, 2, 2], rtol=1e-3)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_six_query_heads(backend, num_kv_heads):
    """XunhaoLai/native-sparse-attention-triton#27: the head index was divided by the wrong count."""
    q, k, v = normal((2, 6, 20, 16), (2, num_kv_heads, 30, 16), (2, num_kv_heads, 30, 16))
    out, *_ = checked(backend, (q, k, v))
    for head in range(6):
        kv_head = head // (6 // num_kv_heads)
        testing.assert_same_bits(out[:, head], backend.attention(q[:, head], k[:, kv_head], v[:, kv_head])[0])


def test_a_few_channels_are_large(backend):
    """TransformerEngine#3216: wrong for head_dim 256, batch 2 and grouped heads, which Gaussian inputs did not show."""
    q, k, v = normal((2, 16, 40, 256), (2, 2, 70, 256), (2, 2, 70, 256), dtype=ml_dtypes.bfloat16)
    for x in q, k:
        x[..., [3, 100, 255]] *= 30
    checked(backend, (q, k, v))


# Head dimensions and lengths


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 32), (32, 16), (64, 128), (128, 64)])
def test_values_are_wider_or_narrower_than_keys(backend, head_dim, head_dim_v):
    """native-sparse-attention-triton#27: v was loaded under the mask of k."""
    checked(backend, normal((1, 2, 30, head_dim), (1, 2, 50, head_dim), (1, 2, 50, head_dim_v)))


@pytest.mark.parametrize("options", [{}, TOP_LEFT, BOTTOM_RIGHT], ids=["full", "top-left", "bottom-right"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_head_dims_and_short_lengths(backend, head_dim, options):
    """triton#621, #4541, #2059, #1975: a part of D = 128, an ignored mask, wrong for short lengths."""
    for length in 1, 2, 15, 16, 17, 63, 64, 65, 130:
        checked(backend, normal((length, head_dim), (130, head_dim), (130, head_dim)), **options)


@pytest.mark.parametrize("seqlen_k", [10, 43, 77])
def test_lengths_need_no_alignment(backend, seqlen_k):
    """xformers#813, #808, #683: key lengths that are not a multiple of 8 were refused."""
    checked(backend, normal((1, 2, 20, 32), (1, 2, seqlen_k, 32), (1, 2, seqlen_k, 32)))


def test_every_length_of_a_cache(backend):
    """torchtitan#3235: NaN at some lengths of the cache."""
    q, k, v = normal((1, 16), (600, 16), (600, 16))
    for seqlen_k in [*range(1, 600, 23), *(n + d for n in (64, 128, 256, 512) for d in (-1, 0, 1))]:
        checked(backend, (q, k[:seqlen_k], v[:seqlen_k]))


# Strides


def test_an_operand_with_stride_zero_in_every_dimension(backend):
    """FA#325: an error for an array broadcast from one number."""
    q, k, _ = normal((2, 9, 32), (2, 20, 32), (1,))
    v = np.broadcast_to(np.float16(1), (2, 20, 32))
    testing.assert_same_bits(checked(backend, (q, k, v))[0], checked(backend, (q, k, v.copy()))[0])


def test_views_whose_last_dimension_is_not_contiguous(backend):
    """FA PR 2777: accepted by one pass, refused by the other."""
    q, k, v = normal((2, 32, 20), (2, 32, 30), (2, 32, 30))
    views = [x.swapaxes(-1, -2) for x in (q, k, v)]
    testing.assert_same_bits(checked(backend, views)[0], checked(backend, [x.copy() for x in views])[0])


def test_keys_shared_by_broadcasting(backend):
    """PT#191937: wrong by 19.5 for k of stride 0, Lk % 32 == 1, bfloat16, the largest head_dim."""
    q, k, v = normal((1, 4, 8, 256), (1, 1, 33, 256), (1, 1, 33, 256), dtype=ml_dtypes.bfloat16)
    shared = [np.broadcast_to(x, (1, 4, 33, 256)) for x in (k, v)]
    testing.assert_same_bits(checked(backend, (q, *shared))[0], checked(backend, (q, *(x.copy() for x in shared)))[0])


def test_a_slice_of_a_cache_gives_the_bits_of_its_copy(backend):
    """FA#1417: slicing the cache changed results a little."""
    q, k, v = normal((2, 3, 1, 64), (2, 3, 600, 64), (2, 3, 600, 64))
    k, v = k[:, :, :333], v[:, :, :333]
    testing.assert_same_bits(checked(backend, (q, k, v))[0], checked(backend, (q, k.copy(), v.copy()))[0])


def test_every_element_of_out_is_written(backend):
    """PT#194167: rows of the second sequence stayed as they were."""
    problem = Problem("float16", (2, 4), (2, 2), (2, 2), 3, 70, 64, 64, views=("plain", "plain", "plain", "wide rows"))
    _, out, _ = poisoned.attention(backend, problem)
    assert np.isfinite(out).all()


def test_results_repeat(backend):
    """FA#2244: 29 of 30 runs differed in some bit."""
    inputs = normal((2, 4, 70, 64), (2, 2, 200, 64), (2, 2, 200, 64))
    first, *_ = checked(backend, inputs, **BOTTOM_RIGHT)
    for _ in range(10):
        testing.assert_same_bits(backend.attention(*inputs, **BOTTOM_RIGHT)[0], first)


# Limits


def test_more_than_65535_batches(backend):
    """PT#142228, xformers#845, FA#1786: an invalid launch beyond 65535 batches or heads."""
    q, k, v = normal((65537, 1, 8), (65537, 1, 8), (65537, 1, 8))
    out, _ = backend.attention(q, k, v, arch=backend.architectures[0])
    assert (out == v).all()


def test_strides_beyond_31_bits(backend):
    """FA#767, #772, #2214, PT#190857: offsets of more than 2**31 elements wrapped around."""
    if not backend.simulated:
        pytest.skip("a terabyte of address space costs nothing in the simulator only")
    near = normal((2, 20, 16), (2, 20, 16), (2, 20, 16))
    expected = backend.attention(*near)
    far = [testing.spread_out(x) for x in near]
    out = testing.spread_out(np.full_like(expected[0], np.nan))
    for result, value in zip(backend.attention(*far, out=out), expected, strict=True):
        testing.assert_same_bits(np.array(result), value)
