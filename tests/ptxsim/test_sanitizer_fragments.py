"""Uninitialised values in tensor-core fragments, their 16-bit halves and asynchronous copies."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, schedule_name
from .sanitized import check, findings, line

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

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
