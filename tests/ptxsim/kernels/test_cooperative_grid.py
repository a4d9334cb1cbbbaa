"""Barriers of the whole grid by cooperative groups: `cooperative_grid.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

N, SWEEPS = 999, 4


def iterate(launch, blocks, threads):
    """Float32 sums in the kernel's order, so that all bits are NumPy's."""
    random = np.random.default_rng()
    f, u = (random.normal(size=N).astype(np.float32) for _ in range(2))
    expected = u.copy()
    for _ in range(SWEEPS):
        expected[1:-1] = np.float32(0.5) * (expected[:-2] + expected[2:] - f[1:-1])
    sizes = np.int32(N), np.int32(SWEEPS)
    launch("cooperative_grid", "jacobi", blocks, threads, f, u, np.zeros_like(u), *sizes, cooperative=True)
    return u, expected


@pytest.mark.parametrize("blocks, threads", [(5, 64), (2, (8, 2, 3))])
def test_jacobi(launch, blocks, threads):
    np.testing.assert_array_equal(*iterate(launch, blocks, threads))


def test_a_mean_over_the_grid(launch):
    x = np.random.default_rng().integers(-99, 99, (4, 150)).astype(np.float32)
    sums, out = ptxsim.empty(12, np.float32), ptxsim.empty(x.shape, np.float32)
    launch("cooperative_grid", "subtract_mean", (3, 4), 64, x, sums, out, np.int32(150), cooperative=True)
    np.testing.assert_array_equal(out, x - x.sum() / np.float32(x.size))  # whole numbers below 2**24 add up exactly


@pytest.mark.parametrize("schedule", ["lockstep", "random"])
def test_a_barrier_of_the_block_is_none(planted, schedule):
    launch = planted("grid.sync();  // after each sweep", "__syncthreads();", schedule=schedule)
    iterate(launch, 5, 64)
    assert launch.kinds == {"global race"}


def test_a_block_that_never_arrives(planted):
    launch = planted("grid.sync();  // after each sweep", "if (blockIdx.x != 3) grid.sync();")
    iterate(launch, 5, 64)
    assert {"livelock", "deadlock"} <= launch.kinds
