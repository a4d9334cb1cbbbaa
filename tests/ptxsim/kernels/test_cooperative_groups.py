"""Groups of threads: `cooperative_groups.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

NUMBERS = np.arange(128, dtype=np.int32)


def integers(n=128, seed=1):
    return np.random.default_rng(seed).integers(-99, 99, n).astype(np.int32)


def empty(dtype=np.int32, n=128):
    return ptxsim.empty(n, dtype)


def test_reduce(launch):
    sums, largest = empty(), empty(np.float32)
    launch("cooperative_groups", "reduce", 1, 128, NUMBERS, sums, largest)
    tiles = np.roll(NUMBERS, -64).reshape(8, 16)
    np.testing.assert_array_equal(sums, np.repeat(tiles.sum(1) + 1000 * np.arange(8), 16))
    np.testing.assert_array_equal(largest, np.repeat(tiles.max(1), 16))


def test_tiles_of_several_warps(launch):
    x, sums = integers(), empty()
    launch("cooperative_groups", "tiles_of_64", 1, 128, x, sums, shared_mem=512)
    np.testing.assert_array_equal(sums, np.repeat(x.reshape(2, 64).sum(1), 64))


def tree(launch, size):
    x, sums = integers().astype(np.float32), empty(np.float32, 128 // size)
    launch("cooperative_groups", f"trees_of_{size}", 1, 128, x, sums)
    return sums, x.reshape(-1, size).sum(1)


@pytest.mark.parametrize("size", [4, 32])
def test_tree(launch, size):
    np.testing.assert_array_equal(*tree(launch, size))


def test_filter(launch):
    x, kept, count = integers(200), empty(n=200), np.zeros(1, np.int32)
    launch("cooperative_groups", "filter", 2, 128, x, kept, count, np.int32(200))
    assert count[0] == (x > 0).sum()
    np.testing.assert_array_equal(np.sort(kept[: count[0]]), np.sort(x[x > 0]))


def test_labelled(launch):
    labels, x, sums = integers(64) % 5, integers(64, seed=2), np.zeros(5, np.int32)
    launch("cooperative_groups", "labelled", 1, 64, labels, x, sums)
    np.testing.assert_array_equal(sums, np.bincount(labels, weights=x, minlength=5))


def test_scan(launch):
    x, before, through = integers(), empty(), empty()
    launch("cooperative_groups", "scan", 1, 128, x, before, through)
    tiles = x.reshape(-1, 8)
    np.testing.assert_array_equal(before.reshape(-1, 8), tiles.cumsum(1) - tiles)
    np.testing.assert_array_equal(through.reshape(-1, 8), np.bitwise_xor.accumulate(tiles, axis=1))


def test_copy(launch):
    turned = empty()
    launch("cooperative_groups", "copy", 1, 128, NUMBERS, turned)
    np.testing.assert_array_equal(turned, NUMBERS[::-1])


def test_a_tile_that_does_not_wait_is_a_race(planted):
    launch = planted("  tile.sync();  // the tile is complete\n", "")
    tree(launch, 32)
    assert launch.kinds == {"shared race"}
