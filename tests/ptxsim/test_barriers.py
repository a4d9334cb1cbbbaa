"""Barriers block, count, and reduce; what cannot go on is reported with its lines; spinning threads let others run."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

ROUNDS = """
extern "C" __global__ void rounds(int* out, int n) {
  __shared__ int box[96];
  int t = threadIdx.x, round = 0, total = 0;
  while (true) {
    box[t] = round * 100 + t;
    __syncthreads();
    total += box[(t + 37) % 96];
    __syncthreads();
    if (++round == n) break;
    if ((t * 7 + round) % 3) continue;
    for (int k = 0; k < t % 9; ++k) total = (total << 1) ^ (total >> 3) ^ k;
  }
  out[blockIdx.x * 96 + t] = total;
}"""


def rounds(t, n):
    total = 0
    for r in range(1, n + 1):
        total += (r - 1) * 100 + (t + 37) % 96
        if r < n and not (t * 7 + r) % 3:
            for k in range(t % 9):
                total = (total << 1) ^ (total >> 3) ^ k
                total = (total + 2**31) % 2**32 - 2**31
    return total


@every_schedule
def test_a_barrier_blocks_lanes_that_jumped_back(settings):
    """Lanes that `continue` reach the next store while others still work: nobody may pass before all have arrived."""
    out = poisoned((3, 96), np.int32)
    launch(ROUNDS, 3, 96, out, np.int32(5), **settings)
    np.testing.assert_array_equal(out, np.tile([rounds(t, 5) for t in range(96)], (3, 1)))


REDUCTION = """
extern "C" __global__ void reduce(const int* x, int* out) {{
  __shared__ int part[128];
  int t = threadIdx.x;
  part[t] = x[blockIdx.x * 128 + t];
  {first}
  for (int step = 64; step > 0; step /= 2) {{
    if (t < step) part[t] += part[t + step];
    {each}
  }}
  if (t == 0) out[blockIdx.x] = part[0];
}}"""
BARRIER = "__syncthreads();"


def block_sums(source, **settings):
    x = np.random.default_rng(1).integers(1, 1000, (4, 128)).astype(np.int32)
    out = poisoned(4, np.int32)
    launch(source, 4, 128, x, out, **settings)
    return (out == x.sum(1)).all()


def test_random_schedules_show_a_missing_barrier():
    """With its barriers the reduction is right under every schedule; without either one it is wrong under some."""
    right = REDUCTION.format(first=BARRIER, each=BARRIER)
    assert block_sums(right)
    assert all(block_sums(right, schedule="random", seed=seed) for seed in range(8))
    for first, each in (("", BARRIER), (BARRIER, "")):
        wrong = REDUCTION.format(first=first, each=each)
        assert not all(block_sums(wrong, schedule="random", seed=seed) for seed in range(8)), (first, each)


def test_a_random_schedule_is_reproduced_by_its_seed():
    racy = """
    extern "C" __global__ void race(int* out) {
      __shared__ int last;
      last = threadIdx.x / 32;
      __syncthreads();
      out[blockIdx.x * blockDim.x + threadIdx.x] = last;
    }"""
    runs = {}
    for seed in (0, 1, 2, 3, 0, 1, 2, 3):
        out = poisoned((8, 128), np.int32)
        launch(racy, 8, 128, out, schedule="random", seed=seed)
        runs.setdefault(seed, []).append(out.tobytes())
    assert all(first == second for first, second in runs.values())
    assert len({first for first, _ in runs.values()}) > 1


@every_schedule
def test_reductions_across_a_barrier(settings):
    source = """
    extern "C" __global__ void votes(const int* x, int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      out[3 * i] = __syncthreads_count(x[i] > 1);
      out[3 * i + 1] = __syncthreads_and(x[i] > 1);
      out[3 * i + 2] = __syncthreads_or(x[i] > 1);
    }"""
    rng = np.random.default_rng(2)
    x = np.stack([rng.integers(0, 4, 80), np.full(80, 2), np.zeros(80), np.arange(80) // 79 * 5]).astype(np.int32)
    out = poisoned((4, 80, 3), np.int32)
    launch(source, 4, 80, x, out, **settings)
    for block, row in enumerate(x > 1):
        np.testing.assert_array_equal(out[block, :, 0], row.sum())
        np.testing.assert_array_equal(out[block, :, 1] != 0, row.all())
        np.testing.assert_array_equal(out[block, :, 2] != 0, row.any())


@every_schedule
def test_named_barriers_of_producers_and_consumers(settings):
    """Two warps fill and arrive without waiting; one warp waits for them, on barriers with thread counts."""
    source = """
    extern "C" __global__ void pipeline(int* out) {
      __shared__ int box[64];
      int t = threadIdx.x;
      for (int round = 0; round < 4; ++round) {
        if (t < 64) {
          if (round) asm volatile("bar.sync 2, 96;" ::: "memory");
          box[t] = round * 1000 + t;
          asm volatile("bar.arrive 1, 96;" ::: "memory");
        } else {
          asm volatile("bar.sync 1, 96;" ::: "memory");
          out[round * 32 + t - 64] = box[t - 64] + box[t - 32];
          if (round < 3) asm volatile("bar.arrive 2, 96;" ::: "memory");
        }
      }
    }"""
    out = poisoned((4, 32), np.int32)
    launch(source, 1, 96, out, **settings)
    t, r = np.arange(32), np.arange(4)[:, None]
    np.testing.assert_array_equal(out, 2 * (1000 * r + t) + 32)


@every_schedule
def test_two_groups_with_a_barrier_each(settings):
    source = """
    extern "C" __global__ void groups(int* out) {
      __shared__ int box[128];
      int t = threadIdx.x, group = t / 64;
      for (int k = 0; k <= group * 3; ++k) {
        box[t] = t * (k + 1);
        asm volatile("bar.sync %0, 64;" :: "r"(group + 1) : "memory");
        out[t] = box[group * 64 + (t + 33) % 64];
        asm volatile("barrier.sync %0, 64;" :: "r"(group + 1) : "memory");
      }
    }"""
    out = poisoned(128, np.int32)
    launch(source, 1, 128, out, **settings)
    t = np.arange(128)
    other = t // 64 * 64 + (t + 33) % 64
    np.testing.assert_array_equal(out, other * np.where(t < 64, 1, 4))


@every_schedule
def test_lanes_of_a_warp_reach_a_counted_barrier_by_two_ways(settings):
    """A warp has arrived when all of its lanes have: those that come first wait for the others."""
    source = """
    extern "C" __global__ void ways(int* out) {
      __shared__ int sum;
      int t = threadIdx.x;
      if (t == 0) sum = 0;
      __syncthreads();
      if (t & 1) {
        atomicAdd(&sum, 1);
        asm volatile("barrier.sync 2, 64;" ::: "memory");
      } else {
        atomicAdd(&sum, 100);
        asm volatile("barrier.sync 2, 64;" ::: "memory");
      }
      out[t] = sum;
    }"""
    out = poisoned(64, np.int32)
    launch(source, 1, 64, out, **settings)
    np.testing.assert_array_equal(out, 3232)


@every_schedule
def test_lanes_of_a_warp_pass_a_barrier_by_two_ways(settings):
    """One warp arrives and goes on: not before both halves of it have arrived."""
    source = """
    extern "C" __global__ void ways(int* out) {
      __shared__ int sum;
      int t = threadIdx.x;
      if (t == 0) sum = 0;
      __syncthreads();
      if (t >= 32) {
        asm volatile("barrier.sync 2, 96;" ::: "memory");
        out[t - 32] = sum;
      } else if (t & 1) {
        atomicAdd(&sum, 1);
        asm volatile("barrier.arrive 2, 96;" ::: "memory");
      } else {
        atomicAdd(&sum, 100);
        asm volatile("barrier.arrive 2, 96;" ::: "memory");
      }
    }"""
    out = poisoned(64, np.int32)
    launch(source, 1, 96, out, **settings)
    np.testing.assert_array_equal(out, 1616)


@every_schedule
def test_exited_threads_are_not_waited_for(settings):
    """A whole warp and some lanes of another leave before the barriers."""
    source = """
    extern "C" __global__ void leave(int* out) {
      __shared__ int box[128];
      int t = threadIdx.x;
      box[t] = -1;
      __syncthreads();
      if (t / 32 == 2 || t % 32 > 20) return;
      box[t] = t;
      __syncthreads();
      out[t] = box[127 - t];
    }"""
    out = poisoned(128, np.int32)
    untouched = out[0]
    launch(source, 1, 128, out, **settings)

    def stays(t):
        return t // 32 != 2 and t % 32 <= 20

    for t in range(128):
        assert out[t] == ((127 - t if stays(127 - t) else -1) if stays(t) else untouched), t


@every_schedule
def test_warps_may_meet_at_different_barrier_instructions(settings):
    source = """
    extern "C" __global__ void sites(int* out) {
      __shared__ int box[64];
      int t = threadIdx.x;
      if (t < 32) { box[t] = t; asm volatile("bar.sync 0; // here" ::: "memory"); }
      else { box[t] = 10 * t; asm volatile("bar.sync 0; // there" ::: "memory"); }
      out[t] = box[63 - t];
    }"""
    out = poisoned(64, np.int32)
    launch(source, 1, 64, out, **settings)
    t = 63 - np.arange(64)
    np.testing.assert_array_equal(out, np.where(t < 32, t, 10 * t))


def line_of(source, mark):
    """The 1-based line on which a marker comment stands."""
    return next(k for k, line in enumerate(source.splitlines(), 1) if mark in line)


def test_a_deadlock_names_every_group_and_its_line():
    source = """
    extern "C" __global__ void stuck(int* out) {
      if (threadIdx.x < 32)
        asm volatile("bar.sync 1, 64;" ::: "memory");  // first
      else
        asm volatile("bar.sync 2, 64;" ::: "memory");  // second
      out[threadIdx.x] = 1;
    }"""
    with pytest.raises(ptxsim.Deadlock) as error:
        launch(source, 1, 64, poisoned(64, np.int32))
    message = str(error.value)
    assert isinstance(error.value, ptxsim.SimulationError) and "stuck" in message
    for mark in ("// first", "// second"):
        assert str(line_of(source, mark)) in message, message


def test_a_barrier_short_of_its_count_is_a_deadlock():
    source = """
    extern "C" __global__ void short_of(int* out) {
      if (threadIdx.x >= 32) return;
      asm volatile("bar.sync 3, 64;" ::: "memory");  // waits
      out[threadIdx.x] = 1;
    }"""
    with pytest.raises(ptxsim.Deadlock, match=str(line_of(source, "// waits"))):
        launch(source, 1, 64, poisoned(64, np.int32))


def test_spinning_lanes_let_the_lane_they_wait_for_run():
    """The counter-example of pure lowest-pc scheduling: 31 lanes poll a flag which the last lane sets."""
    source = """
    extern "C" __global__ void poll(int* flag, int* out) {
      int t = threadIdx.x;
      while (t < 31 && atomicAdd(flag, 0) == 0);
      if (t == 31) atomicExch(flag, 1);
      out[t] = *flag;
    }"""
    flag, out = np.zeros(1, np.int32), poisoned(32, np.int32)
    launch(source, 1, 32, flag, out)
    assert (out == 1).all()


@pytest.mark.parametrize("waiting", ["blockIdx.x != 3", "blockIdx.x != 0", "threadIdx.x / 32 != 1 || blockIdx.x"])
def test_spinning_blocks_and_warps_let_the_others_run(waiting):
    source = f"""
    extern "C" __global__ void poll(volatile int* flag, int* out) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if ({waiting}) while (*flag == 0);
      else {{ __threadfence(); *flag = 7; }}
      out[i] = *flag;
    }}"""
    flag, out = np.zeros(1, np.int32), poisoned((4, 64), np.int32)
    launch(source, 4, 64, flag, out)
    assert (out == 7).all()


@every_schedule
def test_a_lock_taken_by_every_thread(settings):
    source = """
    extern "C" __global__ void locked(int* lock, int* total) {
      bool done = false;
      while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
          *(volatile int*)total = *(volatile int*)total + 1;
          __threadfence();
          atomicExch(lock, 0);
          done = true;
        }
      }
    }"""
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    launch(source, 2, 40, lock, total, **settings)
    assert (total[0], lock[0]) == (80, 0)


def test_waiting_for_ever_is_reported():
    source = """
    extern "C" __global__ void forever(volatile int* flag, int* out) {
      while (*flag == 0);  // spins
      out[threadIdx.x] = 1;
    }"""
    with pytest.raises(ptxsim.Deadlock, match=str(line_of(source, "// spins"))):
        launch(source, 1, 32, np.zeros(1, np.int32), poisoned(32, np.int32))
