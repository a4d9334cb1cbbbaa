"""Divergence and reconvergence: every thread must follow its own path, whatever its warp does."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, python_threads, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def run_per_thread(source, model, settings, count=2 * 96, block=96):
    """Launch out[i] = f(i) and compare each thread with the same function in Python."""
    out = poisoned(count, np.int32)
    launch(source, -(-count // block), block, out, **settings)
    expected = np.array([model(i) for i in range(count)], np.int64).astype(np.int32)
    np.testing.assert_array_equal(out, expected)


@every_schedule
def test_nested_branches(settings):
    source = """
    extern "C" __global__ void branches(int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, x = 0;
      if (i % 2) {
        if (i % 3 == 0) x = 1; else { x = 2; if (i % 5 == 0) x += 40; }
      } else if (i % 7 < 3) {
        x = 3;
        if (i % 4 == 0) x *= -5;
      }
      out[i] = x * 1000 + i;
    }"""

    def model(i):
        if i % 2:
            x = 1 if i % 3 == 0 else 42 if i % 5 == 0 else 2
        else:
            x = (3 if i % 4 else -15) if i % 7 < 3 else 0
        return x * 1000 + i

    run_per_thread(source, model, settings)


COLLATZ = """
extern "C" __global__ void collatz(int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned n = i + 1;
  int steps = 0;
  while (n != 1) { n = n & 1 ? 3 * n + 1 : n / 2; ++steps; }
  out[i] = steps;
}"""


def collatz(i):
    n, steps = i + 1, 0
    while n != 1:
        n, steps = (3 * n + 1 if n & 1 else n // 2), steps + 1
    return steps


@every_schedule
def test_loops_with_their_own_trip_counts(settings):
    run_per_thread(COLLATZ, collatz, settings)


@every_schedule
def test_break_continue_and_return_in_nested_loops(settings):
    source = """
    extern "C" __global__ void jumps(int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
      if (i % 11 == 10) { out[i] = -1; return; }
      for (int a = 0; a < i % 13; ++a) {
        if (a % 4 == 3) continue;
        for (int b = 0;; ++b) {
          if (b == i % 5) break;
          if (b * a > 20) { out[i] = sum; return; }
          sum += a * 7 + b;
        }
      }
      do { sum ^= i; } while ((sum & 7) == 5 && i % 2 && (i = i + 2) < 50);
      out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    }"""

    def model(i):
        total = 0
        if i % 11 == 10:
            return -1
        for a in range(i % 13):
            if a % 4 == 3:
                continue
            for b in range(i % 5):
                if b * a > 20:
                    return total
                total += a * 7 + b
        while True:
            total ^= i
            if not ((total & 7) == 5 and i % 2):
                break
            i += 2
            if not i < 50:
                break
        return total

    run_per_thread(source, model, settings)


@every_schedule
def test_switch_with_fallthrough(settings):
    cases = "\n".join(f"case {k}: x = x * {2 * k + 3} + {k * k}; {'break;' if k % 3 else ''}" for k in range(16))
    source = f"""
    extern "C" __global__ void switches(int* out) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x, x = i;
      switch (i % 19) {{ {cases} default: x ^= 0x55; }}
      out[i] = x;
    }}"""

    def model(i):
        x, k = i, i % 19
        while k < 16:
            x = x * (2 * k + 3) + k * k
            if k % 3:
                return x
            k += 1
        return x ^ 0x55

    run_per_thread(source, model, settings)


@every_schedule
def test_lanes_meet_again_after_a_branch(settings):
    """A full-mask shuffle after an if/else, and after a loop of uneven length, sees every lane."""
    source = """
    extern "C" __global__ void meet(int* out) {
      int i = threadIdx.x, lane = i % 32, x;
      if (lane < 5) x = lane * 3; else if (lane & 1) x = lane + 100; else x = -lane;
      for (int k = 0; k < lane % 7; ++k) x += k;
      int from_next = __shfl_sync(0xffffffffu, x, (lane + 1) & 31);
      out[i] = from_next;
    }"""

    def value(lane):
        x = lane * 3 if lane < 5 else lane + 100 if lane & 1 else -lane
        return x + sum(range(lane % 7))

    run_per_thread(source, lambda i: value((i % 32 + 1) % 32), settings, count=96)


@every_schedule
def test_divergence_between_warps_and_blocks(settings):
    """Whole warps and whole blocks take different sides, with loops inside: the uniform case of a branch."""
    source = """
    extern "C" __global__ void uniform(int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, x = 0;
      if (threadIdx.x / 32 == 1) for (int k = 0; k < (int)blockIdx.x * 3; ++k) x += k * threadIdx.x;
      else if (blockIdx.x & 1) x = 7;
      else return;
      out[i] = x;
    }"""
    out = poisoned((5, 96), np.int32)
    before = out[0, 0]
    launch(source, 5, 96, out, **settings)
    for b in range(5):
        for t in range(96):
            expected = sum(k * t for k in range(3 * b)) if t // 32 == 1 else 7 if b & 1 else before
            assert out[b, t] == expected, (b, t)


@every_schedule
def test_functions_that_are_not_inlined(settings):
    source = """
    __device__ __noinline__ int mix(int a, int b) { return a > b ? a * 3 - b : b * 5 + a; }
    __device__ __noinline__ void store_both(int* pair, int a) { pair[0] = mix(a, 20); pair[1] = mix(20, a); }
    __device__ __noinline__ int first_multiple(int a, int step) {
      for (int k = a;; ++k) if (k % step == 0) return k;
    }
    extern "C" __global__ void calls(int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      int pair[2];
      store_both(pair, i);
      int x = i % 3 ? mix(pair[0], pair[1]) : pair[0] - pair[1];
      out[i] = i % 2 ? first_multiple(x & 1023, 7 + i % 5) : x;
    }"""

    def mix(a, b):
        return a * 3 - b if a > b else b * 5 + a

    def model(i):
        first, second = mix(i, 20), mix(20, i)
        x = mix(first, second) if i % 3 else first - second
        return -(-(x & 1023) // (7 + i % 5)) * (7 + i % 5) if i % 2 else x

    run_per_thread(source, model, settings)


@every_schedule
def test_binary_search_with_divergent_memory(settings):
    source = """
    extern "C" __global__ void search(int* out, const int* sorted, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, low = 0, high = n;
      while (low < high) {
        int middle = (low + high) / 2;
        if (sorted[middle] < i) low = middle + 1; else high = middle;
      }
      out[i] = low;
    }"""
    rng = np.random.default_rng(11)
    table = np.sort(rng.integers(0, 200, 77)).astype(np.int32)
    out = poisoned(192, np.int32)
    launch(source, 2, 96, out, table, np.int32(77), **settings)
    np.testing.assert_array_equal(out, np.searchsorted(table, np.arange(192)))


@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_other_architectures(target):
    run_per_thread(COLLATZ, collatz, {"arch": target})


INLINE = """
extern "C" __global__ void inline_ptx(int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, x;
  asm volatile("{\\n"
      " .reg .pred p, q;\\n .reg .s32 n, c;\\n"
      " mov.s32 n, %1;\\n mov.s32 c, 0;\\n"
      "again:\\n"
      " setp.le.s32 p, n, 0;\\n"
      " @p bra done;\\n"
      " { .reg .s32 n2; mov.s32 n2, n; and.b32 n2, n2, 1; setp.eq.s32 q, n2, 1; }\\n"
      " @q add.s32 c, c, 10;\\n"
      " @!q add.s32 c, c, 1;\\n"
      " sub.s32 n, n, 3;\\n"
      " bra.uni again;\\n"
      "done:\\n"
      " mov.s32 %0, c;\\n}" : "=r"(x) : "r"(i));
  out[i] = x;
}"""


@every_schedule
def test_labels_scopes_and_predicates_in_inline_ptx(settings):
    def model(i):
        return sum(10 if n % 2 else 1 for n in range(i, 0, -3))

    run_per_thread(INLINE, model, settings)


@every_schedule
def test_a_jump_table(settings):
    source = """
    extern "C" __global__ void jumps(int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, x;
      asm volatile("{ .reg .u32 k; .reg .s32 v; rem.u32 k, %1, 3; mov.s32 v, %1;\\n"
          " targets: .branchtargets first, second, third;\\n"
          " brx.idx k, targets;\\n"
          "first: add.s32 v, v, 1000; bra.uni done;\\n"
          "second: neg.s32 v, v;\\n"
          "third: mul.lo.s32 v, v, 3;\\n"
          "done: mov.s32 %0, v; }" : "=r"(x) : "r"(i));
      out[i] = x;
    }"""
    run_per_thread(source, lambda i: (i + 1000, -3 * i, 3 * i)[i % 3], settings)


def test_shadowed_names_in_nested_scopes():
    source = """
    extern "C" __global__ void shadow(int* out) {
      int i = threadIdx.x, x;
      asm("{ .reg .s32 t; mov.s32 t, %1; { .reg .s32 t; mov.s32 t, 1000; { .reg .f32 t; mov.f32 t, 0f40000000; }"
          " add.s32 t, t, 1; } add.s32 %0, t, 5; }" : "=r"(x) : "r"(i));
      int y;
      asm("{ .reg .s32 t; mul.lo.s32 t, %1, 3; mov.s32 %0, t; }" : "=r"(y) : "r"(x));
      out[i] = y;
    }"""
    run_per_thread(source, lambda i: 3 * (i + 5), {}, count=96)


INDEXED = """
extern "C" __global__ void indexed(unsigned* out, unsigned turns, unsigned last) {{
  unsigned t = threadIdx.x, r = 0;
  for (unsigned k = 0; k < turns; ++k)
    asm volatile("{{ .reg .pred away, p; .reg .u32 i;\\n"
        " add.u32 i, %1, %2; setp.ge.u32 away, %1, 27; setp.ne.u32 p, %1, 9; rem.u32 i, i, %3;\\n"
        " @away bra done; ways: .branchtargets one, two, three; add.u32 %0, %0, 1000;\\n"
        " {guard} brx.idx i, ways; add.u32 %0, %0, 7; bra done;\\n"
        " one: add.u32 %0, %0, 1; two: add.u32 %0, %0, 20; bra done; three: add.u32 %0, %0, 300; done: }}"
        : "+r"(r) : "r"(t), "r"(k), "r"(last));
  out[t] = r;
}}"""


@pytest.mark.parametrize("guard", ["", "@p"])
@every_schedule
def test_indexed_branches_of_some_lanes(guard, settings):
    """Lanes that are elsewhere have no index; lanes whose guard is false go on behind the branch."""

    def model(block, t):
        total = 0
        for k in range(4):
            if t < 27:
                total += 1007 if guard and t == 9 else (1021, 1020, 1300)[(t + k) % 3]
        return total

    out = poisoned(32, np.uint32)
    launch(INDEXED.format(guard=guard), 1, 32, out, np.uint32(4), np.uint32(3), **settings)
    np.testing.assert_array_equal(out, python_threads(model, 1, 32)[0])


def test_an_index_outside_the_table():
    with pytest.raises(ptxsim.SimulationError, match=r"index 3 into a table of 3.*thread \(3, 0, 0\)"):
        launch(INDEXED.format(guard=""), 1, 32, poisoned(32, np.uint32), np.uint32(1), np.uint32(4))


LOOK_BACK = """
extern "C" __global__ void chain(volatile int* state) {
  int b = blockIdx.x;
  if (b == 0) { state[0] = 2; return; }
  state[b] = 1;
  for (int p = b - 1;;) {
    int seen = state[p];
    if (seen == 0) continue;
    if (seen == 2) break;
    p--;
  }
  state[b] = 2;
}"""


@every_schedule
def test_blocks_that_look_back_let_those_before_them_finish(settings):
    """Some lanes poll at the lowest pc while others that poll there, too, have been set back."""
    state = np.zeros(9, np.int32)
    launch(LOOK_BACK, 9, 1, state, **settings)
    assert (state == 2).all()


def test_lanes_that_poll_in_ever_new_groups_do_not_starve_the_others():
    source = """
    extern "C" __global__ void wait(volatile int* flag, int* out) {
      int t = threadIdx.x, turns = 0;
      if (t < 8) {
        while (flag[0] == 0) {
          ++turns;
          if ((turns + t) % 2) out[t] = turns; else out[t + 8] = flag[1] - turns;
        }
        out[t] = -1;
      } else if (t == 8) flag[0] = 1;
    }"""
    out = np.zeros(16, np.int32)
    launch(source, 1, 32, np.zeros(2, np.int32), out)
    assert (out[:8] == -1).all()


GRID_BARRIER = """
extern "C" __global__ void meet(unsigned* arrived, int* out) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < gridDim.x) {}
  }
  __syncthreads();
  out[blockIdx.x] = 1;
}"""


def test_blocks_that_wait_for_each_other_run_together():
    out = np.zeros(40, np.int32)
    launch(GRID_BARRIER, 40, 256, np.zeros(1, np.uint32), out)
    assert out.all()
    with pytest.raises(ptxsim.Deadlock, match=r"16 of 40 blocks run at a time .settings: chunk_lanes"):
        launch(GRID_BARRIER, 40, 256, np.zeros(1, np.uint32), out, chunk_lanes=4096)


@pytest.mark.parametrize("look", ["__ldcg(arrived)", "(__threadfence(), *arrived)", "*(volatile unsigned*)arrived"])
def test_every_way_to_look_at_what_other_blocks_write(look):
    source = GRID_BARRIER.replace("atomicAdd(arrived, 0u)", look)
    out = np.zeros(40, np.int32)
    launch(source, 40, 256, np.zeros(1, np.uint32), out)
    assert out.all()


TIMEOUTS = """
extern "C" __global__ void limits(int* out, volatile int* flag) {{
  __shared__ volatile int done;
  if (threadIdx.x == 0) done = 0;
  __syncthreads();
  if (threadIdx.x == 0) {{ {work} done = 1; }}
  if (threadIdx.x == 32) {{ while (done == 0) {{}} out[0] = 1; }}
}}"""


@every_schedule
@pytest.mark.parametrize(
    "work",
    [
        "long long start = clock64(); while (*flag == 0 && clock64() - start < 20000) {}",
        "int turns = 0; while (*flag == 0 && turns < 12000) ++turns;",
    ],
)
def test_a_long_wait_with_a_limit_is_no_hang(work, settings):
    out = np.zeros(1, np.int32)
    launch(TIMEOUTS.format(work=work), 1, 64, out, np.zeros(1, np.int32), **settings)
    assert out[0] == 1
