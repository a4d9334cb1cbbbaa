"""Calls that need a stack: recursion, function pointers, virtual functions, and what goes wrong with them."""

import functools

import numpy as np
import pytest

from cupyflash import ptxsim

from .fuzz.compare import launch_ptx
from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


@every_schedule
def test_recursion_of_each_thread_to_its_own_depth(settings):
    source = """
    __device__ __noinline__ int ackermann(int m, int n) {
      if (m == 0) return n + 1;
      if (n == 0) return ackermann(m - 1, 1);
      return ackermann(m - 1, ackermann(m, n - 1));
    }
    extern "C" __global__ void k(int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      out[i] = ackermann(i % 3, i % 5) + 1000 * ackermann(2, i & 1);
    }"""
    out = poisoned(3 * 40, np.int32)
    launch(source, 3, 40, out, **settings)
    closed = [lambda n: n + 1, lambda n: n + 2, lambda n: 2 * n + 3]
    np.testing.assert_array_equal(out, [closed[i % 3](i % 5) + 1000 * (2 * (i & 1) + 3) for i in range(120)])


@every_schedule
def test_functions_that_call_each_other(settings):
    """Values that live across a call, one of them in the middle of a loop."""
    source = """
    __device__ __noinline__ long long odd(long long n, int step);
    __device__ __noinline__ long long even(long long n, int step) {
      if (n <= 0) return 1;
      long long sum = n * step;
      for (int i = 1; i <= 2; ++i) sum = 3 * sum + i * odd(n - i, step + i);
      return sum;
    }
    __device__ __noinline__ long long odd(long long n, int step) { return n <= 0 ? step : n - even(n - 1, step) * 5; }
    extern "C" __global__ void k(long long* out) { out[threadIdx.x] = even(threadIdx.x % 7, threadIdx.x); }"""

    @functools.cache
    def even(n, step):
        if n <= 0:
            return 1
        total = n * step
        for i in (1, 2):
            total = 3 * total + i * odd(n - i, step + i)
        return total

    def odd(n, step):
        return step if n <= 0 else n - even(n - 1, step) * 5

    out = poisoned(70, np.int64)
    launch(source, 1, 70, out, **settings)
    np.testing.assert_array_equal(out, [even(t % 7, t) for t in range(70)])


@every_schedule
def test_each_call_has_its_own_arrays_and_structures(settings):
    """Structures by value, and a pointer to the array of a caller far above."""
    source = """
    struct Item { double value; int path[5]; };
    __device__ __noinline__ Item descend(Item item, int depth, int* above) {
      int own[4];
      for (int i = 0; i < 4; ++i) own[i] = (above ? above[i] : i) + depth + i;
      if (depth == 0) { item.path[4] = own[3]; return item; }
      item.path[depth & 3] += own[depth & 3];
      Item below = descend(item, depth - 1, own);
      below.value += item.value + own[(below.path[4] + depth) & 3];
      return below;
    }
    extern "C" __global__ void k(const double* x, double* out, int* paths) {
      int t = threadIdx.x;
      Item item{x[t], {t, 1, 2, 3, 4}};
      item = descend(item, t % 6, nullptr);
      out[t] = item.value;
      for (int i = 0; i < 5; ++i) paths[5 * t + i] = item.path[i];
    }"""

    def descend(value, path, depth, above):
        own = [a + depth + i for i, a in enumerate(above)]
        path = list(path)
        if depth == 0:
            return value, [*path[:4], own[3]]
        path[depth & 3] += own[depth & 3]
        below, found = descend(value, path, depth - 1, own)
        return below + (value + own[(found[4] + depth) & 3]), found

    x = np.random.default_rng(3).integers(-99, 99, 64).astype(np.float64)
    out, paths = poisoned(64, np.float64), poisoned((64, 5), np.int32)
    launch(source, 1, 64, x, out, paths, **settings)
    for t in range(64):
        value, path = descend(x[t], [t, 1, 2, 3, 4], t % 6, range(4))
        assert (out[t], paths[t].tolist()) == (value, path)


POINTERS = """
typedef float (*Operation)(float, float);
__device__ float plus(float a, float b) { return a + b; }
__device__ float times(float a, float b) { return a * b; }
__device__ Operation table[2] = {plus, times};
__constant__ Operation reversed[2] = {times, plus};
extern "C" __global__ void apply(float* x, const Operation* chosen) {
  int t = threadIdx.x;
  x[t] = table[t & 1](x[t], 3.0f) - reversed[t & 1](x[t], 5.0f) + chosen[t % 3](x[t], 7.0f);
}
extern "C" __global__ void choose(Operation* out) { out[0] = out[2] = times; out[1] = plus; }
"""


