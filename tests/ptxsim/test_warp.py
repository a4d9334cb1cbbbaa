"""Instructions over a warp: shfl, vote, match, redux, activemask, for full, partial and divergent warps."""

import functools
import operator

import numpy as np
import pytest

from .launching import SCHEDULES, launch, poisoned, schedule_name

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
MODES = ("up", "down", "bfly", "idx")


def shuffle_source(mode, lane, b, c):
    """The rule of the ISA: which lane is read, and whether it was in range."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    max_lane = (lane & mask) | (cval & ~mask)
    min_lane = lane & mask
    if mode == "up":
        j = lane - bval
        in_range = j >= max_lane
    else:
        j = {"down": lane + bval, "bfly": lane ^ bval, "idx": min_lane | (bval & ~mask)}[mode]
        in_range = j <= max_lane
    return (j if in_range else lane), in_range


SHUFFLES = "\n".join(
    f"""
extern "C" __global__ void {mode}(const unsigned* x, const unsigned* b, const unsigned* c, unsigned* out, int* in) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x, p;
  unsigned v;
  asm volatile("{{ .reg .pred p; shfl.sync.{mode}.b32 %0|p, %2, %3, %4, 0xffffffff; selp.s32 %1, 1, 0, p; }}"
      : "=r"(v), "=r"(p) : "r"(x[i]), "r"(b[i]), "r"(c[i]));
  out[i] = v; in[i] = p;
}}"""
    for mode in MODES
)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("mode", MODES)
def test_shuffles_of_every_width(mode, width):
    """Segments as __shfl_sync makes them, with another distance in every lane; then arbitrary clamps and masks."""
    rng = np.random.default_rng(width)
    x = rng.integers(0, 2**32, 128, dtype=np.uint32)
    b = rng.integers(0, 64, 128).astype(np.uint32)
    c = np.full(128, (32 - width) << 8 | (0 if mode == "up" else 31), np.uint32)
    c[64:] = rng.integers(0, 2**13, 64) & 0x1F1F
    out, in_range = poisoned(128, np.uint32), poisoned(128, np.int32)
    launch(SHUFFLES, 2, 64, x, b, c, out, in_range, name=mode)
    for i in range(128):
        j, inside = shuffle_source(mode, i % 32, int(b[i]), int(c[i]))
        if not 0 <= j < 32:
            continue
        assert (out[i], in_range[i]) == (x[i // 32 * 32 + j], inside), (i, hex(c[i]), b[i])


def test_shuffles_as_the_compiler_writes_them():
    source = """
    extern "C" __global__ void shuffles(const double* x, double* out) {
      int i = threadIdx.x;
      double* o = out + 6 * i;
      o[0] = __shfl_sync(0xffffffffu, x[i], 5);
      o[1] = __shfl_sync(0xffffffffu, x[i], i + 3, 8);
      o[2] = __shfl_up_sync(0xffffffffu, x[i], 7);
      o[3] = __shfl_down_sync(0xffffffffu, x[i], 3, 16);
      o[4] = __shfl_xor_sync(0xffffffffu, x[i], 13);
      o[5] = __shfl_xor_sync(0xffffffffu, (float)x[i], 1);
    }"""
    x = np.random.default_rng(1).normal(size=32).astype(np.float32).astype(np.float64)
    out = poisoned((32, 6), np.float64)
    launch(source, 1, 32, x, out)
    i = np.arange(32)
    down = np.where(i % 16 + 3 < 16, i + 3, i)
    sources = [0 * i + 5, i // 8 * 8 + (i + 3) % 8, np.where(i >= 7, i - 7, i), down, i ^ 13, i ^ 1]
    np.testing.assert_array_equal(out, np.stack([x[s] for s in sources], 1))


@every_schedule
def test_shuffles_among_some_lanes(settings):
    """A mask of the lanes on one side of a branch, of the lanes that have not exited, and of a short last warp."""
    source = """
    extern "C" __global__ void some(int* out) {
      int t = threadIdx.x, lane = t & 31, v = 10 * t;
      out[t] = -1;
      if (t < 32) {
        if (lane < 12) v = __shfl_sync(0xfffu, v, (lane + 5) % 12);
        else v = __shfl_xor_sync(0xfffff000u, v, 1);
      } else if (t < 64) {
        if (lane % 4 == 0) return;
        v = __shfl_sync(0xeeeeeeeeu, v, lane ^ (lane % 4 >= 2));
      } else v = __shfl_down_sync(0xffu, v, 4, 8);
      out[t] = v;
    }"""
    out = poisoned(72, np.int32)
    launch(source, 1, 72, out, **settings)
    t = np.arange(72)
    lane = t % 32
    first = np.where(lane < 12, (lane + 5) % 12, t ^ 1)
    second = t ^ (lane % 4 >= 2)
    third = np.where(lane < 4, t + 4, t)
    expected = 10 * np.where(t < 32, first, np.where(t < 64, second, third))
    expected[(t >= 32) & (t < 64) & (lane % 4 == 0)] = -1
    np.testing.assert_array_equal(out, expected)


@every_schedule
def test_a_lane_that_takes_no_part_has_no_value(settings):
    """It has exited, is not in the mask, or is turned off by a predicate: the result is all ones, and no fault."""
    source = """
    extern "C" __global__ void absent(int* out) {
      int t = threadIdx.x, lane = t & 31, v = t;
      if (t < 32) {
        if (lane > 20) return;
        v = __shfl_down_sync(0xffffffffu, t, 4);
      } else if (t < 64) v = __shfl_xor_sync(lane < 8 ? 0xffu : 0xffffff00u, t, 16);
      else asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, 5; @p shfl.sync.down.b32 %0, %2, 1, 31, 0x1f; }"
        : "+r"(v) : "r"(lane), "r"(t));
      out[t] = v;
    }"""
    out = np.zeros(96, np.int32)
    launch(source, 1, 96, out, **settings)
    lane = np.arange(32)
    expected = [
        np.where(lane > 20, 0, np.where(lane > 16, -1, lane + 4)),
        np.where((lane < 8) | (16 <= lane) & (lane < 24), -1, 32 + (lane ^ 16)),
        64 + lane + (lane < 4),
    ]
    expected[2][4] = -1
    np.testing.assert_array_equal(out.reshape(3, 32), expected)


@every_schedule
def test_votes(settings):
    """all, any, uni and ballot over a full warp, over one side of a branch, and with a negated predicate."""
    source = """
    extern "C" __global__ void votes(const int* x, unsigned* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
      unsigned* o = out + 6 * i;
      o[0] = __all_sync(0xffffffffu, x[i] > 0);
      o[1] = __any_sync(0xffffffffu, x[i] > 0);
      o[2] = __ballot_sync(0xffffffffu, x[i] > 0);
      o[3] = __uni_sync(0xffffffffu, x[i] > 0);
      if (lane < 9) o[4] = __ballot_sync(0x1ffu, x[i] > 0);
      else o[4] = __ballot_sync(0xfffffe00u, x[i] <= 0) + __all_sync(0xfffffe00u, x[i] > 0);
      unsigned negated;
      asm volatile("{ .reg .pred p, q; setp.gt.s32 p, %1, 0; vote.sync.any.pred q, !p, 0xffffffff;"
                   " selp.u32 %0, 1, 0, q; }" : "=r"(negated) : "r"(x[i]));
      o[5] = negated;
    }"""
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.integers(-3, 3, 64), np.ones(32), -np.ones(32), rng.integers(0, 3, 32)]).astype(np.int32)
    x[100] = 1
    out = poisoned((160, 6), np.uint32)
    launch(source, 5, 32, x, out, **settings)
    for w in range(5):
        p = x[32 * w : 32 * w + 32] > 0
        bits = sum(1 << k for k in range(32) if p[k])
        left = bits & 0x1FF
        right = (~bits & 0xFFFFFE00) + int(p[9:].all())
        for lane in range(32):
            expected = [p.all(), p.any(), bits, p.all() or not p.any(), left if lane < 9 else right, not p.all()]
            np.testing.assert_array_equal(out[32 * w + lane], [int(e) for e in expected])


def test_ballot_of_a_short_warp_has_no_bits_for_missing_threads():
    source = """
    extern "C" __global__ void ballots(unsigned* out) {
      unsigned mask = threadIdx.x < 32 ? 0xffffffffu : 0x7ffu;
      out[threadIdx.x] = __ballot_sync(mask, 1);
    }"""
    out = poisoned(43, np.uint32)
    launch(source, 1, 43, out)
    assert set(out[:32].tolist()) == {0xFFFFFFFF} and set(out[32:].tolist()) == {0x7FF}


def test_activemask_follows_divergence():
    source = """
    extern "C" __global__ void active(unsigned* out) {
      unsigned m;
      if (threadIdx.x & 1) { asm volatile("activemask.b32 %0;" : "=r"(m)); out[threadIdx.x] = m; }
      else { asm volatile("activemask.b32 %0;" : "=r"(m)); out[threadIdx.x] = m; }
    }"""
    out = poisoned(64, np.uint32)
    launch(source, 1, 64, out)
    for t in range(64):
        other = 0x55555555 if t & 1 else 0xAAAAAAAA
        assert out[t] >> t % 32 & 1 and not out[t] & other, (t, hex(out[t]))


def test_matches():
    source = """
    extern "C" __global__ void matches(const int* x, unsigned* out) {
      int i = threadIdx.x, all;
      out[3 * i] = __match_any_sync(0xffffffffu, x[i]);
      out[3 * i + 1] = __match_all_sync(0xffffffffu, i < 32 ? x[i] : 7, &all);
      out[3 * i + 2] = all;
    }"""
    x = np.random.default_rng(3).integers(0, 5, 64).astype(np.int32)
    out = poisoned((64, 3), np.uint32)
    launch(source, 1, 64, x, out)
    for i in range(64):
        warp = x[i // 32 * 32 : i // 32 * 32 + 32]
        assert out[i, 0] == sum(1 << k for k in range(32) if warp[k] == x[i])
        assert tuple(out[i, 1:]) == ((0xFFFFFFFF, 1) if i >= 32 else (0, 0))


REDUCTIONS = {
    "add.s32": sum,
    "min.s32": min,
    "max.s32": max,
    "add.u32": sum,
    "min.u32": min,
    "max.u32": max,
    "and.b32": lambda v: functools.reduce(operator.and_, v),
    "or.b32": lambda v: functools.reduce(operator.or_, v),
    "xor.b32": lambda v: functools.reduce(operator.xor, v),
}


@every_schedule
def test_redux_over_full_and_partial_masks(settings):
    bodies = "".join(
        f'asm volatile("redux.sync.{op} %0, %1, 0xffffffff;" : "=r"(v) : "r"(x[i])); out[{k} * 64 + i] = v;'
        f'if (i & 3) {{ asm volatile("redux.sync.{op} %0, %1, 0xeeeeeeee;" : "=r"(v) : "r"(x[i]));'
        f" out[({k} + {len(REDUCTIONS)}) * 64 + i] = v; }}"
        for k, op in enumerate(REDUCTIONS)
    )
    source = f"""
    extern "C" __global__ void redux(const unsigned* x, unsigned* out) {{
      int i = threadIdx.x;
      unsigned v;
      {bodies}
    }}"""
    x = np.random.default_rng(4).integers(0, 2**32, 64, dtype=np.uint32)
    out = poisoned((2 * len(REDUCTIONS), 64), np.uint32)
    before = int(out[0, 0])
    launch(source, 1, 64, x, out, **settings)
    for k, (op, function) in enumerate(REDUCTIONS.items()):
        values = (x.view(np.int32) if ".s32" in op else x).tolist()
        for i in range(64):
            warp = range(i // 32 * 32, i // 32 * 32 + 32)
            assert out[k, i] == function([values[j] for j in warp]) % 2**32, (op, i)
            partial = function([values[j] for j in warp if j & 3]) % 2**32 if i & 3 else before
            assert out[k + len(REDUCTIONS), i] == partial, (op, i)


def test_one_lane_is_elected():
    source = """
    extern "C" __global__ void elections(int* out, int* leaders) {
      int p, leader;
      asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; selp.s32 %1, 1, 0, p; }" : "=r"(leader), "=r"(p));
      out[threadIdx.x] = p;
      leaders[threadIdx.x] = leader;
    }"""
    out, leaders = poisoned((2, 32), np.int32), poisoned((2, 32), np.int32)
    launch(source, 1, 64, out, leaders, arch="sm_90")
    np.testing.assert_array_equal(out.sum(1), 1)
    np.testing.assert_array_equal(leaders, np.repeat(out.argmax(1), 32).reshape(2, 32))


def test_lane_registers():
    source = """
    extern "C" __global__ void lanes(unsigned* out) {
      unsigned* o = out + 7 * (threadIdx.y * blockDim.x + threadIdx.x);
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(o[0]));
      asm volatile("mov.u32 %0, %%lanemask_eq;" : "=r"(o[1]));
      asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(o[2]));
      asm volatile("mov.u32 %0, %%lanemask_le;" : "=r"(o[3]));
      asm volatile("mov.u32 %0, %%lanemask_gt;" : "=r"(o[4]));
      asm volatile("mov.u32 %0, %%lanemask_ge;" : "=r"(o[5]));
      asm volatile("mov.u32 %0, WARP_SZ;" : "=r"(o[6]));
    }"""
    out = poisoned((60, 7), np.uint32)
    launch(source, 1, (20, 3), out)
    for linear in range(60):
        lane = linear % 32
        bit, below = 1 << lane, (1 << lane) - 1
        expected = [lane, bit, below, bit | below, 0xFFFFFFFF & ~(bit | below), 0xFFFFFFFF & ~below, 32]
        np.testing.assert_array_equal(out[linear], np.array(expected, np.uint32))
