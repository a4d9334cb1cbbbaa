"""Small whole kernels against NumPy; `kernels` has larger ones, by families."""

import numpy as np
import pytest

from cupyflash import ptxsim

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


@pytest.mark.parametrize("options", [(), ("-G",)], ids=["optimised", "debug"])
def test_printf_as_c_has_it(options, capfd):
    """Widths that are arguments, strings in any memory, hexadecimal floats; the result is how many arguments it had."""
    source = r"""
    extern "C" __global__ void talk(int* counts) {
      char own[3] = {char('a' + threadIdx.x), 'b', 0};
      __shared__ char shared[2];
      shared[0] = 's', shared[1] = 0;
      counts[threadIdx.x] = printf("%s %.1s %s %s|%*d|%-*d|%.*f|%a|%#o|%p|%p|%q\n", own, own, shared, (char*)0,
                                   4, 7, 3, 8, 2, 1.256, -0.75, 8, (void*)0, (void*)255);
      counts[threadIdx.x + 2] = printf("%d of %d\n", 1, threadIdx.x == 1 ? -2 : 2) + printf("%c%%\n", (char)-62);
    }"""
    counts = poisoned(4, np.int32)
    ptxsim.RawKernel(source, "talk", options)((1,), (2,), (counts,))
    said = sorted(capfd.readouterr().out.splitlines())
    line = "{}b {} s (null)|   7|8  |1.26|-0x1.8p-1|010|(nil)|0xff|%q"
    assert said == sorted([line.format(c, c) for c in "ab"] + ["1 of 2", "1 of -2", *2 * ["\u00c2%"]])
    np.testing.assert_array_equal(counts, [14, 14, 3, 3])


def test_printf_of_what_is_no_string():
    source = """extern "C" __global__ void talk(const char* x) { printf("%s", x); }"""
    with pytest.raises(ptxsim.MemoryFault, match="just past the end"):
        launch(source, 1, 1, np.full(4, ord("x"), np.uint8))
