"""Prefix sums: `scan.cu`."""

import numpy as np

from cupyflash import ptxsim

BLOCK = 128


def integers(n, seed=1):
    return np.random.default_rng(seed).integers(-50, 50, n).astype(np.int32)


def hillis_steele(launch, n=BLOCK - 5):
    x, out = integers(n), ptxsim.empty(n, np.int32)
    launch("scan", "hillis_steele", 1, BLOCK, x, out, np.int32(n))
    return out, np.cumsum(x)


def test_hillis_steele(launch):
    np.testing.assert_array_equal(*hillis_steele(launch))


def test_blelloch(launch):
    x, out, total = integers(2 * BLOCK), ptxsim.empty(2 * BLOCK, np.int32), ptxsim.empty(1, np.int32)
    launch("scan", "blelloch", 1, BLOCK, x, out, total)
    np.testing.assert_array_equal(out, np.cumsum(x) - x)
    assert total[0] == x.sum()


def test_warp_shuffles(launch):
    x, out = np.random.default_rng(5).integers(0, 2**32, 301, dtype=np.uint32), ptxsim.empty(301, np.uint32)
    launch("scan", "warp_shuffles", 1, 320, x, out, np.int32(301))
    np.testing.assert_array_equal(out, np.cumsum(x, dtype=np.uint32))


def look_back(launch, n=32 * 34 + 7):
    """More tiles than a warp looks at in one turn."""
    x, out = np.random.default_rng(6).integers(0, 2**32, n, dtype=np.uint32), ptxsim.empty(n, np.uint32)
    tiles = -(-n // 32)
    launch("scan", "look_back", tiles, 32, x, out, np.zeros(tiles, np.uint64), np.zeros(1, np.uint32), np.int32(n))
    return out, np.cumsum(x, dtype=np.uint32)


def test_look_back(launch):
    np.testing.assert_array_equal(*look_back(launch))


def test_segmented(launch):
    rng = np.random.default_rng(7)
    x, heads, out = integers(150), (rng.random(150) < 0.2).astype(np.uint8), ptxsim.empty(150, np.int32)
    launch("scan", "segmented", 5, 32, x, heads, out, np.int32(150))
    expected, total = [], 0
    for i, (value, head) in enumerate(zip(x, heads, strict=True)):
        total = value if head or i % 32 == 0 else total + value
        expected.append(total)
    np.testing.assert_array_equal(out, expected)


def test_a_missing_barrier_is_a_race(planted):
    launch = planted("    __syncthreads();  // the step is complete\n", "")
    hillis_steele(launch)
    assert launch.kinds == {"shared race"}


def test_a_tile_that_publishes_nothing_hangs_those_behind_it(planted):
    launch = planted("if (threadIdx.x == blockDim.x - 1) publish", "if (threadIdx.x == blockDim.x - 1 && tile) publish")
    look_back(launch)
    assert launch.kinds == {"livelock", "deadlock"}  # behind a barrier


def test_a_sum_that_counts_as_a_prefix_is_wrong(planted):
    launch = planted("tile ? SUM : PREFIX", "PREFIX", schedule="random", seed=1)
    out, expected = look_back(launch)
    assert (out != expected).any()
