"""Shared, local, constant, parameter and module-level memory, and generic pointers into each of them."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, module, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


@every_schedule
def test_static_and_dynamic_shared_memory_are_apart(settings):
    """Two static arrays and the dynamic one, aliased under two names, do not overlap, and are private to a block."""
    source = """
    extern __shared__ __align__(16) char dynamic[];
    extern "C" __global__ void spaces(int* out, int n) {
      __shared__ int a[40];
      __shared__ double b[33];
      int* d = (int*)dynamic;
      int t = threadIdx.x, base = blockIdx.x * 1000;
      if (t < 40) a[t] = base + t;
      if (t < 33) b[t] = base + 100 + t;
      for (int k = t; k < n; k += blockDim.x) d[k] = base + 200 + k;
      __syncthreads();
      int r = (t + 17) % 32;
      int* o = out + (blockIdx.x * blockDim.x + t) * 3;
      o[0] = a[r + 8]; o[1] = (int)b[r + 1]; o[2] = d[n - 1 - r];
    }"""
    out = poisoned((3, 64, 3), np.int32)
    launch(source, 3, 64, out, np.int32(150), shared_mem=600, **settings)
    t = np.arange(64)
    r = (t + 17) % 32
    for block in range(3):
        expected = 1000 * block + np.stack([r + 8, 100 + r + 1, 200 + 149 - r], 1)
        np.testing.assert_array_equal(out[block], expected)


def test_kernels_that_share_a_name_of_dynamic_shared_memory():
    """It begins behind the static part of each kernel, also where both kernels are made before either runs."""
    source = """
    extern __shared__ int dynamic[];
    extern "C" __global__ void behind(int* x) {
        __shared__ int first[32];
        int t = threadIdx.x;
        first[t] = x[t];
        dynamic[t] = -1;
        __syncthreads();
        x[t] = first[t ^ 1];
    }
    extern "C" __global__ void alone(int* x) { dynamic[threadIdx.x] = x[threadIdx.x]; x[0] = dynamic[0]; }
    """
    kernels = [module(source).get_function(name) for name in ("behind", "alone")]
    x = np.arange(32, dtype=np.int32)
    kernels[0]((1,), (32,), (x,), shared_mem=128)
    np.testing.assert_array_equal(x, np.arange(32) ^ 1)


def test_shared_memory_holds_other_bytes_in_each_block():
    """The same shared address in blocks that run side by side keeps each block's own value."""
    source = """
    extern "C" __global__ void own(int* out) {
      __shared__ int box;
      if (threadIdx.x == 0) box = blockIdx.x * 7 + 1;
      __syncthreads();
      out[blockIdx.x * blockDim.x + threadIdx.x] = box;
    }"""
    out = poisoned((50, 32), np.int32)
    launch(source, 50, 32, out)
    np.testing.assert_array_equal(out, np.repeat(np.arange(50) * 7 + 1, 32).reshape(50, 32))


@every_schedule
def test_local_arrays_with_run_time_indices(settings):
    source = """
    extern "C" __global__ void local(int* out, const int* order) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      int stack[24];
      short halves[9];
      for (int k = 0; k < 24; ++k) stack[k] = i * k;
      for (int k = 0; k < 9; ++k) halves[order[k]] = (short)(k - i);
      for (int k = 0; k < 24; ++k) if (stack[(k * 5 + i) % 24] & 1) stack[(k + i) % 24] += k;
      int sum = 0;
      for (int k = 0; k < 24; ++k) sum = sum * 3 + stack[(k + order[k % 9]) % 24];
      out[i] = sum + 1000 * halves[order[i % 9]];
    }"""
    order = np.random.default_rng(1).permutation(9).astype(np.int32)
    out = poisoned(160, np.int32)
    launch(source, 2, 80, out, order, **settings)

    def model(i):
        stack, halves = [i * k for k in range(24)], {}
        for k in range(9):
            halves[order[k]] = k - i
        for k in range(24):
            if stack[(k * 5 + i) % 24] & 1:
                stack[(k + i) % 24] += k
        total = 0
        for k in range(24):
            total = total * 3 + stack[(k + int(order[k % 9])) % 24]
        return total + 1000 * int(halves[order[i % 9]])

    expected = [(model(i) + 2**31) % 2**32 - 2**31 for i in range(160)]
    np.testing.assert_array_equal(out, expected)


def test_constant_memory_and_module_variables():
    source = """
    __constant__ float table[5] = {1.5f, -2.0f, 0.25f, 1e30f, -0.0f};
    __constant__ short steps[3][2] = {{1, 2}, {3, 4}, {-5, -6}};
    __device__ int counter = 40;
    __device__ double grid[4] = {0.5, 1.5};
    extern "C" __global__ void constants(float* out, int* more) {
      int i = threadIdx.x;
      out[i] = table[i % 5];
      more[i] = steps[i % 3][i % 2] + counter + (int)(2 * grid[i % 4]);
    }"""
    out, more = poisoned(40, np.float32), poisoned(40, np.int32)
    launch(source, 1, 40, out, more)
    i = np.arange(40)
    np.testing.assert_array_equal(
        out.view(np.uint32), np.array([1.5, -2.0, 0.25, 1e30, -0.0], np.float32)[i % 5].view(np.uint32)
    )
    steps = np.array([[1, 2], [3, 4], [-5, -6]])
    np.testing.assert_array_equal(more, steps[i % 3, i % 2] + 40 + np.array([1, 3, 0, 0])[i % 4])


