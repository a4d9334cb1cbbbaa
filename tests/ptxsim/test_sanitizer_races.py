"""Races are found at both their lines, under every schedule; what is ordered is not reported."""

import threading

import numpy as np
import pytest

from cupyflash import ptxsim

from .kernels import SCHEDULES, launch, poisoned, schedule_name
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


# -- global memory -------------------------------------------------------------------------------------
@every_schedule
@pytest.mark.parametrize("chunk_lanes", [64, 4096])
def test_blocks_are_not_ordered(chunk_lanes, settings):
    source = """
    extern "C" __global__ void chain(const int* x, int* y, int* z) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      y[i] = x[i];  // other
      __syncthreads();
      z[i] = y[(i + 64) % 192] + 1;  // here
    }"""
    x, y, z = numbers(192), poisoned(192, np.int32), poisoned(192, np.int32)
    found = findings(source, 3, 64, x, y, z, chunk_lanes=chunk_lanes, **settings)
    assert {f.kind for f in found} == {"global race"}
    assert {f.where for f in found} | {f.other for f in found} == {line(source, "here"), line(source, "other")}
    assert "args[1][" in str(found[0]), found[0]
    assert not findings(source.replace("+ 64", ""), 3, 64, x, y, z, chunk_lanes=chunk_lanes, **settings)


@every_schedule
@pytest.mark.parametrize("chunk_lanes", [64, 4096])
@pytest.mark.parametrize("step", ["*total += x[i];  // here", "atomicAdd(total, x[i]);"])
def test_a_sum_without_atomics(step, chunk_lanes, settings):
    source = f"""
    extern "C" __global__ void sum(const int* x, int* total) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      {step}
    }}"""
    found = findings(source, 4, 64, numbers(256), np.zeros(1, np.int32), chunk_lanes=chunk_lanes, **settings)
    assert {f.kind for f in found} <= {"global race", "different values"}
    assert {f.where for f in found} == ({line(source, "here")} if "here" in step else set())


LAST_BLOCK = """
extern "C" __global__ void last_block(const int* x, PARTIAL int* partial, unsigned* ticket, int* total) {
  __shared__ int s[64];
  __shared__ bool last;
  int t = threadIdx.x;
  s[t] = x[blockIdx.x * 64 + t];
  __syncthreads();
  for (int step = 32; step > 0; step /= 2) {
    if (t < step) s[t] += s[t + step];
    __syncthreads();
  }
  if (t == 0) {
    partial[blockIdx.x] = s[0];  // other
    FENCE
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 0) {
    int all = 0;
    for (int b = 0; b < gridDim.x; b++) all += partial[b];  // here
    *total = all;
  }
}"""


@every_schedule
@pytest.mark.parametrize("chunk_lanes", [64, 4096])
@pytest.mark.parametrize("fence", ["__threadfence();", ""])
@pytest.mark.parametrize("partial", ["", "volatile"])
def test_the_last_block_adds_the_partial_sums(partial, fence, chunk_lanes, settings):
    source = LAST_BLOCK.replace("FENCE", fence).replace("PARTIAL", partial)
    sums, ticket, total = poisoned(8, np.int32), np.zeros(1, np.uint32), poisoned(1, np.int32)
    found = findings(source, 8, 64, numbers(512), sums, ticket, total, chunk_lanes=chunk_lanes, **settings)
    assert total[0] == 512 * 511 // 2
    if fence or partial:
        assert not found
    else:
        assert_found(source, found, "global race")


LOOK_BACK = """
extern "C" __global__ void scan(const int* x, int* y, volatile int* sums, volatile int* flags, int* tickets) {
  __shared__ int s[32];
  __shared__ int before, block;
  int t = threadIdx.x;
  if (t == 0) block = atomicAdd(tickets, 1);
  __syncthreads();
  int b = block;
  s[t] = x[b * 32 + t];
  __syncwarp();
  for (int step = 1; step < 32; step *= 2) {
    int v = t >= step ? s[t - step] : 0;
    __syncwarp();
    s[t] += v;
    __syncwarp();
  }
  if (t == 31) {
    *(int*)&sums[2 * b] = s[31];  // own
    __threadfence();
    flags[b] = 1;
    int sum = 0;
    for (int k = b - 1; k >= 0; k--) {
      int f;
      while ((f = flags[k]) == 0);
      __threadfence();
      if (f == 2) { sum += *(int*)&sums[2 * k + 1]; break; }
      sum += *(int*)&sums[2 * k];
    }
    *(int*)&sums[2 * b + 1] = sum + s[31];
    __threadfence();
    flags[b] = 2;
    before = sum;
  }
  __syncthreads();
  y[b * 32 + t] = before + s[t];
}"""


