"""More kernels in the manner of those that people pass to `cupy.RawModule`, each against NumPy."""

import numpy as np
import pytest

from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES[:2], ids=schedule_name)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@every_schedule
def test_a_lock_that_threads_spin_on(settings):
    source = """
    extern "C" __global__ void insert(int* lock, int* list, int* count) {
      bool done = false;
      while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
          __threadfence();
          int at = *(volatile int*)count;
          *(volatile int*)(list + at) = blockIdx.x * blockDim.x + threadIdx.x;
          *(volatile int*)count = at + 1;
          __threadfence();
          atomicExch(lock, 0);
          done = true;
        }
      }
    }"""
    items, count = poisoned(80, np.int32), np.zeros(1, np.int32)
    launch(source, 2, 40, np.zeros(1, np.int32), items, count, **settings)
    assert count[0] == 80
    np.testing.assert_array_equal(np.sort(items), np.arange(80))


@every_schedule
def test_mandelbrot(settings):
    """Threads leave the loop one by one, after up to 60 steps."""
    source = """
    extern "C" __global__ void mandelbrot(unsigned char* steps, int width, int height) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y;
      if (i >= width || j >= height) return;
      double a = -2.0 + 2.5 * i / width, b = -1.25 + 2.5 * j / height, x = 0, y = 0;
      int k = 0;
      while (k < 60 && x * x + y * y <= 4.0) {
        double next = x * x - y * y + a;
        y = 2 * x * y + b;
        x = next;
        ++k;
      }
      steps[j * width + i] = k;
    }"""
    width, height = 37, 21
    steps = poisoned((height, width), np.uint8)
    launch(source, (3, 3), (16, 8), steps, np.int32(width), np.int32(height), **settings)
    a = -2.0 + 2.5 * np.arange(width) / width + np.zeros((height, 1))
    b = -1.25 + 2.5 * np.arange(height)[:, None] / height + np.zeros(width)
    x, y, k = np.zeros_like(a), np.zeros_like(a), np.zeros(a.shape, int)
    for _ in range(60):
        inside = x * x + y * y <= 4.0
        x, y = np.where(inside, x * x - y * y + a, x), np.where(inside, 2 * x * y + b, y)
        k += inside
    np.testing.assert_array_equal(steps, k)


@every_schedule
def test_counting_sort_with_shared_counters(settings):
    """Keys of a block counted in shared memory, the counts summed, and every key put where an atomic says."""
    source = """
    extern "C" __global__ void sort(const unsigned char* keys, unsigned char* sorted, int n) {
      __shared__ unsigned counts[256], starts[256];
      int t = threadIdx.x;
      counts[t] = 0;
      __syncthreads();
      for (int i = t; i < n; i += 256) atomicAdd(&counts[keys[i]], 1u);
      __syncthreads();
      if (t == 0) {
        unsigned sum = 0;
        for (int k = 0; k < 256; ++k) { starts[k] = sum; sum += counts[k]; }
      }
      __syncthreads();
      for (int i = t; i < n; i += 256) {
        unsigned at = atomicAdd(&starts[keys[i]], 1u);
        assert(at < n);
        sorted[at] = keys[i];
      }
    }"""
    keys, out = np.random.default_rng(8).integers(0, 256, 999).astype(np.uint8), poisoned(999, np.uint8)
    launch(source, 1, 256, keys, out, np.int32(999), **settings)
    np.testing.assert_array_equal(out, np.sort(keys))