def test_generic_pointers_reach_the_space_they_came_from():
    """One function is given pointers to global, shared, local, constant and module memory, chosen per thread."""
    source = """
    __constant__ int fixed[4] = {10, 20, 30, 40};
    __device__ int moving[4] = {1, 2, 3, 4};
    extern "C" __global__ void generic(const int* x, int* out, int swap) {
      __shared__ int tile[4];
      int own[4];
      int t = threadIdx.x;
      for (int k = 0; k < 4; ++k) { own[k] = -k - 100 * t; if (t == 0) tile[k] = 5000 + k; }
      __syncthreads();
      const int* p;
      switch ((t + swap) % 5) {
        case 0: p = x + 4; break;
        case 1: p = tile; break;
        case 2: p = own; break;
        case 3: p = fixed; break;
        default: p = moving;
      }
      out[t] = p[(t / 5) % 4] * 2 + (__isShared(p) ? 1 : 0);
    }"""
    x = np.arange(100, 108, dtype=np.int32)
    out = poisoned(64, np.int32)
    launch(source, 1, 64, x, out, np.int32(3))
    for t in range(64):
        k, choice = t // 5 % 4, (t + 3) % 5
        values = [104 + k, 5000 + k, -k - 100 * t, (10, 20, 30, 40)[k], (1, 2, 3, 4)[k]]
        assert out[t] == 2 * values[choice] + (choice == 1), t


@pytest.mark.parametrize("arch, shared", [("sm_80", "shared"), ("sm_90", "shared::cluster")])
def test_spaces_of_pointers(arch, shared):
    """isspacep tells the windows apart. A block is a cluster, for which libcu++ asks in code for debugging."""
    spaces = ("global", shared, "local", "const")
    questions = "".join(
        f'asm("{{ .reg .pred p; isspacep.{space} p, %1; selp.s32 %0, 1, 0, p; }}" : "=r"(v) : "l"(pointers[k]));'
        f"out[k * 4 + {n}] = v;"
        for n, space in enumerate(spaces)
    )
    source = f"""
    __constant__ int fixed[2] = {{1, 2}};
    extern "C" __global__ void windows(int* out, int n) {{
      __shared__ int tile[2];
      int own[2] = {{n, n}}, v;
      const void* pointers[4] = {{out, tile + n, own + n, fixed + n}};
      for (int k = 0; k < 4; ++k) {{ {questions} }}
    }}"""
    out = poisoned((4, 4), np.int32)
    launch(source, 1, 1, out, np.int32(1), arch=arch)
    np.testing.assert_array_equal(out, np.eye(4))


def test_writes_through_generic_pointers():
    source = """
    extern "C" __global__ void scatter(int* out) {
      __shared__ int tile[64];
      int t = threadIdx.x;
      int* p = t & 1 ? tile + t : out + t;
      *p = 3 * t;
      if (!(t & 1)) tile[t] = -1;
      __syncthreads();
      if (t & 1) out[t] = tile[t];
    }"""
    out = poisoned(64, np.int32)
    launch(source, 1, 64, out)
    np.testing.assert_array_equal(out, 3 * np.arange(64))


PARAMETERS = np.dtype(
    {
        "names": ["flag", "count", "scale", "ratio", "data", "strides"],
        "formats": ["i1", "i4", "f4", "f8", "u8", ("i8", (8,))],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 96,
    }
)


@pytest.mark.parametrize("qualifier", ["const __grid_constant__", ""])
def test_struct_parameters_by_value(qualifier):
    """One struct argument, read by name and through a run-time index."""
    source = f"""
    struct Params {{
      signed char flag; int count; float scale; double ratio; const float* data; long long strides[8];
    }};
    extern "C" __global__ void structs({qualifier} Params params, double* out) {{
      int i = threadIdx.x;
      long long stride = params.strides[i % params.count];
      out[i] = params.flag * (params.scale + params.ratio) + params.data[i] + stride;
    }}"""
    x = np.random.default_rng(2).normal(size=32).astype(np.float32)
    strides = np.random.default_rng(3).integers(-(2**40), 2**40, 8)
    params = np.zeros((), PARAMETERS)
    values = (-3, 8, 0.1, 1 / 3, x.ctypes.data, strides)
    for name, value in zip(PARAMETERS.names, values, strict=True):
        params[name] = value
    out = poisoned(32, np.float64)
    with ptxsim.device_memory(x):
        launch(source, 1, 32, params[()], out)
    i = np.arange(32)
    expected = -3 * (float(np.float32(0.1)) + 1 / 3) + x.astype(np.float64) + strides[i % 8]
    np.testing.assert_array_equal(out, expected)


def test_address_of_a_grid_constant_parameter():
    source = """
    struct Table { int values[6]; };
    extern "C" __global__ void address(const __grid_constant__ Table table, int* out, const int* other) {
      const int* p = threadIdx.x < 12 ? table.values : other;
      out[threadIdx.x] = p[threadIdx.x % 6];
    }"""
    table = np.zeros((), np.dtype([("values", "i4", (6,))]))
    table["values"] = [5, 8, 13, 21, 34, 55]
    out = poisoned(18, np.int32)
    launch(source, 1, 18, table[()], out, -np.arange(6, dtype=np.int32))
    np.testing.assert_array_equal(out, [5, 8, 13, 21, 34, 55] * 2 + [0, -1, -2, -3, -4, -5])


def test_a_module_is_not_tied_to_the_arrays_of_its_first_launch():
    source = 'extern "C" __global__ void fill(float* out, float x) { out[threadIdx.x] = x; }'
    kernel = module(source).get_function("fill")
    for value in (1.0, 2.5):
        out = poisoned(32, np.float32)
        kernel((1,), (32,), (out, np.float32(value)))
        assert (out == value).all()
