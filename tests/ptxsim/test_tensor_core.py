"""ldmatrix and mma.sync: fragment layouts written out element by element, and the arithmetic within a bound."""

import ml_dtypes
import numpy as np
import pytest

from .launching import launch, poisoned

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def a_position(lane, register, half):
    """(row, k) of half `half` of register `register` of A: rows g and g + 8 alternate, then columns 8 further."""
    return lane // 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register // 2)


def b_position(lane, register, half):
    """(k, column) of half `half` of register `register` of B."""
    return lane % 4 * 2 + half + 8 * register, lane // 4


def c_position(lane, register):
    """(row, column) of accumulator register `register`."""
    return lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2


def pack(matrices, position, registers):
    """Matrices (n, rows, columns) as the registers (n, 32, registers, 2 halves) of n warps."""
    fragments = np.zeros((len(matrices), 32, registers, 2), matrices.dtype)
    for lane in range(32):
        for register in range(registers):
            for half in range(2):
                fragments[:, lane, register, half] = matrices[(slice(None), *position(lane, register, half))]
    return fragments


def pack_accumulator(c):
    fragments = np.zeros((len(c), 32, 4), np.float32)
    for lane in range(32):
        for register in range(4):
            fragments[:, lane, register] = c[(slice(None), *c_position(lane, register))]
    return fragments


def unpack_accumulator(fragments):
    c = np.zeros((len(fragments), 16, 8), np.float32)
    for lane in range(32):
        for register in range(4):
            c[(slice(None), *c_position(lane, register))] = fragments[:, lane, register]
    return c


def mma_source(k, kind):
    a_count, b_count = k // 4, k // 8
    operands = [f'"r"(a[i * {a_count} + {r}])' for r in range(a_count)]
    operands += [f'"r"(b[i * {b_count} + {r}])' for r in range(b_count)]
    operands += [f'"f"(c[i * 4 + {r}])' for r in range(4)]
    places = iter(f"%{n}" for n in range(4, 4 + len(operands)))
    groups = ["{" + ", ".join(next(places) for _ in range(n)) + "}" for n in (a_count, b_count, 4)]
    return f"""
    extern "C" __global__ void mma(const unsigned* a, const unsigned* b, const float* c, float* d) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      asm volatile("mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%0, %1, %2, %3}}, {", ".join(groups)};"
          : "=f"(d[4 * i]), "=f"(d[4 * i + 1]), "=f"(d[4 * i + 2]), "=f"(d[4 * i + 3]) : {", ".join(operands)});
    }}"""


SHAPES = [(k, kind, target) for k, kind, target in ((16, "f16", "sm_80"), (8, "f16", "sm_75"), (16, "bf16", "sm_80"))]
SHAPES += [(8, "bf16", "sm_80"), (8, "f16", "sm_80"), (16, "f16", "sm_90"), (16, "bf16", "sm_90")]
every_shape = pytest.mark.parametrize("k, kind, target", SHAPES)