@every_schedule
def test_a_scan_that_looks_back(settings):
    x, y = numbers(256), poisoned(256, np.int32)
    sums, flags, tickets = poisoned(16, np.int32), np.zeros(8, np.int32), np.zeros(1, np.int32)
    assert not findings(LOOK_BACK, 8, 32, x, y, sums, flags, tickets, **settings)
    np.testing.assert_array_equal(y, np.cumsum(x))


LOCK = """
extern "C" __global__ void locked(int* lock, int* total) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      BEHIND
      *total = *total + 1;  // here
      BEFORE
      atomicExch(lock, 0);
      done = true;
    }
  }
}"""


@every_schedule
@pytest.mark.parametrize("fence", ["__threadfence();", ""])
def test_a_lock_needs_fences(fence, settings):
    source = LOCK.replace("BEHIND", fence).replace("BEFORE", fence)
    total = np.zeros(1, np.int32)
    found = findings(source, 2, 64, np.zeros(1, np.int32), total, **settings)
    if fence:
        assert not found and total[0] == 128
    else:
        assert {(f.where, f.other) for f in found} == {2 * (line(source, "here"),)}
        assert "global race" in {f.kind for f in found}


@every_schedule
def test_release_and_acquire_need_no_fence(settings):
    source = """
    extern "C" __global__ void pass(int* data, int* flag, int* y) {
      if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x;
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("st.release.gpu.u32 [%0], 1;" :: "l"(flag) : "memory");
      } else {
        int seen = 0;
        if (threadIdx.x == 0)
          while (!seen) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        __syncthreads();
        y[threadIdx.x] = data[63 - threadIdx.x];
      }
    }"""
    y = poisoned(64, np.int32)
    assert not findings(source, 2, 64, poisoned(64, np.int32), np.zeros(1, np.int32), y, **settings)
    np.testing.assert_array_equal(y, numbers(64)[::-1])


@every_schedule
def test_a_barrier_of_the_whole_grid(settings):
    source = """
    extern "C" __global__ void steps(int* a, int* b, unsigned* arrived) {
      int i = blockIdx.x * 32 + threadIdx.x, n = gridDim.x * 32;
      for (unsigned round = 1; round <= 3; round++) {
        b[i] = a[(i + 1) % n];
        int* other = a; a = b; b = other;
        __syncthreads();
        if (threadIdx.x == 0) {
          __threadfence();
          atomicAdd(arrived, 1);
          while (*(volatile unsigned*)arrived < round * gridDim.x);
          __threadfence();
        }
        __syncthreads();
      }
    }"""
    a, b = numbers(128), poisoned(128, np.int32)
    assert not findings(source, 4, 32, a, b, np.zeros(1, np.uint32), **settings)
    np.testing.assert_array_equal(b, np.roll(numbers(128), -3))


@every_schedule
def test_a_first_guess_for_compare_and_swap(settings):
    """The loop of the CUDA guide: the plain load only gives the first comparand."""
    source = """
    __device__ double slow_add(double* address, double value) {
      unsigned long long* bits = (unsigned long long*)address;
      unsigned long long old = *bits, assumed;
      do {
        assumed = old;
        old = atomicCAS(bits, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
      } while (assumed != old);
      return __longlong_as_double(old);
    }
    extern "C" __global__ void sum(double* total) { slow_add(total, threadIdx.x); }"""
    total = np.zeros(1)
    assert not findings(source, 2, 64, total, **settings)
    assert total[0] == 64 * 63


@every_schedule
def test_an_atomic_that_adds_nothing_is_a_load(settings):
    source = """
    extern "C" __global__ void poll(int* flag, int* y) {
      int t = threadIdx.x;
      while (t && atomicAdd(flag, 0) == 0);
      if (!t) { __threadfence(); atomicExch(flag, 1); }
      y[t] = *flag;
    }"""
    y = poisoned(64, np.int32)
    assert not findings(source, 1, 64, np.zeros(1, np.int32), y, **settings)
    assert (y == 1).all()


