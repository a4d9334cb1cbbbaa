"""wmma through nvcuda::wmma: products of every type and shape, where elements lie, and whole kernels."""

import importlib.util
import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ptxsim

from .fuzz.compare import launch_ptx
from .launching import SCHEDULES, launch, poisoned, schedule_name

_PLACES = importlib.util.find_spec("nvidia").submodule_search_locations
needs_mma_h = pytest.mark.skipif(
    not any(found for place in _PLACES for found in Path(place).glob("*/include/crt/mma.h")),
    reason="mma.h needs nvidia-cuda-crt",
)

# Type of A and B in CUDA C++, in the fragment, and in NumPy; of the accumulators; shapes; first architecture.
WIDE = [(16, 16, 16), (8, 32, 16), (32, 8, 16)]
TYPES = {
    "half": ("half", np.float16, ("float", "half"), WIDE),
    "bfloat16": ("__nv_bfloat16", ml_dtypes.bfloat16, ("float",), WIDE),
    "tf32": ("float", np.float32, ("float",), [(16, 16, 8)]),
    "double": ("double", np.float64, ("double",), [(8, 8, 4)]),
    "s8": ("signed char", np.int8, ("int",), WIDE),
    "u8": ("unsigned char", np.uint8, ("int",), WIDE),
}
ACCUMULATORS = {"float": np.float32, "half": np.float16, "double": np.float64, "int": np.int32}
HEAD = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <mma.h>
using namespace nvcuda;
"""
BOX = """
template <typename T>
__device__ void boxed(T* box, const T* x, int stride, int lines, int length) {
  __syncwarp();
  for (int i = threadIdx.x; i < lines * length; i += 32)
    box[i / length * (length + 16) + i % length] = x[i / length * stride + i % length];
  __syncwarp();
}"""


def element(kind):
    return "wmma::precision::tf32" if kind == "tf32" else TYPES[kind][0]


def products():
    """One kernel for each type and shape: d = c + a b over several steps along k, of any layouts and strides; every
    other step from shared memory."""
    for kind, (c_type, _, accumulators, shapes) in TYPES.items():
        for accumulator, (m, n, k), (a, b) in itertools.product(accumulators, shapes, ("rc", "cr")):
            name = f"{kind}_{accumulator}_{m}_{n}_{a}{b}"
            layouts = [{"r": "wmma::row_major", "c": "wmma::col_major"}[x] for x in (a, b)]
            lines = [f"{m}, {k}" if a == "r" else f"{k}, {m}", f"{k}, {n}" if b == "r" else f"{n}, {k}"]
            yield f"""
    extern "C" __global__ void {name}(const {c_type}* a, const {c_type}* b, const {accumulator}* c, {accumulator}* d,
                                      int lda, int ldb, int ldc, int ldd, bool by_rows, int steps) {{
      wmma::fragment<wmma::matrix_a, {m}, {n}, {k}, {element(kind)}, {layouts[0]}> left;
      wmma::fragment<wmma::matrix_b, {m}, {n}, {k}, {element(kind)}, {layouts[1]}> right;
      wmma::fragment<wmma::accumulator, {m}, {n}, {k}, {accumulator}> sum;
      auto layout = by_rows ? wmma::mem_row_major : wmma::mem_col_major;
      wmma::load_matrix_sync(sum, c, ldc, layout);
      __shared__ __align__(32) {c_type} box[2][32 * 32];
      for (int s = 0; s < steps; ++s) {{
        const {c_type}* x = a + {k} * s * {1 if a == "r" else "lda"};
        const {c_type}* y = b + {k} * s * {1 if b == "c" else "ldb"};
        if (s % 2 == 0) {{
          wmma::load_matrix_sync(left, x, lda);
          wmma::load_matrix_sync(right, y, ldb);
        }} else {{
          boxed(box[0], x, lda, {lines[0]});
          boxed(box[1], y, ldb, {lines[1]});
          wmma::load_matrix_sync(left, box[0], {lines[0].split()[1]} + 16);
          wmma::load_matrix_sync(right, box[1], {lines[1].split()[1]} + 16);
        }}
        wmma::mma_sync(sum, left, right, sum);
      }}
      wmma::store_matrix_sync(d, sum, ldd, by_rows ? wmma::mem_col_major : wmma::mem_row_major);
    }}"""


PRODUCTS = HEAD + BOX + "".join(products())
CASES = [(kind, acc, *shape) for kind, (_, _, accs, shapes) in TYPES.items() for acc in accs for shape in shapes]


def stored(matrix, by_rows, padding=16):
    """A matrix in memory with longer rows (or columns), and their stride; what is between them is poison."""
    matrix = matrix if by_rows else matrix.T
    memory = poisoned((matrix.shape[0], matrix.shape[1] + padding), matrix.dtype)
    memory[:, : matrix.shape[1]] = matrix
    return memory, memory.shape[1]


@needs_mma_h
@pytest.mark.parametrize("kind, accumulator, m, n, k", CASES)
def test_products_of_every_type_shape_and_layout(kind, accumulator, m, n, k):
    """Of small integers, which every type and sum holds exactly."""
    steps, dtype = 3, TYPES[kind][1]
    rng = np.random.default_rng(m + n)
    low = 0 if kind == "u8" else -3
    for a_rows, c_rows in itertools.product((True, False), repeat=2):
        b_rows = not a_rows
        a, b, c = (rng.integers(low, 4, size) for size in ((m, steps * k), (steps * k, n), (m, n)))
        memory = [stored(a.astype(dtype), a_rows), stored(b.astype(dtype), b_rows)]
        memory.append(stored(c.astype(ACCUMULATORS[accumulator]), c_rows))
        out, stride = stored(poisoned((m, n), ACCUMULATORS[accumulator]), not c_rows)
        expected = out.copy()
        (expected if not c_rows else expected.T)[:m, :n] = a @ b + c
        strides = [np.int32(s) for _, s in memory] + [np.int32(stride), np.bool_(c_rows), np.int32(steps)]
        name = f"{kind}_{accumulator}_{m}_{n}_{'r' if a_rows else 'c'}{'r' if b_rows else 'c'}"
        launch(PRODUCTS, 1, 32, *(x for x, _ in memory), out, *strides, name=name)
        np.testing.assert_array_equal(out, expected, err_msg=name)


def blocks(rows, columns, tall, together):
    """Where the registers of mma fragments begin: (row, column) in A and C, or in the transpose of B, tile by tile."""
    step = 16 if tall else 8
    for row in range(0, rows, step):
        for column in range(0, columns, 4 * together):
            yield from ((row + half, column) for half in range(0, step, 8))


def positions(rows, columns, tall, together):
    """(32, elements) rows and columns of what each lane holds. By the ISA's tables lane 4 g + t has, of a block, row g
    and the columns from t * together on."""
    found = np.zeros((32, 0, 2), int)
    for row, column in blocks(rows, columns, tall, together):
        lane, part = np.arange(32)[:, None], np.arange(together)
        here = np.broadcast_arrays(row + lane // 4, column + lane % 4 * together + part)
        found = np.concatenate([found, np.stack(here, axis=-1)], axis=1)
    return found[..., 0], found[..., 1]


def dump(kind, use, m, n, k, layout):
    c_type = {"half": "half", "s8": "signed char", "tf32": "float", "double": "double", "float": "float"}[kind]
    fragment_type = "wmma::precision::tf32" if kind == "tf32" else c_type
    where = "" if use == "accumulator" else f", wmma::{layout}_major"
    given = f", wmma::mem_{layout}_major" if use == "accumulator" else ""
    name = f"dump_{kind}_{use}_{m}_{n}_{layout}"
    return (
        name,
        f"""
    extern "C" __global__ void {name}(const {c_type}* x, int stride, {c_type}* out, int* count) {{
      wmma::fragment<wmma::{use}, {m}, {n}, {k}, {fragment_type}{where}> f;
      wmma::load_matrix_sync(f, x, stride{given});
      for (int i = 0; i < f.num_elements; ++i) out[threadIdx.x * f.num_elements + i] = f.x[i];
      *count = f.num_elements;
    }}""",
    )


DUMPED = [
    *(("half", use, m, n, 16) for use in ("matrix_a", "matrix_b", "accumulator") for m, n, _ in WIDE),
    *(("s8", use, m, n, 16) for use in ("matrix_a", "matrix_b") for m, n, _ in WIDE),
    *(("float", "accumulator", m, n, 16) for m, n, _ in WIDE),
    *(("tf32", use, 16, 16, 8) for use in ("matrix_a", "matrix_b")),
    *(("double", use, 8, 8, 4) for use in ("matrix_a", "matrix_b", "accumulator")),
]
DUMPS = dict(dump(*case, layout) for case in DUMPED for layout in ("row", "col"))
DUMP_SOURCE = HEAD + "".join(DUMPS.values())
DUMP_TYPES = {"half": np.float16, "s8": np.int8, "tf32": np.float32, "float": np.float32, "double": np.float64}


@needs_mma_h
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("kind, use, m, n, k", DUMPED)
def test_elements_lie_where_those_of_mma_do(kind, use, m, n, k, layout):
    """As in sm_80's machine code: m16n16k16 is two tiles side by side, m8n32k16 the transpose of m32n8k16."""
    turned = (m, n) == (8, 32)
    rows, columns = {"matrix_a": (m, k), "matrix_b": (k, n), "accumulator": (m, n)}[use]
    x = np.random.default_rng(n).permutation(rows * columns).reshape(rows, columns)
    x = (x % 256 - 128 if kind == "s8" else x).astype(DUMP_TYPES[kind])
    memory, stride = stored(x, layout == "row", 0)
    count = poisoned(1, np.int32)
    out = poisoned(32 * 16, x.dtype)
    launch(DUMP_SOURCE, 1, 32, memory, np.int32(stride), out, count, name=f"dump_{kind}_{use}_{m}_{n}_{layout}")
    got = out[: 32 * count[0]].reshape(32, -1)
    turn = use == "matrix_b" or (use == "accumulator" and turned)
    tall = kind != "double" and use != ("matrix_a" if turned else "matrix_b")
    together = {"half": 2, "s8": 4, "tf32": 1, "double": 1}[kind] if use != "accumulator" else 2
    row, column = positions(*((columns, rows) if turn else (rows, columns)), tall, together)
    expected = (x.T if turn else x)[row, column]
    assert got.shape[1] == {("half", True): 16}.get((kind, use != "accumulator"), expected.shape[1])
    np.testing.assert_array_equal(got, np.tile(expected, (1, got.shape[1] // expected.shape[1])))


MIXED = (
    HEAD
    + """
template <typename D, typename C> __device__ void multiply(const half* a, const half* b, const C* c, D* d) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> right;
  wmma::fragment<wmma::accumulator, 16, 16, 16, C> addend;
  wmma::fragment<wmma::accumulator, 16, 16, 16, D> sum;
  wmma::load_matrix_sync(left, a, 16);
  wmma::load_matrix_sync(right, b, 16);
  wmma::load_matrix_sync(addend, c, 16, wmma::mem_row_major);
  wmma::mma_sync(sum, left, right, addend);
  wmma::store_matrix_sync(d, sum, 16, wmma::mem_row_major);
}
extern "C" __global__ void narrow(const half* a, const half* b, const float* c, half* d) { multiply(a, b, c, d); }
extern "C" __global__ void widen(const half* a, const half* b, const half* c, float* d) { multiply(a, b, c, d); }
"""
)


@needs_mma_h
@pytest.mark.parametrize(
    "name, addend, result", [("narrow", np.float32, np.float16), ("widen", np.float16, np.float32)]
)
def test_accumulators_of_two_types(name, addend, result):
    """The sum is that of float32; float16 is its rounding."""
    rng = np.random.default_rng(4)
    a, b, c = (rng.normal(size=(16, 16)).astype(t) for t in (np.float16, np.float16, addend))
    out = poisoned((16, 16), result)
    launch(MIXED, 1, 32, a, b, c, out, name=name, mma="exact")
    exact = a.astype(np.float64) @ b.T.astype(np.float64) + c
    np.testing.assert_array_equal(out, exact.astype(np.float32).astype(result))


CLAMPED = (
    HEAD
    + """
extern "C" __global__ void clamped(const signed char* a, const signed char* b, int* d, int start) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, signed char, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, signed char, wmma::col_major> right;
  wmma::fragment<wmma::accumulator, 16, 16, 16, int> sum;
  wmma::load_matrix_sync(left, a, 16);
  wmma::load_matrix_sync(right, b, 16);
  wmma::fill_fragment(sum, start);
  for (int k = 0; k < 3; ++k) wmma::mma_sync(sum, left, right, sum, CLAMP);
  wmma::store_matrix_sync(d, sum, 16, wmma::mem_row_major);
}
"""
)


@needs_mma_h
@pytest.mark.parametrize("clamp", [False, True])
def test_sums_of_integers_wrap_or_are_clamped(clamp):
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-128, 128, (16, 16)).astype(np.int8) for _ in "ab")
    for start in (2**31 - 60_000, -(2**31) + 60_000):
        out = poisoned((16, 16), np.int32)
        launch(CLAMPED.replace("CLAMP", str(clamp).lower()), 1, 32, a, b, out, np.int32(start))
        exact = np.full((16, 16), start, np.int64)
        for _ in range(3):
            exact += a.astype(np.int64) @ b.T.astype(np.int64)
            exact = np.clip(exact, -(2**31), 2**31 - 1) if clamp else exact
        np.testing.assert_array_equal(out, exact.astype(np.int32))
        assert (exact != exact.astype(np.int32)).any() != clamp


NIBBLES = (
    HEAD
    + """
extern "C" __global__ void nibbles(const int* a, const int* b, int* d, int stride) {
  using namespace wmma::experimental;
  wmma::fragment<wmma::matrix_a, 8, 8, 32, precision::KIND, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 8, 8, 32, precision::KIND, wmma::col_major> right;
  wmma::fragment<wmma::accumulator, 8, 8, 32, int> sum;
  wmma::fill_fragment(sum, 7);
  wmma::load_matrix_sync(left, a, stride);
  wmma::load_matrix_sync(right, b, stride);
  wmma::mma_sync(sum, left, right, sum);
  wmma::store_matrix_sync(d, sum, 8, wmma::mem_col_major);
}
"""
)


@needs_mma_h
@pytest.mark.parametrize("kind", ["s4", "u4"])
def test_numbers_of_4_bits(kind):
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-8, 8, (8, 64)) + 8 * (kind == "u4") for _ in "ab")
    packed = [(x[:, ::2] & 15 | (x[:, 1::2] & 15) << 4).astype(np.uint8) for x in (a, b)]
    out = poisoned((8, 8), np.int32)
    launch(NIBBLES.replace("KIND", kind), 1, 32, *packed, out, np.int32(64))
    np.testing.assert_array_equal(out.T, 7 + a[:, :32] @ b[:, :32].T)


