"""Barriers and pipelines of NVIDIA's C++ standard library: `libcudacxx_barriers.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

FAMILY = "libcudacxx_barriers"
every_arch = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])


@every_arch
def test_diffusion(launch, arch):
    x = np.random.default_rng(5).integers(-99, 99, (2, 64)).astype(np.float32)
    out, sums = ptxsim.empty((2, 64), np.float32), ptxsim.empty((2, 64), np.float32)
    launch(FAMILY, "diffusion", 2, 64, x, out, sums, np.int32(5), arch=arch)
    value, whole = x.astype(float), 0  # exact: multiples of 2**-5
    for _ in range(5):
        whole, value = whole + value, (np.roll(value, 1, 1) + np.roll(value, -1, 1)) / 2
    np.testing.assert_array_equal(out, value)
    np.testing.assert_array_equal(sums, whole)


@every_arch
def test_roles(launch, arch):
    x = np.random.default_rng(3).integers(-(2**20), 2**20, (2, 8, 32)).astype(np.int32)
    sums = ptxsim.empty((2, 32), np.int32)
    launch(FAMILY, "roles", 2, 64, x, sums, np.int32(8), arch=arch)
    np.testing.assert_array_equal(sums, x.sum(1)[:, ::-1])


@every_arch
def test_reversed(launch, arch):
    """On sm_90 by cp.async.bulk."""
    x = np.arange(3 * 64 * 4, dtype=np.int32).reshape(3, 64, 4)
    out = ptxsim.empty(x.shape, np.int32)
    launch(FAMILY, "reversed", 1, 64, x, out, np.int32(3), arch=arch)
    np.testing.assert_array_equal(out, x[:, ::-1])
