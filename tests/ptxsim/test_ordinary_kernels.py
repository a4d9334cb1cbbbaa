"""Whole kernels as people write them, against NumPy: what the simulator is for."""

import numpy as np
import pytest

from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@every_schedule
def test_saxpy(settings):
    source = """
    extern "C" __global__ void saxpy(int n, float a, const float* __restrict__ x, float* __restrict__ y) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = a * x[i] + y[i];
    }"""
    x, y = normal(2, 1000)
    expected = np.float32(-1.7) * x + y
    launch(source, 8, 128, np.int32(1000), np.float32(-1.7), x, y, **settings)
    np.testing.assert_array_equal(y, expected)


@every_schedule
@pytest.mark.parametrize("m, n, k", [(32, 32, 32), (33, 17, 50)])
def test_tiled_matmul(m, n, k, settings):
    source = """
    #define TILE 16
    extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
      __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE + 1];
      int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
      float sum = 0.0f;
      for (int start = 0; start < k; start += TILE) {
        a_tile[threadIdx.y][threadIdx.x] = row < m && start + threadIdx.x < k ? a[row * k + start + threadIdx.x] : 0;
        b_tile[threadIdx.y][threadIdx.x] = column < n && start + threadIdx.y < k
            ? b[(start + threadIdx.y) * n + column] : 0;
        __syncthreads();
        #pragma unroll
        for (int j = 0; j < TILE; ++j) sum = __fmaf_rn(a_tile[threadIdx.y][j], b_tile[j][threadIdx.x], sum);
        __syncthreads();
      }
      if (row < m && column < n) c[row * n + column] = sum;
    }"""
    a, b, c = normal(m, k), normal(k, n, seed=2), poisoned((m, n), np.float32)
    sizes = (np.int32(m), np.int32(n), np.int32(k))
    launch(source, (-(-n // 16), -(-m // 16)), (16, 16), a, b, c, *sizes, **settings)
    exact, bound = a.astype(float) @ b, (k + 1) * 2.0**-24 * (abs(a).astype(float) @ abs(b))
    assert (abs(c - exact) <= bound).all()


@every_schedule
def test_online_softmax_of_rows(settings):
    source = """
    extern "C" __global__ void softmax(const float* x, float* out, int n) {
      const float* row = x + (long long)blockIdx.x * n;
      float m = -INFINITY, l = 0.0f;
      for (int j = threadIdx.x; j < n; j += 32) {
        float previous = m;
        m = fmaxf(m, row[j]);
        l = l * expf(previous - m) + expf(row[j] - m);
      }
      for (int mask = 16; mask; mask >>= 1) {
        float other_m = __shfl_xor_sync(0xffffffffu, m, mask), other_l = __shfl_xor_sync(0xffffffffu, l, mask);
        float both = fmaxf(m, other_m);
        l = l * expf(m - both) + other_l * expf(other_m - both);
        m = both;
      }
      for (int j = threadIdx.x; j < n; j += 32) out[(long long)blockIdx.x * n + j] = expf(row[j] - m) / l;
    }"""
    x, out = 8 * normal(9, 50), poisoned((9, 50), np.float32)
    launch("#define INFINITY __int_as_float(0x7f800000)\n" + source, 9, 32, x, out, np.int32(50), **settings)
    p = np.exp(x.astype(float) - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, p / p.sum(1, keepdims=True), rtol=1e-5, atol=1e-36)


@every_schedule
def test_bitonic_sort(settings):
    source = """
    extern "C" __global__ void sort(float* x) {
      __shared__ float box[128];
      int t = threadIdx.x;
      box[t] = x[t];
      for (int size = 2; size <= 128; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
          __syncthreads();
          int other = t ^ step;
          float mine = box[t], theirs = box[other];
          bool ascending = (t & size) == 0;
          __syncthreads();
          box[t] = (t < other) == ascending ? fminf(mine, theirs) : fmaxf(mine, theirs);
        }
      x[t] = box[t];
    }"""
    x = normal(128)
    expected = np.sort(x)
    launch(source, 1, 128, x, **settings)
    np.testing.assert_array_equal(x, expected)


def test_stencil_in_three_dimensions():
    source = """
    extern "C" __global__ void stencil(const float* x, float* out, int n) {
      int i = threadIdx.x, j = threadIdx.y, k = blockIdx.x * blockDim.z + threadIdx.z;
      if (i == 0 || j == 0 || k == 0 || i >= n - 1 || j >= n - 1 || k >= n - 1) return;
      const float* p = x + (k * n + j) * n + i;
      out[(k * n + j) * n + i] = (p[-1] + p[1]) + (p[-n] + p[n]) + (p[-n * n] + p[n * n]) - 6.0f * p[0];
    }"""
    x, out = normal(10, 10, 10), np.zeros((10, 10, 10), np.float32)
    launch(source, 3, (10, 10, 4), x, out, np.int32(10))
    inner = x[1:-1, 1:-1, 1:-1]
    expected = (
        (x[1:-1, 1:-1, :-2] + x[1:-1, 1:-1, 2:])
        + (x[1:-1, :-2, 1:-1] + x[1:-1, 2:, 1:-1])
        + (x[:-2, 1:-1, 1:-1] + x[2:, 1:-1, 1:-1])
    ) - np.float32(6) * inner
    np.testing.assert_array_equal(out[1:-1, 1:-1, 1:-1], expected)
    assert not out[0].any() and not out[:, :, -1].any()


def test_monte_carlo_with_an_integer_generator():
    """A 64-bit linear congruential generator per thread, and doubles made of its high bits."""
    source = """
    extern "C" __global__ void pi(unsigned long long* inside, int draws) {
      unsigned long long state = blockIdx.x * blockDim.x + threadIdx.x + 12345;
      unsigned long long count = 0;
      for (int k = 0; k < draws; ++k) {
        double p[2];
        for (int j = 0; j < 2; ++j) {
          state = state * 6364136223846793005ULL + 1442695040888963407ULL;
          p[j] = (double)(state >> 11) * (1.0 / 9007199254740992.0);
        }
        count += p[0] * p[0] + p[1] * p[1] < 1.0;
      }
      atomicAdd(inside, count);
    }"""
    inside = np.zeros(1, np.uint64)
    launch(source, 2, 64, inside, np.int32(40))
    state = np.arange(128, dtype=np.uint64) + np.uint64(12345)
    count = 0
    for _ in range(40):
        p = []
        for _ in range(2):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            p.append((state >> np.uint64(11)).astype(np.float64) / 2.0**53)
        count += int((p[0] * p[0] + p[1] * p[1] < 1).sum())
    assert inside[0] == count


def test_half_precision_with_the_toolkit_header():
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void axpy(__half2 a, const __half2* x, __half2* y, float* sum) {
      int i = threadIdx.x;
      y[i] = __hfma2(a, x[i], y[i]);
      sum[i] = __low2float(y[i]) + __half2float(__high2half(y[i]));
    }"""
    x, y = normal(2, 64).astype(np.float16)
    a = np.array([1.5, -2.0], np.float16)
    expected = (np.tile(a, 32).astype(float) * x + y).astype(np.float16)
    total = poisoned(32, np.float32)
    launch(source, 1, 32, a.view("V4")[0], x, y, total)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(total, expected.astype(np.float32).reshape(32, 2).sum(1))


def test_printf(capfd):
    source = r"""
    extern "C" int printf(const char*, ...);
    extern "C" __global__ void talk(const float* x) {
      if (threadIdx.x % 16 == 3)
        printf("thread %d of %s: %.3f %5u|%-4x|%lld %c %%\n",
               threadIdx.x, "block", x[threadIdx.x], 42u, 255, -5LL, 'z');
    }"""
    x = normal(32)
    launch(source, 1, 32, x)
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == sorted(f"thread {t} of block: {x[t]:.3f}    42|ff  |-5 z %" for t in (3, 19))