# -- who has read and written --------------------------------------------------------------------------
@every_schedule
@pytest.mark.parametrize("writer", [0, 32])
def test_two_readers_are_both_remembered(writer, settings):
    source = f"""
    extern "C" __global__ void readers(int* y) {{
      __shared__ volatile int s;
      int t = threadIdx.x;
      if (t == 0) s = 1;
      __syncthreads();
      if (t == 0) y[0] = s;  // thread 0
      if (t == 32) y[1] = s;  // thread 32
      if (t == {writer}) s = 7;  // write
    }}"""
    found = findings(source, 1, 64, poisoned(2, np.int32), **settings)
    assert [f.kind for f in found] == ["shared race"]
    assert line(source, "write") in (found[0].where, found[0].other)


@every_schedule
@pytest.mark.parametrize("space", ["__shared__ int", "__device__ int"])
@pytest.mark.parametrize("writer", [0, 17, 63])
def test_readers_at_once_are_all_remembered(writer, space, settings):
    """The last lane that reads is none but one of them; the writer orders its own read, not those of its warp."""
    outside, inside = ("", f"{space} s;") if "shared" in space else (f"{space} s;", "")
    source = f"""
    {outside}
    extern "C" __global__ void broadcast(int* y) {{
      {inside}
      int t = threadIdx.x;
      if (t == 0) s = 1;
      __syncthreads();
      y[t] = s;  // read
      if (t == {writer}) s = 7;  // write
    }}"""
    found = findings(source, 1, 64, poisoned(64, np.int32), **settings)
    assert f"{space.split()[0].strip('_').replace('device', 'global')} race" in {f.kind for f in found}
    assert {f.where for f in found} | {f.other for f in found} == {line(source, "read"), line(source, "write")}
    assert not findings(
        source.replace("if (t ==", "__syncthreads(); if (t =="), 1, 64, poisoned(64, np.int32), **settings
    )


@every_schedule
@pytest.mark.parametrize("place", ["s[0]", "z[0]"])
def test_a_value_that_all_have_written_can_be_read_by_each(place, settings):
    source = f"""
    extern "C" __global__ void same(volatile int* z, int* y) {{
      __shared__ volatile int s[1];
      {place} = 5;
      y[blockIdx.x * 64 + threadIdx.x] = {place};
    }}"""
    y = poisoned(128, np.int32)
    assert not findings(source, 2, 64, poisoned(1, np.int32), y, **settings)
    assert not findings(source.replace("volatile", ""), 2, 64, poisoned(1, np.int32), y, **settings)
    assert (y == 5).all()


@every_schedule
@pytest.mark.parametrize("blocks", [1, 2])
def test_each_writes_the_value_again_and_reads_it(blocks, settings):
    source = """
    extern "C" __global__ void again(volatile int* z, int* y) {
      __shared__ volatile int s;
      for (int k = 0; k < 4; k++) {
        s = 5;
        y[blockIdx.x * 96 + threadIdx.x] = s;
        z[0] = 6;
        y[blockIdx.x * 96 + threadIdx.x] += z[0];
      }
    }"""
    y = poisoned(192, np.int32)
    for text in (source, source.replace("volatile ", "")):
        assert not findings(text, blocks, 96, poisoned(1, np.int32), y, **settings)
    assert (y[: 96 * blocks] == 11).all()


@every_schedule
@pytest.mark.parametrize(
    "space, blocks, threads, writes, reads",
    [
        (space, 1, *rest)
        for space in "sz"
        for rest in [(96, "t < 50", "t >= 64"), (32, "t < 10", "true"), (96, "t % 48 == 5", "t > 50")]
    ]
    + [("z", 3, 32, "b < 2", "b == 2")],
)
def test_a_value_that_several_have_written_is_not_there_for_others(space, blocks, threads, writes, reads, settings):
    """Those that have not written it may read what was there before."""
    source = f"""
    extern "C" __global__ void some(int* z, int* y) {{
      __shared__ int s[1];
      int t = threadIdx.x, b = blockIdx.x;
      if (t == 0) s[0] = 0;
      __syncthreads();
      if ({writes}) {space}[0] = 1;  // other
      SYNC
      if ({reads}) y[t] = {space}[0];  // here
    }}"""
    z, y = np.zeros(1, np.int32), poisoned(threads, np.int32)
    found = findings(source.replace("SYNC", ""), blocks, threads, z, y, **settings)
    assert found and {f.kind for f in found} == {"shared race" if space == "s" else "global race"}
    assert {f.where for f in found} | {f.other for f in found} == {line(source, "here"), line(source, "other")}
    if blocks == 1:
        assert not findings(source.replace("SYNC", "__syncthreads();"), blocks, threads, z, y, **settings)


