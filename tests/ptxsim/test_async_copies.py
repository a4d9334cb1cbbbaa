"""cp.async: the bytes are there after the wait and not before it, groups complete in order, short copies fill zeros."""

import numpy as np
import pytest

from .launching import launch, poisoned

OLD = 0x11111111

COPY = """
__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
"""


def random_words(*shape):
    """Words of a 16-byte aligned array, none of them equal to the old value."""
    words = np.random.default_rng(len(shape)).integers(2**30, 2**31, (*shape[:-1], shape[-1] + 8), dtype=np.uint32)
    flat = words.reshape(-1)
    start = -flat.ctypes.data % 16 // 4
    return flat[start : start + int(np.prod(shape))].reshape(shape)


def test_a_copy_lands_at_the_wait():
    """Reading one's own destination before the wait never gives the new bytes; after the wait it always does."""
    source = (
        COPY
        + """
    extern "C" __global__ void late(const uint4* x, unsigned* early, uint4* after) {
      __shared__ uint4 tile[64];
      int t = threadIdx.x;
      tile[t] = make_uint4(0x11111111, 0x11111111, 0x11111111, 0x11111111);
      __syncthreads();
      copy16(&tile[t], &x[t]);
      commit();
      early[t] = ((volatile unsigned*)&tile[t])[1];
      wait<0>();
      after[t] = tile[t];
    }"""
    )
    x = random_words(64, 4)
    early, after = poisoned(64, np.uint32), poisoned((64, 4), np.uint32)
    launch(source, 1, 64, x, early, after)
    assert not (early == x[:, 1]).any()
    np.testing.assert_array_equal(after, x)


def test_other_threads_see_a_copy_after_the_barrier():
    source = (
        COPY
        + """
    extern "C" __global__ void exchange(const uint4* x, uint4* out) {
      __shared__ uint4 tile[96];
      int t = threadIdx.x;
      copy16(&tile[t], &x[blockIdx.x * 96 + t]);
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
      out[blockIdx.x * 96 + t] = tile[95 - t];
    }"""
    )
    x = random_words(5, 96, 4)
    for settings in ({}, {"schedule": "random", "seed": 3}):
        out = poisoned((5, 96, 4), np.uint32)
        launch(source, 5, 96, x, out, **settings)
        np.testing.assert_array_equal(out, x[:, ::-1])


@pytest.mark.parametrize("missing", ["wait<0>();", "__syncthreads();"])
def test_a_missing_wait_or_barrier_shows(missing):
    """Without the wait, or under some schedule without the barrier, other threads' bytes are not there."""
    body = """
    extern "C" __global__ void exchange(const uint4* x, uint4* out) {
      __shared__ uint4 tile[128];
      int t = threadIdx.x;
      copy16(&tile[t], &x[t]);
      commit();
      wait<0>();
      __syncthreads();
      out[t] = tile[127 - t];
    }"""
    x = random_words(128, 4)

    def right(source, seed):
        out = poisoned((128, 4), np.uint32)
        launch(source, 1, 128, x, out, schedule="random", seed=seed)
        return (out == x[::-1]).all()

    assert all(right(COPY + body, seed) for seed in range(4))
    assert not all(right(COPY + body.replace(missing, ""), seed) for seed in range(4))


def test_groups_complete_in_order():
    """After waiting for all but the N newest groups, exactly the older ones have landed; empty groups count."""
    source = (
        COPY
        + """
    extern "C" __global__ void groups(const uint4* x, unsigned* out) {
      __shared__ uint4 tile[4][32];
      int t = threadIdx.x;
      for (int k = 0; k < 4; ++k) tile[k][t] = make_uint4(0x11111111, 0, 0, 0);
      volatile uint4 (*seen)[32] = tile;
      copy16(&tile[0][t], &x[t]); commit();
      copy16(&tile[1][t], &x[32 + t]); copy16(&tile[2][t], &x[64 + t]); commit();
      commit();
      copy16(&tile[3][t], &x[96 + t]);
      wait<2>(); for (int k = 0; k < 4; ++k) out[(0 * 4 + k) * 32 + t] = seen[k][t].x;
      wait<1>(); for (int k = 0; k < 4; ++k) out[(1 * 4 + k) * 32 + t] = seen[k][t].x;
      wait<0>(); for (int k = 0; k < 4; ++k) out[(2 * 4 + k) * 32 + t] = seen[k][t].x;
      commit();
      wait<0>(); for (int k = 0; k < 4; ++k) out[(3 * 4 + k) * 32 + t] = seen[k][t].x;
    }"""
    )
    x = random_words(4, 32, 4)
    out = poisoned((4, 4, 32), np.uint32)
    launch(source, 1, 32, x, out)
    landed = (out == x[None, :, :, 0]).all(2)
    absent = (out != x[None, :, :, 0]).all(2)
    # Three groups: {0}, {1, 2}, {}; buffer 3 is in no group until the last commit.
    expected = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(landed, expected)
    np.testing.assert_array_equal(absent, ~expected)


