"""Primitives of CUB: `cub.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

THREADS, ITEMS = 64, 4


def integers(n, seed=1):
    return np.random.default_rng(seed).integers(-999, 999, n).astype(np.int32)


def reduce(launch, kernel):
    x, sum_, largest = integers(THREADS), ptxsim.empty(1, np.int32), ptxsim.empty(1, np.int32)
    launch("cub", kernel, 1, THREADS, x, sum_, largest)
    return (sum_[0], largest[0]), (x.sum(), x.max())


@pytest.mark.parametrize("kernel", ["reduce_raking", "reduce_warps"])
def test_reduce(launch, kernel):
    got, expected = reduce(launch, kernel)
    assert got == expected


def test_scan(launch):
    n = THREADS * ITEMS - 5
    x, before, total = integers(n), ptxsim.empty(n, np.int32), ptxsim.empty(1, np.int32)
    launch("cub", "scan", 1, THREADS, x, before, total, np.int32(n))
    np.testing.assert_array_equal(before, np.cumsum(x) - x)
    assert total[0] == x.sum()


@pytest.mark.parametrize("kernel, dtype", [("sort_floats", np.float32), ("sort_shorts", np.uint16)])
def test_sort(launch, kernel, dtype):
    keys, places = integers(THREADS * ITEMS).astype(dtype), ptxsim.empty(THREADS * ITEMS, np.int32)
    expected = np.argsort(keys, kind="stable")
    in_order = keys[expected]
    launch("cub", kernel, 1, THREADS, keys, places)
    np.testing.assert_array_equal(keys, in_order)
    np.testing.assert_array_equal(places, expected)


@pytest.mark.parametrize("kernel, width", [("whole_warps", 32), ("quarter_warps", 8)])
def test_warps(launch, kernel, width):
    x = integers(THREADS).astype(np.float64)
    sums, through = ptxsim.empty(THREADS // width), ptxsim.empty(THREADS)
    launch("cub", kernel, 1, THREADS, x, sums, through)
    tiles = x.reshape(-1, width)
    np.testing.assert_array_equal(sums, tiles.sum(1))
    np.testing.assert_array_equal(through.reshape(-1, width), tiles.cumsum(1))


@pytest.mark.parametrize("kernel", ["histogram_by_sorting", "histogram_by_atomics"])
def test_histogram(launch, kernel):
    x, counts = (integers(THREADS * ITEMS) % 40).astype(np.uint8), ptxsim.empty(256, np.uint32)
    launch("cub", kernel, 1, THREADS, x, counts)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=256))


def test_storage_that_is_used_again_too_early_is_a_race(planted):
    launch = planted("  __syncthreads();  // the storage is free\n", "")
    reduce(launch, "reduce_warps")
    assert launch.kinds == {"shared race"}
