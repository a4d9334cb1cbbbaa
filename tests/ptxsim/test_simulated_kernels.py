"""Kernels of the simulated CuPy: arguments as CuPy passes them, and the kernels that CuPy generates, against NumPy."""

import gc

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim.testing import launches, simulated_cupy

cp = simulated_cupy()

ADD = r"""
struct Pair { const float* x; float factor; };
extern "C" __global__ void add(const float* x, float* y, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += factor * x[i];
}
extern "C" __global__ void add_pair(Pair pair, float* y) { y[threadIdx.x] += pair.factor * pair.x[threadIdx.x]; }
extern "C" __global__ void add_all(const float* const* x, float* y, int count) {
    for (int i = 0; i < count; i++) y[threadIdx.x] += x[i][threadIdx.x];
}
template <typename T> __global__ void fill(T* x, T value) { x[threadIdx.x] = value; }
extern "C" {
__constant__ float weights[4];
__device__ int total;
__global__ void weigh(float* x) { x[threadIdx.x] *= weights[threadIdx.x]; atomicAdd(&total, 1); }
}
"""
PAIR = np.dtype([("x", np.uint64), ("factor", np.float32)], align=True)


@pytest.fixture(scope="module")
def module():
    return cp.RawModule(code=ADD, name_expressions=("fill<float>", "fill<short>"))


@pytest.fixture
def x():
    return cp.asarray(np.random.default_rng(0).standard_normal(4).astype(np.float32))


