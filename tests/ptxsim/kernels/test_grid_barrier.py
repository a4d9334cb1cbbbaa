"""Barriers of the whole grid by hand, in ordinary launches: `grid_barrier.cu`."""

import numpy as np
import pytest

BLOCKS, N = 5, 250
KERNELS = {"scan_counting": np.zeros(1, np.uint32), "scan_flags": np.zeros(2 * BLOCKS, np.int32)}


def scan(launch, kernel):
    x = np.random.default_rng().integers(-999, 999, N).astype(np.int32)
    expected, next_ = np.cumsum(x), np.zeros_like(x)
    launch("grid_barrier", kernel, BLOCKS, 64, x, next_, np.int32(N), KERNELS[kernel].copy())
    return x, expected  # after 8 rounds


@pytest.mark.parametrize("kernel", KERNELS)
def test_scan(launch, kernel):
    np.testing.assert_array_equal(*scan(launch, kernel))


@pytest.mark.parametrize(
    "kernel, before, after",
    [
        ("scan_counting", "    __threadfence();  // its writes are there before the counter says so\n", ""),
        ("scan_counting", "  __syncthreads();  // the block has arrived\n", ""),
        ("scan_counting", "    atomicAdd(arrived, 1u);", "    ++*arrived;"),
        ("scan_counting", "  __syncthreads();  // nobody goes on before\n", ""),
        ("scan_flags", "    __threadfence();  // its writes are there before the flag is up\n", ""),
        ("scan_flags", "    while (answered[blockIdx.x] < round)\n      ;\n", ""),
    ],
)
def test_a_barrier_that_does_not_hold_is_a_race(planted, kernel, before, after):
    launch = planted(before, after)
    scan(launch, kernel)
    assert "global race" in launch.kinds


def test_one_that_holds_by_luck_is_a_race_in_some_schedule(planted):
    """In lockstep the last block is never late."""
    for seed in range(20):
        launch = planted("round * gridDim.x", "round * gridDim.x - 1", schedule="random", seed=seed)
        scan(launch, "scan_counting")
        if launch.kinds:
            break
    assert "global race" in launch.kinds
