"""Inputs behind public bug reports of other attention kernels that need options: masks, biases, windows and so on.

FA is Dao-AILab/flash-attention, PT pytorch/pytorch. The reference gives what each result has to be. Plain inputs are
in test_reported_bugs.py, layouts in test_reported_layouts.py. Reports without a test here or there, and why:

* Caches that pages are appended to (FA#2709, FA#772's append, PT#194167's pages): there is no paged cache; lengths and
  strides cover what it holds.
* Float8 (FA#2716, FA#1848): not one of the dtypes.
* Installation, compile times, architectures and messages (FA#1038, #945, #1560, #382, #1912, #1567, #420, #720, #542,
  #762, #1533, #562; flashinfer#2968, #154, #4410, PR 3556; vllm PR 54529): not a result.
* More memory than a machine has (FA#767, TabPFN PR 1184, flashattention2-custom-mask#2 at their full sizes): large
  strides over little memory take their place.
* FA#1071, #16, #37, #2151, attention-gym#131 ask which tolerance is right: the bounds answer.
* FA#904 asks for the maximum, which ``return_max`` gives: test_variants.py.
"""

import numpy as np
import pytest

import cupyflash
from cupyflash import reference
from cupyflash.testing import assert_same_bits, element_type
from tests.reports import BOTTOM_RIGHT, TOP_LEFT, checked, normal, output_gradient

both = pytest.mark.parametrize("dtype", ["float16", "float32"])


@both
def test_a_mask_with_empty_rows(backend, dtype):
    """PT#103963: NaN."""
    mask = np.zeros((8, 8), bool)
    mask[:4, :4] = True
    for results in checked(backend, normal(dtype, *[(1, 1, 8, 8)] * 3), mask=mask):
        assert (results.out[..., 4:, :] == 0).all() and (results.lse[..., 4:] == -np.inf).all()
        assert all((x[..., 4:, :] == 0).all() for x in (results.dq, results.dk, results.dv))


@both
def test_an_appended_row_of_padding(backend, dtype):
    """PT#103749: NaN from a row that the mask empties."""
    q, k, v = normal(dtype, (6, 16), (10, 16), (10, 16))
    mask = np.ones((6, 10), bool)
    mask[5] = False
    results, _ = checked(backend, (q, k, v), mask=mask)
    alone, _ = checked(backend, (q[:5], k, v), mask=mask[:5], dout=output_gradient(results.out)[:5])
    assert (results.out[5] == 0).all()
    for name in "out", "lse", "dq":
        assert_same_bits(getattr(results, name)[:5], getattr(alone, name))


@both
def test_nan_in_a_key_that_is_masked(backend, dtype):
    """PT#101967: it reached the output; what is masked is never part of it."""
    q, k, v = normal(dtype, (2, 4), (2, 4), (2, 4))
    k[1, 0], v[1] = np.nan, np.inf
    out, _ = backend.attention(q, k, v, mask=np.array([True, False]))
    assert_same_bits(out, np.stack([v[0], v[0]]))


@both
def test_nan_in_the_padding_of_a_cache(backend, dtype):
    """FA#1745: lengths 1 and 3 of 3, NaN behind them."""
    q, k, v = normal(dtype, (2, 1, 1, 64), (2, 1, 3, 64), (2, 1, 3, 64))
    k[0, :, 1:], v[0, :, 1:] = np.nan, np.nan
    out, _ = backend.attention(q, k, v, seqlens_k=np.array([1, 3]))
    assert_same_bits(out[0, 0, 0], v[0, 0, 0])
    assert np.isfinite(out.astype(float)).all()


@both
def test_more_parts_than_keys(backend, dtype):
    """flashinfer PR 4401: NaN from parts without keys; one key for 17 queries."""
    q, k, v = normal(dtype, (17, 16), (300, 16), (300, 16))
    out, lse = backend.attention(q, k, v, split_size=128, seqlens_k=np.array(1))
    exact, exact_lse = reference.attention(q, k[:1], v[:1], return_lse=True)
    np.testing.assert_array_equal(out, exact)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


@both
def test_the_first_key_tiles_of_rows_are_masked(backend, dtype):
    """PT#127055: NaN under a band, q = k = v = 1; cuDNN's note on block masks: NaN where the first tile is removed."""
    length = 600 if dtype == "float16" else 150
    ones = np.ones((length, 16), element_type(dtype))
    distance = np.arange(length)[:, None] - np.arange(length)
    out, _ = backend.attention(ones, ones, ones, mask=(distance >= 0) & (distance < 10))
    np.testing.assert_array_equal(out, 1)
    q, k, v = normal(dtype, (20, 16), (256, 16), (256, 16))
    out, _ = backend.attention(q, k, v, mask=np.arange(256) >= 128)
    np.testing.assert_allclose(out, reference.attention(q, k[128:], v[128:]), atol=2e-3)


