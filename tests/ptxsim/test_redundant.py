"""Lower bounds leave out what ptxas may share, hoist, fold or forward."""

import numpy as np
import pytest

from .launching import zeros
from .test_profile import profiled


def bound(source, grid, block, *args, on="A100", **options):
    return profiled(source, grid, block, *args, **options).lower_bound(on)


DIVISIONS = """
extern "C" __global__ void divisions(const float* x, float* out) {
  __shared__ float s[1024];
  int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  float l = x[t], a = 0;
  for (int i = 0; i < 1024; ++i) a += __fdividef(s[i], l);
  out[t] = a;
}"""


def test_divisions_by_what_a_loop_does_not_change():
    """SASS: one MUFU.RCP before the loop, and in it one FFMA for each division and sum."""
    found = bound(DIVISIONS, 1, 1024, zeros(1024), zeros(1024)).resources
    assert found["MUFU"] == 0
    assert found["FP32"] == 32 * 1024 * 32 / 64


TWICE = """
extern "C" __global__ void twice(const float* x, float* out) {{
  int t = threadIdx.x;
  float v = x[t], w = x[t + 32], a, b;
  {body}
  out[t] = a;
  out[t + 32] = b;
}}"""
APPROX = 'asm volatile("{0}.approx.ftz.f32 %0, %1;" : "=f"({1}) : "f"({2}));'


@pytest.mark.parametrize(
    "first, second, cycles",
    [
        (APPROX.format("ex2", "a", "v"), APPROX.format("ex2", "b", "v"), 2),
        (APPROX.format("rcp", "a", "v"), APPROX.format("rcp", "b", "v"), 2),
        (APPROX.format("sqrt", "a", "v"), APPROX.format("rsqrt", "b", "v"), 4),
        (APPROX.format("ex2", "a", "v"), APPROX.format("ex2", "b", "w"), 4),
        (APPROX.format("ex2", "a", "v"), APPROX.format("ex2", "b", "a"), 4),
        (APPROX.format("ex2", "a", "v"), APPROX.format("lg2", "b", "v"), 4),
        (APPROX.format("ex2", "a", "v"), "b = a; " + APPROX.format("lg2", "v", "w"), 2),
    ],
)
def test_one_special_function_of_one_register(first, second, cycles):
    """SASS: one MUFU where two are the same or where the second is not used, else two."""
    found = bound(TWICE.format(body=first + second), 1, 32, zeros(64), zeros(64))
    assert found.resources["MUFU"] == cycles


def test_equal_shuffles_are_one():
    """SASS: one SHFL.BFLY of the first two, and one of the third."""
    body = "a = __shfl_xor_sync(~0u, v, 1) + __shfl_xor_sync(~0u, v, 1); b = __shfl_xor_sync(~0u, v, 2);"
    assert bound(TWICE.format(body=body), 1, 32, zeros(64), zeros(64)).resources["shuffle"] == 2


LOOP = """
extern "C" __global__ void loop(float* x, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  float v = x[t], w = x[t + 32], a = v, b;
  s[t] = v;
  #pragma unroll 1
  for (int k = 0; k < n; ++k) {
    #pragma unroll 1
    for (int i = 0; i < 3; ++i) { BODY }
    __syncwarp();
  }
  x[t] = a;
}"""


@pytest.mark.parametrize(
    "body, turns",
    [
        ("FUNCTION(v); a += b;", 0),  # the same in each turn
        ("b = v * i; FUNCTION(b); a += b;", 0),  # three numbers, whatever k
        ("FUNCTION(a); a = b;", 3),  # carried from turn to turn
        ("b = v * k; FUNCTION(b); a += b;", 0),  # the same in the inner loop
        ("b = v * (k + i); FUNCTION(b); a += b;", 3),
        ("b = s[t ^ 1]; FUNCTION(b); a += b; s[t] = b;", 3),  # loaded, as the loop stores
    ],
)
def test_what_a_loop_does_not_change_is_done_before_it(body, turns):
    function = APPROX.format("ex2", "b", "OF")
    head, _, rest = body.partition("FUNCTION(")
    of, _, tail = rest.partition(")")
    source = LOOP.replace("BODY", head + function.replace("OF", of) + tail)
    assert bound(source, 1, 32, zeros(64), np.int32(5)).resources["MUFU"] == 2 * 5 * turns


STORES = """
extern "C" __global__ void stores(float* out, int n) {
  __shared__ float s[32];
  int t = threadIdx.x;
  unsigned at = (unsigned)__cvta_generic_to_shared(s + t);
  s[t] = t;
  #pragma unroll 1
  for (int k = 0; k < n; ++k) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    STORE
  }
}"""


@pytest.mark.parametrize(
    "store, loads",
    [
        ('asm volatile("st.global.f32 [%0], %1;" :: "l"(out + 32 * k + t), "f"(v));', 0),
        ("__stwt(out + 32 * k + t, v); s[t ^ 1] = v;", 5),
    ],
)
def test_loads_that_find_the_same_in_each_turn(store, loads):
    """In front of the loop, stores of global memory cannot change what is in shared memory."""
    found = bound(STORES.replace("STORE", store), 1, 32, zeros(32 * 5), np.int32(5)).resources["shared memory"]
    assert found == 1 + loads * 2


def test_what_a_thread_has_just_stored_need_not_be_loaded():
    """SASS: STS and STG of the register, no LDS."""
    source = STORES.replace("for (int k = 0; k < n; ++k)", "int k = n - 1;").replace("#pragma unroll 1", "")
    source = source.replace("STORE", "out[32 * k + t] = v;")
    assert bound(source, 1, 32, zeros(32), np.int32(1)).resources["shared memory"] == 1


NEUTRAL = """asm("mul.f32 %0, %1, %2;" : "=f"(a) : "f"(v), "f"(1.0f));
asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(b) : "f"(v), "f"(1.0f), "f"(0.0f));"""


@pytest.mark.parametrize("unrounded, left", [("mul.f32", 1), ("mul.rn.f32", 2)])
def test_multiplications_by_one(unrounded, left):
    """SASS: FMUL only of mul.rn, and FFMA for the fma."""
    body = NEUTRAL.replace("mul.f32", unrounded)
    found = bound(TWICE.format(body=body), 1, 32, zeros(64), zeros(64))
    assert found.resources["FP32"] == left * 32 / 64


def test_integers_count_nothing():
    """SASS: (a & b) ^ (~a & c) is one LOP3, a product and its high half one IMAD.WIDE, additions go into addresses."""
    source = """
    extern "C" __global__ void integers(const unsigned* x, unsigned* out) {
      unsigned t = threadIdx.x, a = x[t], b = x[t + 32], c = x[t + 64];
      for (int i = 0; i < 8; ++i) {
        unsigned m = (a & b) ^ (~a & c), lo = a * b, hi = __umulhi(a, b);
        a = b; b = lo ^ c; c = m + hi + __clz(m);
      }
      out[t] = a ^ b ^ c;
    }"""
    found = bound(source, 1, 32, zeros(96, np.uint32), zeros(32, np.uint32)).resources
    assert found["ALU"] == 0 and found["issue"] == 1  # three loads and a store
