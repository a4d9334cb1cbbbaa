"""Shuffles and votes: lanes that are not there, and masks that do not name who takes part."""

import numpy as np
import pytest

from .launching import SCHEDULES, launch, schedule_name
from .sanitized import check, findings, line

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def kernel(code):
    return f"""
    extern "C" __global__ void kernel(int* out, int n) {{
      int t = threadIdx.x;
      {code}
    }}"""


def run(code, n=0, threads=32, **settings):
    return findings(kernel(code), 2, threads, np.zeros(64, np.int32), np.int32(n), **settings)


@every_schedule
def test_a_shuffle_reads_a_lane_that_has_left(settings):
    code = """
      if (t > 20) return;
      int v = __shfl_down_sync(0xffffffff, t, 1);  // fault
      out[t] = v + 1;  // use"""
    found = check(run(code, **settings), kernel(code), "inactive lane", other="use")
    assert "thread (20, 0, 0)" in found.message and "a lane that takes no part" in found.message and found.count == 2


@every_schedule
def test_a_shuffle_reads_a_lane_outside_its_mask(settings):
    code = """
      out[t] = __shfl_sync(t < 16 ? 0xffff : 0xffff0000, t, n ? 16 : t);  // fault"""
    assert not run(code, **settings)
    found = check(run(code, 1, **settings), kernel(code), "inactive lane")
    assert "thread (0, 0, 0)" in found.message and found.count == 32


REDUCTION = """
      if (t < 8) {
        int v = t;
        for (int k = 4; k; k >>= 1) v += __shfl_down_sync(0xff, v, k);  // fault
        if (t <= n) out[blockIdx.x * 8 + t] = v;
      }"""


@every_schedule
def test_lanes_whose_value_nobody_uses_may_read_inactive_ones(settings):
    """The lower half of a reduction is what counts: lane 4 - k and up add what lanes beyond the mask do not have."""
    assert not run(REDUCTION, 0, **settings)
    assert check(run(REDUCTION, 1, **settings), kernel(REDUCTION), "inactive lane").count == 2
    out = np.zeros(16, np.int32)
    launch(kernel(REDUCTION), 2, 32, out, np.int32(0), **settings)
    assert out.tolist() == [28, *[0] * 7] * 2


def test_an_inactive_lane_and_an_undefined_value():
    """The shuffle passes on what the active lanes do not have either, from where they have it."""
    code = """
      __shared__ int box[32];
      if (t < 20) box[t] = t;
      __syncwarp();
      if (t > 24) return;
      int v = box[t];  // memory
      v = __shfl_down_sync(0xffffffff, v, 2);  // lane
      out[t] = v;  // use"""
    found = run(code)
    assert {(f.kind, f.where, f.count) for f in found} == {
        ("uninitialised shared memory", line(kernel(code), "memory"), 10),
        ("inactive lane", line(kernel(code), "lane"), 4),
    }


@pytest.mark.parametrize(
    "call",
    ["__shfl_xor_sync(0xffffu << n, t, 1)", "__ballot_sync(0xffffu << n, t)", "__any_sync(0xffffu << n, t == 3)",
     "__match_any_sync(0xffffu << n, t)", "__reduce_add_sync(0xffffu << n, t)"],
)  # fmt: skip
def test_who_is_not_in_its_own_mask(call):
    code = f"""
      if (t < 20) out[t] = {call};  // fault"""
    found = check(run(code), kernel(code), "member mask")
    assert "thread (16, 0, 0)" in found.message and found.count == 8


def test_a_mask_names_lanes_that_a_predicate_turns_off():
    code = """
      asm volatile("{ .reg .pred p, q; setp.lt.u32 p, %0, 12; setp.lt.u32 q, %0, 3;"  // fault
        "@p vote.sync.any.pred q, q, 0xffffffff; }" :: "r"(t));
      out[t] = 1;"""
    assert "lane 12 " in check(run(code), kernel(code), "inactive lane").message


CLEAN = {
    "the active ones": "if (t % 3) out[t] = __shfl_sync(__activemask(), t, 1);",
    "halves": "out[t] = __shfl_xor_sync(t < 16 ? 0xffff : 0xffff0000, t, 3);",
    "a tail": "unsigned m = __ballot_sync(~0u, t < 20); if (t < 20) out[t] = __reduce_max_sync(m, t);",
    "out of range": "unsigned m = __ballot_sync(~0u, t < 20); if (t < 20) out[t] = __shfl_up_sync(m, t, 4);",
    "each on its own": "out[t] = __shfl_sync(1u << t, t, t) + __popc(__match_any_sync(1u << t, 0));",
}


@pytest.mark.parametrize("code", CLEAN.values(), ids=CLEAN)
@every_schedule
def test_exchanges_that_are_in_order(code, settings):
    for threads in (32, 20):
        assert not run(code, threads=threads, **settings)