GEMM = (
    HEAD
    + """
constexpr int TILE = 64, DEPTH = 32, SKEW = 16;
extern "C" __global__ void __launch_bounds__(128) gemm(const half* a, const half* b, const float* c, float* d, int m,
                                                       int n, int k, float alpha, float beta) {
  __shared__ __align__(32) half left[TILE][DEPTH + SKEW], right[DEPTH][TILE + SKEW];
  int warp = threadIdx.x / 32, row = blockIdx.y * TILE + warp / 2 * 32, column = blockIdx.x * TILE + warp % 2 * 32;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
  for (auto& line : sum) for (auto& tile : line) wmma::fill_fragment(tile, 0.0f);
  for (int start = 0; start < k; start += DEPTH) {
    for (int i = threadIdx.x; i < TILE * DEPTH / 8; i += blockDim.x) {
      int r = i / (DEPTH / 8), s = i % (DEPTH / 8) * 8;
      *(int4*)&left[r][s] = *(const int4*)&a[(blockIdx.y * TILE + r) * k + start + s];
      r = i / (TILE / 8), s = i % (TILE / 8) * 8;
      *(int4*)&right[r][s] = *(const int4*)&b[(start + r) * n + blockIdx.x * TILE + s];
    }
    __syncthreads();
    for (int inner = 0; inner < DEPTH; inner += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> x[2];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> y[2];
      for (int i = 0; i < 2; ++i) {
        wmma::load_matrix_sync(x[i], &left[warp / 2 * 32 + 16 * i][inner], DEPTH + SKEW);
        wmma::load_matrix_sync(y[i], &right[inner][warp % 2 * 32 + 16 * i], TILE + SKEW);
      }
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], x[i], y[j], sum[i][j]);
    }
    AFTER_USE;
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      wmma::fragment<wmma::accumulator, 16, 16, 16, float> old;
      wmma::load_matrix_sync(old, c + (row + 16 * i) * n + column + 16 * j, n, wmma::mem_row_major);
      for (int e = 0; e < old.num_elements; ++e) old.x[e] = alpha * sum[i][j].x[e] + beta * old.x[e];
      wmma::store_matrix_sync(d + (row + 16 * i) * n + column + 16 * j, old, n, wmma::mem_row_major);
    }
}"""
)


