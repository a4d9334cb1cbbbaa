"""Races in global memory: blocks are ordered by flags, locks and grid barriers alone."""

import numpy as np
import pytest

from .launching import SCHEDULES, poisoned, schedule_name
from .sanitized import assert_found, findings, line

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def numbers(n, dtype=np.int32):
    return np.arange(n, dtype=dtype)


@every_schedule
@pytest.mark.parametrize("chunk_lanes", [64, 4096])
def test_blocks_are_not_ordered(chunk_lanes, settings):
    source = """
    extern "C" __global__ void chain(const int* x, int* y, int* z) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      y[i] = x[i];  // other
      __syncthreads();
      z[i] = y[(i + 64) % 192] + 1;  // here
    }"""
    x, y, z = numbers(192), poisoned(192, np.int32), poisoned(192, np.int32)
    found = findings(source, 3, 64, x, y, z, chunk_lanes=chunk_lanes, **settings)
    assert {f.kind for f in found} == {"global race"}
    assert {f.where for f in found} | {f.other for f in found} == {line(source, "here"), line(source, "other")}
    assert "args[1][" in str(found[0]), found[0]
    assert not findings(source.replace("+ 64", ""), 3, 64, x, y, z, chunk_lanes=chunk_lanes, **settings)


@every_schedule
@pytest.mark.parametrize("chunk_lanes", [64, 4096])
@pytest.mark.parametrize("step", ["*total += x[i];  // here", "atomicAdd(total, x[i]);"])
def test_a_sum_without_atomics(step, chunk_lanes, settings):
    source = f"""
    extern "C" __global__ void sum(const int* x, int* total) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      {step}
    }}"""
    found = findings(source, 4, 64, numbers(256), np.zeros(1, np.int32), chunk_lanes=chunk_lanes, **settings)
    assert {f.kind for f in found} <= {"global race", "different values"}
    assert {f.where for f in found} == ({line(source, "here")} if "here" in step else set())


LAST_BLOCK = """
extern "C" __global__ void last_block(const int* x, PARTIAL int* partial, unsigned* ticket, int* total) {
  __shared__ int s[64];
  __shared__ bool last;
  int t = threadIdx.x;
  s[t] = x[blockIdx.x * 64 + t];
  __syncthreads();
  for (int step = 32; step > 0; step /= 2) {
    if (t < step) s[t] += s[t + step];
    __syncthreads();
  }
  if (t == 0) {
    partial[blockIdx.x] = s[0];  // other
    FENCE
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 0) {
    int all = 0;
    for (int b = 0; b < gridDim.x; b++) all += partial[b];  // here
    *total = all;
  }
}"""


@every_schedule
@pytest.mark.parametrize("chunk_lanes", [64, 4096])
@pytest.mark.parametrize("fence", ["__threadfence();", ""])
@pytest.mark.parametrize("partial", ["", "volatile"])
def test_the_last_block_adds_the_partial_sums(partial, fence, chunk_lanes, settings):
    source = LAST_BLOCK.replace("FENCE", fence).replace("PARTIAL", partial)
    sums, ticket, total = poisoned(8, np.int32), np.zeros(1, np.uint32), poisoned(1, np.int32)
    found = findings(source, 8, 64, numbers(512), sums, ticket, total, chunk_lanes=chunk_lanes, **settings)
    assert total[0] == 512 * 511 // 2
    if fence or partial:
        assert not found
    else:
        assert_found(source, found, "global race")


LOOK_BACK = """
extern "C" __global__ void scan(const int* x, int* y, volatile int* sums, volatile int* flags, int* tickets) {
  __shared__ int s[32];
  __shared__ int before, block;
  int t = threadIdx.x;
  if (t == 0) block = atomicAdd(tickets, 1);
  __syncthreads();
  int b = block;
  s[t] = x[b * 32 + t];
  __syncwarp();
  for (int step = 1; step < 32; step *= 2) {
    int v = t >= step ? s[t - step] : 0;
    __syncwarp();
    s[t] += v;
    __syncwarp();
  }
  if (t == 31) {
    *(int*)&sums[2 * b] = s[31];  // own
    __threadfence();
    flags[b] = 1;
    int sum = 0;
    for (int k = b - 1; k >= 0; k--) {
      int f;
      while ((f = flags[k]) == 0);
      __threadfence();
      if (f == 2) { sum += *(int*)&sums[2 * k + 1]; break; }
      sum += *(int*)&sums[2 * k];
    }
    *(int*)&sums[2 * b + 1] = sum + s[31];
    __threadfence();
    flags[b] = 2;
    before = sum;
  }
  __syncthreads();
  y[b * 32 + t] = before + s[t];
}"""


@every_schedule
def test_a_scan_that_looks_back(settings):
    x, y = numbers(256), poisoned(256, np.int32)
    sums, flags, tickets = poisoned(16, np.int32), np.zeros(8, np.int32), np.zeros(1, np.int32)
    assert not findings(LOOK_BACK, 8, 32, x, y, sums, flags, tickets, **settings)
    np.testing.assert_array_equal(y, np.cumsum(x))


LOCK = """
extern "C" __global__ void locked(int* lock, int* total) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      BEHIND
      *total = *total + 1;  // here
      BEFORE
      atomicExch(lock, 0);
      done = true;
    }
  }
}"""


@every_schedule
@pytest.mark.parametrize("fence", ["__threadfence();", ""])
def test_a_lock_needs_fences(fence, settings):
    source = LOCK.replace("BEHIND", fence).replace("BEFORE", fence)
    total = np.zeros(1, np.int32)
    found = findings(source, 2, 64, np.zeros(1, np.int32), total, **settings)
    if fence:
        assert not found and total[0] == 128
    else:
        assert {(f.where, f.other) for f in found} == {2 * (line(source, "here"),)}
        assert "global race" in {f.kind for f in found}