@both
def test_a_mask_and_causal_together(backend, dtype):
    """onnx#8054: (1 - mask) * -inf is NaN where a pair is allowed."""
    mask = np.random.default_rng(0).random((5, 9)) < 0.5
    for options in TOP_LEFT, BOTTOM_RIGHT:
        checked(backend, normal(dtype, (5, 16), (9, 16), (9, 16)), mask=mask, **options)


@both
def test_a_sequence_without_keys_in_a_packed_batch(dtype):
    """cudnn-frontend#943: NaN rows; FA#1537, #1619: an error for single queries of grouped heads."""
    q, k, v = normal(dtype, (5, 9, 16), (8, 3, 16), (8, 3, 16))
    out = cupyflash.attention_varlen(q, k, v, np.array([0, 3, 5]), np.array([0, 0, 4]))
    assert (out[:3] == 0).all() and (out[3:] != 0).all()
    offsets = np.array([0, 0, 1, 1, 2]), np.array([0, 0, 3, 3, 8])
    out = cupyflash.attention_varlen(q[:2], k, v, *offsets)
    np.testing.assert_allclose(out, reference.attention_varlen(q[:2], k, v, *offsets), atol=2e-3)


@pytest.mark.parametrize("smallest", [-65504.0, -1e9])
def test_the_smallest_number_as_a_mask(backend, smallest):
    """transformers PR 17306: float16's minimum plus a score overflowed; ocannl#548: -1e9 is -inf in float16."""
    inputs = normal("float16", (4, 16), (6, 16), (6, 16))
    with np.errstate(over="ignore"):
        bias = np.where(np.arange(6) < 4, 0, smallest).astype(np.float16)
    bias_of_row = np.stack([bias, np.full(6, bias[-1]), bias, bias])
    results, exact = checked(backend, inputs, bias=bias_of_row)
    assert np.isfinite(results.out.astype(float)).all()
    assert (exact.lse[1] == -np.inf) == (smallest == -1e9)


@both
def test_two_sided_windows(backend, dtype):
    """FA#2199: 55 rows of zeros are right for 129 queries, 10 keys and the window (32, 64); FA#1366."""
    q, k, v = normal(dtype, (129, 16), (10, 16), (10, 16))
    results, _ = checked(backend, (q, k, v), window_size=(32, 64), align="bottom-right")
    assert ((results.out == 0).all(axis=-1) == (np.arange(129) < 55)).all()
    length = 300 if dtype == "float16" else 70
    inputs = normal(dtype, *[(1, 2, length, 64)] * 3)
    checked(backend, inputs, window_size=(7, 0), align="top-left")


@both
def test_a_window_counts_keys_beside_the_current_one(backend, dtype):
    """transformers#39408, zml PR 763: models count the current token, too; left 1 is 2 keys."""
    q, k, v = normal(dtype, (4, 16), (4, 16), (4, 16))
    out, _ = backend.attention(q, k, v, window_size=(1, 0))
    np.testing.assert_allclose(out[3:], reference.attention(q[3:], k[2:], v[2:]), atol=2e-3)


def test_a_negative_window_is_refused(backend):
    """DiTFastAttn#7, hippogriff#7: it meant infinite."""
    inputs = normal("float16", (4, 16), (4, 16), (4, 16))
    with pytest.raises(ValueError, match="window_size"):
        backend.attention(*inputs, window_size=(-3, 3))


@both
def test_softcap_before_masks(backend, dtype):
    """FA PR 1025: a cap after the mask let the future in; FA PR 2402: x tanh(x); sgl-kernel-xpu PR 491: no cap."""
    q, k, v = normal(dtype, (2, 16), (2, 16), (2, 16))
    results, _ = checked(backend, (q, k, v), softcap=1.0, **TOP_LEFT)
    assert_same_bits(results.out[0], v[0])
    one = np.zeros((1, 1), q.dtype) + 1
    _, lse = backend.attention(one, 3 * one, one, softcap=1.0, softmax_scale=1.0)
    np.testing.assert_allclose(lse, 0.99505, rtol=1e-5)
    q, k, v = normal(dtype, (20, 16), (30, 16), (30, 16))
    capped, _ = checked(backend, (q, k, v), softcap=0.1)
    assert (capped.out != backend.attention(q, k, v)[0]).any()


