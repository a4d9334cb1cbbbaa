"""Uninitialised values are followed to where they matter; moving them about, padding and tails are no fault."""

import gc

import numpy as np
import pytest

from cupyflash import ptxsim

from .kernels import SCHEDULES, launch, schedule_name
from .sanitized import check, findings, line

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

SHARED = """
extern "C" __global__ void shared(int* out, int n) {
  __shared__ int box[64];
  int t = threadIdx.x;
  if (t < n) box[t] = 3 * t;
  __syncthreads();
  int found = box[63 - t];  // fault
  out[blockIdx.x * 64 + t] = found + 1;  // use
}"""


@every_schedule
def test_shared_memory_that_nobody_wrote(settings):
    out = ptxsim.empty((3, 64), np.int32)
    found = check(
        findings(SHARED, 3, 64, out, np.int32(60), **settings), SHARED, "uninitialised shared memory", other="use"
    )
    assert found.count == 12
    assert not findings(SHARED, 3, 64, out, np.int32(64), **settings)
    assert (out == 3 * (63 - np.arange(64)) + 1).all()


def test_blocks_do_not_see_what_earlier_ones_wrote():
    """Shared memory is undefined again for every block, also for those of a later chunk."""
    source = """
    extern "C" __global__ void first(int* out) {
      __shared__ int box[32];
      if (blockIdx.x < 5) box[threadIdx.x] = 1;
      __syncwarp();
      out[blockIdx.x] = box[3];  // fault
    }"""
    found = check(findings(source, 6, 32, np.zeros(6, np.int32), chunk_lanes=32), source, "uninitialised shared memory")
    assert "block (5, 0, 0)" in found.message


def test_halting_raises_at_the_first_finding():
    with pytest.raises(ptxsim.SimulationError, match="uninitialised shared memory"), ptxsim.sanitize(halt=True):
        launch(SHARED, 1, 64, np.zeros(64, np.int32), np.int32(1))


def test_local_memory_that_the_thread_did_not_write():
    source = """
    extern "C" __global__ void local(float* out, int n) {
      volatile float own[8];
      for (int j = 0; j < n; ++j) own[j] = j;
      out[threadIdx.x] = own[threadIdx.x & 7];  // fault
    }"""
    out = ptxsim.empty(32, np.float32)
    found = check(findings(source, 1, 32, out, np.int32(7)), source, "uninitialised local memory")
    assert "thread (7, 0, 0)" in found.message and found.count == 4
    assert not findings(source, 1, 32, out, np.int32(8))


def test_a_register_that_got_no_value_on_this_path():
    source = """
    extern "C" __global__ void last_match(const int* x, int* out, int n) {
      int place;
      for (int i = 0; i < n; ++i)
        if (x[i] == threadIdx.x) place = i;
      out[threadIdx.x] = place;  // fault
    }"""
    x, out = np.arange(32)[::-1].astype(np.int32), ptxsim.empty(32, np.int32)
    assert not findings(source, 1, 32, x, out, np.int32(32))
    found = check(findings(source, 1, 32, x, out, np.int32(31)), source, "uninitialised register")
    assert "thread (0, 0, 0)" in found.message and found.count == 1


SCALE = """
extern "C" __global__ void scale({type}* x, {type}* out, int n) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * ({type})2;  // fault
}}"""


@pytest.mark.parametrize("dtype, type_", [("f4", "float"), ("f8", "double"), ("i4", "int"), ("i8", "long long")])
def test_elements_of_an_empty_array(dtype, type_):
    """Only elements that nobody wrote, NumPy or a kernel, are uninitialised; outputs that are only written, clean."""
    source = SCALE.format(type=type_)
    x, y, z = (ptxsim.empty(100, dtype) for _ in range(3))
    x[:90] = np.arange(90)
    n = np.int32(90)
    with ptxsim.sanitize() as report:
        launch(source, 2, 64, x, y, n)
        launch(source, 2, 64, y[:90], z, n)
    assert not report and (z[:90] == 4 * np.arange(90)).all()
    found = check(findings(source, 2, 64, y[30:], z, np.int32(70)), source, "uninitialised global memory")
    assert found.count == 10
    assert not findings(source, 2, 64, np.empty(100, dtype), z, np.int32(100)), "other arrays count as initialised"


