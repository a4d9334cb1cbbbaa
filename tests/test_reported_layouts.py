"""Inputs behind public bug reports of other attention kernels that concern how arrays lie in memory, and how many.

FA is Dao-AILab/flash-attention, PT pytorch/pytorch.
"""

import numpy as np
import pytest

import cupyflash
from cupyflash.testing import assert_same_bits, element_type, laid_out, spread_out
from tests import test_launch
from tests.reports import BOTTOM_RIGHT, DTYPES, HALF_TYPES, assert_same, checked, normal, output_gradient

gpu = test_launch.gpu  # a fixture
all_types = pytest.mark.parametrize("dtype", DTYPES)


# Strides of operands


@all_types
def test_an_operand_with_stride_zero_in_every_dimension(backend, dtype):
    """FA#325: an error for an array broadcast from one number."""
    q, k = normal(dtype, (2, 9, 16), (2, 20, 16))
    v = np.broadcast_to(q.dtype.type(1), (2, 20, 16))
    assert_same(checked(backend, (q, k, v))[0], checked(backend, (q, k, v.copy()))[0])


@all_types
def test_views_whose_last_dimension_is_not_contiguous(backend, dtype):
    """FA PR 2777: accepted by the forward, refused by the backward."""
    views = [x.swapaxes(-1, -2) for x in normal(dtype, (2, 16, 20), (2, 16, 30), (2, 16, 30))]
    results, _ = checked(backend, views)
    assert results.dq.shape == (2, 20, 16) and results.dk.shape == (2, 30, 16)
    assert_same(results, checked(backend, [x.copy() for x in views])[0])


@all_types
def test_keys_shared_by_broadcasting(backend, dtype):
    """PT#191937: wrong by 19.5 for k of stride 0, Lk % 32 == 1, bfloat16, the largest head_dim."""
    q, k, v = normal(dtype, (1, 4, 8, 256), (1, 1, 33, 256), (1, 1, 33, 256))
    shared = [np.broadcast_to(x, (1, 4, 33, 256)) for x in (k, v)]
    assert_same(checked(backend, (q, *shared))[0], checked(backend, (q, *(x.copy() for x in shared)))[0])


@all_types
def test_a_slice_of_a_cache_gives_the_bits_of_its_copy(backend, dtype):
    """FA#1417: slicing the cache changed results a little."""
    q, k, v = normal(dtype, (1, 3, 1, 16), (1, 3, 100, 16), (1, 3, 100, 16))
    k, v = k[:, :, :77], v[:, :, :77]
    assert_same(checked(backend, (q, k, v))[0], checked(backend, (q, k.copy(), v.copy()))[0])


@all_types
def test_padding_of_a_cache_holds_nan(backend, dtype):
    """FA#1745, #1455: NaN in the padding of a key-value cache reached the output, lengths 1 and 3 of 3."""
    q, k, v = normal(dtype, (2, 1, 1, 16), (2, 1, 3, 16), (2, 1, 3, 16))
    k[0, :, 1:], v[0, :, 1:] = np.nan, np.nan
    for batch, length in enumerate((1, 3)):
        results, _ = checked(backend, (q[batch], k[batch, :, :length], v[batch, :, :length]))
        assert batch == 1 or (results.out == v[0, :, :1]).all()


@all_types
def test_rows_behind_the_last_sequence(backend, dtype):
    """FA PR 2324, PT#176793, fla PR 892: gradients of padded rows were NaN, total 946 of which 944 are used."""
    inputs = normal(dtype, (946, 16), (946, 16), (946, 16))
    for x in inputs:
        x[944:] = np.nan
    grads = [np.zeros_like(x) for x in inputs]
    first, last = slice(0, 20), slice(900, 944)
    for rows in first, last:
        results, _ = checked(backend, [x[rows] for x in inputs], grads_out=[x[rows] for x in grads])
        assert_same([x[rows] for x in grads], results[2:])
    for gradient in grads:
        assert (gradient[20:900] == 0).all() and (gradient[944:] == 0).all()
        assert (gradient[last] != 0).any(axis=-1).all()


@all_types
def test_every_element_of_the_results_is_written(backend, dtype):
    """PT#194167: rows of the second sequence stayed as they were."""
    inputs = normal(dtype, (2, 4, 3, 16), (2, 2, 70, 16), (2, 2, 70, 16))
    shapes = inputs[0].shape, *(x.shape for x in inputs)
    out, *grads = (laid_out(np.full(shape, np.nan, inputs[0].dtype), "wide rows") for shape in shapes)
    results, _ = checked(backend, inputs, out=out, grads_out=grads)
    assert results.out is out and all(given is made for given, made in zip(grads, results[2:], strict=True))


