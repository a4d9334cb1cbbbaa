"""atom and red on vectors: each element is changed by itself, by the operation of its type."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ptxsim

from .fuzz.compare import launch_ptx
from .launching import SCHEDULES, launch, poisoned, schedule_name

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
CASES = [
    *(("add", "f32", count) for count in (2, 4)),
    *((op, t, count) for op in ("add", "min", "max") for t in ("f16", "bf16") for count in (2, 4, 8)),
    *((op, f"{t}x2", count) for op in ("add", "min", "max") for t in ("f16", "bf16") for count in (2, 4)),
]
OPERATIONS = {"add": np.add, "min": np.fmin, "max": np.fmax}


def kernel(opcode, op, ptx_type, count):
    """PTX of a kernel whose lane i changes vector i % 4 by its own vector, and keeps the old one if it is an atom."""
    bits = 32 if ptx_type == "f32" or ptx_type.endswith("x2") else 16
    size, noftz = bits // 8 * count, "" if ptx_type == "f32" else ".noftz"
    values, olds = ("{" + ", ".join(f"%{x}{n}" for n in range(count)) + "}" for x in "xo")
    result = f"{olds}, " if opcode == "atom" else ""
    loads = "\n".join(f"ld.global.b{bits} %x{n}, [%at+{bits // 8 * n}];" for n in range(count))
    stores = "\n".join(f"st.global.b{bits} [%to+{bits // 8 * n}], %o{n};" for n in range(count))
    return f""".version 8.8
