"""How many blocks are simulated together never shows: not in results, faults, progress or counters."""

import itertools

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import launch, poisoned
from .test_barriers import ROUNDS, rounds

every_grouping = pytest.mark.parametrize("lanes", [1, 96, 1000, 8192, 10**6])


@every_grouping
@pytest.mark.parametrize("schedule", ["lockstep", "random"])
def test_results(lanes, schedule):
    out = poisoned((40, 96), np.int32)
    launch(ROUNDS, 40, 96, out, np.int32(4), schedule=schedule, seed=5, chunk_lanes=lanes)
    np.testing.assert_array_equal(out, np.tile([rounds(t, 4) for t in range(96)], (40, 1)))


@every_grouping
def test_atomics_of_all_blocks_reach_one_counter(lanes):
    source = """
    __device__ unsigned tickets;
    extern "C" __global__ void count(unsigned* total, unsigned* ticket) {
      atomicAdd(total, threadIdx.x);
      if (threadIdx.x == 0) ticket[blockIdx.x] = atomicAdd(total + 1, 1u);
    }"""
    total, ticket = np.zeros(2, np.uint32), poisoned(60, np.uint32)
    launch(source, 60, 64, total, ticket, chunk_lanes=lanes)
    assert tuple(total) == (60 * 63 * 32, 60)
    np.testing.assert_array_equal(np.sort(ticket), np.arange(60))


@every_grouping
def test_a_fault_names_its_block(lanes):
    source = """
    extern "C" __global__ void late(int* out) {
      int block = blockIdx.x;
      out[block == 77 && threadIdx.x == 13 ? 1000 : block] = 1;
    }"""
    with pytest.raises(ptxsim.MemoryFault, match=r"\b13\b.*\b77\b"):
        launch(source, 100, 32, poisoned(100, np.int32), chunk_lanes=lanes)


@every_grouping
def test_a_deadlock_in_one_block_ends_the_launch(lanes):
    source = """
    extern "C" __global__ void stuck(int* out) {
      if (blockIdx.x == 55 && threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
      out[blockIdx.x] = 1;
    }"""
    with pytest.raises(ptxsim.Deadlock, match="55"):
        launch(source, 100, 64, poisoned(100, np.int32), chunk_lanes=lanes)


@every_grouping
def test_progress_ends_at_all_blocks(lanes):
    calls = []
    source = 'extern "C" __global__ void fill(int* out) { out[blockIdx.x] = 1; }'
    out = np.zeros(100, np.int32)
    launch(source, 100, 32, out, progress=lambda done, total: calls.append((done, total)), chunk_lanes=lanes)
    assert out.all() and calls[-1] == (100, 100)
    assert all(a <= b for (a, _), (b, _) in itertools.pairwise(calls))


@every_grouping
def test_counters(lanes):
    source = """
    extern "C" __global__ void mean(const float* x, float* out) {
      __shared__ float box[64];
      box[threadIdx.x] = x[(blockIdx.x % 7) * 64 + threadIdx.x];
      __syncthreads();
      out[blockIdx.x * 64 + threadIdx.x] = 0.5f * (box[threadIdx.x] + box[63 - threadIdx.x]);
    }"""
    x, out = np.zeros(7 * 64, np.float32), poisoned(50 * 64, np.float32)
    with ptxsim.profile() as profile:
        launch(source, 50, 64, x, out, chunk_lanes=lanes)
    (kernel,) = profile.kernels
    assert (kernel.launches, kernel.global_load_sectors, kernel.global_store_sectors) == (1, 50 * 8, 50 * 8)
    assert (kernel.distinct_load_sectors, kernel.distinct_store_sectors) == (7 * 8, 50 * 8)
    assert (kernel.shared_wavefronts, kernel.shared_ideal_wavefronts) == (50 * 6, 50 * 6)


@pytest.mark.parametrize("lanes", [0, -4, 1.5, "many"])
def test_groupings_that_make_no_sense(lanes):
    with pytest.raises((ValueError, TypeError), match="chunk_lanes"), ptxsim.settings(chunk_lanes=lanes):
        pass