@every_schedule
def test_functions_through_pointers(settings):
    x = np.random.default_rng(1).integers(-9, 9, 50).astype(np.float32)
    plus, times = (lambda y: x + y), (lambda y: x * y)
    t = np.arange(50)
    expected = np.where(t & 1, times(3), plus(3)) - np.where(t & 1, plus(5), times(5))
    expected += np.where(t % 3 == 1, plus(7), times(7))
    chosen = np.zeros(3, np.uint64)
    launch(POINTERS, 1, 1, chosen, name="choose", **settings)
    launch(POINTERS, 1, 50, x, chosen, name="apply", **settings)
    np.testing.assert_array_equal(x, expected)


@every_schedule
def test_virtual_functions(settings):
    source = """
    struct Node { __device__ virtual int size(int depth) const = 0; };
    struct Leaf : Node { int n; __device__ int size(int depth) const override { return n + depth; } };
    struct Pair : Node {
      const Node *left, *right;
      __device__ int size(int depth) const override { return left->size(depth + 1) * 3 + right->size(depth + 2); }
    };
    extern "C" __global__ void k(int* out) {
      Leaf a, b;
      a.n = threadIdx.x, b.n = 7;
      Pair both, twice;
      both.left = &a, both.right = &b;
      twice.left = &both, twice.right = threadIdx.x % 2 ? (Node*)&a : (Node*)&both;
      const Node* nodes[] = {&a, &both, &twice};
      out[threadIdx.x] = nodes[threadIdx.x % 3]->size(0);
    }"""

    def both(t, depth):
        return 3 * (t + depth + 1) + 7 + depth + 2

    def size(t):
        right = t + 2 if t % 2 else both(t, 2)
        return (t, both(t, 0), 3 * both(t, 1) + right)[t % 3]

    out = poisoned(70, np.int32)
    launch(source, 1, 70, out, **settings)
    np.testing.assert_array_equal(out, [size(t) for t in range(70)])


@every_schedule
def test_warps_and_blocks_meet_inside_functions(settings):
    """A warp votes and shuffles in a recursion of one depth; a block waits in a function behind a pointer."""
    source = """
    __device__ __noinline__ int fold(int value, int step) {
      if (step == 0) return value;
      int far = __shfl_xor_sync(~0u, value, step);
      int any = __any_sync(~0u, far == 5);
      return fold(value + far, step / 2) + any;
    }
    __shared__ int sums[64];
    __device__ int exchange(int value) {
      sums[threadIdx.x] = value;
      __syncthreads();
      return sums[63 - threadIdx.x];
    }
    __device__ int (*pointer)(int) = exchange;
    extern "C" __global__ void k(int* out) {
      int t = threadIdx.x, sum = fold(t, 16);
      out[t] = pointer(sum * 100 + t);
    }"""
    out = poisoned(64, np.int32)
    with ptxsim.sanitize() as report:
        launch(source, 1, 64, out, **settings)
    assert not report.findings
    t = np.arange(64)[::-1]
    value, votes = np.arange(64), np.zeros(64, int)
    for step in (16, 8, 4, 2, 1):
        far = value[np.arange(64) ^ step]
        votes += np.repeat((far == 5).reshape(2, 32).any(1), 32)
        value = value + far
    np.testing.assert_array_equal(out, (value + votes)[::-1] * 100 + t)