@both
def test_large_scores_under_a_cap_have_gradients(backend, dtype):
    """tokamax PR 1121: 1 - tanh^2 after masking overflowed; scores to 168, cap 30."""
    q, k, v = normal(dtype, (20, 16), (20, 16), (20, 16))
    results, _ = checked(backend, (6 * q, 6 * k, v), softcap=30.0, **TOP_LEFT)
    assert all(np.isfinite(x.astype(float)).all() for x in results)


@both
def test_alibi(backend, dtype):
    """keras-hub#2861: 0 for one query; a source finding: lse lacked the row's part."""
    q, k, v = normal(dtype, (1, 1, 3, 16), (1, 1, 3, 16), (1, 1, 3, 16))
    slopes = np.ones(1, np.float32)
    _, lse = backend.attention(q, k, v, alibi_slopes=slopes, causal=True)
    scores = (q[0, 0].astype(float) @ k[0, 0].astype(float).T) / 4 - np.abs(np.arange(3)[:, None] - np.arange(3))
    expected = np.log(np.where(np.tri(3) > 0, np.exp(scores), 0).sum(axis=1))
    np.testing.assert_allclose(lse[0, 0], expected, rtol=1e-5, atol=1e-5)
    last, _ = backend.attention(q[..., 2:, :], k, v, alibi_slopes=slopes, align="bottom-right")
    assert_same_bits(last[0, 0, 0], backend.attention(q, k, v, alibi_slopes=slopes)[0][0, 0, 2])


@both
@pytest.mark.parametrize("seqlen_k", [10, 43, 77])
def test_masks_and_biases_need_no_alignment(backend, dtype, seqlen_k):
    """xformers#813, #808, #683: rows of a bias had to be multiples of 8; bool masks were refused. jax#28974: a mask of
    shape (B, 1, 1, Lk) was not broadcast.
    """
    inputs = normal(dtype, (2, 2, 5, 16), (2, 2, seqlen_k, 16), (2, 2, seqlen_k, 16))
    mask = np.random.default_rng(0).random((2, 1, 1, seqlen_k)) < 0.7
    checked(backend, inputs, mask=mask, bias=normal("float32", (5, seqlen_k))[0])


def test_float32_bias_of_bfloat16(backend):
    """jax#32242: NaN gradients."""
    checked(backend, normal("bfloat16", *[(1, 2, 128, 32)] * 3), bias=normal("float32", (1, 2, 128, 128))[0])


@both
def test_rows_behind_the_last_offset_have_gradient_zero(dtype):
    """FA PR 2324, PT#176793, fla PR 892: NaN in gradients of rows beyond the last offset."""
    q, k, v = normal(dtype, *[(46, 2, 16)] * 3)
    for x in q, k, v:
        x[44:] = np.nan
    offsets = np.array([0, 20, 44])
    out, lse = cupyflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True)
    dout = np.full_like(out, 1)
    dout[44:] = np.nan
    gradients = cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, offsets, offsets)
    for x in out, *gradients:
        assert np.isfinite(x.astype(float)).all() and (x[44:] == 0).all()


def test_lengths_are_not_negative(backend):
    """jax PR 30023: -1 as the length of an unused segment."""
    inputs = normal("float16", *[(2, 1, 4, 16)] * 3)
    with pytest.raises(ValueError, match="seqlens_k"):
        backend.attention(*inputs, seqlens_k=np.array([-1, 3]))


@both
def test_parts_of_a_cache_agree(backend, dtype):
    """torchtitan#3235: NaN in some steps; FA#1455: a part took the padded length; PT#194167: rows never written."""
    q, k, v = normal(dtype, (2, 2, 1, 16), (2, 2, 600, 16), (2, 2, 600, 16))
    for lengths in (1, 600), (127, 129), (0, 385):
        lengths = np.array(lengths)
        out, _ = backend.attention(q, k, v, split_size=128, seqlens_k=lengths)
        exact = reference.attention(q, k, v, seqlens_k=lengths)
        np.testing.assert_allclose(out.astype(float), exact, atol=2e-3)


def test_a_causal_bias_at_an_odd_length(backend):
    """PT#153799: NaN in the backward for a score mod and a mask together, L = 1025."""
    inputs = normal("float16", *[(257, 16)] * 3)
    checked(backend, inputs, score_mod="score + (i - j)", **TOP_LEFT)
