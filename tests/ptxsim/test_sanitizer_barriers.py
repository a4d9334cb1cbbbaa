"""Barriers that a warp or a block does not meet together, deadlocks and livelocks; early returns are no fault."""

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim import machine

from .launching import SCHEDULES, launch, poisoned, schedule_name
from .sanitized import check, findings, line_of

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def kernel(code):
    return f"""
    extern "C" __global__ void kernel(int* out, int n) {{
      __shared__ int box[64];
      int t = threadIdx.x;
      {code}
    }}"""


def run(code, threads=64, n=3, **settings):
    """Findings of two blocks of a kernel with this body."""
    return findings(kernel(code), 2, threads, np.zeros((2, 64), np.int32), np.int32(n), **settings)


LEFT_OUT = """
      if (t % 32 < 16) {
        box[t] = t;
        __syncthreads();  // fault
      }
      out[64 * blockIdx.x + t] = t;"""
TWO_SITES = """
      if (t & 1) {
        box[t] = t;
        __syncthreads();  // fault
        out[t] = 1;
      } else {
        __syncthreads();  // other
        out[t] = 2;
      }"""


@every_schedule
def test_a_barrier_that_some_lanes_leave_out(settings):
    found = check(run(LEFT_OUT, **settings), kernel(LEFT_OUT), "divergent barrier")
    assert found.count == 64 and "thread (16, 0, 0)" in found.message


@every_schedule
def test_lanes_of_one_warp_at_two_barriers(settings):
    check(run(TWO_SITES, 32, **settings), kernel(TWO_SITES), "divergent barrier", other="other")


@every_schedule
def test_a_barrier_in_a_loop_of_different_lengths(settings):
    code = """
      for (int i = t; i < 100; i += 32) {
        box[t] = i;
        __syncthreads();  // fault
        atomicAdd(out + t, box[t ^ 1]);
      }
      out[t] += 1;"""
    found = [f for f in run(code, 32, **settings) if f.kind == "divergent barrier"]
    check(found[:1], kernel(code), "divergent barrier")


@every_schedule
def test_warps_at_two_barriers(settings):
    code = TWO_SITES.replace("t & 1", "t < 32")
    check(run(code, **settings), kernel(code), "mismatched barrier", other="other")


@every_schedule
def test_two_counts_for_one_barrier(settings):
    code = """
      if (t < 32) {
        asm volatile("bar.arrive 1, 64;");  // first
        out[t] = 1;
      } else {
        asm volatile("bar.sync 1, 96;");  // second
        out[t] = 2;
      }"""
    found = run(code, **settings)
    assert [f.kind for f in found] == ["barrier count", "deadlock"]
    check(found[:1], kernel(code), "barrier count", "first", "second")
    assert found[1].where.endswith(f":{line_of(kernel(code), 'second')}")


@pytest.mark.parametrize(
    "instruction, kind",
    [
        ('"bar.sync 1, 40;"', "barrier count"),
        ('"bar.sync 1, %0;" :: "r"(n + 30)', "barrier count"),
        ('"bar.sync %0;" :: "r"(n + 14)', "barrier number"),
    ],
)
def test_counts_and_numbers_that_no_barrier_has(instruction, kind):
    code = f"""
      asm volatile({instruction});  // fault
      out[t] = 1;"""
    check([f for f in run(code) if f.kind != "deadlock"], kernel(code), kind)


def test_a_deadlock_is_a_finding_for_each_group():
    code = """
      if (t >= 48) return;
      if (t < 32)
        asm volatile("bar.sync 1, 64;" ::: "memory");  // first
      else
        asm volatile("bar.sync 2, 64;" ::: "memory");  // second
      out[t] = 1;"""
    found = run(code)
    assert [f.kind for f in found] == ["deadlock", "deadlock"]
    for finding, mark, threads in zip(found, ("first", "second"), (64, 32), strict=True):
        assert finding.where.endswith(f":{line_of(kernel(code), mark)}") and finding.count == threads
        assert "64 threads" in finding.message and "32 of their blocks have exited" in finding.message
    with pytest.raises(ptxsim.Deadlock), ptxsim.sanitize(halt=True):
        launch(kernel(code), 2, 64, np.zeros(64, np.int32), np.int32(1))


SPINS = {
    "a flag": """
      while (((volatile int*)out)[63] == 0);  // fault
      out[t] = 1;""",
    "an exchange": """
      while (atomicExch(out + 63, 1));  // fault
      out[0] = 1;""",
    "a register": """
      asm volatile("{ .reg .pred p; here: setp.eq.u32 p, %0, 3; @p bra here; }" :: "r"(n));  // fault
      out[t] = 1;""",
    "two registers in turn": """
      asm volatile("{ .reg .pred p; .reg .u32 a; mov.u32 a, %0; here: xor.b32 a, a, 8; setp.ne.u32 p, a, 0; "
                   "@p bra here; }" :: "r"(n));  // fault
      out[t] = 1;""",
}


@pytest.mark.parametrize("code", SPINS.values(), ids=SPINS)
@every_schedule
def test_loops_that_change_nothing_are_livelocks(code, settings):
    """Whatever they wait for: they come back to where they were, with the same registers and memory."""
    source = kernel(code)
    found = findings(source, 1, 64, np.zeros(64, np.int32), np.int32(3), **settings)
    assert {f.kind for f in found} == {"livelock"} and sum(f.count for f in found) in (63, 64)
    assert all(abs(int(f.where.split(":")[1]) - line_of(source, "fault")) <= 1 for f in found)