def test_groups_belong_to_their_thread():
    """A thread that commits more groups than its neighbour waits for its own newest ones only."""
    source = (
        COPY
        + """
    extern "C" __global__ void own(const uint4* x, unsigned* out) {
      __shared__ uint4 tile[3][64];
      int t = threadIdx.x, n = 1 + t % 3;
      for (int k = 0; k < 3; ++k) tile[k][t] = make_uint4(0x11111111, 0, 0, 0);
      for (int k = 0; k < n; ++k) { copy16(&tile[k][t], &x[k * 64 + t]); commit(); }
      wait<1>();
      for (int k = 0; k < 3; ++k) out[k * 64 + t] = ((volatile uint4*)tile[k])[t].x;
      wait<0>();
    }"""
    )
    x = random_words(3, 64, 4)
    out = poisoned((3, 64), np.uint32)
    launch(source, 1, 64, x, out)
    for t in range(64):
        for k in range(3):
            assert (out[k, t] == x[k, t, 0]) == (k < t % 3), (k, t)
            assert out[k, t] != OLD or k >= t % 3


def test_threads_that_do_not_wait_do_not_get_their_bytes():
    """A wait on one side of a branch completes the copies of the threads on that side."""
    source = (
        COPY
        + """
    extern "C" __global__ void some(const uint4* x, unsigned* out) {
      __shared__ uint4 tile[96];
      int t = threadIdx.x;
      tile[t] = make_uint4(0x11111111, 0, 0, 0);
      copy16(&tile[t], &x[t]);
      commit();
      if (t % 5 < 2) wait<0>();
      out[t] = ((volatile uint4*)tile)[t].x;
      wait<0>();
      out[96 + t] = ((volatile uint4*)tile)[t].x;
    }"""
    )
    x = random_words(96, 4)
    out = poisoned((2, 96), np.uint32)
    launch(source, 1, 96, x, out)
    np.testing.assert_array_equal(out[0] == x[:, 0], np.arange(96) % 5 < 2)
    np.testing.assert_array_equal(out[1], x[:, 0])


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("address", ['"r"(shared_address(to))', '"l"(__cvta_generic_to_shared(to))', '"l"(to)'])
def test_sizes_and_zero_fill(size, address):
    """src-size bytes are copied and the rest of cp-size is zero; src-size 0 reads nothing, whatever the address."""
    cache = "cg" if size == 16 else "ca"
    source = (
        COPY
        + f"""
    extern "C" __global__ void fill(const char* x, char* out, const int* sizes) {{
      __shared__ __align__(16) char tile[64 * 16];
      int t = threadIdx.x;
      char* to = tile + 16 * t;
      for (int k = 0; k < 16; ++k) to[k] = 0x11;
      const char* from = sizes[t] ? x + 16 * t : (const char*)0x1230 - (1LL << 40);
      asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;"
          :: {address}, "l"(from), "r"(sizes[t]) : "memory");
      wait<0>();
      asm volatile("cp.async.wait_all;" ::: "memory");
      for (int k = 0; k < 16; ++k) out[16 * t + k] = to[k];
    }}"""
    )
    x = random_words(64, 4).view(np.uint8).reshape(64, 16)
    sizes = (np.arange(64) % (size + 1)).astype(np.int32)
    out = poisoned((64, 16), np.uint8)
    launch(source, 1, 64, x, out, sizes)
    k = np.arange(16)
    filled = np.where(k < size, np.where(k < sizes[:, None], x, 0), 0x11)
    np.testing.assert_array_equal(out, filled)


def test_prefetch_hints_and_full_size_form():
    source = (
        COPY
        + """
    extern "C" __global__ void hints(const float4* x, float4* out) {
      __shared__ float4 tile[2][32];
      int t = threadIdx.x;
      asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16;"
          :: "r"(shared_address(&tile[0][t])), "l"(x + t) : "memory");
      asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16, 16;"
          :: "r"(shared_address(&tile[1][t])), "l"(x + 32 + t) : "memory");
      commit();
      wait<0>();
      out[t] = tile[0][t]; out[32 + t] = tile[1][t];
    }"""
    )
    x = random_words(64, 4)
    out = poisoned((64, 4), np.uint32)
    launch(source, 1, 32, x, out)
    np.testing.assert_array_equal(out, x)


def test_copies_of_some_lanes():
    """A predicated copy touches only the lanes that issue it."""
    source = (
        COPY
        + """
    extern "C" __global__ void some(const uint4* x, uint4* out) {
      __shared__ uint4 tile[64];
      int t = threadIdx.x;
      tile[t] = make_uint4(t, t, t, t);
      if (t % 3 == 0) copy16(&tile[t], &x[t]);
      commit();
      wait<0>();
      __syncthreads();
      out[t] = tile[63 - t];
    }"""
    )
    x = random_words(64, 4)
    out = poisoned((64, 4), np.uint32)
    launch(source, 1, 64, x, out)
    t = np.arange(64, dtype=np.uint32)[:, None]
    np.testing.assert_array_equal(out, np.where(t % 3 == 0, x, t)[::-1])