@every_schedule
def test_release_and_acquire_need_no_fence(settings):
    source = """
    extern "C" __global__ void pass(int* data, int* flag, int* y) {
      if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x;
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("st.release.gpu.u32 [%0], 1;" :: "l"(flag) : "memory");
      } else {
        int seen = 0;
        if (threadIdx.x == 0)
          while (!seen) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        __syncthreads();
        y[threadIdx.x] = data[63 - threadIdx.x];
      }
    }"""
    y = poisoned(64, np.int32)
    assert not findings(source, 2, 64, poisoned(64, np.int32), np.zeros(1, np.int32), y, **settings)
    np.testing.assert_array_equal(y, numbers(64)[::-1])


@every_schedule
def test_a_barrier_of_the_whole_grid(settings):
    source = """
    extern "C" __global__ void steps(int* a, int* b, unsigned* arrived) {
      int i = blockIdx.x * 32 + threadIdx.x, n = gridDim.x * 32;
      for (unsigned round = 1; round <= 3; round++) {
        b[i] = a[(i + 1) % n];
        int* other = a; a = b; b = other;
        __syncthreads();
        if (threadIdx.x == 0) {
          __threadfence();
          atomicAdd(arrived, 1);
          while (*(volatile unsigned*)arrived < round * gridDim.x);
          __threadfence();
        }
        __syncthreads();
      }
    }"""
    a, b = numbers(128), poisoned(128, np.int32)
    assert not findings(source, 4, 32, a, b, np.zeros(1, np.uint32), **settings)
    np.testing.assert_array_equal(b, np.roll(numbers(128), -3))


ARRIVAL = r"""
__device__ void wait(volatile int* flag, int all) {
  while (*flag < all);
  __threadfence();
}
extern "C" __global__ void steps(int* data, int* flags, int* out) {
  __shared__ volatile int half;
  int t = threadIdx.x, i = blockIdx.x * 64 + t, all = 0;
  if (t == 0) half = 0;
  __syncthreads();
  for (int round = 1; round <= 4; round++) {
    if (round % 2) data[i] = round; else out[i] = data[(blockIdx.x + 1) % gridDim.x * 64 + 63 - t];
    all += gridDim.x;
    ARRIVE
  }
}"""
ARRIVE = "atomicAdd(flags, 1); wait(flags, all);"
ARRIVALS = {
    "every thread has fenced": f"__threadfence(); __syncthreads(); if (t == 0) {{ {ARRIVE} }} __syncthreads();",
    "every warp arrives": f"""
      __syncwarp(); if (t % 32 == 0) {{ __threadfence(); {ARRIVE.replace("all", "2 * all")} }} __syncwarp();""",
    "bar.arrive": f"""
      if (t < 32) asm volatile("bar.sync 1, 64;" ::: "memory"); else asm volatile("bar.arrive 1, 64;" ::: "memory");
      if (t == 0) {{ __threadfence(); {ARRIVE} }}
      __syncthreads();""",
    "a flag of the other warp": f"""
      __syncwarp();
      if (t == 32) {{ __threadfence(); half = round; }}
      if (t == 0) {{ while (half < round); __threadfence(); {ARRIVE} }}
      __syncthreads();""",
    "a tree of blocks": """
      __syncthreads();
      if (t == 0) {
        __threadfence();
        if (atomicAdd(flags + 1 + blockIdx.x / 2, 1) % 2) { __threadfence(); atomicAdd(flags, 2); }
        wait(flags, all);
      }
      __syncthreads();""",
}


@every_schedule
@pytest.mark.parametrize("arrival", ARRIVALS)
def test_ways_to_arrive_at_a_barrier_of_the_grid(arrival, settings):
    data, flags, out = poisoned(256, np.int32), np.zeros(3, np.int32), poisoned(256, np.int32)
    assert not findings(ARRIVAL.replace("ARRIVE", ARRIVALS[arrival]), 4, 64, data, flags, out, **settings)
    assert (out == 3).all()


@every_schedule
def test_the_other_warp_has_not_arrived(settings):
    """Its writes are before a fence, but nobody knows that they are."""
    arrive = f"if (t == 0) {{ __threadfence(); {ARRIVE} }} __syncthreads();"
    data, flags, out = poisoned(256, np.int32), np.zeros(3, np.int32), poisoned(256, np.int32)
    found = findings(ARRIVAL.replace("ARRIVE", arrive), 4, 64, data, flags, out, **settings)
    assert {f.kind for f in found} == {"global race"}


@every_schedule
def test_a_first_guess_for_compare_and_swap(settings):
    """The loop of the CUDA guide: the plain load only gives the first comparand."""
    source = """
    __device__ double slow_add(double* address, double value) {
      unsigned long long* bits = (unsigned long long*)address;
      unsigned long long old = *bits, assumed;
      do {
        assumed = old;
        old = atomicCAS(bits, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
      } while (assumed != old);
      return __longlong_as_double(old);
    }
    extern "C" __global__ void sum(double* total) { slow_add(total, threadIdx.x); }"""
    total = np.zeros(1)
    assert not findings(source, 2, 64, total, **settings)
    assert total[0] == 64 * 63


@every_schedule
def test_an_atomic_that_adds_nothing_is_a_load(settings):
    source = """
    extern "C" __global__ void poll(int* flag, int* y) {
      int t = threadIdx.x;
      while (t && atomicAdd(flag, 0) == 0);
      if (!t) { __threadfence(); atomicExch(flag, 1); }
      y[t] = *flag;
    }"""
    y = poisoned(64, np.int32)
    assert not findings(source, 1, 64, np.zeros(1, np.int32), y, **settings)
    assert (y == 1).all()
