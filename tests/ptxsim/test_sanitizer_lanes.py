"""Shuffles and votes: lanes that are not there, and masks that do not name who takes part."""

import numpy as np
import pytest

from .kernels import SCHEDULES, schedule_name
from .sanitized import check, findings

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
      out[t] = __shfl_down_sync(0xffffffff, t, 1);  // fault"""
    found = check(run(code, **settings), kernel(code), "inactive lane")
    assert "thread (20, 0, 0)" in found.message and "lane 21" in found.message


@every_schedule
def test_a_shuffle_reads_a_lane_outside_its_mask(settings):
    code = """
      out[t] = __shfl_sync(t < 16 ? 0xffff : 0xffff0000, t, n ? 16 : t);  // fault"""
    assert not run(code, **settings)
    found = check(run(code, 1, **settings), kernel(code), "member mask")
    assert "thread (0, 0, 0)" in found.message and found.count == 32


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