READ_BY_BOTH = {
    "shared": """
    extern "C" __global__ void both(int* z, int* flags, int* y) {
      __shared__ int s[32], flag;
      int t = threadIdx.x;
      if (t == 0) flag = 0;
      if (t < 32) s[t] = 7;
      __syncthreads();
      if (t == 0) {
        y[0] = s[5];
        SIGNAL
        atomicExch(&flag, 1);
      } else if (t == 32) {
        int mine = s[5];
        while (atomicAdd(&flag, 0) == 0);
        __threadfence_block();
        s[5] = mine + 1;  // write
        y[1] = s[5];
      }
    }""",
    "global": """
    extern "C" __global__ void both(int* z, int* flags, int* y) {
      int mine = z[0];
      if (threadIdx.x == 0 && blockIdx.x == 0) {
        y[0] = mine;
        SIGNAL
        atomicExch(flags, 1);
      } else if (threadIdx.x == 0) {
        while (atomicAdd(flags, 0) == 0);
        __threadfence();
        z[0] = mine + 1;  // write
        y[1] = z[0];
      }
    }""",
    "whole warps": """
    extern "C" __global__ void both(int* z, int* flags, int* y) {
      __shared__ int s[1];
      __shared__ volatile int flag;
      int t = threadIdx.x;
      if (t == 0) s[0] = 7, flag = 0;
      __syncthreads();
      int mine = s[0];
      if (t < 32) {
        y[0] = mine;
        SIGNAL
        __syncwarp();
        if (t == 0) flag = 1;
      } else {
        while (flag == 0);
        __threadfence_block();
        __syncwarp();
        if (t == 32) s[0] = mine + 1;  // write
        __syncwarp();
        y[1] = s[0];
      }
    }""",
}


@every_schedule
@pytest.mark.parametrize("where", READ_BY_BOTH)
def test_two_have_read_and_one_of_them_writes_behind_the_flag_of_the_other(where, settings):
    z, y = np.full(1, 7, np.int32), poisoned(2, np.int32)
    source = READ_BY_BOTH[where]
    blocks, threads = (2, 1) if where == "global" else (1, 64)
    fenced = source.replace("SIGNAL", "__threadfence();")
    assert not findings(fenced, blocks, threads, z, np.zeros(1, np.int32), y, **settings)
    assert list(y) == [7, 8]
    found = findings(source.replace("SIGNAL", ""), blocks, threads, z, np.zeros(1, np.int32), y, **settings)
    assert line(source, "write") in {f.where for f in found}


SAME_WORD = """
extern "C" __global__ void all(int* y) { y[0] = threadIdx.x; }"""


def test_an_inner_report_takes_the_findings_and_other_threads_are_not_checked():
    def race():
        launch(SAME_WORD, 1, 32, poisoned(1, np.int32))

    with ptxsim.sanitize() as outer:
        with ptxsim.sanitize() as inner:
            race()
        thread = threading.Thread(target=race)
        thread.start()
        thread.join()
    assert [f.kind for f in inner.findings] == ["different values"] and not outer.findings


@every_schedule
def test_the_first_look_of_a_wait_that_sleeps(settings):
    """Compilers take the first look out of the loop."""
    source = """
    extern "C" __global__ void wait(int* out, int n) {
      __shared__ volatile int flag;
      __shared__ int data;
      if (threadIdx.x == 0) flag = 0;
      __syncthreads();
      if (threadIdx.x == 0) { data = n; __threadfence_block(); flag = 1; }
      if (threadIdx.x == 32) { while (flag == 0) __nanosleep(100); __threadfence_block(); out[0] = data; }
    }"""
    assert not findings(source, 1, 64, np.zeros(1, np.int32), np.int32(5), arch="sm_80", **settings)
    racy = source.replace("__threadfence_block();", "")
    assert findings(racy, 1, 64, np.zeros(1, np.int32), np.int32(5), arch="sm_80", **settings)
