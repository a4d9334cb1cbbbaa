"""Findings in inlined functions name the calls."""

import numpy as np

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
