"""Sectors are those of arrays that begin where memory of a GPU begins, wherever malloc has put them."""

import itertools

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import OPTIONS, zeros
from .test_profile import STRIDED, profiled


def memory_at(*places):
    """Arrays of float32 of their own, of (first byte, elements) within one stretch that starts with a sector."""
    raw = bytearray(32 + max(first + 4 * count for first, count in places))
    start = -np.frombuffer(raw, np.uint8).ctypes.data % 32
    return [np.frombuffer(raw, np.float32, count, start + first) for first, count in places]


def sectors(source, grid, *args):
    """Sectors of loads, stores and atomics: of all requests, and distinct ones."""
    kernel = profiled(source, grid, 32, *args)
    assert kernel.block_load_sectors <= kernel.global_load_sectors
    return [
        getattr(kernel, f"{which}_{what}_sectors")
        for what in ("load", "store", "atomic")
        for which in ("global", "distinct")
    ]


@pytest.mark.parametrize("first, second", list(itertools.product((0, 4, 16, 28), repeat=2)))
def test_wherever_two_arrays_lie(first, second):
    """Of 64 elements each; also next to each other, where one sector of this machine belongs to both."""
    for gap in 0, 64:
        x, out = memory_at((first, 64), (first + 256 + gap + (second - first) % 32, 64))
        assert sectors(STRIDED, 2, x, out, np.int32(1), np.int32(0)) == [8, 8, 8, 8, 0, 0]
        assert sectors(STRIDED, 2, out, x, np.int32(1), np.int32(0)) == [8, 8, 8, 8, 0, 0]


@pytest.mark.parametrize("first", [0, 12])
def test_neighbours_share_no_sector(first):
    """One element of each of three arrays that lie within one sector of this machine: three sectors."""
    source = """
    extern "C" __global__ void sum(const float* x, const float* y, float* out) { *out = *x + *y; }"""
    x, y, out = memory_at((first, 1), (first + 4, 1), (first + 8, 1))
    assert sectors(source, 1, x, y, out) == [2, 2, 1, 1, 0, 0]


def test_atomics():
    source = 'extern "C" __global__ void add(float* x, float* y) { atomicAdd(x + threadIdx.x, 1.0f); atomicAdd(y, 1); }'
    for first, second in (0, 128), (16, 144), (16, 160), (20, 176):
        x, y = memory_at((first, 32), (second, 4))
        assert sectors(source, 1, x, y) == [0, 0, 0, 0, 5, 5]


def test_one_instruction_that_reads_several_arrays():
    source = """
    extern "C" __global__ void pick(const float* x, const float* y, const float* z, float* out) {
      int t = threadIdx.x;
      const float* from = t < 8 ? x : t < 16 ? y : z;
      if (t != 5) out[t] = from[t % 8];
    }"""
    for places in ((0, 16), (64, 16), (128, 16), (256, 32)), ((16, 16), (96, 16), (164, 16), (252, 32)):
        x, y, z, out = memory_at(*places)
        assert sectors(source, 1, x, y, z, out) == [3, 3, 4, 4, 0, 0]


def test_a_view_stays_where_it_is_in_its_memory():
    """One element on, a warp that reads 128 bytes reads from a fifth sector; and memory that two views share is one."""
    for first in 0, 16:
        x, out = memory_at((first, 68), (first + 320, 64))
        for view in x[1:], x.view(np.int32)[1:].view(np.float32), np.lib.stride_tricks.as_strided(x[1:], (32,), (4,)):
            assert sectors(STRIDED, 1, view, out, np.int32(1), np.int32(0)) == [5, 5, 4, 4, 0, 0]
        assert sectors(STRIDED, 1, x[:32], x[33:], np.int32(1), np.int32(0)) == [4, 4, 5, 5, 0, 0]


def test_memory_that_the_simulator_has_placed():
    source = """
    __device__ float kept[40];
    extern "C" __global__ void keep(const float* x) { kept[threadIdx.x] = x[threadIdx.x]; }"""
    for x in ptxsim.empty(32, np.float32), zeros(32):
        assert sectors(source, 1, x) == [4, 4, 4, 4, 0, 0]
    module = ptxsim.RawModule(code=source, options=OPTIONS)
    kept = module.get_global("kept").view(np.float32)
    with ptxsim.profile() as profile:
        module.get_function("keep")((1,), (32,), (kept[1:],))
    assert profile.kernels[0].distinct_load_sectors == 5
    assert profile.kernels[0].distinct_store_sectors == 4