def test_what_a_kernel_writes_is_initialised_for_its_own_later_reads():
    source = """
    extern "C" __global__ void twice(float* x, float* out) {
      x[threadIdx.x] = threadIdx.x;
      __syncwarp();
      out[threadIdx.x] = x[threadIdx.x ^ 1] + x[threadIdx.x + 32];  // fault
    }"""
    x, out = ptxsim.empty(64, np.float32), np.zeros(32, np.float32)
    assert check(findings(source, 1, 32, x, out), source, "uninitialised global memory").count == 32
    x[32:] = 0
    assert not findings(source, 1, 32, x, out)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "i1", "u2", "i4", "u8"])
def test_empty_arrays_show_their_elements(dtype):
    """NaN in every floating-point type; of every other type, some elements are found."""
    x = ptxsim.empty((3, 16), dtype)
    assert x.shape == (3, 16) and x.dtype == dtype and x.flags.c_contiguous
    if x.dtype.kind in "fc":
        assert np.isnan(x).all()
    source = 'extern "C" __global__ void copy(const long long* x, long long* out) { *out = *x; }  // fault'
    out = np.zeros(1, np.int64)
    check(findings(source, 1, 1, x, out), source, "uninitialised global memory")
    x[0] = 1
    assert not findings(source, 1, 1, x, out)
    assert not findings(source, 1, 1, np.ones(1, np.int64), x[2:])
    with pytest.raises(TypeError, match="dtype"):
        ptxsim.empty(3, object)