.target sm_90
.address_size 64
.visible .entry change(.param .u64 cells, .param .u64 x, .param .u64 old)
{{
.reg .b{bits} %x<{count}>, %o<{count}>; .reg .b32 %t, %cell; .reg .b64 %cells, %at, %to;
mov.u32 %t, %tid.x;
and.b32 %cell, %t, 3;
ld.param.u64 %cells, [cells]; mad.wide.u32 %cells, %cell, {size}, %cells;
ld.param.u64 %at, [x]; mad.wide.u32 %at, %t, {size}, %at;
ld.param.u64 %to, [old]; mad.wide.u32 %to, %t, {size}, %to;
{loads}
{opcode}.global.{op}{noftz}.v{count}.{ptx_type} {result}[%cells], {values};
{stores if opcode == "atom" else ""}
ret;
}}"""


@pytest.mark.parametrize("opcode", ["atom", "red"])
@pytest.mark.parametrize("op, ptx_type, count", CASES)
def test_every_element_is_changed(op, ptx_type, count, opcode):
    """Small integers, of which sums are exact in any order; every old value has been in memory."""
    dtype = DTYPES[ptx_type.removesuffix("x2")]
    elements = count * (2 if ptx_type.endswith("x2") else 1)
    rng = np.random.default_rng(count)
    cells, x = (rng.integers(-9, 10, (n, elements)).astype(dtype) for n in (4, 40))
    start, old = cells.astype(np.float64), poisoned((40, elements), dtype)
    launch_ptx(kernel(opcode, op, ptx_type, count), "change", (1,), (40,), (cells, x, old), arch="sm_90")
    changes = x.astype(np.float64).reshape(10, 4, elements)
    expected = OPERATIONS[op].reduce(np.concatenate([start[None], changes]))
    np.testing.assert_array_equal(cells.astype(np.float64), expected)
    if opcode == "atom":
        old = old.astype(np.float64).reshape(10, 4, elements)
        between = OPERATIONS[op].accumulate(np.concatenate([start[None], changes]))[:-1]
        np.testing.assert_array_equal(old, between)  # lanes act in order


@pytest.mark.parametrize("ptx_type", ["f16", "bf16x2"])
def test_minima_of_nan_and_zeros(ptx_type):
    """A number wins over NaN, -0 is below +0, and no subnormal is flushed."""
    dtype = DTYPES[ptx_type.removesuffix("x2")]
    tiny = np.finfo(np.float16).smallest_subnormal if dtype == np.float16 else 2.0**-133
    columns = [
        (np.nan, 3, 3),
        (3, np.nan, 3),
        (0.0, -0.0, -0.0),
        (-0.0, 0.0, -0.0),
        (tiny, 1, tiny),
        (-np.inf, 2, -np.inf),
    ]
    cells, x, expected = (np.array([c[n] for c in columns] + [0.0] * 2, dtype)[None] for n in range(3))
    count = 8 if ptx_type == "f16" else 4
    launch_ptx(kernel("red", "min", ptx_type, count), "change", (1,), (1,), (cells, x, x.copy()), arch="sm_90")
    np.testing.assert_array_equal(cells.view(np.uint16), expected.view(np.uint16))


SUMS = """
extern "C" __global__ void sums(const float4* x, float4* sums, float2* pairs, float4* old) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  old[i] = atomicAdd(sums + i % 3, x[i]);
  atomicAdd(pairs, make_float2(1, x[i].w));
}"""


@pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
def test_atomic_addition_of_float4(settings):
    x = np.random.default_rng(1).integers(-99, 100, (192, 4)).astype(np.float32)
    sums, pairs, old = np.zeros((3, 4), np.float32), np.zeros((1, 2), np.float32), poisoned((192, 4), np.float32)
    with ptxsim.sanitize() as report, ptxsim.profile() as profile:
        launch(SUMS, 3, 64, x, sums, pairs, old, arch="sm_90", **settings)
    assert not report, str(report)
    np.testing.assert_array_equal(sums, x.reshape(64, 3, 4).sum(0))
    np.testing.assert_array_equal(pairs, [[192, x[:, 3].sum()]])
    assert len({tuple(row) for row in old.tolist()}) > 150 and np.isfinite(old).all()
    assert profile.kernels[0].atomics == 12


def test_vectors_must_be_aligned_and_inside():
    x, old = np.ones((40, 4), np.float32), poisoned((40, 4), np.float32)
    text = kernel("atom", "add", "f32", 4)
    memory = np.zeros(20, np.float32)
    start = -memory.ctypes.data // 4 % 4  # elements to the next multiple of 16 bytes
    launch_ptx(text, "change", (1,), (1,), (memory[start : start + 4], x, old), arch="sm_90")
    with pytest.raises(ptxsim.MemoryFault, match=r"write of 16 bytes in global memory at .*misaligned"):
        launch_ptx(text, "change", (1,), (1,), (memory[start + 1 : start + 5], x, old), arch="sm_90")
    with pytest.raises(ptxsim.MemoryFault, match="outside every mapped array"):
        launch_ptx(text, "change", (1,), (2,), (memory[start : start + 6], x, old), arch="sm_90")
    np.testing.assert_array_equal(memory[start : start + 8], [1, 1, 1, 1, 0, 0, 0, 0])


def test_a_store_to_one_element_races_with_the_atomic():
    source = """
    extern "C" __global__ void mixed(float4* sums) {
      if (threadIdx.x < 32) atomicAdd(sums, make_float4(1, 1, 1, 1));
      else if (threadIdx.x == 32) sums->w = 5;
    }"""
    with ptxsim.sanitize() as report:
        launch(source, 1, 64, np.zeros((1, 4), np.float32), arch="sm_90")
    assert [f.kind for f in report.findings] == ["global race"], str(report)


def test_undefined_elements_are_found():
    text = kernel("red", "add", "f32", 4).replace("ld.global.b32 %x2, [%at+8];", "")
    cells, x, old = np.zeros((4, 4), np.float32), np.ones((32, 4), np.float32), poisoned((32, 4), np.float32)
    with ptxsim.sanitize() as report:
        launch_ptx(text, "change", (1,), (32,), (cells, x, old), arch="sm_90")
    assert [f.kind for f in report.findings] == ["uninitialised register"] and report.findings[0].count == 32


WIDE = """
struct alignas(16) Pair { double low; unsigned long long high; };
extern "C" __global__ void exchange(Pair* cell, Pair* old) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  old[i] = atomicExch(cell, Pair{i + 0.5, 3ull * i});
}
extern "C" __global__ void add(Pair* cell, Pair* shared_cell) {
  __shared__ Pair box;
  if (threadIdx.x == 0) box = Pair{-0.0, 7};
  __syncthreads();
  for (Pair* at : {cell, &box}) {
    Pair seen = *(volatile Pair*)at, assumed;
    do {
      assumed = seen;
      seen = atomicCAS(at, assumed, Pair{assumed.low + 1, assumed.high + 2});
    } while (__double_as_longlong(seen.low) != __double_as_longlong(assumed.low) || seen.high != assumed.high);
  }
  __syncthreads();
  if (threadIdx.x == 0) shared_cell[blockIdx.x] = box;
}
extern "C" __global__ void halves(Pair* cells) {
  Pair here{1, 2}, first{1, 3}, second{4, 2}, put{5, 6};
  atomicCAS(cells, first, put);
  atomicCAS(cells + 1, second, put);
  atomicCAS(cells + 2, here, put);
}""".replace("*(volatile Pair*)at", "atomicCAS(at, Pair{}, Pair{})")
PAIR = np.dtype([("low", np.float64), ("high", np.uint64)])


@pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
def test_16_bytes_are_exchanged_as_one(settings):
    """Whoever takes a value finds one that another has put there, and each is taken once."""
    cell, old = np.zeros((2, 2), np.uint64), poisoned((97, 2), np.uint64)
    cell[1] = 5
    with ptxsim.sanitize() as report:
        launch(WIDE, 2, 48, cell, old, name="exchange", arch="sm_90", **settings)
    assert not report, str(report)
    low, high = np.concatenate([old[:96], cell[:1]]).T
    thread = np.argsort(high, kind="stable")
    np.testing.assert_array_equal(high[thread], [0, *3 * np.arange(96)])
    assert sorted(low.view(np.float64)) == [0, *np.arange(96) + 0.5] and (cell[1] == 5).all()


@pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
def test_16_bytes_are_compared_bit_by_bit(settings):
    """A NaN equals itself, and -0 is not 0: as a complex number, which 16 bytes are in memory here, neither holds."""
    cell, boxes = np.zeros(1, PAIR), np.zeros(2, PAIR)
    launch(WIDE, 2, 33, cell.view(np.uint64), boxes.view(np.uint64), name="add", arch="sm_90", **settings)
    assert tuple(cell[0]) == (66, 132) and [tuple(box) for box in boxes] == [(33, 73)] * 2
    source = WIDE.replace("assumed.low + 1", "-assumed.low")
    cell["low"], cell["high"] = np.nan, 1
    launch(source, 1, 32, cell.view(np.uint64), boxes.view(np.uint64), name="add", arch="sm_90", **settings)
    assert np.isnan(cell[0]["low"]) and cell[0]["high"] == 65


def test_both_halves_are_compared():
    cells = np.array([(1, 2)] * 3, PAIR)
    launch(WIDE, 1, 1, cells.view(np.uint64), name="halves", arch="sm_90")
    assert [tuple(cell) for cell in cells] == [(1, 2), (1, 2), (5, 6)]
