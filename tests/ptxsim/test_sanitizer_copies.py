"""cp.async: reading before the wait, before the barrier, and refilling too early."""

import numpy as np
import pytest

from .launching import SCHEDULES, poisoned, schedule_name
from .sanitized import findings, line

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

HELPERS = """
__device__ void fetch(void* to, const void* from) {
  unsigned at = __cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n> __device__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory"); }
"""

STREAM = (
    HELPERS
    + """
extern "C" __global__ void stream(const int4* x, int4* y, int rounds) {
  __shared__ int4 s[2][64];
  int t = threadIdx.x;
  fetch(&s[0][t], x + t);
  commit();
  for (int r = 0; r < rounds; r++) {
    fetch(&s[(r + 1) % 2][t], x + 64 * (r + 1) + t);
    commit();
    WAIT
    FILLED
    y[64 * r + t] = s[r % 2][63 - t];  // here
    READ
  }
  wait<0>();
}"""
)
PARTS = {"WAIT": "wait<1>();", "FILLED": "__syncthreads();", "READ": "__syncthreads();"}


def stream(missing):
    source = STREAM
    for name, text in PARTS.items():
        source = source.replace(name, "" if name == missing else text)
    return source


def run(source, **settings):
    x, y = np.arange(5 * 256, dtype=np.int32), poisoned((4, 64, 4), np.int32)
    found = findings(source, 1, 64, x, y, np.int32(4), **settings)
    return found, (y == x.reshape(5, 64, 4)[:4, ::-1]).all()


@every_schedule
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_a_pipeline_is_clean(arch, settings):
    found, right = run(stream(None), arch=arch, **settings)
    assert not found and right


@every_schedule
@pytest.mark.parametrize("wait", ["", "wait<2>();"])
def test_a_missing_wait(wait, settings):
    source = stream("WAIT").replace("commit();\n    \n", f"commit();\n    {wait}\n")
    assert wait in source
    found, _ = run(source, **settings)
    assert ("missing cp.async wait", line(source, "here")) in {(f.kind, f.where) for f in found}
    assert all("by cp.async" in f.message for f in found if f.kind == "missing cp.async wait")
    assert {f.other for f in found} <= {line(source, "here"), "kernel.cu:4"}


@every_schedule
def test_a_barrier_before_the_wait_is_no_barrier_after_it(settings):
    source = stream("FILLED").replace("wait<1>();", "__syncthreads(); wait<1>();")
    found, _ = run(source, **settings)
    found = [f for f in found if f.kind in ("shared race", "missing cp.async wait")]
    assert line(source, "here") in {f.where for f in found}
    assert {f.other for f in found} <= {line(source, "here"), "kernel.cu:4"}


@every_schedule
def test_a_refill_while_others_may_still_read(settings):
    source = stream("READ")
    found, _ = run(source, **settings)
    assert ("shared race", "kernel.cu:4", line(source, "here")) in {(f.kind, f.where, f.other) for f in found}


@every_schedule
def test_a_store_over_a_copy_under_way(settings):
    source = (
        HELPERS
        + """
    extern "C" __global__ void over(const int4* x, int4* y) {
      __shared__ int4 s[32];
      int t = threadIdx.x;
      fetch(&s[t], x + t);
      s[t].y = 5;  // here
      commit();
      wait<0>();
      y[t] = s[t];
    }"""
    )
    found = findings(source, 1, 32, np.zeros(128, np.int32), poisoned(128, np.int32), **settings)
    assert [(f.kind, f.where, f.other, f.count) for f in found] == [
        ("missing cp.async wait", line(source, "here"), "kernel.cu:4", 32)
    ]


@every_schedule
def test_copies_that_nobody_waits_for_are_no_fault(settings):
    source = (
        HELPERS
        + """
    extern "C" __global__ void leave(const int4* x, int* y) {
      __shared__ int4 s[32];
      fetch(&s[threadIdx.x], x + threadIdx.x);
      y[threadIdx.x] = 1;
    }"""
    )
    assert not findings(source, 3, 32, np.zeros(128, np.int32), poisoned(32, np.int32), chunk_lanes=32, **settings)


@every_schedule
@pytest.mark.parametrize("source_of", ["x", "x + t / 32"])
@pytest.mark.parametrize("apart", [False, True])
def test_all_copy_one_value_to_one_place(source_of, apart, settings):
    """As stores of equal values are harmless, whatever the order in which threads issue and wait."""
    waits = "if (t % 2) { wait<0>(); y[t] = 1; } else wait<0>();" if apart else "wait<0>();"
    source = (
        HELPERS
        + f"""
    extern "C" __global__ void all(const int4* x, int* y) {{
      __shared__ int4 s[1];
      int t = threadIdx.x;
      for (int k = 0; k < 3; k++) {{
        fetch(s, {source_of});  // here
        commit();
        {waits}
        __syncthreads();
        y[t] = s[0].x + s[0].w;
        __syncthreads();
      }}
    }}"""
    )
    y = poisoned(96, np.int32)
    found = findings(source, 1, 96, np.arange(5, 21, dtype=np.int32), y, **settings)
    if source_of == "x":
        assert not found and (y == 5 + 8).all()
    else:
        assert found and {f.kind for f in found} <= {"missing cp.async wait", "different values", "shared race"}


@every_schedule
def test_own_copies_need_no_barrier(settings):
    source = (
        HELPERS
        + """
    extern "C" __global__ void own(const int4* x, int4* y) {
      __shared__ int4 s[64];
      int t = threadIdx.x;
      if (t % 3) {
        fetch(&s[t], x + t);
        commit();
        wait<0>();
        y[t] = s[t];
      }
    }"""
    )
    assert not findings(source, 1, 64, np.zeros(256, np.int32), poisoned(256, np.int32), **settings)


@every_schedule
@pytest.mark.parametrize("source_size", [16, 8, 0])
@pytest.mark.parametrize("place", ["t", "t / 2", "t % 16", "0"])
def test_copies_to_one_place_at_once(place, source_size, settings):
    """By lanes of one warp. Equal ones are harmless, as equal stores are."""
    source = f"""
    extern "C" __global__ void one(const int4* x, int4* y) {{
      __shared__ int4 s[32];
      int t = threadIdx.x;
      unsigned at = __cvta_generic_to_shared(&s[{place}]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"  // copy
        :: "r"(at), "l"(x + t), "r"({source_size}) : "memory");
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
      y[t] = s[{place}];
    }}"""
    x, y = np.zeros((32, 4), np.int32), poisoned((32, 4), np.int32)
    assert not findings(source, 1, 32, x, y, **settings)
    x[:, 1], x[:, 3] = np.arange(32), 7 * np.arange(32)
    expected = [("different values", line(source, "copy"))] if place != "t" else []
    found = findings(source, 1, 32, x, y, **settings)
    assert [(f.kind, f.where) for f in found] == (expected if source_size else [])
    x[:, 1] = 0  # the second half differs, which not all of them read
    found = findings(source, 1, 32, x, y, **settings)
    assert [(f.kind, f.where) for f in found] == (expected if source_size == 16 else [])