# -- uses ------------------------------------------------------------------------------------------------
USES = {
    "the address": "out[box[t] & 31] = 1;",
    "the predicate": 'if (box[t] > 5) asm volatile("st.global.u32 [%0], %1;" :: "l"(out + t), "r"(1));',
    "an operand": "atomicAdd(out, box[t]);",
    "the value": "out[t] = box[t] ^ t;",
    "a shuffled value": "out[t] = __shfl_xor_sync(~0u, box[t], 1);",
    "a vote": "out[t] = __ballot_sync(~0u, box[t] > 0);",
    "an undecided vote": "out[t] = __any_sync(~0u, box[t] == 100);",
    "a match": "out[t] = __match_any_sync(~0u, box[t]);",
    "an atomic": "atomicAdd(box + t, 1);",
    "a selection": "out[t] = box[t] > 0 ? 3 : t;",
    "a double": "out[t] = (int)sqrt((double)box[t]);",
    "a guard": 'asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p red.global.add.u32 [%0], 1; }" '
    ':: "l"(out), "r"(box[t]));',
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_of_an_undefined_value(use):
    source = f"""
    extern "C" __global__ void uses(int* out, int n) {{
      __shared__ int box[32];
      int t = threadIdx.x;
      if (t < n) box[t] = t;
      __syncwarp();
      {use}  // fault
    }}"""
    assert not findings(source, 1, 32, np.zeros(32, np.int32), np.int32(32))
    check(findings(source, 1, 32, np.zeros(32, np.int32), np.int32(20)), source, "uninitialised shared memory")


CLEAN = {
    "a tail that is selected away": "int v = box[t]; out[t] = t < n ? v : 0;",
    "a condition that decides alone": "if (t < n && box[t] > 3) out[t] = 1;",
    "a copy": "int v = box[t]; __syncwarp(); box[t ^ 1] = v; __syncwarp(); if ((t ^ 1) < n) out[t] = box[t];",
    "an exchange": "atomicExch(box + t, t); out[t] = atomicAdd(box + t, 1);",
    "a shuffle of the others": "int v = __shfl_sync(~0u, box[t], t % n); out[t] = v;",
    "a reduction of the others": """
      int v = t < n ? box[t] : 0;
      for (int k = 16; k; k /= 2) v += __shfl_xor_sync(~0u, v, k);
      out[t] = v;""",
    "any": "out[t] = __any_sync(~0u, box[t] == 3);",
    "all": "out[t] = __all_sync(~0u, box[t] != 3);",
    "lanes that others name": """
      unsigned mine = t < 16 ? 0xffff : 0xffff0000;
      int sum = __reduce_add_sync(mine, box[t]), same = __match_any_sync(mine, box[t]);
      if (t < 16) out[t] = sum + same + __ballot_sync(0xffff, box[t] > 2);""",
    "a byte of a word": "((char*)box)[4 * t + 2] = 1; __syncwarp(); out[t] = box[t];",
}


@pytest.mark.parametrize("code", CLEAN.values(), ids=CLEAN)
def test_undefined_values_that_do_not_matter(code):
    source = f"""
    extern "C" __global__ void clean(int* out, int n) {{
      __shared__ int box[32];
      int t = threadIdx.x;
      if (t < n) box[t] = t;
      __syncwarp();
      {code}
    }}"""
    assert not findings(source, 1, 32, np.zeros(32, np.int32), np.int32(20))


def test_a_copy_of_an_undefined_value_is_undefined():
    source = """
    extern "C" __global__ void moved(int* out, int n) {
      __shared__ int4 box[64];
      int t = threadIdx.x;
      if (t < n) box[t] = make_int4(t, t, t, t);
      __syncwarp();
      box[32 + t] = box[t];  // fault
      __syncwarp();
      out[t] = box[63 - t].y;  // use
    }"""
    found = findings(source, 1, 32, np.zeros(32, np.int32), np.int32(31))
    assert check(found, source, "uninitialised shared memory", other="use").count == 1


@every_schedule
def test_memory_that_was_written_is_undefined_again_with_an_undefined_value(settings):
    """After a barrier that found all of shared memory written."""
    source = """
    extern "C" __global__ void again(const int* x, int* out) {
      __shared__ int box[64];
      int t = threadIdx.x;
      box[t] = t;
      __syncthreads();
      int v = x[t];  // fault
      box[63 - t] = v;
      __syncthreads();
      out[t] = box[t];
    }"""
    x, out = ptxsim.empty(64, np.int32), np.zeros(64, np.int32)
    x[:40] = 0
    found = findings(source, 1, 64, x, out, **settings)
    assert check(found, source, "uninitialised global memory").count == 24
    x[40:] = 0
    assert not findings(source, 1, 64, x, out, **settings)


WAYS = {
    "shared": "volatile __shared__ int box[64]; box[t] = v; __syncthreads(); v = box[63 - t];",
    "local": "volatile int own[4]; own[t & 3] = v; v = own[t & 3];",
    "shared, then local": """
      volatile __shared__ int box[64]; box[t] = v; __syncthreads(); volatile int own[4]; own[t & 3] = box[t];
      v = own[t & 3];""",
    "an exchange": "__shared__ int box[64]; box[t] = 0; __syncthreads(); atomicExch(box + t, 1); v ^= box[t];",
    "a matrix": """
      __shared__ __align__(16) int box[64]; box[t] = v; __syncthreads();
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
        : "=r"(v) : "r"((unsigned)__cvta_generic_to_shared(box + t % 8 * 4 + t / 32 * 32)) : "memory");""",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_undefined_value_keeps_its_origin(way):
    """Wherever it has been stored meanwhile, the finding tells which memory nobody had written."""
    source = """
    extern "C" __global__ void kept(const int* x, int* out) {
      int t = threadIdx.x;
      int v = x[t];  // fault
      WAY
      out[t] = v;  // use
    }""".replace("WAY", way)
    x = ptxsim.empty(64, np.int32)
    x[:60] = 1
    found = check(
        findings(source, 1, 64, x, np.zeros(64, np.int32)), source, "uninitialised global memory", other="use"
    )
    assert found.count == 4 and "global memory that nothing has written" in found.message
    x[60:] = 1
    assert not findings(source, 1, 64, x, np.zeros(64, np.int32))


def test_many_origins():
    """There are numbers for some 250 of them; the values of further ones are found where they are used."""
    source = """
    extern "C" __global__ void many(const int* x, int* out) {
      volatile int own[2];
      #pragma unroll
      for (int k = 0; k < 300; ++k) {
        own[0] = x[k];  // fault
        out[k] = own[0] + 1;  // use
      }
    }"""
    found = findings(source, 1, 32, ptxsim.empty(300, np.int32), np.zeros(300, np.int32))
    assert {f.kind: f.where for f in found} == {
        "uninitialised global memory": line(source, "fault"),
        "uninitialised value": line(source, "use"),
    }
    assert sum(f.count for f in found) == 300 * 32


DIVERGENT = """
extern "C" __global__ void ways(const int* x, int* out, int n) {{
  __shared__ int box[64];
  int t = threadIdx.x, v, sum = 0;
  box[t] = t;
  if (t < n) {{
    v = x[t];  // fault
    for (int i = 0; i < t % 5; ++i) sum += box[i] ^ sum;
  }} else {{
    v = {other};
    for (int i = 0; i < t % 7; ++i) sum += box[i] * 3;
  }}
  __syncthreads();
  for (int i = 0; i < t % 3; ++i) sum ^= box[i + 5];
  if ({stores}) out[t] = v + sum;
}}"""


@every_schedule
def test_values_are_followed_through_divergent_code(settings):
    x, out = ptxsim.empty(64, np.int32), np.zeros(64, np.int32)
    x[:8] = 1

    def run(stores, other="t"):
        source = DIVERGENT.format(stores=stores, other=other)
        found = findings(source, 1, 64, x, out, np.int32(20), **settings)
        return source, [f for f in found if f.kind.startswith("uninitialised")]

    source, found = run("true")
    assert check(found, source, "uninitialised global memory").count == 12
    assert run("t < 8 || t >= 20")[1] == []
    source, found = run("t >= 20", "x[t & 15]")
    assert found[0].kind == "uninitialised global memory" and found[0].count == sum(t & 15 >= 8 for t in range(20, 64))


def predicates(instructions):
    """A kernel in which p is true for n < 5 and u is undefined from thread 20 on."""
    return f"""
    extern "C" __global__ void decide(int* out, int n) {{
      __shared__ int box[32];
      int t = threadIdx.x, r;
      if (t < 20) box[t] = t;
      __syncwarp();
      int v = box[t];  // fault
      asm("{{ .reg .pred p, u, q; setp.lt.s32 p, %1, 5; setp.lt.s32 u, %2, 10; {instructions} selp.u32 %0, 1, 2, q; }}"
        : "=r"(r) : "r"(n), "r"(v));
      out[t] = r;
    }}"""


@pytest.mark.parametrize(
    "instructions, decides",
    [
        ("and.pred q, p, u;", "false"),
        ("and.pred q, u, p;", "false"),
        ("or.pred q, p, u;", "true"),
        ("or.pred q, u, p;", "true"),
        ("setp.lt.and.s32 q, %2, 7, p;", "false"),
        ("setp.lt.or.s32 q, %2, 7, p;", "true"),
        ("xor.pred q, p, u;", "neither"),
        ("setp.lt.xor.s32 q, %2, 7, p;", "neither"),
    ],
)
def test_one_operand_may_decide(instructions, decides):
    source = predicates(instructions)
    for n, value in ((4, "true"), (5, "false")):
        found = findings(source, 1, 32, np.zeros(32, np.int32), np.int32(n))
        if value == decides:
            assert not found
        else:
            assert check(found, source, "uninitialised shared memory").count == 12


def test_small_integers_may_equal_the_pattern():
    """Of one or two bytes only eight at once are uninitialised, and never fewer at the end of an array."""
    source = """
    extern "C" __global__ void bytes(const unsigned char* x, int* out, int n) {
      if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x];
    }"""
    out = np.zeros(64, np.int32)
    for size in (63, 64):
        x = ptxsim.empty(size, np.uint8)
        x[::8] = 0
        assert not findings(source, 1, 64, x, out, np.int32(size))
        x = ptxsim.empty(size, np.uint8)
        x[:56] = 0
        assert len(findings(source, 1, 64, x, out, np.int32(size))) == (size == 64)


def test_an_array_starts_where_memory_of_a_gpu_starts_and_lives_as_long_as_its_views():
    source = """
    extern "C" __global__ void copy(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x]; }"""
    out = np.zeros(32, np.float32)
    for shape in (1, 5, (3, 7), ()):
        assert ptxsim.empty(shape, np.float32).ctypes.data % 256 == 0
    x = ptxsim.empty((2, 32), np.float32)[1]
    gc.collect()
    (finding,) = findings(source, 1, 32, x, out)
    assert finding.count == 32


def test_padding_of_a_structure():
    source = """
    struct Padded { char tag; int value; short last; };
    extern "C" __global__ void padded(Padded* out) {
      __shared__ Padded box[32];
      int t = threadIdx.x;
      box[t].tag = t; box[t].value = 2 * t; box[t].last = 3 * t;
      __syncwarp();
      out[t] = box[31 - t];
    }"""
    assert not findings(source, 1, 32, np.zeros((32, 3), np.int32))


# -- tensor cores and cp.async ---------------------------------------------------------------------------
PRODUCT = """
#include <cuda_fp16.h>
extern "C" __global__ void product(const half* a, const half* b, float* out, int rows, int columns) {{
  __shared__ __align__(16) half left[16 * 16], right[8 * 16];
  int t = threadIdx.x;
  for (int i = t; i < 256; i += 32) if (i / 16 < rows) left[i] = a[i];
  for (int i = t; i < 128; i += 32) if (i / 16 < columns) right[i] = b[i];
  __syncwarp();
  unsigned p = (unsigned)__cvta_generic_to_shared(left + t % 16 * 16 + t / 16 * 8);
  unsigned q = (unsigned)__cvta_generic_to_shared(right + t % 8 * 16 + t / 8 % 2 * 8);
  unsigned x[4], y[2];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0,%1,%2,%3}}, [%4];"  // left
    : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(p) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%0,%1}}, [%2];"  // right
    : "=r"(y[0]), "=r"(y[1]) : "r"(q) : "memory");
  float d[4] = {{}};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, "
    "{{%0,%1,%2,%3}};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
    : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int k = 0; k < 4; ++k) {{
    int row = t / 4 + k / 2 * 8, column = t % 4 * 2 + k % 2;
    if ({stored}) out[row * 8 + column] = d[k];
  }}
}}"""


@pytest.mark.parametrize("rows, columns", [(16, 8), (13, 8), (16, 5), (3, 2), (8, 8)])
def test_a_product_is_undefined_in_the_rows_and_columns_of_undefined_operands(rows, columns):
    """A kernel that stores only the others is right, one that stores a row or a column more is not."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)

    def run(more_rows, more_columns):
        source = PRODUCT.format(stored=f"row < rows + {more_rows} && column < columns + {more_columns}")
        out = ptxsim.empty((16, 8), np.float32)
        return out, source, findings(source, 1, 32, a, b, out, np.int32(rows), np.int32(columns))

    out, _, found = run(0, 0)
    assert not found
    expected = a[:rows].astype("f8") @ b[:columns].astype("f8").T
    np.testing.assert_allclose(out[:rows, :columns], expected, rtol=0, atol=1e-5)
    for mark, more in (("left", (1, 0)), ("right", (0, 1))):
        if (mark == "left" and rows == 16) or (mark == "right" and columns == 8):
            continue
        _, source, found = run(*more)
        assert {f.where for f in found} == {check(found[:1], source, "uninitialised shared memory", mark).where}
        assert sum(f.count for f in found) == (columns if mark == "left" else rows)


PAIR = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void pair(const TYPE* x, float* out, int n) {
  __shared__ __align__(16) TYPE box[8 * 8];
  int t = threadIdx.x;
  unsigned r = 0, one = sizeof(TYPE) == 2 ? 0x3c003c00 : 0;
  TYPE2 v;
  v.x = t / 4 < n || t % 4 > 0 ? x[2 * t] : TYPE(1);  // even
  v.y = x[2 * t + 1];  // odd
  MAKE
  float d[4] = {};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.KIND.KIND.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(r), "r"(r), "r"(one));
  if (t / 4 < n) out[t] = d[0];
}"""
PAIRS = {
    "packed": "r = *(unsigned*)&v;",
    "computed": "TYPE2 w = __floats2TYPE2_rn(2 * (float)v.x, 2 * (float)v.y); r = *(unsigned*)&w;",
    "computed in pairs": "v = __hfma2(v, v, v); r = *(unsigned*)&v;",
    "stored": "*(TYPE2*)(box + 2 * t) = v; __syncwarp(); r = *(volatile unsigned*)(box + 2 * t);",
    "stored in halves": """
      box[2 * t] = v.x; box[2 * t + 1] = v.y; __syncwarp(); r = *(volatile unsigned*)(box + 2 * t);""",
    "a matrix": """
      *(TYPE2*)(box + 2 * t) = v; __syncwarp();
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
        : "=r"(r) : "r"((unsigned)__cvta_generic_to_shared(box + t % 8 * 8)) : "memory");""",
    "a transposed matrix": """
      for (int k = 0; k < 2; ++k) box[(2 * (t % 4) + k) * 8 + t / 4] = k ? v.y : v.x;
      __syncwarp();
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
        : "=r"(r) : "r"((unsigned)__cvta_generic_to_shared(box + t % 8 * 8)) : "memory");""",
}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_half_of_an_operand_of_mma(make, kind):
    """One undefined element of a row of A makes that row of the result undefined, be it in the low or the high half."""
    type_ = {"f16": "half", "bf16": "bfloat16"}[kind]
    source = PAIR.replace("MAKE", make).replace("KIND", kind).replace("TYPE2_rn", f"{type_}2_rn")
    source = source.replace("TYPE", {"f16": "half", "bf16": "__nv_bfloat16"}[kind])

    def run(undefined, n):
        x = ptxsim.empty(64, np.float16)
        x[[k for k in range(64) if k not in undefined]] = 1
        return findings(source, 1, 32, x, ptxsim.empty(32, np.float32), np.int32(n))

    assert not run([], 8)
    for place, mark in ((8 * 5 + 2, "even"), (8 * 5 + 7, "odd")):
        found = run([place], 8)
        assert {f.kind for f in found} == {"uninitialised global memory"}, place
        assert {f.where for f in found} == {line(source, mark)}
        assert sum(f.count for f in found) == 4, "of the row only"
        assert not run([place], 5), "the row is not stored"


CLEAN_PAIRS = {
    "the defined half": "out[t] = __low2float(v);",
    "the undefined half is replaced": "v.y = half(2); out[t] = __low2float(v) + __high2float(v);",
    "shifted out": "out[t] = (*(unsigned*)&v << 16) > 5;",
    "a copy of the whole": "((half2*)out)[t] = v;",
    "swapped and taken apart": "out[t] = __high2float(__lowhigh2highlow(v));",
    **{
        instruction: f"""
      unsigned r; asm volatile("{instruction};" : "=r"(r) : "r"(*(unsigned*)&v));
      half2 w = *(half2*)&r; out[t] = __high2float(w);"""
        for instruction in ("prmt.b32 %0, %1, %1, 0x1010", "shl.b32 %0, %1, 16", "and.b32 %0, %1, 0xffff")
    },
    "through shared memory": """
      __shared__ half2 box[32]; box[t] = v; __syncwarp(); out[t] = __half2float(((volatile half*)box)[2 * t]);""",
}


@pytest.mark.parametrize("code", CLEAN_PAIRS.values(), ids=CLEAN_PAIRS)
def test_pairs_whose_undefined_half_does_not_matter(code):
    source = f"""
    #include <cuda_fp16.h>
    extern "C" __global__ void half_defined(const half* x, float* out) {{
      int t = threadIdx.x;
      half2 v = __halves2half2(x[2 * t], x[2 * t + 1]);
      {code}
    }}"""
    x = ptxsim.empty((32, 2), np.float16)
    x[:, 0] = 1
    assert not findings(source, 1, 32, x, np.zeros(32, np.float32))


@pytest.mark.parametrize("half", [0, 1])
def test_an_undefined_half_that_is_taken_out(half):
    source = f"""
    #include <cuda_fp16.h>
    extern "C" __global__ void taken(const half* x, float* out) {{
      __shared__ half2 box[32];
      int t = threadIdx.x;
      box[t] = __halves2half2(x[2 * t], x[2 * t + 1]);  // fault
      __syncwarp();
      out[t] = __{("low", "high")[half]}2float(box[31 - t]);
    }}"""
    x = ptxsim.empty((32, 2), np.float16)
    x[:, 1 - half] = 1
    assert (
        check(findings(source, 1, 32, x, np.zeros(32, np.float32)), source, "uninitialised global memory").count == 32
    )


def test_bfloat16_that_becomes_float32():
    source = """
    #include <cuda_bf16.h>
    extern "C" __global__ void wider(const __nv_bfloat16* x, float* out) {
      out[threadIdx.x] = 2 * __bfloat162float(x[threadIdx.x]);  // fault
    }"""
    for arch in ("sm_75", "sm_80"):
        found = findings(source, 1, 32, ptxsim.empty(32, np.float16), np.zeros(32, np.float32), arch=arch)
        assert check(found, source, "uninitialised global memory").count == 32


COPY = """
extern "C" __global__ void copy(const uint4* x, unsigned* out, int n) {{
  __shared__ uint4 tile[32];
  int t = threadIdx.x;
  unsigned to = (unsigned)__cvta_generic_to_shared(tile + t);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"  // copy
    :: "r"(to), "l"(x + t), "r"(t < n ? 16 : 0) : "memory");
  {wait}
  __syncwarp();
  out[t] = tile[31 - t].z;  // fault
}}"""
WAIT = 'asm volatile("cp.async.wait_all;" ::: "memory");'


@every_schedule
def test_asynchronous_copies_write_their_target(settings):
    source = COPY.format(wait=WAIT)
    x, out = ptxsim.empty((32, 4), np.uint32), ptxsim.empty(32, np.uint32)
    x[:30] = 7
    assert not findings(source, 1, 32, x, out, np.int32(30), **settings), "what is filled with zeros is written"
    assert out.tolist() == [0, 0, *[7] * 30]
    found = findings(source, 1, 32, x, out, np.int32(31), **settings)
    found = check(found, source, "uninitialised global memory", "copy", other="fault")
    assert found.count == 1 and "thread (1, 0, 0)" in found.message


def test_a_copy_that_is_not_awaited_has_not_written():
    source = COPY.format(wait="")
    found = findings(source, 1, 32, np.ones((32, 4), np.uint32), ptxsim.empty(32, np.uint32), np.int32(32))
    check([f for f in found if f.kind.startswith("uninitialised")], source, "uninitialised shared memory")
