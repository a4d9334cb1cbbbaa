"""More kernels in the manner of those that people pass to `cupy.RawModule`, each against NumPy."""

import numpy as np
import pytest

from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES[:2], ids=schedule_name)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_matrix_product_by_register_tiles():
    """A 32 x 32 tile for 64 threads, 4 x 4 results each, loaded as float4 and multiplied from registers."""
    source = """
    extern "C" __global__ void __launch_bounds__(64) sgemm(const float4* __restrict__ a, const float4* __restrict__ b,
                                                           float4* __restrict__ c, int n, int k) {
      __shared__ float left[8][36], right[8][32];
      int t = threadIdx.x, row = t / 8 * 4, column = t % 8 * 4;
      float sum[4][4] = {};
      for (int start = 0; start < k; start += 8) {
        float4 x = a[((blockIdx.y * 32 + t / 2) * k + start) / 4 + t % 2];
        left[t % 2 * 4][t / 2] = x.x; left[t % 2 * 4 + 1][t / 2] = x.y;
        left[t % 2 * 4 + 2][t / 2] = x.z; left[t % 2 * 4 + 3][t / 2] = x.w;
        *(float4*)&right[t / 8][column] = b[((start + t / 8) * n + blockIdx.x * 32 + column) / 4];
        __syncthreads();
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          float p[4], q[4];
          *(float4*)p = *(float4*)&left[j][row];
          *(float4*)q = *(float4*)&right[j][column];
          #pragma unroll
          for (int r = 0; r < 4; ++r)
            #pragma unroll
            for (int s = 0; s < 4; ++s) sum[r][s] += p[r] * q[s];
        }
        __syncthreads();
      }
      for (int r = 0; r < 4; ++r)
        c[((blockIdx.y * 32 + row + r) * n + blockIdx.x * 32 + column) / 4] = *(float4*)sum[r];
    }"""
    a, b, c = normal(64, 24), normal(24, 96, seed=2), poisoned((64, 96), np.float32)
    launch(source, (3, 2), 64, a, b, c, np.int32(96), np.int32(24))
    bound = 26 * 2.0**-24 * (abs(a).astype(float) @ abs(b))
    assert (abs(c - a.astype(float) @ b) <= bound).all()


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
def test_layer_norm_with_running_moments(settings):
    """Mean and variance in one pass, merged across a warp; __half in and out."""
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void layer_norm(const __half* x, const float* scale, __half* out, int n, float epsilon) {
      const __half* row = x + blockIdx.x * n;
      float mean = 0.0f, m2 = 0.0f, count = 0.0f;
      for (int j = threadIdx.x; j < n; j += 32) {
        float v = __half2float(row[j]), d = v - mean;
        count += 1.0f;
        mean += d / count;
        m2 += d * (v - mean);
      }
      for (int mask = 1; mask < 32; mask *= 2) {
        float other_mean = __shfl_xor_sync(~0u, mean, mask), other_m2 = __shfl_xor_sync(~0u, m2, mask);
        float other_count = __shfl_xor_sync(~0u, count, mask), all = count + other_count, d = other_mean - mean;
        if (all > 0.0f) {
          m2 += other_m2 + d * d * count * other_count / all;
          mean += d * other_count / all;
        }
        count = all;
      }
      float factor = rsqrtf(m2 / n + epsilon);
      for (int j = threadIdx.x; j < n; j += 32)
        out[blockIdx.x * n + j] = __float2half((__half2float(row[j]) - mean) * factor * scale[j]);
    }"""
    x, scale, out = (3 + 2 * normal(6, 75)).astype(np.float16), normal(75, seed=3), poisoned((6, 75), np.float16)
    launch(source, 6, 32, x, scale, out, np.int32(75), np.float32(1e-5), **settings)
    wide = x.astype(float)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)


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