def gemm(m, n, k, after_use="__syncthreads()", **settings):
    """The result of the kernel, and the same in float64 with a bound of float32 sums."""
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.normal(size=size).astype(np.float16) for size in ((m, k), (k, n)))
    c, d = rng.normal(size=(m, n)).astype(np.float32), poisoned((m, n), np.float32)
    source = GEMM.replace("AFTER_USE", after_use)
    scalars = [np.int32(x) for x in (m, n, k)] + [np.float32(0.5), np.float32(-2)]
    launch(source, (n // 64, m // 64), 128, a, b, c, d, *scalars, name="gemm", **settings)
    a, b = a.astype(np.float64), b.astype(np.float64)
    exact = 0.5 * (a @ b) - 2 * c.astype(np.float64)
    return d, exact, (k + 4) * 2.0**-23 * (0.5 * abs(a) @ abs(b) + 2 * abs(c))


@needs_mma_h
@pytest.mark.parametrize(
    "settings",
    [s | {"arch": a} for s, a in zip(SCHEDULES, ("sm_80", "sm_75", "sm_90"), strict=True)],
    ids=schedule_name,
)
def test_a_gemm_with_tiles_in_shared_memory(settings):
    out, exact, bound = gemm(128, 64, 96, **settings)
    assert (abs(out - exact) <= bound).all()


@needs_mma_h
def test_a_gemm_in_the_arithmetic_of_a_gpu():
    """Other bits than the float32 sums, and within the same bound."""
    out, exact, bound = gemm(64, 64, 64, mma="ampere")
    assert (abs(out - exact) <= bound).all() and (out != gemm(64, 64, 64)[0]).any()


PTX = """
.version 8.8
.target sm_75
.address_size 64
.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 d)
{
.reg .b32 %a<8>, %b<8>; .reg .f32 %c<8>, %zero; .reg .b64 %p; .shared .align 32 .b8 tile[512];
.reg .b32 %t, %low, %high; .reg .b64 %at;
mov.u32 %t, %tid.x; ld.param.u64 %p, [b]; mad.wide.u32 %at, %t, 16, %p;
ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%at];
mov.u32 %low, tile; mad.lo.u32 %low, %t, 16, %low; st.shared.v4.b32 [%low], {%a0, %a1, %a2, %a3};
bar.warp.sync 0xffffffff;
ld.param.u64 %p, [a];
wmma.load.a.sync.aligned.m16n16k16.col.f16 {%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, [%p];
wmma.load.b.sync.aligned.m16n16k16.col.shared.f16 {%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7}, [tile];
mov.f32 %zero, 0f00000000;
wmma.mma.sync.aligned.col.col.m16n16k16.f32.f32 {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7},
  {%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, {%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7},
  {%zero, %zero, %zero, %zero, %zero, %zero, %zero, %zero};
ld.param.u64 %p, [d];
wmma.store.d.sync.aligned.m16n16k16.row.global.f32 [%p+64], {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7};
ret;
}"""


def test_operands_as_hand_written_ptx_has_them():
    """Without strides, from a generic address and a variable, to an address with an offset."""
    a, b = (np.random.default_rng(n).integers(-9, 10, (16, 16)).astype(np.float16) for n in range(2))
    out = poisoned((17, 16), np.float32)
    launch_ptx(PTX, "product", (1,), (32,), (a, b, out), arch="sm_75")
    np.testing.assert_array_equal(out[1:], a.T.astype(float) @ b.T)
    assert np.isnan(out[0]).all()


@needs_mma_h
def test_the_sanitizer_sees_into_fragments():
    with ptxsim.sanitize() as report:
        gemm(64, 64, 64)
    assert not report, str(report)
    with ptxsim.sanitize() as report:
        gemm(64, 64, 64, after_use="")
    assert {finding.kind for finding in report.findings} == {"shared race"} and "mma.hpp" in str(report), str(report)


@needs_mma_h
def test_the_profile_counts_tiles():
    with ptxsim.profile() as profile:
        gemm(64, 64, 64)
    (kernel,) = profile.kernels
    assert kernel.mma_flops == 2 * 64**3 and kernel.opcodes["mma.m16n8k16.f16"] == 64**3 // (16 * 8 * 16)
    assert kernel.opcodes["wmma.load"] == 4 * (4 * 4 + 4) and kernel.opcodes["ldmatrix.x4"] == 4 * 4 * 4


LONELY = (
    HEAD
    + """
extern "C" __global__ void lonely(const half* x, half* out) {
  wmma::fragment<wmma::accumulator, 16, 16, 16, half> f;
  if (threadIdx.x != LANE) wmma::load_matrix_sync(f, x, 16, wmma::mem_row_major);
  if (threadIdx.x != LANE) wmma::store_matrix_sync(out, f, 16, wmma::mem_row_major);
}"""
)


@needs_mma_h
def test_every_lane_must_take_part():
    x, out = np.ones((16, 16), np.float16), poisoned((16, 16), np.float16)
    source = LONELY
    launch(source.replace("LANE", "32"), 1, 32, x, out)
    np.testing.assert_array_equal(out, x)
    for lane, threads, said in (
        (5, 32, "1 is missing; kernel lonely, thread (0, 0, 0) of block (0, 0, 0)"),
        (0, 32, "1 is missing; kernel lonely, thread (1, 0, 0) of block (0, 0, 0)"),
        (99, 16, "16 are missing: the block has 16 threads, lanes 16 to 31 do not exist; kernel lonely, thread (0, "),
        (99, 63, "1 is missing: the block has 63 threads, lane 31 does not exist; kernel lonely, thread (32, "),
        (5, 40, "1 is missing; kernel lonely, thread (0, 0, 0) of block (0, 0, 0)"),
    ):
        with pytest.raises(ptxsim.SimulationError, match=r"wmma.load.c\S* needs every lane of the warp, ") as error:
            launch(source.replace("LANE", str(lane)), 1, threads, x, out)
        assert said in str(error.value)


@needs_mma_h
def test_accesses_outside_of_arrays_are_found():
    x, out = np.ones((15, 16), np.float16), poisoned((16, 16), np.float16)
    with pytest.raises(ptxsim.MemoryFault, match="read of 4 bytes in global memory"):
        launch(LONELY.replace("LANE", "32"), 1, 32, x, out)
