"""Sums of float32 and of integers: `reduction.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

BLOCK = 128
N = 999


def floats(n=N):
    return np.random.default_rng(n).normal(size=n).astype(np.float32)


def assert_sum(total, x, additions):
    """A sum whose longest chain has so many additions (Higham 2002, equation 4.4)."""
    assert abs(total - x.astype(float).sum()) <= additions * 2.0**-24 * abs(x).astype(float).sum()


def block_sums(launch, kernel, blocks, **options):
    x, sums = floats(), ptxsim.empty(blocks, np.float32)
    launch("reduction", kernel, blocks, BLOCK, x, sums, np.int32(N), **options)
    return sums, x


@pytest.mark.parametrize("kernel", ["interleaved", "sequential"])
def test_a_block_adds_as_many_as_it_has_threads(launch, kernel):
    sums, x = block_sums(launch, kernel, 8)
    for b, total in enumerate(sums):
        assert_sum(total, x[b * BLOCK : (b + 1) * BLOCK], 7)


def test_first_add_on_load(launch):
    sums, x = block_sums(launch, "first_add_on_load", 4, shared_mem=4 * BLOCK)
    for b, total in enumerate(sums):
        assert_sum(total, x[2 * b * BLOCK : 2 * (b + 1) * BLOCK], 8)


@pytest.mark.parametrize("kernel", ["unrolled_last_warp", "shuffles"])
def test_strides_over_the_grid(launch, kernel):
    sums, x = block_sums(launch, kernel, 3)
    assert_sum(sums.astype(float).sum(), x, 12)


def test_loads_of_16_bytes(launch):
    x, total = floats(), np.zeros(1)
    launch("reduction", "vectorised", 2, 96, x, total, np.int32(N))
    np.testing.assert_allclose(total[0], x.astype(float).sum(), rtol=0, atol=20 * 2.0**-53 * abs(x).sum())


def test_atomics_of_many_blocks(launch):
    x = np.random.default_rng(2).integers(-(2**20), 2**20, N).astype(np.int32)
    total, largest = np.zeros(1, np.int64), np.full(1, -(2**31), np.int32)
    launch("reduction", "multi_block", 3, 64, x, total, largest, np.int32(N))
    assert (total[0], largest[0]) == (x.sum(), x.max())


def test_the_last_block_adds_up(launch):
    x = np.random.default_rng(6).integers(-99, 99, N).astype(np.float32)
    for _ in range(2):  # the tickets wrap around to where they began
        total = ptxsim.empty(1, np.float32)
        launch("reduction", "last_block", 5, 64, x, ptxsim.empty(5, np.float32), total, np.int32(N))
        assert total[0] == x.sum()


def test_arg_max(launch):
    x = np.random.default_rng(7).integers(0, 9, (6, 77)).astype(np.float32)
    where = ptxsim.empty(6, np.int32)
    launch("reduction", "arg_max", 6, 32, x, where, np.int32(77))
    np.testing.assert_array_equal(where, x.argmax(1))


@pytest.mark.parametrize(
    "kernel, before, after",
    [
        ("interleaved", "    __syncthreads();  // before others read these sums\n", ""),
        ("unrolled_last_warp", "__syncwarp();\n  sum += box[t + 1];", "sum += box[t + 1];"),
        ("shuffles", "  __syncthreads();  // of_warp is complete\n", ""),
    ],
)
def test_a_missing_barrier_is_a_race(planted, kernel, before, after):
    launch = planted(before, after)
    block_sums(launch, kernel, 3)
    assert launch.kinds == {"shared race"}


def test_a_missing_fence_is_a_race(planted):
    launch = planted("    __threadfence();  // the sum is there before the ticket is drawn\n", "")
    x, sums, total = floats(), ptxsim.empty(5, np.float32), ptxsim.empty(1, np.float32)
    launch("reduction", "last_block", 5, 64, x, sums, total, np.int32(N))
    assert launch.kinds == {"global race"}