@every_schedule
def test_lanes_that_part_and_meet_in_a_livelock_are_seen_at_once(settings, monkeypatch):
    """In one turn of the loop half of them look at the flag, and all vote: no group stays together for long."""
    monkeypatch.setattr(machine, "RESCUES_WITHOUT_CHANGE", float("inf"))
    code = """
      while (__any_sync(~0u, t % 2 && ((volatile int*)out)[63] == 0));
      out[t] = 1;"""
    found = findings(kernel(code), 1, 64, np.zeros(64, np.int32), np.int32(3), **settings)
    assert sum(f.count for f in found) == 64 and "livelock" in {f.kind for f in found}


def test_who_waits_for_a_livelock_is_named_as_well():
    code = """
      if (t == 5) while (((volatile int*)out)[0] == 0);  // spins
      __syncthreads();  // waits
      out[t] = 1;"""
    found = {f.kind: f for f in run(code, 32)}
    assert found["livelock"].where.endswith(f":{line_of(kernel(code), 'spins')}") and found["livelock"].count == 2
    assert found["deadlock"].where.endswith(f":{line_of(kernel(code), 'waits')}") and found["deadlock"].count == 62


def test_a_long_loop_is_no_livelock():
    code = """
      unsigned a = t + 1;
#pragma unroll 1
      for (int k = 0; k < 9000; ++k) a = a * 1664525 + 1013904223;
      out[t] = a;"""
    out = np.zeros(64, np.int32)
    assert not findings(kernel(code), 1, 32, out, np.int32(3))
    a = np.arange(1, 33, dtype=np.uint32)
    for _ in range(9000):
        a = a * np.uint32(1664525) + np.uint32(1013904223)
    np.testing.assert_array_equal(out[:32].view(np.uint32), a)


def test_a_timeout_is_no_livelock():
    code = """
      long long start = clock64();
      while (((volatile int*)out)[63] == 0 && clock64() - start < 2000);
      out[t] = 1;"""
    assert not findings(kernel(code), 1, 32, np.zeros(64, np.int32), np.int32(3))


CLEAN = {
    "a uniform condition": "if (n > 2) { box[t] = t; __syncthreads(); out[t] = box[t ^ 1]; }",
    "an early return of lanes": "if (t > 40) return; box[t] = t; __syncthreads(); out[t] = box[t / 2];",
    "an early return of warps": "if (t < 32) { out[t] = 1; return; } box[t] = t; __syncthreads(); out[t] = box[t ^ 1];",
    "a return from a loop": """
      for (int i = 0; i < 64; i += 8) {
        if (i > t) return;
        box[t] = i;
        __syncthreads();
        atomicAdd(out + t, box[t]);
      }""",
    "lanes that come late": """
      if (t % 32 < 16) for (int i = 0; i < t; ++i) atomicAdd(out + t, i);
      __syncthreads();
      if (t & 1) atomicAdd(out + t, 3); else for (int i = 0; i < t; ++i) atomicAdd(out + t, i ^ 1);
      __syncthreads();
      out[t] += 1;""",
    "roles": """
      if (t < 32) {
        box[t] = t;
        asm volatile("bar.arrive 1, 64;" ::: "memory");
        asm volatile("bar.sync 2, 64;" ::: "memory");
        out[t] = box[t + 32];
      } else {
        box[t] = t;
        asm volatile("bar.arrive 2, 64;" ::: "memory");
        asm volatile("bar.sync 1, 64;" ::: "memory");
        out[t] = box[t - 32];
      }""",
    "groups": """
      if (t & 1) { box[t] = 1; asm volatile("barrier.sync 0;" ::: "memory"); out[t] = box[t ^ 1]; }
      else { box[t] = 2; asm volatile("barrier.sync 0;" ::: "memory"); out[t] = box[t ^ 1]; }""",
    "a reduction": """
      int count = __syncthreads_count(t % 3);
      if (t < count) out[t] = count;
      if (__syncthreads_or(t == 5)) out[t] = 2;""",
    "one barrier, two counts in turn": """
      asm volatile("bar.sync 1, 64;" ::: "memory");
      if (t < 32) asm volatile("bar.sync 1, 32;" ::: "memory");
      out[t] = 1;""",
}


@pytest.mark.parametrize("code", CLEAN.values(), ids=CLEAN)
@every_schedule
def test_barriers_that_are_in_order(code, settings):
    found = findings(kernel(code), 1, 64, np.zeros(64, np.int32), np.int32(3), **settings)
    assert not found


@every_schedule
def test_a_warp_comes_to_a_counted_barrier_with_all_of_its_lanes(settings):
    """Half a warp does not complete a barrier for 64 threads before its other half is there."""
    code = """
      asm volatile("bar.sync 2, 64;" ::: "memory");
      if (t < 32) {
        box[t] = t + 100;
        if (t & 1) asm volatile("bar.sync 1, 64;" ::: "memory");
        else {
          for (int i = 0; i < 20; ++i) atomicAdd(out + 1, 1);
          asm volatile("bar.sync 1, 64;" ::: "memory");
        }
      } else {
        asm volatile("bar.sync 1, 64;" ::: "memory");
        out[t] = out[1];
      }"""
    out = poisoned(64, np.int32)
    out[1] = 0
    launch(kernel(code), 1, 64, out, np.int32(0), **settings)
    assert out[1] == 320 and (out[32:] == 320).all()
