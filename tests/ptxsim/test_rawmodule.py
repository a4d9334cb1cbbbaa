"""RawModule as CuPy's: names and templates, options, arguments of every kind, grids and blocks of every shape."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim

from .launching import OPTIONS, SCHEDULES, launch, module, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)


def test_templates_by_name_expression():
    source = """
    template <typename T, int N> __global__ void scale(T* x) { x[threadIdx.x] *= N; }
    namespace inner { __global__ void zero(int* x) { x[threadIdx.x] = 0; } }
    """
    names = ("scale<float, 3>", "scale<long long, -2>", "inner::zero")
    templates = ptxsim.RawModule(code=source, options=OPTIONS, name_expressions=names)
    floats, integers, zeros = np.arange(8, dtype=np.float32), np.arange(8), np.ones(8, np.int32)
    templates.get_function("scale<float, 3>")((1,), (8,), (floats,))
    templates.get_function("scale<long long, -2>")((1,), (8,), (integers,))
    templates.get_function("inner::zero")((1,), (8,), (zeros,))
    np.testing.assert_array_equal(floats, 3 * np.arange(8))
    np.testing.assert_array_equal(integers, -2 * np.arange(8))
    assert not zeros.any()


def test_a_complex_argument_is_two_doubles():
    source = """
    struct Complex { double real, imaginary; };
    extern "C" __global__ void parts(double* out, Complex z) { out[0] = z.real; out[1] = z.imaginary; }"""
    out = poisoned(2, np.float64)
    launch(source, 1, 1, out, 2.5 - 3j)
    np.testing.assert_array_equal(out, [2.5, -3])


@pytest.mark.parametrize("kind", [int, np.int64, np.uint64])
def test_integers_of_64_bits_for_smaller_parameters(kind):
    """A GPU reads the low bytes: right for every value that the parameter holds, and refused for others."""
    source = """
    struct Whole { int value; };
    extern "C" __global__ void widen(long long* out, int a, unsigned b, short c, unsigned char d) {
        out[0] = a; out[1] = b; out[2] = c; out[3] = d;
    }
    extern "C" __global__ void take(int* out, Whole whole) { *out = whole.value; }
    """
    both = module(source)
    limits = [(2**31 - 1, 2**32 - 1, 2**15 - 1, 2**8 - 1), (-(2**31), 0, -(2**15), 0), (5, 6, 7, 8)]
    for values in limits:
        if kind is np.uint64 and min(values) < 0:
            continue
        out = poisoned(4, np.int64)
        both.get_function("widen")((1,), (1,), (out, *map(kind, values)))
        np.testing.assert_array_equal(out, values)
    with pytest.raises(TypeError, match=r"args\[3\].*8 bytes"):
        both.get_function("widen")((1,), (1,), (poisoned(4, np.int64), kind(0), kind(0), kind(2**16), kind(0)))
    with pytest.raises(TypeError, match=r"args\[1\].*8 bytes"):
        both.get_function("take")((1,), (1,), (poisoned(1, np.int32), kind(5)))


def test_several_kernels_in_one_module():
    source = """
    extern "C" __global__ void first(int* out) { out[threadIdx.x] = 1; }
    extern "C" __global__ void second(int* out, int x) { out[threadIdx.x] = x; }
    """
    both, out = module(source), poisoned(32, np.int32)
    both.get_function("second")((1,), (32,), (out, np.int32(5)))
    assert (out == 5).all()
    both.get_function("first")((1,), (32,), (out,))
    assert (out == 1).all()


def test_options_define_macros():
    source = 'extern "C" __global__ void value(int* out) { *out = VALUE + (int)sizeof(TYPE) * (__cplusplus / 100); }'
    for value, ptx_type, size in ((7, "double", 8), (-3, "short", 2)):
        defined = ptxsim.RawModule(code=source, options=("-std=c++17", f"-DVALUE={value}", f"-DTYPE={ptx_type}"))
        out = poisoned(1, np.int32)
        defined.get_function("value")((1,), (1,), (out,))
        assert out[0] == value + size * 2017


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_architecture_of_the_settings_is_compiled_for(target):
    source = 'extern "C" __global__ void arch(int* out) { *out = __CUDA_ARCH__; }'
    out = poisoned(1, np.int32)
    launch(source, 1, 1, out, arch=target)
    assert out[0] == 10 * int(target[3:])
    assert f".target {target}" in ptxsim.compile_ptx(source, OPTIONS, target)


def test_float_code_is_flushed_to_zero_as_cupy_compiles_it():
    source = 'extern "C" __global__ void half(const float* x, float* out) { out[0] = x[0] * 0.5f; }'
    x, out = np.array([2.0**-126], np.float32), poisoned(1, np.float32)
    launch(source, 1, 1, x, out)
    assert out[0] == 0


MIXED = """
struct Pair { short a; double b; };
extern "C" __global__ void mixed(double* out, signed char c, bool flag, unsigned short h, int i, long long l, float f,
                                 double d, Pair pair, const double* maybe) {
  out[0] = c; out[1] = flag; out[2] = h; out[3] = i; out[4] = (double)l; out[5] = f; out[6] = d;
  out[7] = pair.a; out[8] = pair.b; out[9] = maybe ? maybe[0] : -1.0;
}"""


def test_arguments_of_every_kind():
    """NumPy scalars keep their width; a Python int is 64-bit, a Python float double, a bool one byte, None null."""
    pair = np.zeros((), np.dtype([("a", "i2"), ("b", "f8")], align=True))
    pair["a"], pair["b"] = -5, 2.75
    fixed = (np.int8(-7), np.bool_(True), np.uint16(65535), np.int32(-(2**31)), np.int64(2**52), np.float32(0.1))
    for long, double, flag, maybe in (
        (np.int64(2**52), np.float64(0.1), True, np.array([9.5])),
        (2**52, 0.1, np.bool_(False), None),
    ):
        out = poisoned(10, np.float64)
        arguments = (out, fixed[0], flag, fixed[2], fixed[3], long, fixed[5], double, pair[()], maybe)
        launch(MIXED, 1, 1, *arguments)
        expected = [-7, bool(flag), 65535, -(2.0**31), 2.0**52, float(np.float32(0.1)), 0.1, -5, 2.75]
        np.testing.assert_array_equal(out, [*expected, -1 if maybe is None else 9.5])


STRUCTURES = """
struct Small { float scale; int shift; };
struct Large { short tag; double matrix[2][3]; Small inner[2]; const float* data; };
extern "C" __global__ void structures(double* out, Small small, Large large, float f) {
  int t = threadIdx.x;
  Small inner = large.inner[t % 2];
  out[t] = large.tag + large.matrix[t % 2][t % 3] * small.scale + small.shift + inner.scale * inner.shift * f;
  if (large.data) out[t] += large.data[t];
}"""
SMALL = np.dtype([("scale", "f4"), ("shift", "i4")], align=True)
LARGE = np.dtype(
    [("tag", "i2"), ("matrix", "f8", (2, 3)), ("inner", SMALL, 2), ("data", np.uint64)],
    align=True,
)


@pytest.mark.parametrize("form", [lambda x: x[()], lambda x: x, lambda x: x.reshape(1, 1)])
def test_structures_by_value(form):
    """As scalars of a structured dtype, or as arrays of one element: `Small` has the size of a pointer."""
    random, t = np.random.default_rng(), np.arange(32)
    small, large, data = np.zeros((), SMALL), np.zeros((), LARGE), random.integers(0, 99, 32).astype(np.float32)
    small["scale"], small["shift"], large["tag"], large["data"] = 0.5, -7, 123, data.ctypes.data
    large["matrix"], large["inner"]["scale"], large["inner"]["shift"] = random.normal(size=(2, 3)), [2, -4], [3, 5]
    out = poisoned(32, np.float64)
    with ptxsim.device_memory(data):
        launch(STRUCTURES, 1, 32, out, form(small), form(large), form(np.asarray(np.float32(0.25))))
    expected = 123 + large["matrix"][t % 2, t % 3] * 0.5 - 7 + np.array([1.5, -5])[t % 2] + data
    np.testing.assert_array_equal(out, expected)


VIEWS = {
    "offset": lambda x: x[2:, 3:],
    "reversed": lambda x: x[::-1, ::-1],
    "transposed": lambda x: x.T,
    "steps": lambda x: x[::2, 1::3],
    "broadcast": lambda x: np.broadcast_to(x[1], (4, x.shape[1])),
    "negative columns": lambda x: x[1:5, 6:0:-2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_a_pointer_to_its_first_element(view):
    source = """
    extern "C" __global__ void gather(const float* x, float* out, long long row_stride, long long column_stride) {
      out[threadIdx.y * blockDim.x + threadIdx.x] = x[threadIdx.y * row_stride + threadIdx.x * column_stride];
    }"""
    x = VIEWS[view](np.random.default_rng(1).normal(size=(8, 9)).astype(np.float32))
    out = poisoned(x.shape, np.float32)
    strides = [np.int64(s // x.itemsize) for s in x.strides]
    launch(source, 1, (x.shape[1], x.shape[0]), x, out, *strides)
    np.testing.assert_array_equal(out, x)


def test_arrays_of_any_dtype_and_empty_arrays_are_pointers():
    source = 'extern "C" __global__ void nothing(const void* a, const void* b, const void* c, int* out) { *out = 3; }'
    out = poisoned(1, np.int32)
    arguments = (np.zeros(3, ml_dtypes.bfloat16), np.zeros(2, [("x", "i4"), ("y", "f8")]), np.zeros((0, 5)), out)
    launch(source, 1, 1, *arguments)
    assert out[0] == 3


COORDINATES = """
extern "C" __global__ void coordinates(int* out) {
  unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int* o = out + 6 * (block * (blockDim.x * blockDim.y * blockDim.z) + thread);
  o[0] = blockIdx.x; o[1] = blockIdx.y; o[2] = blockIdx.z; o[3] = threadIdx.x; o[4] = threadIdx.y; o[5] = threadIdx.z;
}"""

SHAPES = [((1,), (1,)), ((3,), (33,)), ((2, 3), (5, 7)), ((2, 1, 4), (3, 4, 5)), ((1, 2), (1, 1, 64)), ((5,), (1024,))]


@every_schedule
@pytest.mark.parametrize("grid, block", SHAPES)
def test_grids_and_blocks_of_up_to_three_dimensions(grid, block, schedule):
    full_grid, full_block = ((*shape, 1, 1)[:3] for shape in (grid, block))
    out = poisoned((*full_grid[::-1], *full_block[::-1], 6), np.int32)
    launch(COORDINATES, grid, block, out, **schedule)
    indices = np.indices(out.shape[:-1])
    np.testing.assert_array_equal(out, np.stack([*indices[2::-1], *indices[:2:-1]], -1))


MIXING = """
extern "C" __global__ void mixing(const int* x, int* out) {
  __shared__ int box[48];
  int t = threadIdx.x, i = blockIdx.x * 48 + t, v = x[i];
  for (int round = 0; round < (int)(blockIdx.x % 4) + 1; ++round) {
    box[t] = v;
    __syncthreads();
    v = v * 3 + box[(t * 5 + round) % 48];
    if (v & 1) v ^= blockIdx.x; else for (int k = 0; k < (v & 7); ++k) v += k;
    __syncthreads();
  }
  out[i] = v;
}"""


def test_results_do_not_depend_on_the_schedule_or_on_other_blocks():
    """More than a thousand blocks at once equal fewer blocks, random schedules, and the formula."""
    blocks = 1100
    x = np.random.default_rng(2).integers(-1000, 1000, (blocks, 48)).astype(np.int32)
    out = poisoned(x.shape, np.int32)
    launch(MIXING, blocks, 48, x, out)
    some = poisoned((200, 48), np.int32)
    launch(MIXING, 200, 48, x[:200], some, schedule="random", seed=1)
    np.testing.assert_array_equal(some, out[:200])
    few = poisoned((9, 48), np.int32)
    launch(MIXING, 9, 48, x[:9], few)
    np.testing.assert_array_equal(few, out[:9])

    v = x.astype(np.int64)
    block = np.arange(blocks)[:, None]
    for r in range(4):
        box = v[:, (np.arange(48) * 5 + r) % 48]
        new = v * 3 + box
        v = np.where(block % 4 >= r, np.where(new & 1 == 1, new ^ block, settled(new)), v)
    np.testing.assert_array_equal(out, v)


def settled(v):
    """What `for (k = 0; k < (v & 7); ++k) v += k` leaves; its bound moves with v."""
    v = v.copy()
    running = np.ones(v.shape, bool)
    for k in range(8):
        running &= k < (v & 7)
        v += np.where(running, k, 0)
    return v


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.integers(1, 70), threads=st.integers(1, 130), n=st.integers(0, 6000), seed=st.none() | st.integers(0, 99)
)
def test_a_grid_stride_loop_covers_everything_once(blocks, threads, n, seed):
    source = """
    extern "C" __global__ void stride(int* out, int n) {
      for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) out[i] += i + 1;
    }"""
    out = np.zeros(6000, np.int32)
    schedule = {"schedule": "lockstep"} if seed is None else {"schedule": "random", "seed": seed}
    launch(source, blocks, threads, out, np.int32(n), **schedule)
    expected = np.arange(1, 6001)
    expected[n:] = 0
    np.testing.assert_array_equal(out, expected)


def test_registers_of_the_launch_in_inline_ptx():
    source = """
    extern "C" __global__ void registers(int* out) {
      int r[6];
      asm("mov.u32 %0, %%tid.x;" : "=r"(r[0]));     asm("mov.u32 %0, %%ntid.y;" : "=r"(r[1]));
      asm("mov.u32 %0, %%ctaid.x;" : "=r"(r[2]));   asm("mov.u32 %0, %%nctaid.x;" : "=r"(r[3]));
      asm("{ .reg .u16 h; mov.u16 h, 77; cvt.u32.u16 %0, h; }" : "=r"(r[4]));
      asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(r[5]));
      for (int k = 0; k < 6; ++k)
        out[((blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) * 6 + k] = r[k];
    }"""
    out = poisoned((3, 2, 5, 6), np.int32)
    launch(source, 3, (5, 2), out, shared_mem=1040)
    block, _, x = np.indices((3, 2, 5))
    expected = [x, 0 * x + 2, block, 0 * x + 3, 0 * x + 77, 0 * x + 1040]
    np.testing.assert_array_equal(out, np.stack(expected, -1))


def test_declarations_without_spaces():
    """As the functions of cuda_fp16.h have them, in nested scopes."""
    source = r"""
    extern "C" __global__ void nested(int* x) {
      int y;
      asm("{.reg.b32 a,b;\n mov.b32 a,%1;\n add.s32 b,a,1;\n{.reg.b32 a; mov.b32 a,2; mul.lo.s32 b,b,a;}\n"
          "add.s32 %0,a,b;}" : "=r"(y) : "r"(x[threadIdx.x]));
      x[threadIdx.x] = y;
    }"""
    x = np.arange(32, dtype=np.int32)
    launch(source, 1, 32, x)
    np.testing.assert_array_equal(x, np.arange(32) * 3 + 2)
