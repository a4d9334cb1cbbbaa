"""Findings in inlined functions name the calls; what the sanitizer knows of a kernel it knows through calls."""

import numpy as np
import pytest

from cupyflash import ptxsim
from tests.ptxsim import launching

SOURCE = """\
__device__ __forceinline__ void put(float* p, float v) {
    *p = v;
}
__device__ __forceinline__ void put_twice(float* p, float v) {
    put(p, v);
    put(p + 64, v);
}
__shared__ float s[128];
extern "C" __global__ void k(float* x) {
    put_twice(s + threadIdx.x, 1.0f);
    x[threadIdx.x] = s[threadIdx.x ^ 32];
    put(x + threadIdx.x + 64, s[64 + (threadIdx.x ^ 32)]);
}
"""


def test_both_places_with_their_calls():
    with ptxsim.sanitize() as report:
        launching.launch(SOURCE, 1, 64, np.zeros(128, np.float32), name="k")
    first, second = sorted(report.findings, key=lambda finding: finding.where)
    assert (first.where, first.calls) == ("kernel.cu:11", ())
    assert (first.other, first.other_calls) == ("kernel.cu:2", ("kernel.cu:5", "kernel.cu:10"))
    assert (second.where, second.calls) == ("kernel.cu:12", ())
    assert (second.other, second.other_calls) == ("kernel.cu:2", ("kernel.cu:6", "kernel.cu:10"))
    assert "kernel.cu:12 and kernel.cu:2 called at kernel.cu:6 called at kernel.cu:10" in str(second)


def test_one_finding_for_each_call():
    source = """\
    __device__ __forceinline__ void put(float* p) { *p = threadIdx.x; }
    extern "C" __global__ void k(float* x) {
        put(x);
        put(x + 1);
    }"""
    with ptxsim.sanitize() as report:
        launching.launch(source, 1, 32, np.zeros(2, np.float32), name="k")
    assert [(finding.where, finding.calls) for finding in report.findings] == [
        ("kernel.cu:1", ("kernel.cu:3",)),
        ("kernel.cu:1", ("kernel.cu:4",)),
    ]


FLAGS = r"""
extern "C" __global__ void sum(unsigned long long* total) {  // the loop of the CUDA guide
  unsigned long long old = *total, assumed;
  do {
    assumed = old;
    old = atomicCAS(total, assumed, __double_as_longlong(threadIdx.x + __longlong_as_double(assumed)));
  } while (assumed != old);
}
extern "C" __global__ void in_turn(int* out) {
  __shared__ volatile int turn;
  __shared__ int value;
  if (threadIdx.x == 0) turn = 0, value = 0;
  __syncthreads();
  while (turn != threadIdx.x) __nanosleep(10);
  __threadfence_block();
  value = 2 * value + 1;
  __threadfence_block();
  turn = threadIdx.x + 1;
  __syncthreads();
  out[threadIdx.x] = value;
}"""


@pytest.mark.parametrize("options", [(), ("-G",)], ids=["optimised", "debug"])
@pytest.mark.parametrize("schedule", ["lockstep", "random"])
def test_flags_and_guesses(options, schedule):
    """In code for debugging, __nanosleep and atomicCAS are calls, and what they are given goes through memory."""
    total, out = np.zeros(1), np.zeros(7, np.int32)
    module = ptxsim.RawModule(code=FLAGS, options=options)
    with ptxsim.settings(schedule=schedule), ptxsim.sanitize() as report:
        module.get_function("sum")((2,), (40,), (total,))
        module.get_function("in_turn")((1,), (7,), (out,))
    assert not report.findings
    assert total[0] == 40 * 39
    np.testing.assert_array_equal(out, 127)


def test_a_flag_without_a_fence_in_code_for_debugging():
    code = FLAGS.replace("__threadfence_block();", "")
    with ptxsim.sanitize() as report:
        ptxsim.RawModule(code=code, options=("-G",)).get_function("in_turn")((1,), (7,), (np.zeros(7, np.int32),))
    assert "shared race" in {f.kind for f in report.findings}
