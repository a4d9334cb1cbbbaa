"""Uninitialised values are followed to where they matter; moving them about, padding and tails are no fault."""

import gc

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, schedule_name
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
