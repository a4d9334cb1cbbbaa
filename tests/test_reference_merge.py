"""Merging exact partial results gives those over all keys."""

import math

import numpy as np
import pytest

from cupyflash import reference


@pytest.mark.parametrize("splits", [[], [2], [0, 3, 3], [1, 2, 3, 4]])
def test_parts_make_the_whole(splits):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, 4)) for n in (5, 6, 6))
    q *= 30
    options = {"return_lse": True}
    out, lse = reference.attention(q, k, v, **options)
    parts = [
        reference.attention(q, part_k, part_v, **options)
        for part_k, part_v in zip(np.split(k, splits, axis=-2), np.split(v, splits, axis=-2), strict=True)
    ]
    merged, merged_lse = reference.merge([x for x, _ in parts], [x for _, x in parts])
    assert merged.dtype == merged_lse.dtype == np.float64 and merged.flags.c_contiguous
    # What the parts' own last roundings leave: of an lse, absolute in its weight.
    np.testing.assert_allclose(merged, out, rtol=0, atol=2.0**-52 * np.abs(lse).max() * np.abs(v).max())
    np.testing.assert_allclose(merged_lse, lse, rtol=2.0**-52)


def test_float64_parts_are_merged_with_more_than_float64():
    """The weights are 1/2 (1 +- 2^-53): 1 + 2^-53 times 1, less 1, is lost in float64."""
    outs, lses = [np.array([[1.0]]), np.array([[-1.0]])], [np.array([2.0**-53]), np.array([-(2.0**-53)])]
    assert reference.merge(outs, lses)[0] == 2.0**-53


@pytest.mark.parametrize(("dtype", "lse_dtype"), [(np.float16, np.float32), (np.float64, np.float64)])
def test_a_part_without_keys_adds_nothing(dtype, lse_dtype):
    out, lse = np.array([[2.0], [3.0]], dtype), np.array([5.0, -math.inf], lse_dtype)
    nothing, none = np.full((2, 1), math.nan, dtype), np.full(2, -math.inf, lse_dtype)
    merged, merged_lse = reference.merge([nothing, out], [none, lse])
    np.testing.assert_array_equal(merged, [[2.0], [0.0]])
    np.testing.assert_array_equal(merged_lse, lse)


def test_a_part_that_is_not_finite_spoils_its_rows_only():
    out, lse = np.array([[2.0], [3.0]]), np.array([1.0, 1.0])
    for bad_out, bad_lse in (math.inf, 0.0), (math.nan, 0.0), (1.0, math.nan), (1.0, math.inf):
        merged, _ = reference.merge([out, np.array([[bad_out], [3.0]])], [lse, np.array([bad_lse, 0.0])])
        assert not np.isfinite(merged[0]) and merged[1] == 3
