"""atom and red: every operation and type, with the old values, under contention in a warp and between blocks."""

import collections

import ml_dtypes
import numpy as np
import pytest

from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

C_TYPES = {"s32": "int", "u32": "unsigned", "u64": "unsigned long long", "s64": "long long"}
DTYPES = {"s32": np.int32, "u32": np.uint32, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64}
OPERATIONS = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}
CASES = [
    *(("add", t) for t in ("s32", "u32", "u64", "f32", "f64")),
    *((op, t) for op in ("min", "max") for t in ("s32", "u32", "s64", "u64")),
    *((op, t) for op in ("and", "or", "xor", "exch") for t in ("b32", "b64")),
    ("inc", "u32"),
    ("dec", "u32"),
]


def value_type(ptx_type):
    return ptx_type.replace("b", "u")


def atomic_source(op, ptx_type, space):
    c_type = {**C_TYPES, "f32": "float", "f64": "double"}[value_type(ptx_type)]
    constraint = {"f32": "f", "f64": "d"}.get(ptx_type, "r" if ptx_type.endswith("32") else "l")
    target = "box + k" if space == "shared" else "cells + k"
    dot = {"global": ".global", "shared": "", "generic": ""}[space]
    return f"""
    extern "C" __global__ void atomics({c_type}* cells, const int* where, const {c_type}* x, {c_type}* old) {{
      __shared__ {c_type} box[8];
      int t = threadIdx.x, k = where[t];
      if (t < 8) box[t] = cells[t];
      __syncthreads();
      {c_type} previous;
      asm volatile("atom{dot}.{op}.{ptx_type} %0, [%1], %2;"
          : "={constraint}"(previous) : "l"({target}), "{constraint}"(x[t]) : "memory");
      old[t] = previous;
      __syncthreads();
      if ({int(space == "shared")} && t < 8) cells[t] = box[t];
    }}"""


def is_a_sequence(start, final, steps):
    """Whether the (old, new) pairs can be put one after another from `start` to `final`, each used once.

    They are the edges of a graph of values: such an order is an Eulerian trail, which exists when every value is left
    as often as it is entered (the two ends apart) and all of them can be reached.
    """
    balance = collections.Counter([old for old, _ in steps])
    balance.subtract([new for _, new in steps])
    balance[start] -= 1
    balance[final] += 1
    reached, frontier = {start}, [start]
    while frontier:
        here = frontier.pop()
        fresh = {new for old, new in steps if old == here} - reached
        reached |= fresh
        frontier += fresh
    return not any(balance.values()) and all(old in reached for old, _ in steps)


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("op, ptx_type", CASES)
def test_contended_atomics_happen_one_at_a_time(op, ptx_type, space):
    """64 threads on 8 cells: the old values and the results are those of some order of the operations."""
    rng = np.random.default_rng(sum(map(ord, op + ptx_type)))
    dtype = DTYPES[value_type(ptx_type)]
    low = -40 if np.dtype(dtype).kind == "i" else 0
    where = rng.integers(0, 8, 64).astype(np.int32)
    x = rng.integers(low, 6 if op in ("inc", "dec") else 1000, 64).astype(dtype)
    cells = rng.integers(0, 200, 8).astype(dtype)
    before, old = cells.copy(), poisoned(64, dtype)
    launch(atomic_source(op, ptx_type, space), 1, 64, cells, where, x, old)
    for k in range(8):
        olds, values = old[where == k].tolist(), x[where == k].tolist()
        steps = [(o, OPERATIONS[op](o, v)) for o, v in zip(olds, values, strict=True)]
        assert is_a_sequence(before[k].item(), cells[k].item(), steps), (k, before[k], cells[k], steps)


def test_increments_wrap_at_their_limit():
    """inc and dec by one thread each, one at a time, against their definition."""
    source = """
    extern "C" __global__ void wrap(unsigned* up, unsigned* down, unsigned* old) {
      for (int k = 0; k < 12; ++k) {
        old[2 * k] = atomicInc(up, 4);
        old[2 * k + 1] = atomicDec(down, 4);
      }
    }"""
    up, down, old = np.array([2], np.uint32), np.array([9], np.uint32), poisoned((12, 2), np.uint32)
    launch(source, 1, 1, up, down, old)
    a, b = 2, 9
    for k in range(12):
        assert tuple(old[k]) == (a, b)
        a, b = OPERATIONS["inc"](a, 4), OPERATIONS["dec"](b, 4)
    assert (up[0], down[0]) == (a, b)


@every_schedule
def test_histogram_in_shared_and_global_memory(settings):
    source = """
    extern "C" __global__ void histogram(const unsigned char* x, int n, unsigned* counts) {
      __shared__ unsigned bins[256];
      for (int k = threadIdx.x; k < 256; k += blockDim.x) bins[k] = 0;
      __syncthreads();
      for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[x[i]], 1u);
      __syncthreads();
      for (int k = threadIdx.x; k < 256; k += blockDim.x) if (bins[k]) atomicAdd(&counts[k], bins[k]);
    }"""
    rng = np.random.default_rng(1)
    x = np.minimum(rng.geometric(0.05, 3001), 255).astype(np.uint8)
    counts = np.zeros(256, np.uint32)
    launch(source, 6, 96, x, np.int32(x.size), counts, **settings)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=256))


