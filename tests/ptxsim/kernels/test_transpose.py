"""Transposed matrices, and what their layouts cost: `transpose.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim


def transpose(launch, kernel, rows=45, columns=70, dtype=np.float32):
    x = np.random.default_rng(rows).normal(size=(rows, columns)).astype(dtype)
    out = ptxsim.empty((columns, rows), dtype)
    grid = (-(-columns // 32), -(-rows // 32))
    launch("transpose", kernel, grid, (32, 8), x, out, np.int32(rows), np.int32(columns))
    return out, x.T


@pytest.mark.parametrize("kernel", ["naive", "conflicts", "padded", "swizzled", "padded_double"])
def test_transpose(launch, kernel):
    out, expected = transpose(launch, kernel, dtype=np.float64 if kernel.endswith("double") else np.float32)
    np.testing.assert_array_equal(out, expected)


def test_matrices_of_a_warp(launch):
    x, out = np.arange(3 * 64, dtype=np.uint16).reshape(3, 8, 8), ptxsim.empty((3, 8, 8), np.uint16)
    launch("transpose", "matrices_of_a_warp", 3, 32, x, out)
    np.testing.assert_array_equal(out, x.swapaxes(1, 2))


def test_quads_of_lanes(launch):
    x, out = np.arange(64 * 4, dtype=np.int32).reshape(16, 4, 4), ptxsim.empty((16, 4, 4), np.int32)
    launch("transpose", "quads_of_lanes", 1, 64, x, out)
    np.testing.assert_array_equal(out, x.swapaxes(1, 2))


@pytest.mark.parametrize(
    "kernel, store_efficiency, shared_efficiency",
    [("naive", 1 / 8, None), ("conflicts", 1, 2 / 33), ("padded", 1, 1), ("swizzled", 1, 1)],
)
def test_what_a_layout_costs(launcher, kernel, store_efficiency, shared_efficiency):
    """A warp that writes a column needs 32 sectors, one that reads a column of an unpadded tile 32 wavefronts."""
    with ptxsim.profile() as profile:
        transpose(launcher, kernel, 64, 64)
    (counters,) = profile.kernels
    assert (counters.global_load_efficiency, counters.global_store_efficiency) == (1, store_efficiency)
    assert counters.shared_efficiency == shared_efficiency
    assert counters.barriers == (0 if kernel == "naive" else 4)


def test_a_missing_barrier_is_a_race(planted):
    launch = planted("  __syncthreads();\n", "")
    transpose(launch, "padded")
    assert launch.kinds == {"shared race"}


def test_a_row_that_is_not_checked_is_out_of_bounds(planted):
    launch = planted("if (row < rows && column + y < columns)", "if (column + y < columns)")
    transpose(launch, "swizzled")
    assert launch.kinds == {"out of bounds"}
