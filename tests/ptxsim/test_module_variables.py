"""Variables of a module, `__device__` and `__constant__`, from inside and outside of kernels."""

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim import memory, workers

from .launching import OPTIONS, SCHEDULES, launch, module, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

WEIGHTED = """
__constant__ float weights[8];
__constant__ short fixed[3] = {7, -8, 9};
namespace inner { __device__ int seen[4] = {1, 2, 3}; }
template <typename T> __global__ void weighted(const T* x, T* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = x[i] * weights[threadIdx.x % 8] + fixed[threadIdx.x % 3];
  if (threadIdx.x < 4) atomicAdd(&inner::seen[threadIdx.x], 1);
}"""
NAMES = ("weighted<float>", "&weights", "&inner::seen")


def values(raw, name, shape, dtype):
    """A variable as `cupy.ndarray(shape, dtype, raw.get_global(name))` has it."""
    return np.ndarray(shape, dtype, raw.get_global(name))


@every_schedule
def test_constants_that_are_written_between_launches(settings):
    raw = ptxsim.RawModule(code=WEIGHTED, options=OPTIONS, name_expressions=NAMES)
    weights = values(raw, "&weights", 8, np.float32)
    assert raw.get_global("weights").nbytes == 32 and raw.get_global("fixed").nbytes == 6
    assert not weights.any()
    random = np.random.default_rng()
    i = np.arange(128)
    for _ in range(2):
        weights[...] = random.integers(-99, 99, 8)
        x, out = random.integers(-99, 99, 128).astype(np.float32), poisoned(128, np.float32)
        with ptxsim.settings(**settings):
            raw.get_function(NAMES[0])((2,), (64,), (x, out))
        expected = x * weights[i % 64 % 8] + np.array([7, -8, 9])[i % 64 % 3]
        np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(values(raw, "&inner::seen", 4, np.int32), np.array([1, 2, 3, 0]) + 4)


@pytest.mark.skipif(not workers.AVAILABLE, reason="worker processes need Linux")
def test_constants_in_worker_processes():
    source = """
    __constant__ int table[4];
    extern "C" __global__ void look(int* out) { out[blockIdx.x * 32 + threadIdx.x] = table[blockIdx.x % 4]; }"""
    table = values(module(source, "sm_80"), "table", 4, np.int32)
    for _ in range(2):
        table[...] = np.random.default_rng().integers(0, 1000, 4)
        out = poisoned((8, 32), np.int32)
        launch(source, 8, 32, out, workers=3, chunk_lanes=32)
        np.testing.assert_array_equal(out, np.repeat(np.tile(table, 2)[:, None], 32, 1))


def test_each_architecture_has_variables_of_its_own():
    source = """
    __constant__ int level;
    extern "C" __global__ void tell(int* out) { *out = level; }"""
    raw, out = ptxsim.RawModule(code=source), poisoned(1, np.int32)
    for arch in ("sm_80", "sm_90", "sm_80"):
        with ptxsim.settings(arch=arch):
            level = values(raw, "level", 1, np.int32)
            level += int(arch[3:])
            raw.get_function("tell")((1,), (1,), (out,))
            assert out[0] == level[0]
    assert level[0] == 160


def test_a_variable_as_an_argument():
    source = """
    __constant__ int fixed[32];
    __device__ int moving[32];
    extern "C" __global__ void copy(const int* from, int* to) { to[threadIdx.x] = from[threadIdx.x]; }
    extern "C" __global__ void twice(int* out) { int t = threadIdx.x; out[t] = 2 * fixed[t] + moving[t]; }"""
    raw = ptxsim.RawModule(code=source)
    x, out = np.arange(32, dtype=np.int32), poisoned(32, np.int32)
    for name, n in (("fixed", 1), ("moving", 100)):
        raw.get_function("copy")((1,), (32,), (n * x, raw.get_global(name)))
    raw.get_function("twice")((1,), (32,), (out,))
    np.testing.assert_array_equal(out, 102 * x)