def test_a_barrier_that_threads_reach_at_different_depths():
    """In a block of two warps, one of which goes deeper: bar.sync counts warps, wherever they come from. Within one
    warp it is a deadlock."""
    source = """
    __device__ __noinline__ int wait(int depth) {
      if (depth == 0) { __syncthreads(); return 1; }
      return wait(depth - 1) + 1;
    }
    extern "C" __global__ void k(int* out, int shift) { out[threadIdx.x] = wait(threadIdx.x >> shift); }"""
    out = poisoned(64, np.int32)
    launch(source, 1, 64, out, np.int32(5))
    np.testing.assert_array_equal(out, 1 + np.arange(64) // 32)
    diverging = """
    __device__ __noinline__ int wait(int depth) {
      int below = depth == 0 ? 0 : wait(depth - 1);
      __syncthreads();
      return below + 1;
    }
    extern "C" __global__ void k(int* out) { out[threadIdx.x] = wait(threadIdx.x & 1); if (out[0]) __syncthreads(); }"""
    with ptxsim.sanitize() as report:
        launch(diverging, 1, 32, out)
    assert {finding.kind for finding in report.findings} & {"deadlock", "divergent barrier"}, report


WAITING = """
__device__ int look(volatile int* flag) { return *flag; }
__device__ int (*pointer)(volatile int*) = look;
extern "C" __global__ void k(int* out) {
  if (threadIdx.x < 2) {
    while (pointer(out) == 0) {}
    out[1] = 3;
  } else if (threadIdx.x == 3) {
    out[FLAG] = 1;
  }
}"""


@every_schedule
def test_waiting_in_a_function_lets_others_run(settings):
    out = np.zeros(2, np.int32)
    launch(WAITING.replace("FLAG", "0"), 1, 32, out, **settings)
    np.testing.assert_array_equal(out, [1, 3])


@every_schedule
@pytest.mark.parametrize("threads", [1, 4, 64])
def test_waiting_in_a_function_for_what_never_comes(threads, settings):
    with pytest.raises(ptxsim.Deadlock, match="repeating a loop for ever"):
        launch(WAITING.replace("FLAG", "1"), 1, threads, np.zeros(2, np.int32), **settings)


@every_schedule
def test_a_loop_of_calls_without_an_end(settings):
    """Others finish first: here they end it, there they do not."""
    source = """
    __device__ void nothing() {}
    __device__ void (*pointer)() = nothing;
    extern "C" __global__ void k(int* flag, int value) {
      if (threadIdx.x < 2) while (*flag == 0) pointer();
      else flag[threadIdx.x == 3 ? 0 : threadIdx.x] = value;
    }"""
    flag = np.zeros(32, np.int32)
    launch(source, 1, 32, flag, np.int32(1), **settings)
    assert flag.sum() == 30 and flag[0] == 1
    with pytest.raises(ptxsim.Deadlock, match="2 threads repeating a loop for ever"):
        launch(source, 1, 32, np.zeros(32, np.int32), np.int32(0), **settings)


# -- what goes wrong -----------------------------------------------------------------------------------
def test_a_recursion_without_an_end():
    source = """
    __device__ __noinline__ int deeper(int n) {
      return n == 1000000 ? 0 : deeper(n + 1) * 2 + n;
    }
    extern "C" __global__ void k(int* out) { if (threadIdx.x > 3) out[0] = deeper(threadIdx.x); }"""
    with pytest.raises(ptxsim.SimulationError, match=r"call of \w*deeper\w*, 1024 calls deep, over.*thread \(4.*cu:3"):
        launch(source, 1, 32, np.zeros(1, np.int32))


@pytest.mark.parametrize(
    "pointer, complaint",
    [
        ("0", r"call of 0x0, which is the address of no function"),
        ("(Operation)out", "which is the address of no function"),
        ("(Operation)wide", r"call of \w*wide\w* with results and arguments of \[4, 4\] bytes, .* \[4, 8\]"),
    ],
)
def test_pointers_to_no_function(pointer, complaint):
    source = f"""
    typedef int (*Operation)(int);
    __device__ int narrow(int x) {{ return x; }}
    __device__ int wide(long long x) {{ return x; }}
    extern "C" __global__ void k(int* out, int which) {{
      Operation operations[] = {{narrow, {pointer}}};
      out[threadIdx.x] = operations[threadIdx.x == which](4);  // fault
    }}"""
    out = poisoned(32, np.int32)
    launch(source, 1, 32, out, np.int32(99))
    np.testing.assert_array_equal(out, 4)
    with pytest.raises(ptxsim.SimulationError, match=rf"{complaint}.*thread \(17, 0, 0\).*kernel.cu:7"):
        launch(source, 1, 32, out, np.int32(17))


CALLS = """.version 8.5
.target sm_80
.address_size 64
.func (.param .b32 result) add_one(.param .b32 x)
{{ .reg .b32 %r<2>; ld.param.u32 %r0, [x]; add.u32 %r0, %r0, 1; st.param.b32 [result], %r0; ret; }}
.func (.param .b32 result) double(.param .b32 x)
{{ .reg .b32 %r<2>; .reg .pred %p; ld.param.u32 %r0, [x]; add.u32 %r0, %r0, %r0;
  setp.gt.u32 %p, %r0, 20; @!%p st.param.b32 [result], %r0; @!%p ret; mov.u32 %r0, 20; st.param.b32 [result], %r0; }}
.visible .entry k(.param .u64 out)
{{
  .reg .b32 %r<4>; .reg .b64 %d<4>; .reg .pred %p;
  .param .b32 a; .param .b32 b; .param .b64 wide;
  prototype: .callprototype (.param .b32 _) _ (.param .b32 _);
  mov.u32 %r0, %tid.x; setp.lt.u32 %p, %r0, 3; mov.u32 %r1, 77;
  @%p mov.u64 %d0, add_one; @!%p mov.u64 %d0, double;
  {body}
  ld.param.u64 %d1, [out]; mad.wide.u32 %d1, %r0, 4, %d1; st.global.u32 [%d1], %r1;
}}"""
POINTER = "st.param.b32 [a], %r0; call (b), %d0, (a), {0}; ld.param.b32 %r1, [b];"


def add_or_double(t):
    return t + 1 if t < 3 else min(2 * t, 20)


@pytest.mark.parametrize(
    "body, expected",
    [
        (POINTER.format("prototype"), add_or_double),
        ("list: .calltargets add_one, double; " + POINTER.format("list"), add_or_double),
        (
            "st.param.b32 [a], 5; @%p call (b), %d0, (a), prototype; @%p ld.param.b32 %r1, [b];",
            lambda t: 6 if t < 3 else 77,
        ),
        (
            POINTER.format("prototype") + "st.param.b32 [a], %r1; call (b), double, (a); ld.param.b32 %r1, [b];",
            lambda t: min(2 * add_or_double(t), 20),
        ),
    ],
    ids=["prototype", "targets", "guard", "twice"],
)
def test_calls_in_hand_written_code(body, expected):
    out = poisoned(32, np.uint32)
    launch_ptx(CALLS.format(body=body), "k", (1,), (32,), (out,))
    np.testing.assert_array_equal(out, [expected(t) for t in range(32)])


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("call (b), add_one, (wide);", r"passes \[4, 8\] bytes for parameters of \[4, 4\]"),
        ("call (b), %d0, (%r0), prototype;", "passes something else than .param variables"),
        ("call (b), %d0, (b), prototype;", "b is passed by two calls that differ"),
        ("st.param.b32 [a], 1; call (b), %d0, (b), list; call (b), %d0, (a), list;", "another call comes between"),
        ("call (b), %d0, (a), list; call (wide), %d0, (a), list; ld.param.b32 %r1, [b];", "another call comes between"),
    ],
    ids=["sizes", "registers", "places", "stores", "loads"],
)
def test_calls_that_are_refused(body, complaint):
    with pytest.raises(NotImplementedError, match=complaint):
        launch_ptx(CALLS.format(body=body), "k", (1,), (32,), (np.zeros(32, np.uint32),))


