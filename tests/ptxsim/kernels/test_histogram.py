"""Histograms of bytes: `histogram.cu`."""

import numpy as np
import pytest


def histogram(launch, kernel, grid, block, n=1003, **options):
    x = (np.random.default_rng(n).normal(100, 20, n).clip(0, 255)).astype(np.uint8)
    counts = np.zeros(256, np.uint32)
    launch("histogram", kernel, grid, block, x, counts, np.int32(n), **options)
    return counts, np.bincount(x, minlength=256)


@pytest.mark.parametrize(
    "kernel, grid, block", [("global_atomics", 3, 64), ("privatised", 2, 96), ("warp_aggregated", 11, 96)]
)
def test_histogram(launch, kernel, grid, block):
    np.testing.assert_array_equal(*histogram(launch, kernel, grid, block))


def test_packed_counts(launch):
    np.testing.assert_array_equal(*histogram(launch, "packed_counts", 1, 96, shared_mem=3 * 128 * 4))


def test_equal_warps(launch):
    x = np.repeat([7, 9, 250], 32).astype(np.uint8)
    x[40] = 8
    counts = np.zeros(256, np.uint32)
    launch("histogram", "equal_warps", 3, 32, x, counts)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=256))


@pytest.mark.parametrize(
    "before, after",
    [
        ("  __syncthreads();  // all counts are zero\n", ""),
        ("atomicAdd(&mine[q.x], 1u);", "mine[q.x] += 1;"),
    ],
    ids=["barrier", "atomic"],
)
def test_what_is_missing_is_a_race(planted, before, after):
    launch = planted(before, after)
    histogram(launch, "privatised", 2, 96)
    assert launch.kinds == {"shared race"}


def test_a_leader_that_adds_for_itself_only_is_wrong(planted):
    launch = planted("__popc(same));", "1u);")
    counts, expected = histogram(launch, "warp_aggregated", 11, 96)
    assert (counts != expected).any()