ADDRESSES = """
__device__ int numbers[5] = {1, 20, 300, 4000, 50000};
__constant__ int fixed[3] = {7, 8, 9};
__device__ int* third = numbers + 2;
__constant__ const int* table[2][2] = {{numbers + 4, fixed + 1}, {numbers}};
__device__ const char* words[2] = {"one", "three"};
struct Node { const Node* next; short value; };
__constant__ Node last = {nullptr, -5}, first = {&last, 6};
__device__ int twice(int x) { return 2 * x; }
__device__ int less(int x) { return x - 1; }
typedef int (*Function)(int);
__constant__ Function functions[2] = {less, twice};
extern "C" __global__ void follow(int* out) {
  int t = threadIdx.x;
  out[t] = *third + *table[t / 2][0] * 2 + *table[0][t % 2] + words[t % 2][2];
  out[t] += 1000000 * first.next->value + functions[t % 2](t);
  third = numbers + t % 2;
}"""


@every_schedule
def test_addresses_as_initial_values(settings):
    """Of global and constant memory, of strings, of functions; with offsets, and in structures."""
    out, t = poisoned(4, np.int32), np.arange(4)
    raw = ptxsim.RawModule(code=ADDRESSES, options=OPTIONS)
    with ptxsim.settings(**settings):
        raw.get_function("follow")((1,), (4,), (out,))
    letters = np.array([ord("e"), ord("r")])[t % 2]
    called = np.where(t % 2, 2 * t, t - 1)
    pointed = np.array([50000, 1])[t // 2] * 2 + np.array([50000, 8])[t % 2]
    np.testing.assert_array_equal(out, 300 + pointed + letters + called - 5000000)
    offset = values(raw, "third", 1, np.uint64)[0] - raw.get_global("numbers").ctypes.data
    assert offset in (0, 4)


def test_module_variables_keep_their_value_between_launches_of_one_module():
    source = """
    __device__ int total;
    extern "C" __global__ void accumulate(int* out) { total += threadIdx.x == 0 ? 5 : 0; out[0] = total; }"""
    fresh = ptxsim.RawModule(code=source, options=OPTIONS)
    out = poisoned(1, np.int32)
    for launches in (1, 2, 3):
        fresh.get_function("accumulate")((1,), (1,), (out,))
        assert out[0] == 5 * launches
    ptxsim.RawModule(code=source, options=OPTIONS).get_function("accumulate")((1,), (1,), (out,))
    assert out[0] == 5


def test_constants_are_read_only_in_kernels():
    source = """
    __constant__ int fixed[4];
    extern "C" __global__ void write(int* out, int i) {
      int* p = i >= 0 ? (int*)fixed + i : out;
      *p = 1;
      *out = fixed[0];
    }"""
    out = poisoned(1, np.int32)
    with pytest.raises(ptxsim.MemoryFault, match=r"write of 4 bytes in global memory .* read-only"):
        launch(source, 1, 1, out, np.int32(2))
    launch(source, 1, 1, out, np.int32(-1))
    assert out[0] == 0


def test_variables_that_nothing_refers_to_cost_a_launch_nothing(monkeypatch):
    """Modules that include CUB have two thousand of them. Whoever asks for one may hand its address to a kernel."""
    count = 300
    source = (
        "".join(f"__device__ int unused{n}[5] = {{{n}}};\n" for n in range(count))
        + """
    __device__ int used = 3;
    extern "C" __global__ void look(const int* p, int* out) { *out = *p + used; }"""
    )
    raw, out = ptxsim.RawModule(code=source, options=OPTIONS), poisoned(1, np.int32)
    segments = []
    monkeypatch.setattr(memory, "Segment", lambda *edges, make=memory.Segment: segments.append(edges) or make(*edges))
    raw.get_function("look")((1,), (1,), (np.full(1, 4, np.int32), out))
    assert out[0] == 4 + 3 and len(segments) <= 3
    asked = raw.get_global(f"unused{count - 1}").ctypes.data
    raw.get_function("look")((1,), (1,), (np.uint64(asked), out))
    assert out[0] == count - 1 + 3