def test_a_function_that_is_no_target_of_the_call():
    text = CALLS.format(body="list: .calltargets add_one; " + POINTER.format("list"))
    with pytest.raises(ptxsim.SimulationError, match=r"call of double, which is none of those.*thread \(3, 0, 0\)"):
        launch_ptx(text, "k", (1,), (32,), (np.zeros(32, np.uint32),))


def test_a_pointer_where_no_function_has_an_address():
    source = """
    extern "C" __global__ void k(int* out, void (*function)(int*)) { if (out[threadIdx.x]) function(out); }"""
    out = np.zeros(32, np.int32)
    launch(source, 1, 32, out, np.uint64(48))
    out[7] = 1
    with pytest.raises(ptxsim.SimulationError, match=r"call of 0x30, .* no function; kernel k, thread \(7, 0, 0\)"):
        launch(source, 1, 32, out, np.uint64(48))


# -- those who watch -----------------------------------------------------------------------------------
FACTORIAL = """
__device__ __noinline__ unsigned factorial(unsigned n) {
  if (n == 0) return 1;
  return factorial(n - 1) * n + n;
}
extern "C" __global__ void k(const unsigned* x, unsigned* out) { out[threadIdx.x] = factorial(x[threadIdx.x]); }
"""


@pytest.mark.parametrize("undefined, found", [(0, []), (3, ["uninitialised global memory"])])
def test_uninitialised_values_stay_with_the_call_that_has_them(undefined, found):
    """`own` is alive across the call but in the innermost one, which leaves its value in the same register."""
    source = """
    __device__ __noinline__ unsigned visit(const volatile unsigned* x, int depth) {
      unsigned own = x[depth];
      if (depth == 0) return 1;
      return visit(x, depth - 1) * 3 + own;
    }
    extern "C" __global__ void k(const unsigned* x, unsigned* out) { out[threadIdx.x] = visit(x, 3); }"""
    x, out = ptxsim.empty(4, np.uint32), poisoned(32, np.uint32)
    x[np.arange(4) != undefined] = 5
    with ptxsim.sanitize() as report:
        launch(source, 1, 32, x, out)
    assert [finding.kind for finding in report.findings] == found, report