def test_arguments(module, x):
    y, factor = cp.ones(4, cp.float32), np.float32(0.5)
    module.get_function("add")((1,), (4,), args=(x, y, factor, x.size), stream=cp.cuda.Stream.null)
    cp.testing.assert_array_equal(y, 1 + factor * x)
    add = module.get_function("add")
    add((1,), (4,), (x.data, y.data + 8, np.array(2, np.float32), np.array([2], np.int32)))  # NumPy's: by value
    np.testing.assert_array_equal(y.get(), (1 + factor * x.get()) + np.append([0, 0], 2 * x[:2].get()).astype("f4"))
    for wrong, error in (
        ((x.get(), y, factor, 4), r"args\[0\].*host memory"),
        ((x, y, x[:1], 4), r"args\[2\]"),  # a device array is an address, also where it has one element
        ((x, y, 0.5, 4), r"args\[2\].*8 bytes"),
        ((x, y, factor), "3 arguments"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            add((1,), (4,), wrong)


def test_a_grid_without_blocks_launches_one(module, x):
    y = cp.zeros(4, cp.float32)
    for grid in ((0,), (0, 1), 0):
        module.get_function("add")(grid, (4,), (x, y, np.float32(1), x.size))
    cp.testing.assert_allclose(y, 3 * x, rtol=1e-6)


def test_addresses_in_structures_and_in_memory(module, x):
    y = cp.zeros(4, cp.float32)
    pair = np.zeros(1, PAIR)
    pair["x"], pair["factor"] = x.data.ptr, 2
    module.get_function("add_pair")((1,), (4,), (pair, y))
    others = [cp.full(4, value, cp.float32) for value in (10, 20)]
    addresses = cp.array([other.data.ptr for other in others], dtype=cp.uint64)
    module.get_function("add_all")((1,), (4,), (addresses, y, len(others)))
    cp.testing.assert_array_equal(y, 2 * x + 10 + 20)
    del others
    gc.collect()
    with pytest.raises(ptxsim.MemoryFault):  # the memory is gone
        module.get_function("add_all")((1,), (4,), (addresses, y, 2))


def test_templates_and_variables(module, x):
    y = cp.zeros(4, cp.int16)
    module.get_function("fill<short>")((1,), (4,), (y, np.int16(-3)))
    assert y.tolist() == [-3] * 4
    weights = cp.ndarray((4,), cp.float32, module.get_global("weights"))
    weights[...] = cp.arange(4, dtype=cp.float32)
    last = weights[2:]
    last += 5  # a view of the variable
    before = x.copy()
    module.get_function("weigh")((1,), (4,), (x,))
    cp.testing.assert_array_equal(x, before * cp.array([0, 1, 7, 8], dtype=cp.float32))
    assert int(cp.ndarray((), cp.int32, module.get_global("total"))) == 4


def test_a_kernel_is_compiled_when_it_is_needed():
    kernel = cp.RawKernel("nonsense", "nonsense")
    for use in (kernel.compile, lambda: kernel.num_regs, lambda: kernel((1,), (1,), ())):
        with pytest.raises(cp.cuda.compiler.CompileException, match="nonsense"):
            use()
    with pytest.raises(cp.cuda.compiler.CompileException):
        cp.RawModule(code="nonsense").get_function("nonsense")


def test_attributes_of_a_kernel():
    code = 'extern "C" __global__ void last(char* x, int n) { extern __shared__ char s[]; s[n] = 1; *x = s[n]; }'
    kernel, x = cp.RawKernel(code, "last"), cp.zeros(1, cp.int8)
    with pytest.raises(ValueError, match="max_dynamic_shared_size_bytes"):
        kernel((1,), (1,), (x, 99_999), shared_mem=100_000)
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((1,), (1,), (x, 99_999), shared_mem=100_000)
    assert x.tolist() == [1] and kernel.attributes["max_dynamic_shared_size_bytes"] == 100_000
    assert kernel.attributes == {name: getattr(kernel, name) for name in kernel.attributes}
    assert not kernel.enable_cooperative_groups
    assert 0 < kernel.num_regs <= 255 and kernel.shared_size_bytes == 0


def test_arrays_are_called_what_the_project_calls_them():
    source = 'extern "C" __global__ void last(int n, int* x) { x[0] = threadIdx.x; }'
    for x in cp.zeros(1, cp.int32), cp.zeros(2, cp.int32):
        with ptxsim.sanitize() as report:
            cp.RawKernel(source, "last")((1,), (32,), (2, x))
        assert "different values to args[1][0]" in report.findings[0].message
    with ptxsim.sanitize() as report:
        cp.RawKernel(source, "last")((1,), (32,), (2, x.data))
    assert f"different values to memory at {x.data.ptr:#x}[0]" in report.findings[0].message
    put = cp.ElementwiseKernel("T value", "raw T place", "place[0] = value", "put")
    with ptxsim.sanitize() as report:
        put(cp.arange(4), cp.zeros(1, int))
    assert "different values to place[0]" in report.findings[0].message


def test_launches_are_counted(x):
    kernel = cp.RawKernel('extern "C" __global__ void counted(float* x) { x[threadIdx.x] = 0; }', "counted")
    assert launches.launches["counted"] == 0 and "counted" in launches.launches
    for _ in range(2):
        kernel((1,), (4,), (x,))
    assert launches.launches["counted"] == 2


AXPY = cp.ElementwiseKernel("T x, T y, float32 factor", "T z", "z = (T)(factor * x + y)", "axpy")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, x),
        lambda x: (x[:, ::2], x[:, 1::2]),
        lambda x: (x.T, x.T),
        lambda x: (x[:1], x[:, :1]),
        lambda x: (x, 3),
        lambda x: (np.int32(2), x[0]),
        lambda x: (x[0, 0], x[1, 1]),
        lambda x: (x[:, :0], x[:, :0]),
    ],
    ids=["plain", "strided", "transposed", "broadcast", "scalar", "scalar first", "0-d", "empty"],
)
def test_elementwise(make):
    x = np.random.default_rng(1).integers(-99, 99, (5, 8), dtype=np.int32)
    expected = sum(np.multiply(v, f) for v, f in zip(make(x), (2, 1), strict=True))
    z = AXPY(*make(cp.asarray(x)), 2)
    assert isinstance(z, cp.ndarray) and z.dtype == np.int32 and z.shape == expected.shape
    cp.testing.assert_array_equal(z, expected)


@pytest.mark.parametrize("dtype", ["float16", "complex64", "bool", "uint8"])
def test_elementwise_types(dtype):
    add = cp.ElementwiseKernel("T x, T y", "T z", "z = x + y", "add")
    x = np.random.default_rng(2).integers(0, 5, (3, 7)).astype(dtype)
    for y in (x, x.dtype.type(1)):
        z = add(cp.asarray(x), cp.asarray(y) if y is x else y)
        assert z.dtype == x.dtype
        cp.testing.assert_array_equal(z, x + y)


def test_elementwise_outputs():
    x = cp.arange(6.0).reshape(2, 3)
    both = cp.ElementwiseKernel("T x", "T up, int64 down", "up = x + 1; down = -x", "both")
    up, down = both(x)
    assert (up == x + 1).all() and down.dtype == np.int64 and (down == -x).all()
    given = cp.empty((2, 3)), cp.empty((3, 2), cp.int64).T
    results = both(x, *given)
    assert results[0] is given[0] and results[1] is given[1] and (given[1] == -x).all()
    for wrong, error, match in (
        ((x, up[0], down), ValueError, r"up: shape \(3,\), must be \(2, 3\)"),
        ((x, up, up), TypeError, "Type is mismatched. down"),
        ((x, up.get(), down), TypeError, r"output: ndarray, must be cupy\.ndarray"),
        ((x.get(), up, down), TypeError, "host memory"),
        ((x, up), TypeError, "2 arguments, must be 1, or 3"),
    ):
        with pytest.raises(error, match=match):
            both(*wrong)
    in_place = x.copy()
    both(in_place, in_place, down)  # in CuPy's source the name x is a reference to what is written
    assert (in_place == x + 1).all() and (down == -in_place).all()
    single = cp.ElementwiseKernel("T x", "T y", "y = x", "single", return_tuple=True)
    assert isinstance(single(x), tuple)
    nothing = cp.ElementwiseKernel("T x", "T y", "y = x", "nothing", no_return=True)
    assert nothing(x, up) is None and (up == x).all()


