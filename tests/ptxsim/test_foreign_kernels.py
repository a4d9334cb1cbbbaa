"""More kernels in the manner of those that people pass to `cupy.RawModule`, each against NumPy."""

import numpy as np
import pytest

from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES[:2], ids=schedule_name)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


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