# Strides of the output's gradient


@all_types
def test_the_gradient_of_a_sum_has_stride_zero(backend, dtype):
    """FA#325: the gradient of out.sum() is one number in every place, and was refused."""
    inputs = normal(dtype, (2, 9, 16), (2, 20, 16), (2, 20, 24))
    one = np.broadcast_to(inputs[0].dtype.type(1), (2, 9, 24))
    assert_same(checked(backend, inputs, dout=one)[0], checked(backend, inputs, dout=one.copy())[0])


@all_types
def test_out_and_its_gradient_need_not_lie_alike(backend, dtype):
    """FlagAttention PR 1, PT#133671, FA#91, ROCm/flash-attention#40: one was read with the strides of the other."""
    inputs = normal(dtype, (1, 3, 20, 16), (1, 3, 30, 16), (1, 3, 30, 16))
    expected, _ = checked(backend, inputs)
    dout = output_gradient(expected.out)
    concatenated = np.concatenate([dout, np.full_like(dout, np.nan)], axis=-1)[..., :16]
    for out_view, other in (
        ("rows before heads", concatenated),
        ("columns first", laid_out(dout, "rows before heads")),
        ("plain", laid_out(dout, "reversed axes")),
    ):
        out = laid_out(np.full_like(expected.out, np.nan), out_view)
        assert_same(checked(backend, inputs, dout=other, out=out)[0], expected)


# The same bits


@all_types
def test_results_repeat(backend, dtype):
    """FA#2244: dq differed in 29 of 30 runs."""
    inputs = normal(dtype, (1, 4, 40, 16), (1, 2, 70, 16), (1, 2, 70, 16))
    first, _ = checked(backend, inputs, **BOTTOM_RIGHT)
    dout = output_gradient(first.out)
    for _ in range(4 if dtype in HALF_TYPES else 1):
        out, lse = backend.attention(*inputs, **BOTTOM_RIGHT)
        assert_same((out, lse, *backend.attention_backward(dout, *inputs, out, lse, **BOTTOM_RIGHT)), first)


# Limits


def test_more_than_65535_batches(backend):
    """PT#142228, xformers#845, FA#1786: an invalid launch beyond 65535 batches or heads."""
    q, k, v = normal("float16", (65537, 1, 8), (65537, 1, 8), (65537, 1, 8))
    out, _ = backend.attention(q, k, v, arch=backend.architectures[0])
    assert (out == v).all()


@all_types
def test_grids_have_one_dimension(gpu, dtype):
    """The same reports: only the first may exceed 65535."""
    q = gpu.array((65537, 2, 1, 8), element_type(dtype))
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    cupyflash.attention_backward(out, q, q, q, out, lse)
    assert len(gpu.launches) >= 4
    for _, grid, _, _ in gpu.launches:
        assert len(grid) == 1 and grid[0] >= 65537 * 2 // 4


@all_types
def test_strides_beyond_31_bits(backend, dtype):
    """FA#767, #772, #2214, #1311, PT#190857, TabPFN PR 1184: offsets of more than 2**31 elements wrapped around."""
    if not backend.simulated:
        pytest.skip("a terabyte of address space costs nothing in the simulator only")
    near = normal(dtype, (2, 20, 16), (2, 20, 16), (2, 20, 16))
    expected, _ = checked(backend, near)
    dout, *far = (spread_out(x) for x in (output_gradient(expected.out), *near))
    out, *grads = (spread_out(np.full_like(x, np.nan)) for x in (expected.out, *near))
    results = backend.attention(*far, out=out)
    assert_same([np.array(x) for x in results], expected[:2])
    gradients = backend.attention_backward(dout, *far, *results, grads_out=grads)
    assert_same([np.array(x) for x in gradients], expected[2:])
    for given, made in zip(grads, gradients, strict=True):
        assert given is made


@all_types
def test_a_step_along_the_keys_beyond_31_bits(backend, dtype):
    """PT#190857: keys stored as (Lk, batch, head_dim), so that a step along the keys is large."""
    if not backend.simulated:
        pytest.skip("a terabyte of address space costs nothing in the simulator only")
    near = normal(dtype, (3, 9, 16), (3, 20, 16), (3, 20, 16))
    far = [near[0], *(spread_out(x.swapaxes(0, 1)).swapaxes(0, 1) for x in near[1:])]
    expected, _ = checked(backend, near)
    results = backend.attention(*far)
    assert_same_bits(results[0], expected.out)
    gradients = backend.attention_backward(output_gradient(expected.out), *far, *results)
    assert_same(gradients, expected[2:])
