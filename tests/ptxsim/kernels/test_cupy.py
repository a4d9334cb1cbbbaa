"""Kernels as CuPy writes them: `cupy.cu`."""

import numpy as np

from cupyflash import ptxsim


def carray(array, ndim):
    """The bytes that CuPy passes for an array: address, size, shape and strides."""
    pointer = array.ctypes.data
    fields = np.array([pointer, array.size, *array.shape, *array.strides], np.int64)
    assert fields.size == 2 + 2 * ndim
    return fields.view(f"V{fields.nbytes}")[0]


def indexer(*shape):
    """The same for what counts through a shape."""
    fields = np.array([np.prod(shape), *shape, *(0 for _ in shape)], np.int64)
    return fields.view(f"V{fields.nbytes}")[0]


def launch_over(launch, kernel, grid, block, arguments, arrays):
    with ptxsim.device_memory(*arrays):
        launch("cupy", kernel, grid, block, *arguments)


def test_elementwise(launch):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(7, 26)).astype(np.float32)[:, ::2], rng.normal(size=(13, 7)).astype(np.float32).T
    z = ptxsim.empty((7, 13), np.float32)
    arguments = *(carray(a, 2) for a in (x, y, z)), indexer(7, 13)
    launch_over(launch, "elementwise", 2, 32, arguments, (x, y, z))
    np.testing.assert_array_equal(z, (x - y) ** 2)


def reduction(launch):
    x, out = np.random.default_rng(2).normal(size=(5, 130)).astype(np.float16), ptxsim.empty(5, np.float16)
    launch_over(launch, "reduction", 2, 64, (carray(x, 2), carray(out, 1), indexer(5)), (x, out))
    return out, x


def test_reduction(launch):
    out, x = reduction(launch)
    exact = x.astype(float).sum(1)
    assert (abs(out - exact) <= 2.0**-11 * abs(exact) + 10 * 2.0**-24 * abs(x).astype(float).sum(1)).all()


def test_complex_functions(launch):
    z = np.random.default_rng(3).normal(size=(32, 2)).view(np.complex128)[:, 0]
    out, lengths = ptxsim.empty(32, np.complex128), ptxsim.empty(32)
    launch("cupy", "complex_functions", 1, 32, z, out, lengths)
    np.testing.assert_allclose(lengths, abs(z), rtol=1e-15)
    np.testing.assert_allclose(out, z * z / (z + 3 + 1j) - z.conj() + np.exp(z / 4) + np.sqrt(z), rtol=1e-13)


def test_halves(launch):
    x = np.random.default_rng(4).integers(-40, 40, 64).astype(np.float16)
    x[3], x[40] = np.inf, np.nan
    y, total, finite = ptxsim.empty(32, np.float16), np.zeros(2, np.float16), ptxsim.empty(32, np.bool_)
    x[3] = np.inf
    launch("cupy", "halves", 1, 32, x, y, total, finite)
    a, b = x[:32], x[32:]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(finite, np.isfinite(a) & ~np.isnan(b) & (a < b))
    known = np.isfinite(a) & np.isfinite(b)
    expected = np.maximum(a * b, a + b) / np.float16(3)
    np.testing.assert_array_equal(y[known], expected[known])
    assert total[0] == a[::2].sum() and np.isposinf(total[1])


def test_scatter_add(launch):
    indices = np.random.default_rng(5).integers(-9, 9, 100)
    values, out = np.arange(100), np.zeros(18, np.int64)[::2]
    expected = np.zeros(9, np.int64)
    np.add.at(expected, indices, values)
    arguments = carray(indices, 1), carray(values, 1), carray(out, 1)
    launch_over(launch, "scatter_add", 2, 32, arguments, (indices, values, out))
    np.testing.assert_array_equal(out, expected)


def test_a_tree_that_begins_too_early_is_a_race(planted):
    launch = planted("    __syncthreads();  // of all elements\n", "")
    reduction(launch)
    assert launch.kinds == {"shared race"}