def test_elementwise_raw():
    shifted = cp.ElementwiseKernel("raw T x, int32 by", "T y", "y = x[(i + by) % _ind.size()]", "shifted")
    x = cp.arange(7)
    assert shifted(x, 2, size=7).tolist() == [2, 3, 4, 5, 6, 0, 1]
    assert shifted(x[::-1], 2, size=7).tolist() == [4, 3, 2, 1, 0, 6, 5]
    assert shifted(x, 2, cp.zeros(7, int)).tolist() == [2, 3, 4, 5, 6, 0, 1]
    with pytest.raises(ValueError, match="size must be given"):
        shifted(x, 2)
    with pytest.raises(ValueError, match="size must be given"):
        shifted(x, 2, cp.zeros(7, int), size=7)
    scatter = cp.ElementwiseKernel("T x", "raw T y", "y[i] = x", "scatter")
    with pytest.raises(ValueError, match="raw output"):
        scatter(x)
    with pytest.raises(ValueError, match="block_size: 0"):
        shifted(x, 2, size=7, block_size=0)
    with pytest.raises(AttributeError, match=r"ElementwiseKernel\.cached_code: not simulated"):
        shifted.cached_code  # noqa: B018


def test_elementwise_source():
    """All parts of the source are there, and what goes wrong in it names its kernel."""
    kernel = cp.ElementwiseKernel(
        "raw T x",
        "T y",
        "y = twice(x[i]) + OFFSET + offset",
        "parts",
        preamble="template <typename T> __device__ T twice(T x) { return 2 * x; }",
        loop_prep="int offset = 100;",
        options=("-DOFFSET=1000",),
    )
    assert kernel(cp.arange(3), size=3).tolist() == [1100, 1102, 1104]
    with ptxsim.sanitize() as report:
        kernel(cp.arange(3), size=5)
    assert [(finding.kind, finding.kernel) for finding in report.findings] == [("out of bounds", "parts")]
    index = cp.ElementwiseKernel("T x", "T y", "y = 10 * _ind.get()[0] + _ind.get()[1]", "index", reduce_dims=False)
    assert index(cp.zeros((2, 3), int)).tolist() == [[0, 1, 2], [10, 11, 12]]


DISTANCE = cp.ReductionKernel("T x, T y", "T z", "(x - y) * (x - y)", "a + b", "z = sqrt(a)", "0", "distance")


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reduction(axis, keepdims):
    x, y = np.random.default_rng(3).standard_normal((2, 5, 33, 4))
    expected = np.sqrt(((x - y) ** 2).sum(axis=axis, keepdims=keepdims))
    z = DISTANCE(cp.asarray(x), cp.asarray(y), axis=axis, keepdims=keepdims)
    assert isinstance(z, cp.ndarray) and z.shape == expected.shape
    cp.testing.assert_allclose(z, expected, rtol=1e-14)
    out = cp.empty(expected.shape)
    assert DISTANCE(cp.asarray(x.T).T, cp.asarray(y), axis=axis, keepdims=keepdims, out=out) is out
    cp.testing.assert_allclose(out, expected, rtol=1e-14)


def test_reduction_of_many_and_of_nothing():
    largest = cp.ReductionKernel("T x", "T y", "x", "max(a, b)", "y = a", None, "largest")
    x = np.random.default_rng(4).integers(0, 2**31, 5000, dtype=np.int64)
    with ptxsim.sanitize() as report:
        assert int(largest(cp.asarray(x))) == x.max()
    assert not report
    with pytest.raises(ValueError, match="nothing to reduce"):
        largest(cp.zeros((3, 0)), axis=1)
    assert largest(cp.zeros((0, 3)), axis=1).shape == (0,)
    assert DISTANCE(cp.zeros((3, 0)), cp.zeros((3, 0)), axis=1).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="no array to reduce"):
        largest(3)
    with pytest.raises(ValueError, match="out"):
        largest(cp.zeros(3), cp.zeros(()), out=cp.zeros(()))