@every_schedule
def test_every_ticket_is_given_once(settings):
    """The old values of contended additions are all different: within a warp and between blocks."""
    source = """
    extern "C" __global__ void tickets(int* next, int* out) {
      out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(next, 3);
    }"""
    counter, out = np.array([100], np.int32), poisoned((7, 50), np.int32)
    launch(source, 7, 50, counter, out, **settings)
    np.testing.assert_array_equal(np.sort(out.ravel()), 100 + 3 * np.arange(350))
    assert counter[0] == 100 + 3 * 350


@every_schedule
@pytest.mark.parametrize("bits", [32, 64])
def test_compare_and_swap(bits, settings):
    """A maximum of floats (or doubles) by a CAS loop, the classic of hand-written kernels; and one direct success."""
    c_type, word = ("float", "int") if bits == 32 else ("double", "long long")
    to_bits, from_bits = ("__float_as_int", "__int_as_float") if bits == 32 else DOUBLE_BITS
    source = f"""
    extern "C" __global__ void maximum(const {c_type}* x, unsigned {word}* best) {{
      {c_type} mine = x[blockIdx.x * blockDim.x + threadIdx.x];
      unsigned {word} seen = *best;
      while (mine > {from_bits}(seen)) {{
        unsigned {word} assumed = seen;
        seen = atomicCAS(best, assumed, (unsigned {word}){to_bits}(mine));
        if (seen == assumed) break;
      }}
    }}"""
    dtype = np.float32 if bits == 32 else np.float64
    x = np.random.default_rng(2).normal(size=128).astype(dtype)
    best = np.array([-np.inf], dtype)
    launch(source, 2, 64, x, best, **settings)
    assert best[0] == x.max()


DOUBLE_BITS = ("__double_as_longlong", "__longlong_as_double")


@pytest.mark.parametrize(
    "ptx_type, target", [("f16", "sm_80"), ("f16x2", "sm_80"), ("bf16", "sm_90"), ("bf16x2", "sm_90")]
)
def test_atomic_addition_of_halves(ptx_type, target):
    """Small integers, so that the sums are exact in any order; packed types add both halves."""
    c_type, letter = ("unsigned", "r") if ptx_type.endswith("x2") else ("unsigned short", "h")
    source = f"""
    extern "C" __global__ void halves({c_type}* sum, const {c_type}* x) {{
      {c_type} old;
      asm volatile("atom.global.add.noftz.{ptx_type} %0, [%1], %2;"
          : "={letter}"(old) : "l"(sum + threadIdx.x % 4), "{letter}"(x[threadIdx.x]) : "memory");
    }}"""
    dtype = np.float16 if ptx_type.startswith("f16") else ml_dtypes.bfloat16
    shape = (48, 2) if ptx_type.endswith("x2") else (48, 1)
    x = np.random.default_rng(4).integers(-9, 10, shape).astype(dtype)
    sums = np.zeros((4, shape[1]), dtype)
    launch(source, 1, 48, sums, x, arch=target)
    expected = x.reshape(12, 4, -1).astype(np.float64).sum(0)
    np.testing.assert_array_equal(sums.astype(np.float64), expected)


def test_reductions_without_a_result():
    source = """
    extern "C" __global__ void red(int* cells, float* sum) {
      int t = threadIdx.x;
      asm volatile("red.global.add.s32 [%0], %1;" :: "l"(cells + t % 4), "r"(t) : "memory");
      asm volatile("red.global.max.s32 [%0], %1;" :: "l"(cells + 4 + t % 4), "r"(t) : "memory");
      asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(sum), "f"(0.5f) : "memory");
      asm volatile("red.global.or.b32 [%0], %1;" :: "l"(cells + 8), "r"(1 << t % 32) : "memory");
    }"""
    cells, total = np.zeros(9, np.int32), np.zeros(1, np.float32)
    launch(source, 1, 64, cells, total)
    t = np.arange(64)
    sums, highest = [t[t % 4 == k].sum() for k in range(4)], [60, 61, 62, 63]
    np.testing.assert_array_equal(cells, [*sums, *highest, -1])
    assert total[0] == 32


def test_predicated_atomics_touch_only_their_lanes():
    source = """
    extern "C" __global__ void some(int* cells, int* out) {
      int t = threadIdx.x;
      if (t % 3 == 1) out[t] = atomicAdd(cells + t, 7);
    }"""
    cells, out = np.arange(32, dtype=np.int32), np.full(32, -1, np.int32)
    launch(source, 1, 32, cells, out)
    t = np.arange(32)
    np.testing.assert_array_equal(cells, t + 7 * (t % 3 == 1))
    np.testing.assert_array_equal(out, np.where(t % 3 == 1, t, -1))


@every_schedule
def test_the_last_block_finishes_the_work(settings):
    """Blocks publish partial sums; whoever takes the last ticket adds them up."""
    source = """
    extern "C" __global__ void total(const int* x, volatile int* partial, unsigned* ticket, int* out) {
      __shared__ int box[32];
      __shared__ bool last;
      int t = threadIdx.x;
      box[t] = x[blockIdx.x * 32 + t];
      __syncthreads();
      if (t == 0) {
        int sum = 0;
        for (int k = 0; k < 32; ++k) sum += box[k];
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
      }
      __syncthreads();
      if (last && t == 0) {
        int sum = 0;
        for (unsigned k = 0; k < gridDim.x; ++k) sum += partial[k];
        *out = sum;
      }
    }"""
    x = np.random.default_rng(3).integers(-1000, 1000, (9, 32)).astype(np.int32)
    partial, ticket, out = poisoned(9, np.int32), np.zeros(1, np.uint32), poisoned(1, np.int32)
    launch(source, 9, 32, x, partial, ticket, out, **settings)
    assert out[0] == x.sum() and ticket[0] == 0