def multiply(a, b, c, k, kind, target, **settings):
    """D = A B + C for batches of matrices, one warp each, through fragments packed by the tables above."""
    fragments = [pack(a.astype(DTYPES[kind]), a_position, k // 4), pack(b.astype(DTYPES[kind]), b_position, k // 8)]
    out = poisoned((len(a), 32, 4), np.float32)
    warps = 2 if len(a) % 2 == 0 else 1
    words = [np.ascontiguousarray(f).view(np.uint32) for f in fragments]
    accumulator = pack_accumulator(c)
    launch(mma_source(k, kind), len(a) // warps, 32 * warps, *words, accumulator, out, arch=target, **settings)
    return unpack_accumulator(out)


@every_shape
def test_every_element_of_a_and_b_is_where_the_isa_says(k, kind, target):
    """One-hot A against a B of distinct numbers, then one-hot B against such an A."""
    numbers_b = np.arange(1, 8 * k + 1, dtype=np.float32).reshape(k, 8)
    numbers_a = np.arange(1, 16 * k + 1, dtype=np.float32).reshape(16, k)
    zero = np.zeros((16 * k, 16, 8), np.float32)
    one_hot = np.eye(16 * k, dtype=np.float32).reshape(16 * k, 16, k)
    # Integers up to 256 are exact in both formats.
    out = multiply(one_hot, np.broadcast_to(numbers_b, (16 * k, k, 8)), zero, k, kind, target)
    np.testing.assert_array_equal(out, one_hot @ numbers_b)
    one_hot = np.eye(8 * k, dtype=np.float32).reshape(8 * k, k, 8)
    out = multiply(np.broadcast_to(numbers_a, (8 * k, 16, k)), one_hot, zero[: 8 * k], k, kind, target)
    np.testing.assert_array_equal(out, numbers_a @ one_hot)


@every_shape
def test_the_accumulator_passes_through(k, kind, target):
    """With A = 0 the sum is C itself, element by element and bit by bit (a zero's sign apart)."""
    rng = np.random.default_rng(1)
    c = (rng.normal(size=(6, 16, 8)) * 2.0 ** rng.integers(-60, 60, (6, 16, 8))).astype(np.float32)
    out = multiply(np.zeros((6, 16, k)), np.ones((6, k, 8)), c, k, kind, target)
    np.testing.assert_array_equal(out, c)


@every_shape
@pytest.mark.parametrize("scale", [0, 6])
def test_random_products_are_within_the_bound_of_float32_accumulation(k, kind, target, scale):
    rng = np.random.default_rng(2)
    a, b = (rng.normal(size=s) * 2.0 ** rng.integers(-scale, scale + 1, s) for s in ((64, 16, k), (64, k, 8)))
    a, b = (x.astype(DTYPES[kind]).astype(np.float64) for x in (a, b))
    c = rng.normal(size=(64, 16, 8)).astype(np.float32)
    out = multiply(a, b, c, k, kind, target)
    exact = a @ b + c
    sizes = abs(a) @ abs(b) + abs(c)
    # Truncation at 2**-23 of the largest term per summand, and one final rounding.
    assert (abs(out - exact) <= (k + 2) * 2.0**-23 * sizes).all()


@pytest.mark.parametrize("kind", DTYPES)
def test_subnormal_operands_are_not_flushed(kind):
    tiny = float(np.finfo(np.float16).smallest_subnormal) if kind == "f16" else 2.0**-133
    a = np.zeros((2, 16, 16))
    a[:, 3, 5] = tiny * 3
    b = np.zeros((2, 16, 8))
    b[:, 5, 2] = 2.0**10
    out = multiply(a, b, np.zeros((2, 16, 8), np.float32), 16, kind, "sm_80")
    assert out[0, 3, 2] == tiny * 3 * 2.0**10 and np.count_nonzero(out) == 2


@pytest.mark.parametrize("kind", DTYPES)
def test_infinities_and_nans_reach_their_row_and_column_only(kind):
    a, b = np.ones((2, 16, 16)), np.ones((2, 16, 8))
    a[:, 4, 7] = np.inf
    a[:, 9, 1] = np.nan
    b[:, 7, 3] = 0
    c = np.zeros((2, 16, 8), np.float32)
    c[:, 12, 6] = -np.inf
    out = multiply(a, b, c, 16, kind, "sm_80")[1]
    assert np.isnan(out[9]).all() and np.isnan(out[4, 3]) and out[12, 6] == -np.inf
    rest = np.ones((16, 8), bool)
    rest[[4, 9]] = rest[12, 6] = False
    assert (np.delete(out[4], 3) == np.inf).all()
    assert (out[rest] == np.where(np.arange(8) == 3, 15, 16)[np.nonzero(rest)[1]]).all()


def ldmatrix_source(count, transposed):
    trans = ".trans" if transposed else ""
    registers = ", ".join(f"%{r}" for r in range(count))
    outs = ", ".join(f'"=r"(out[({r} * gridDim.x + blockIdx.x) * 32 + t])' for r in range(count))
    return f"""
    extern "C" __global__ void load(const unsigned* x, const int* offsets, unsigned* out) {{
      __shared__ __align__(16) unsigned tile[1024];
      int t = threadIdx.x;
      for (int k = t; k < 1024; k += 32) tile[k] = x[k];
      __syncthreads();
      unsigned address = (unsigned)__cvta_generic_to_shared(tile) + offsets[blockIdx.x * 32 + t];
      asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%{count}];"
          : {outs} : "r"(address) : "memory");
    }}"""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
def test_ldmatrix(count, transposed, target):
    """Lane 8 i + r names row r of matrix i; lanes beyond the matrices name nothing and may hold any address."""
    rng = np.random.default_rng(count)
    halves = rng.permutation(65536)[:2048].astype(np.uint16)
    offsets = np.stack([rng.permutation(256)[:32] * 16 for _ in range(5)]).astype(np.int32)
    given = offsets.copy()
    given[:, 8 * count :] = 12345677
    out = poisoned((count, 5, 32), np.uint32)
    launch(ldmatrix_source(count, transposed), 5, 32, halves.view(np.uint32), given, out, arch=target)
    got = out.view(np.uint16).reshape(count, 5, 32, 2)
    for matrix in range(count):
        for warp in range(5):
            rows = [halves[o // 2 : o // 2 + 8] for o in offsets[warp, 8 * matrix : 8 * matrix + 8]]
            for lane in range(32):
                for half in range(2):
                    row, column = lane // 4, lane % 4 * 2 + half
                    expected = rows[column][row] if transposed else rows[row][column]
                    assert got[matrix, warp, lane, half] == expected, (matrix, warp, lane, half)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_is_the_inverse_of_ldmatrix(count, transposed):
    trans = ".trans" if transposed else ""
    registers = ", ".join(f"%{r + 1}" for r in range(count))
    values = ", ".join(f'"r"(x[{r} * 32 + t])' for r in range(count))
    source = f"""
    extern "C" __global__ void store(const unsigned* x, const int* offsets, unsigned* out) {{
      __shared__ __align__(16) unsigned tile[1024];
      int t = threadIdx.x;
      for (int k = t; k < 1024; k += 32) tile[k] = 0xffffffff;
      __syncthreads();
      unsigned address = (unsigned)__cvta_generic_to_shared(tile) + offsets[t];
      asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%0], {{{registers}}};"
          :: "r"(address), {values} : "memory");
      __syncthreads();
      for (int k = t; k < 1024; k += 32) out[k] = tile[k];
    }}"""
    rng = np.random.default_rng(count)
    x = rng.integers(0, 65535, (count, 32, 2)).astype(np.uint16)
    offsets = (rng.permutation(256)[:32] * 16).astype(np.int32)
    out = poisoned(2048, np.uint16)
    launch(source, 1, 32, x.view(np.uint32), offsets, out, arch="sm_90")
    expected = np.full(2048, 0xFFFF, np.uint16)
    for matrix in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                row, column = (column, row) if transposed else (row, column)
                expected[offsets[8 * matrix + row] // 2 + column] = x[matrix, lane, half]
    np.testing.assert_array_equal(out, expected)


def test_movmatrix_transposes_a_fragment():
    source = """
    extern "C" __global__ void move(const unsigned* x, unsigned* out) {
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out[threadIdx.x]) : "r"(x[threadIdx.x]));
    }"""
    matrix = np.random.default_rng(1).integers(0, 65536, (2, 8, 8)).astype(np.uint16)
    out = poisoned((2, 8, 8), np.uint16)
    launch(source, 1, 64, matrix, out)
    np.testing.assert_array_equal(out, matrix.transpose(0, 2, 1))


MODIFIER_ORDER = """
extern "C" __global__ void orders(unsigned* out) {
  __shared__ __align__(16) unsigned tile[128];
  int t = threadIdx.x;
  for (int k = t; k < 128; k += 32) tile[k] = 77 * k;
  __syncthreads();
  unsigned long long generic = (unsigned long long)(tile + 4 * t);
  unsigned address = (unsigned)__cvta_generic_to_shared(tile + 4 * t);
  unsigned a, b, c, d;
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
  out[t] = a; out[32 + t] = b; out[64 + t] = c; out[96 + t] = d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(generic) : "memory");
  out[128 + t] = a; out[160 + t] = b; out[192 + t] = c; out[224 + t] = d;
}"""


def test_ldmatrix_modifiers_in_either_order_and_generic_addresses():
    out = poisoned((2, 128), np.uint32)
    launch(MODIFIER_ORDER, 1, 32, out)
    np.testing.assert_array_equal(out[0], 77 * np.arange(128))
    np.testing.assert_array_equal(out[1], out[0])
