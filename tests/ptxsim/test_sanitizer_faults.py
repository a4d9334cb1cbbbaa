"""Faults end their launch and are findings, with the line, the first thread and the number of threads."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, schedule_name
from .sanitized import assert_found, findings

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

SHIFT = """
extern "C" __global__ void shift(const float* x, float* y, int by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 1;
  float v = x[i + by];  // here
  y[i] = v;
}"""


@every_schedule
@pytest.mark.parametrize(
    "by, count, who, near",
    [
        (2, 2, "thread (30, 0, 0) of block (1, 0, 0)", "just past the end of args[0] ("),
        (-1, 1, "thread (0, 0, 0) of block (0, 0, 0)", "4 bytes before the start of args[0]"),
    ],
)
def test_out_of_bounds_in_global_memory(by, count, who, near, settings):
    x, y = np.zeros(64, np.float32), poisoned(64, np.float32)
    found = findings(SHIFT, 2, 32, x, y, np.int32(by), **settings)
    assert_found(SHIFT, found, "out of bounds", other=None)
    (finding,) = [f for f in found if f.kind == "out of bounds"]
    assert finding.count == count and who in finding.message and near in finding.message, finding
    assert "read of 4 bytes" in finding.message
    assert (y == 0).sum() < 64  # the launch has stopped


def test_all_threads_at_the_instruction_are_counted():
    _, x, _, y = poisoned((4, 64), np.float32)  # nothing else lies within 64 elements of x
    x[:] = 0
    for by, count in ((64, 64), (40, 40), (-5, 5)):
        found = findings(SHIFT, 2, 32, x, y, np.int32(by))
        assert [f.count for f in found if f.kind == "out of bounds"] == [count]


def test_the_next_launch_runs():
    x, y = np.zeros(64, np.float32), poisoned(64, np.float32)
    with ptxsim.sanitize() as report:
        launch(SHIFT, 2, 32, x, y, np.int32(1))
        launch(SHIFT, 2, 32, x, y, np.int32(0))
    assert (y == 0).all() and [f.kind for f in report.findings] == ["out of bounds"]


def test_without_the_sanitizer_or_if_it_halts_a_fault_raises():
    x, y = np.zeros(64, np.float32), poisoned(64, np.float32)
    with pytest.raises(ptxsim.MemoryFault):
        launch(SHIFT, 2, 32, x, y, np.int32(1))
    with pytest.raises(ptxsim.MemoryFault, match="args"), ptxsim.sanitize(halt=True) as report:
        launch(SHIFT, 2, 32, x, y, np.int32(1))
    assert [f.kind for f in report.findings] == ["out of bounds"]


SPACES = {
    "static shared": "__shared__ int s[8]; s[t % 8] = t; __syncthreads(); y[t] = s[t + shift];  // here",
    "dynamic shared": "extern __shared__ int s[]; s[t] = t; __syncthreads(); y[t] = s[t + shift];  // here",
    "local": "int s[8]; for (int i = 0; i < 8; i++) s[i] = y[i]; y[t] = s[t + shift];  // here",
}


@every_schedule
@pytest.mark.parametrize("space", SPACES)
def test_the_end_of_shared_and_local_memory(space, settings):
    source = f"""
    extern "C" __global__ void ends(int* y, int shift) {{
      int t = threadIdx.x;
      {SPACES[space]}
    }}"""
    dynamic = 32 if space.startswith("dynamic") else 0
    for shift in (8, 1):
        y = np.zeros(8, np.int32)
        found = findings(source, 1, 8, y, np.int32(shift), shared_mem=dynamic, **settings)
        found = [f for f in found if f.kind == "out of bounds"]
        assert_found(source, found, "out of bounds", other=None)
        assert [f.count for f in found] == [shift]
    assert not [f for f in findings(source, 1, 8, y, np.int32(0), shared_mem=dynamic, **settings) if "out" in f.kind]


@every_schedule
@pytest.mark.parametrize("space", ["shared", "global"])
def test_misaligned(space, settings):
    source = """
    extern "C" __global__ void crooked(char* y, int shift) {
      __shared__ char s[128];
      char* p = SPACE;
      if (threadIdx.x < 16) *(int*)(p + 4 * threadIdx.x + shift) = 7;  // here
    }""".replace("SPACE", {"shared": "s", "global": "y"}[space])
    y = np.zeros(132, np.int8)
    found = findings(source, 1, 32, y, np.int32(2), **settings)
    assert_found(source, found, "misaligned access", other=None)
    assert [f.count for f in found] == [16]
    assert not findings(source, 1, 32, y, np.int32(4), **settings)


@every_schedule
def test_writes_to_read_only_memory(settings):
    source = """
    extern "C" __global__ void stamp(int* y) {
      if (threadIdx.x % 2) y[threadIdx.x] = 1;  // here
    }"""
    y = np.zeros(32, np.int32)
    y.flags.writeable = False
    found = findings(source, 1, 32, y, **settings)
    assert_found(source, found, "read-only memory", other=None)
    assert [f.count for f in found] == [16] and not y.any()