@pytest.mark.parametrize("initialised, found", [("0, 0, 0", []), ("0", ["uninitialised local memory"])])
def test_what_earlier_calls_have_left_is_no_value(initialised, found):
    source = """
    __device__ __noinline__ int fill(int n) {
      volatile int a[4];
      for (int i = 0; i < 4; ++i) a[i] = n;
      return n ? fill(n - 1) * 3 + a[n & 3] : a[1];
    }
    __device__ __noinline__ int peek(int n) {
      volatile int a[4];
      int given[] = {INITIALISED};
      for (int i = 0; i < sizeof(given) / sizeof(int); ++i) a[i] = given[i];
      return n ? peek(n - 1) * 3 + a[0] : a[2];
    }
    extern "C" __global__ void k(int* out, int n) { out[threadIdx.x] = fill(n) + peek(n); }"""
    with ptxsim.sanitize() as report:
        launch(source.replace("INITIALISED", initialised), 1, 32, poisoned(32, np.int32), np.int32(2))
    assert [finding.kind for finding in report.findings] == found, report


@pytest.mark.parametrize("function", ["meet", "pointer"])
def test_a_barrier_in_a_function_that_some_lanes_leave_out(function):
    """Whether the function is inlined or not; lanes that leave early leave nothing out."""
    source = """
    __device__ void meet(int* out) { out[threadIdx.x] = 1; __syncthreads(); }
    __device__ void (*pointer)(int*) = meet;
    extern "C" __global__ void skip(int* out) { if (threadIdx.x < 16) FUNCTION(out); out[threadIdx.x + 32] = 2; }
    extern "C" __global__ void leave(int* out) {
      if (threadIdx.x >= 16) return;
      FUNCTION(out);
      out[threadIdx.x + 32] = 2;
    }"""
    kinds = {}
    for name in ("skip", "leave"):
        with ptxsim.sanitize() as report:
            launch(source.replace("FUNCTION", function), 1, 32, np.zeros(64, np.int32), name=name)
        kinds[name] = [finding.kind for finding in report.findings]
    assert kinds == {"skip": ["divergent barrier"], "leave": []}


def test_stacks_of_a_large_grid_are_not_there_at_once(monkeypatch):
    monkeypatch.setattr(ptxsim.launch, "_LOCAL_BYTES", 1 << 20)  # of 64 stacks
    done = []
    x, out = np.arange(256, dtype=np.uint32) % 4, poisoned(256, np.uint32)
    source = FACTORIAL.replace("threadIdx.x", "blockIdx.x * 32 + threadIdx.x")
    launch(source, 8, 32, x, out, progress=lambda blocks, total: done.append(blocks), workers=1)
    assert done == [2, 4, 6, 8]
    np.testing.assert_array_equal(out, np.array([1, 2, 6, 21])[x])


def test_counts_of_a_recursion():
    """Each level of depth n runs once for the threads that go so deep."""
    x, out = np.arange(64, dtype=np.uint32) // 32 * 3, poisoned(64, np.uint32)
    control = []
    for more in (0, 1):
        with ptxsim.profile() as profile:
            launch(FACTORIAL, 1, 64, x + np.uint32(more), out)
        control.append(profile.kernels[0].instructions["control"])
    assert control[1] - control[0] == 2 * 3  # for each warp a branch, a call and a return


def test_prints_and_assertions_in_functions(capfd):
    source = """
    #define assert(x) ((x) ? void(0) : __assertfail(#x, "file", 12, __func__, 1))
    __device__ __noinline__ void visit(int node, int depth) {
      printf("%d at %d\\n", node, depth);
      assert(depth < 3);
      if (node < 4) { visit(2 * node, depth + 1); visit(2 * node + 1, depth + 1); }
    }
    extern "C" __global__ void k(int root, int depth) { visit(root, depth); }"""
    launch(source, 1, 1, np.int32(1), np.int32(0))
    assert capfd.readouterr().out == "1 at 0\n2 at 1\n4 at 2\n5 at 2\n3 at 1\n6 at 2\n7 at 2\n"
    with pytest.raises(ptxsim.SimulationError, match="assertion failed, line 12: depth < 3"):
        launch(source, 1, 1, np.int32(1), np.int32(1))
