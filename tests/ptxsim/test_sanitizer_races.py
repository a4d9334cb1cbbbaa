"""Races are found at both their lines, under every schedule; what is ordered is not reported."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, schedule_name
from .sanitized import assert_found, findings, line

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def numbers(n, dtype=np.int32):
    return np.arange(n, dtype=dtype)


# -- shared memory -------------------------------------------------------------------------------------
NEIGHBOUR = """
extern "C" __global__ void neighbour(const int* x, int* y, int rounds) {
  __shared__ int s[96];
  int t = threadIdx.x;
  for (int r = 0; r < rounds; r++) {
    s[t] = x[t] + r;  // write
    FILLED
    int mine = s[(t + 40) % 96];  // read
    READ
    y[t] = mine;
  }
}"""


@every_schedule
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("missing", ["nothing", "FILLED", "READ"])
def test_a_barrier_before_and_after(missing, arch, settings):
    """Reading what another warp has just written, and writing over what it may still read."""
    source = NEIGHBOUR.replace(missing, "").replace("FILLED", "__syncthreads();").replace("READ", "__syncthreads();")
    found = findings(source, 3, 96, numbers(96), poisoned(96, np.int32), np.int32(2), arch=arch, **settings)
    races = [f for f in found if f.kind == "shared race"]
    if missing == "nothing":
        assert not races
    elif missing == "FILLED":
        # whichever of the two comes first under this schedule
        assert {f.where for f in races} <= {line(source, "read"), line(source, "write")}
        assert {f.other for f in races} <= {line(source, "read"), line(source, "write")} and races
    else:
        assert_found(source, races, "shared race", "write", "read")


def test_a_finding_names_both_threads_and_both_lines():
    source = NEIGHBOUR.replace("FILLED", "").replace("READ", "__syncthreads();")
    with ptxsim.sanitize() as report:
        launch(source, 1, 96, numbers(96), poisoned(96, np.int32), np.int32(1))
    (finding,) = report.findings
    assert finding.count == 96 and finding.where == line(source, "read") and finding.other == line(source, "write")
    text = str(finding)
    for part in ("shared race", "neighbour", "thread (0, 0, 0) of block (0, 0, 0)", "thread (40, 0, 0)", "96 times"):
        assert part in text, text
    assert finding.where in text and finding.other in text and str(report) == text


@every_schedule
@pytest.mark.parametrize(
    "writer, sync, readers",
    [
        (0, "", "other threads"),
        (30, "", "thread (0, 0, 0) of block (0, 0, 0) and others"),
        (30, "__syncwarp();", "other threads"),
        (40, "__syncwarp();", "thread (0, 0, 0) of block (0, 0, 0) and others"),
    ],
)
def test_a_finding_names_no_reader_that_is_ordered(writer, sync, readers, settings):
    """Of many readers one is remembered: where it is the writer itself, or ordered before it, the others race."""
    source = f"""
    extern "C" __global__ void readers(const int* x, int* y) {{
      __shared__ int s[64];
      int t = threadIdx.x;
      s[t] = x[t];
      __syncthreads();
      int v = s[0];  // other
      {sync}
      if (t == {writer}) s[0] = v + 5;  // here
      y[t] = v;
    }}"""
    found = findings(source, 1, 64, numbers(64), poisoned(64, np.int32), **settings)
    assert found and {f.kind for f in found} <= {"shared race"}
    assert {f.where for f in found} | {f.other for f in found} == {line(source, "here"), line(source, "other")}
    writes = [f for f in found if f.where == line(source, "here")]
    if settings["schedule"] == "lockstep":
        assert len(writes) == 1
        assert f"which {readers} read with nothing" in writes[0].message
    for finding in writes:
        assert f"which thread ({writer}, 0, 0) of" not in finding.message


def test_halt_raises_the_first_finding():
    source = NEIGHBOUR.replace("FILLED", "").replace("READ", "__syncthreads();")
    with pytest.raises(ptxsim.SimulationError, match=r"shared race.*kernel\.cu"), ptxsim.sanitize(halt=True) as report:
        launch(source, 1, 96, numbers(96), poisoned(96, np.int32), np.int32(1))
    assert len(report.findings) == 1


WARP_SUM = """
extern "C" __global__ void warp_sum(const int* x, int* y) {
  __shared__ VOLATILE int s[128];
  int t = threadIdx.x, lane = t % 32;
  s[t] = x[t];
  SYNC
  for (int step = 16; step > 0; step /= 2) {
    int other = lane < step ? s[t + step] : 0;  // read
    SYNC
    if (lane < step) s[t] = s[t] + other;  // write
    SYNC
  }
  if (lane == 0) y[t / 32] = s[t];
}"""


@every_schedule
@pytest.mark.parametrize("volatile", ["", "volatile"])
@pytest.mark.parametrize("sync", ["__syncwarp();", "", "__shfl_sync(~0u, t, 0);"])
def test_lanes_of_a_warp_need_syncwarp(sync, volatile, settings):
    """Neither volatile nor a shuffle orders the memory of a warp."""
    source = WARP_SUM.replace("SYNC", sync).replace("VOLATILE", volatile)
    y = poisoned(4, np.int32)
    found = findings(source, 1, 128, numbers(128), y, **settings)
    if "syncwarp" in sync:
        assert not found and list(y) == [496, 1520, 2544, 3568]
    else:
        assert found and {f.kind for f in found} == {"shared race"}
        assert line(source, "read") in {f.where for f in found}


@every_schedule
def test_tiles_of_a_warp(settings):
    source = """
    extern "C" __global__ void tiles(const int* x, int* y) {
      __shared__ int s[64];
      int t = threadIdx.x;
      unsigned members = 0xffu << (t % 32 / 8 * 8);
      s[t] = x[t];
      __syncwarp(members);
      y[t] = s[t ^ 5];
    }"""
    y = poisoned(64, np.int32)
    assert not findings(source, 1, 64, numbers(64), y, **settings)
    np.testing.assert_array_equal(y, numbers(64) ^ 5)


PRODUCER = """
extern "C" __global__ void pipeline(const int* x, int* y) {
  __shared__ int full[64], other[64];
  int t = threadIdx.x;
  if (t < 64) {
    for (int r = 0; r < 4; r++) {
      EMPTY
      full[t] = x[64 * r + t];  // fill
      asm volatile("bar.arrive 1, 128;" ::: "memory");
    }
  } else {
    asm volatile("bar.arrive 2, 128;" ::: "memory");
    for (int r = 0; r < 4; r++) {
      FULL
      y[64 * r + t - 64] = full[127 - t];  // use
      asm volatile("bar.arrive 2, 128;" ::: "memory");
    }
  }
}"""


@every_schedule
@pytest.mark.parametrize("missing", ["nothing", "EMPTY", "FULL"])
def test_named_barriers_between_producers_and_consumers(missing, settings):
    waits = {"EMPTY": 'asm volatile("bar.sync 2, 128;" ::: "memory");'}
    waits["FULL"] = waits["EMPTY"].replace("2,", "1,")
    source = PRODUCER
    for name, text in waits.items():
        source = source.replace(name, "" if name == missing else text)
    y = poisoned(256, np.int32)
    found = findings(source, 2, 128, numbers(256), y, **settings)
    races = [f for f in found if f.kind == "shared race"]
    if missing == "nothing":
        assert not found
        np.testing.assert_array_equal(y.reshape(4, 64), numbers(256).reshape(4, 64)[:, ::-1])
    elif missing == "FULL" or races:
        assert {f.where for f in races} | {f.other for f in races} == {line(source, "fill"), line(source, "use")}
    else:
        assert found  # a producer that arrives twice for one barrier leaves its consumers waiting


@every_schedule
def test_a_barrier_of_two_warps_does_not_order_a_third(settings):
    source = """
    extern "C" __global__ void some(int* y) {
      __shared__ int s[96];
      int t = threadIdx.x;
      s[t] = t;  // other
      if (t < 64) asm volatile("bar.sync 3, 64;" ::: "memory");
      y[t] = t < 32 ? s[t + 32] : t < 64 ? s[t + 32] : 0;  // here
    }"""
    found = findings(source, 1, 96, poisoned(96, np.int32), **settings)
    assert [(f.kind, f.count) for f in found] == [("shared race", 32)]
    assert {found[0].where, found[0].other} == {line(source, "here"), line(source, "other")}


@every_schedule
@pytest.mark.parametrize("type_", ["char", "short"])
def test_parts_of_a_word_are_different_places(type_, settings):
    source = f"""
    extern "C" __global__ void parts({type_}* y) {{
      __shared__ {type_} s[64];
      int t = threadIdx.x;
      s[t] = t;
      y[t] = s[t];
      y[t] = y[t] + 1;
    }}"""
    y = poisoned(64, np.int8 if type_ == "char" else np.int16)
    assert not findings(source, 1, 64, y, **settings)
    np.testing.assert_array_equal(y, np.arange(1, 65))


@every_schedule
def test_a_part_of_a_word_and_the_whole_word(settings):
    source = """
    extern "C" __global__ void overlap(int* y) {
      __shared__ int s[32];
      int t = threadIdx.x;
      if (t < 32) s[t] = t;  // word
      else reinterpret_cast<char*>(s)[4 * (t - 32) + 2] = 1;  // byte
      __syncthreads();
      if (t < 32) y[t] = s[t];
    }"""
    found = findings(source, 1, 64, poisoned(32, np.int32), **settings)
    assert [f.kind for f in found] == ["different values"]
    assert {found[0].where, found[0].other} == {line(source, "word"), line(source, "byte")}


@every_schedule
def test_threads_that_have_returned_do_not_disturb(settings):
    source = """
    extern "C" __global__ void early(const int* x, int* y) {
      __shared__ int s[128];
      int t = threadIdx.x;
      s[t] = x[t];
      if (t % 3 == 2) return;
      __syncthreads();
      y[t] = s[127 - t];
    }"""
    assert not findings(source, 2, 128, numbers(128), poisoned(128, np.int32), **settings)


@every_schedule
def test_flags_between_warps_in_shared_memory(settings):
    source = """
    extern "C" __global__ void signal(int* y) {
      __shared__ volatile int flag;
      __shared__ int data[32];
      int t = threadIdx.x;
      if (t == 0) flag = 0;
      __syncthreads();
      if (t < 32) {
        data[t] = t;
        FENCE
        __syncwarp();
        if (t == 0) flag = 1;
      } else {
        while (flag == 0);
        y[t - 32] = data[63 - t];  // here
      }
    }"""
    y = poisoned(32, np.int32)
    assert not findings(source.replace("FENCE", "__threadfence_block();"), 1, 64, y, **settings)
    np.testing.assert_array_equal(y, numbers(32)[::-1])
    found = findings(source.replace("FENCE", ""), 1, 64, y, **settings)
    assert [(f.kind, f.where) for f in found] == [("shared race", line(source, "here"))]


@every_schedule
@pytest.mark.parametrize("plain", [False, True])
def test_atomics_are_ordered_among_themselves_only(plain, settings):
    source = """
    extern "C" __global__ void histogram(const int* x, int* y) {
      __shared__ int bins[8];
      int t = threadIdx.x;
      if (t < 8) bins[t] = 0;
      __syncthreads();
      atomicAdd(&bins[x[t] % 8], 1);  // other
      BARRIER
      if (t < 8) y[t] = bins[t];  // here
    }""".replace("BARRIER", "" if plain else "__syncthreads();")
    y = poisoned(8, np.int32)
    found = findings(source, 1, 128, numbers(128), y, **settings)
    if plain:
        assert found and {f.kind for f in found} == {"shared race"}
        assert {found[0].where, found[0].other} == {line(source, "here"), line(source, "other")}
    else:
        assert not found and (y == 16).all()


# -- values --------------------------------------------------------------------------------------------
@every_schedule
@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("value", ["5", "t / 64", "t"])
def test_different_values_for_one_place(space, value, settings):
    """Equal values are harmless, whether the threads store at once or one after the other."""
    source = """
    extern "C" __global__ void all(int* y) {
      __shared__ int s[2];
      int t = threadIdx.x;
      int* p = SPACE;
      p[t / 64] = VALUE;  // here
      __syncthreads();
      if (t == 0) y[2] = p[0] + p[1];
    }""".replace("SPACE", {"shared": "s", "global": "y"}[space]).replace("VALUE", value)
    found = findings(source, 1, 128, poisoned(3, np.int32), **settings)
    if value == "t":
        assert {(f.kind, f.where, f.other) for f in found} == {("different values", *2 * [line(source, "here")])}
    else:
        assert not found
