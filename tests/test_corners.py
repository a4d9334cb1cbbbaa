"""Places that random problems reach too rarely: each chunk position, the largest finite values, many dimensions."""

import numpy as np
import pytest

from cupyflash import bounds, reference, testing
from cupyflash.testing import element_type
from tests import accuracy

DTYPES = ("float16", "bfloat16")


def _problem(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(element_type(dtype)) for shape in shapes]


def _assert_within_bounds(backend, q, k, v, **options):
    out, lse = backend.attention(q, k, v, **options)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True, **options)
    bound, lse_bound = bounds.attention(q, k, v, return_lse=True, **options)
    assert np.isfinite(bound).all()
    testing.assert_within_bound(out, exact, bound, name="out")
    testing.assert_within_bound(lse, exact_lse, lse_bound, name="lse")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_masked_value_in_each_position_of_a_chunk(backend, dtype, value):
    q, k, v = _problem(dtype, (40, 16), (40, 16), (40, 16))
    clean, _ = backend.attention(q, k, v, causal=True)
    for column in range(16):
        spoilt = v.copy()
        spoilt[30, column] = value
        out, _ = backend.attention(q, k, spoilt, causal=True)
        testing.assert_same_bits(out[:30], clean[:30])
        others = np.arange(16) != column
        testing.assert_same_bits(out[:, others], clean[:, others])
        assert not np.isfinite(out[30:, column].astype(np.float64)).any()


@pytest.mark.parametrize("dtype, largest", [("float16", 60000.0), ("bfloat16", 8e36)])
def test_large_values_behind_a_mask_are_finite(backend, dtype, largest):
    q, k, v = _problem(dtype, (8, 16), (8, 16), (8, 16))
    size = np.linspace(0.01, 1, v.size).reshape(v.shape)
    v = (np.sign(v.astype(np.float64)) * largest * size).astype(v.dtype)
    _assert_within_bounds(backend, q, k, v, causal=True)


def test_six_leading_dimensions_that_do_not_merge(backend):
    q, k, v = (x.transpose(4, 3, 2, 1, 0, 5, 6) for x in _problem("float16", *[(2, 2, 2, 2, 2, 3, 16)] * 3))
    _assert_within_bounds(backend, q, k, v)
    copies = (np.ascontiguousarray(x) for x in (q, k, v))
    testing.assert_same_bits(backend.attention(q, k, v)[0], backend.attention(*copies)[0])


def test_a_shift_beyond_16_bits(backend):
    q, k, v = _problem("float16", (1, 16), (33000, 16), (33000, 16))
    k[:200] = q  # most of the weight lies on keys that a shift cut to 16 bits would hide or show
    _assert_within_bounds(backend, q, k, v, causal=True, align="bottom-right")


def test_more_than_256_matrices(backend):
    q, k, v = _problem("float16", (300, 3, 16), (300, 5, 16), (300, 5, 16))
    _assert_within_bounds(backend, q, k, v)


def test_rescaling_by_a_factor_near_one(backend):
    """The maximum grows by 2^-14 with each tile: no rescaling is small enough to be left out."""
    q, k = np.zeros((16, 16), np.float16), np.zeros((24 * 128, 16), np.float16)
    q[:, 0] = 1
    k[:, 0] = np.repeat(np.arange(24), 128) / 2**14
    _assert_within_bounds(
        backend, q, k, np.sign(np.arange(24 * 128) - 1535.5)[:, None].astype(np.float16), softmax_scale=1.0
    )


@pytest.mark.parametrize("dtype", (*DTYPES, "float32", "float64"))
def test_the_largest_score_in_each_place(backend, dtype):
    accuracy.assert_maximum_is_found(backend, element_type(dtype))
