"""Counters by source line and by opcode: they add up, they go to the right line, they can be written out."""

import json
from pathlib import Path

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim.parse import parse
from cupyflash.ptxsim.profile.results import COUNTERS
from cupyflash.ptxsim.profile.static import opcode_key, source_of

from .launching import SCHEDULES, launch, module, poisoned, zeros
from .test_profile import profiled

MIXED = """#line 1 "mixed.cu"
__device__ int twice(int x) {
  return x + (x << 3);
}
extern "C" __global__ void mixed(const float* x, const int* at, float* out, int* counts) {
  __shared__ float tile[96];
  volatile float own[4];
  int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  own[t % 4] = x[i];
  tile[t] = own[t % 4] * 2.5f;
  __syncthreads();
  for (int k = 0; k < at[i] % 5; ++k)
    tile[t] += x[(i + k) % 128];
  if (t < 50)
    atomicAdd(counts + at[i] % 8, twice(t));
  __syncthreads();
  switch (at[i] % 4) {
    case 0: out[i] = tile[95 - t]; break;
    case 1: out[i] = tile[(7 * t) % 96]; break;
    default: out[i] = fmaf(tile[t], x[i], 1.0f);
  }
}"""
BLOCKS = 12


def mixed(**settings):
    """The profile of a kernel that does a bit of everything."""
    rng = np.random.default_rng(5)
    x, at, out, counts = (
        zeros(96 * BLOCKS),
        zeros(96 * BLOCKS, np.int32),
        zeros(96 * BLOCKS),
        zeros(8, np.int32),
    )
    at[:] = rng.integers(0, 100, at.size)
    with ptxsim.profile() as profile:
        launch(MIXED, BLOCKS, 96, x, at, out, counts, **settings)
    return profile


def line(kernel, text):
    """The one line with a text."""
    (found,) = (x for x in kernel.lines if text in x.text)
    return found


def test_lines_add_up_to_the_kernel():
    (kernel,) = mixed().kernels
    assert len(kernel.lines) > 10
    for name in COUNTERS:
        parts, whole = [getattr(x, name) for x in kernel.lines], getattr(kernel, name)
        if isinstance(whole, dict):
            assert whole == {key: sum(part.get(key, 0) for part in parts) for key in whole}, name
            assert all(set(part) <= set(whole) for part in parts), name
        elif name.startswith("distinct"):  # lines may touch the same sectors
            assert max(parts) <= whole <= sum(parts), name
        else:
            assert whole == sum(parts), name
        if name not in ("mma_flops", "predicated_off"):
            assert whole, f"{name}: this kernel has none"
    assert sum(kernel.opcodes.values()) == kernel.warp_instructions


def test_counts_go_to_the_line_that_causes_them():
    (kernel,) = mixed().kernels
    warps, lanes = 3 * BLOCKS, 96 * BLOCKS
    assert [(x.file, x.line) for x in kernel.lines] == sorted((x.file, x.line) for x in kernel.lines)
    assert {x.file for x in kernel.lines} == {"mixed.cu"}
    loaded = line(kernel, "own[t % 4] = x[i]")
    assert (loaded.line, loaded.global_load_bytes, loaded.local_store_bytes) == (8, 4 * lanes, 4 * lanes)
    scaled = line(kernel, "* 2.5f")
    assert (scaled.flops, scaled.local_load_bytes, scaled.shared_wavefronts) == ({"f32": lanes}, 4 * lanes, warps)
    assert line(kernel, "atomicAdd").atomic_lanes == 50 * BLOCKS
    assert line(kernel, "default: out").flops["f32"] % 2 == 0
    assert [x.barriers for x in kernel.lines if "__syncthreads" in x.text] == [BLOCKS, BLOCKS]
    assert sum(x.barriers for x in kernel.lines) == 2 * BLOCKS


def test_an_inlined_function_keeps_its_line():
    (kernel,) = mixed().kernels
    inner = line(kernel, "return x + (x << 3)")
    assert inner.line == 2 and inner.instructions["integer arithmetic"] >= 2 * BLOCKS


def test_the_hottest_lines_come_first():
    (kernel,) = mixed().kernels
    hottest = kernel.hottest(3)
    assert len(hottest) == 3
    assert hottest[0].warp_instructions == max(x.warp_instructions for x in kernel.lines)
    assert [x.line for x in kernel.hottest(5, by="atomics")] == [line(kernel, "atomicAdd").line]
    shared = [x.shared_wavefronts for x in kernel.hottest(20, by="shared_wavefronts")]
    assert shared == sorted(shared, reverse=True) and min(shared) > 0


@pytest.mark.parametrize("settings", [*SCHEDULES[1:], *({"chunk_lanes": n} for n in (1, 200, 10**6))])
def test_neither_schedule_nor_grouping_changes_a_count(settings):
    assert mixed(**settings).as_dict() == mixed().as_dict()


def test_a_dict_and_json():
    profile = mixed()
    document = json.loads(profile.to_json())
    assert document == profile.as_dict()
    counters = document["mixed"]
    (kernel,) = profile.kernels
    assert counters["global_load_sectors"] == kernel.global_load_sectors
    assert counters["active_lane_efficiency"] == kernel.active_lane_efficiency < 1
    assert counters["shapes"] == [
        {
            "grid": [BLOCKS, 1, 1],
            "block": [96, 1, 1],
            "static_shared_bytes": 96 * 4,
            "dynamic_shared_bytes": 0,
            "arch": "sm_80",
            "launches": 1,
        }
    ]
    assert {"file", "line", "text", "opcodes", "branch_efficiency", *COUNTERS} <= set(counters["lines"][0])


def test_tables():
    profile = mixed()
    (kernel,) = profile.kernels
    table = str(profile)
    assert table.startswith("mixed\n")
    for label, value in (
        ("shared wavefronts", f"{kernel.shared_wavefronts:,}"),
        ("branch efficiency", f"{100 * kernel.branch_efficiency:.1f}%"),
        ("block load sectors", f"{kernel.block_load_sectors:,}"),
    ):
        assert any(row.split() == [*label.split(), value] for row in table.splitlines()), label
    title, heading, *rows = profile.line_table(4, by="shared_wavefronts").splitlines()
    assert title == "mixed, lines with most shared wavefronts" and len(rows) == 4
    assert "wavefr" in heading and all(row.split()[0].startswith("mixed.cu:") for row in rows)
    assert max(map(len, (title, heading, *rows))) <= 120


def test_tables_of_code_from_headers(tmp_path):
    """Under a path that would fill a row: the last directory, and who calls it."""
    folder = tmp_path.joinpath(*["somewhere"] * 10)
    for name, function in (
        ("crt/short.hpp", "set(int* x, int value) { x[threadIdx.x] = value; }"),
        ("a_directory/of_a_very_long_name_in_some_library.cuh", "add(int* x) { x[threadIdx.x] += x[0]; }"),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"__device__ void {function}")
    source = """#include "crt/short.hpp"
    #include "a_directory/of_a_very_long_name_in_some_library.cuh"
    extern "C" __global__ void calls(int* x) {
        set(x, 4);
        set(x + 32, 4);
        add(x);
    }"""
    kernel = ptxsim.RawModule(code=source, options=(f"-I{folder}",)).get_function("calls")
    with ptxsim.profile() as profile:
        kernel((1,), (32,), (poisoned(64, np.int32),))
    rows = profile.kernels[0].line_table().splitlines()[2:]
    assert max(map(len, rows)) <= 120
    (short,) = (row for row in rows if row.split()[0] == "crt/short.hpp:1")
    assert "  from kernel.cu:4" in short
    (long,) = (row for row in rows if row.split()[0].startswith("..."))
    assert long.split()[0].endswith("_library.cuh:1") and "  from kernel.cu:6" in long
    lines = {Path(line["file"]).name: line["callers"] for line in profile.kernels[0].as_dict()["lines"]}
    assert lines["short.hpp"] == [["kernel.cu", 4], ["kernel.cu", 5]] and lines["kernel.cu"] == []


def test_shapes_of_launches():
    source = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = 1; }'
    with ptxsim.profile() as profile:
        for block in (32, 64, 32):
            launch(source, (2, 3), (block,), poisoned(64, np.int32), shared_mem=48)
        launch(source, 2, 32, poisoned(64, np.int32), arch="sm_90")
    (kernel,) = profile.kernels
    assert kernel.launches == 4
    assert {(s.grid, s.threads, s.blocks, s.dynamic_shared_bytes, s.arch): n for s, n in kernel.shapes.items()} == {
        ((2, 3, 1), 32, 6, 48, "sm_80"): 2,
        ((2, 3, 1), 64, 6, 48, "sm_80"): 1,
        ((2, 1, 1), 32, 2, 0, "sm_90"): 1,
    }
    assert kernel.module is module(source, "sm_90")


ARITHMETIC = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void arithmetic(float* f, double* d, __half2* h, __nv_bfloat16* b, int* i) {
  int t = threadIdx.x;
  f[t] = fmaf(f[t], 3.0f, f[t + 1]);
  f[t] = f[t] + f[t + 1] - f[t + 2] * f[t + 3];
  d[t] = fma(d[t], d[t + 1], d[t]) * 3.0;
  h[t] = __hfma2(h[t], h[t + 1], h[t]);
  b[t] = __hfma(b[t], b[t + 1], b[t]);
  i[t] = i[t] * 7 + i[t + 1];
  f[t] = sqrtf(f[t]);
}"""


def test_scalar_operations_of_lanes():
    """A fused multiply-add is two, a packed pair twice as many; 40 lanes of two blocks."""
    arrays = [np.ones(64, t) for t in (np.float32, np.float64, np.uint32, np.uint16, np.int32)]
    kernel = profiled(ARITHMETIC, 2, 40, *arrays)
    lanes = 80
    assert kernel.flops == {"f32": 5 * lanes, "f64": 3 * lanes, "f16": 4 * lanes, "bf16": 2 * lanes}
    by_text = {x.text.strip().split(" =")[0]: x.flops for x in kernel.lines if x.flops}
    assert by_text["d[t]"] == {"f64": 3 * lanes} and by_text["h[t]"] == {"f16": 4 * lanes}


def test_lanes_that_a_guard_switches_off():
    """The warp issues the instruction; lanes without the predicate neither compute nor load."""
    source = """
    extern "C" __global__ void guarded(const float* x, float* out, int n) {
      float value = 1.0f, loaded = 0.0f;
      asm volatile("{ .reg .pred p; setp.lt.s32 p, %2, %3; @p add.f32 %0, %0, %0;"
                   " @p ld.global.f32 %1, [%4]; }"
                   : "+f"(value), "+f"(loaded) : "r"(threadIdx.x), "r"(n), "l"(x + threadIdx.x));
      out[threadIdx.x] = value + loaded;
    }"""
    for n, requests in ((0, 0), (5, 1), (32, 1), (40, 2), (64, 2)):
        out = zeros(64)
        kernel = profiled(source, 3, 64, zeros(64), out, np.int32(n))
        assert out.tolist() == [2.0] * n + [1.0] * (64 - n)
        assert kernel.predicated_off == 3 * 2 * (64 - n)
        assert kernel.flops == {"f32": 3 * (n + 64)}
        assert (kernel.global_load_requests, kernel.global_load_bytes) == (3 * requests, 3 * 4 * n)
        assert (kernel.distinct_load_sectors, kernel.block_load_sectors) == (-(-n // 8), 3 * -(-n // 8))
        assert kernel.opcodes["ld.global"] == 3 * 2
        assert kernel.active_lane_efficiency == 1


@pytest.mark.parametrize("n", [0, 1])
def test_a_guard_that_is_the_same_for_all_lanes(n):
    source = """
    extern "C" __global__ void guarded(float* out, int n) {
      float value = 1.0f;
      asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; @p add.f32 %0, %0, %0; }" : "+f"(value) : "r"(n));
      out[threadIdx.x] = value;
    }"""
    kernel = profiled(source, 3, 64, zeros(64), np.int32(n))
    assert (kernel.predicated_off, kernel.flops) == (3 * 64 * (1 - n), {"f32": 3 * 64 * n})


def test_a_branch_of_some_lanes_of_a_warp():
    """Only lanes that come to a branch decide whether it diverges: in the inner one here, no warp's do."""
    source = """
    extern "C" __global__ void nested(const int* inner, int* out) {
      int t = threadIdx.x;
      if (t % 2) {
        if (inner[t])
          atomicAdd(out, 1);
        else
          atomicAdd(out + 1, 1);
      }
    }"""
    inner, out = zeros(96, np.int32), zeros(2, np.int32)
    inner[:] = np.arange(96) // 32 != 1
    kernel = profiled(source, 2, 96, inner, out)
    assert out.tolist() == [64, 32]
    outer, nested = line(kernel, "t % 2"), line(kernel, "if (inner[t])")
    assert (outer.branches, outer.divergent_branches) == (6, 6)
    assert (nested.branches, nested.divergent_branches) == (6, 0)


def test_blocks_of_which_one_has_fewer_lanes():
    """They do the same in shared memory, but not with the same lanes."""
    source = """
    extern "C" __global__ void tail(const double* x, double* out, int n) {
      extern __shared__ double tile[];
      int t = threadIdx.x, i = blockIdx.x * 64 + t;
      if (i < n) {
        tile[t] = x[i];
        out[i] = ((volatile double*)tile)[t ^ 1];
      }
    }"""
    x, out = zeros(192, np.float64), zeros(192, np.float64)
    kernel = profiled(source, 3, 64, x, out, np.int32(170), shared_mem=512)
    assert (kernel.shared_requests, kernel.shared_wavefronts) == (2 * 6, 2 * (5 * 2 + 1))


def test_an_indexed_branch_is_a_branch():
    """brx.idx: lanes of a warp with two targets diverge, warps with one do not."""
    source = """
    extern "C" __global__ void table(int* out, int split) {
      int way = threadIdx.x < split, value;
      asm volatile("{ .reg .u32 r; ways: .branchtargets zero, one; brx.idx %1, ways;"
                   " zero: mov.u32 %0, 10; bra done; one: mov.u32 %0, 11; done: }" : "=r"(value) : "r"(way));
      out[threadIdx.x] = value;
    }"""
    for split, divergent in ((0, 0), (7, 1), (32, 0), (96, 0)):
        out = poisoned(96, np.int32)
        kernel = profiled(source, 1, 96, out, np.int32(split))
        assert out.tolist() == [11] * split + [10] * (96 - split)
        assert (kernel.branches, kernel.divergent_branches) == (3, divergent)


def test_named_barriers_of_two_lines():
    """Half of the block waits at one line, half at another: one barrier, that of the first thread's line."""
    source = """
    extern "C" __global__ void halves(int* out) {
      if (threadIdx.x < 32)
        asm volatile("barrier.sync 3, 64;" ::: "memory");
      else
        asm volatile("barrier.sync 3, 64; // second" ::: "memory");
      out[threadIdx.x] = 1;
    }"""
    for settings in SCHEDULES:
        with ptxsim.profile() as profile:
            launch(source, 5, 64, poisoned(64, np.int32), **settings)
        (kernel,) = profile.kernels
        assert kernel.barriers == 5
        assert [(x.line, x.barriers) for x in kernel.lines if x.barriers] == [(4, 5)]


@pytest.mark.parametrize("threads", [32, 1024])
@pytest.mark.parametrize("arrays", [0, 1])
def test_a_fault_is_reported_as_without_counters(threads, arrays):
    """Also if enough lanes came together to be counted, and if nothing at all is mapped."""
    source = 'extern "C" __global__ void wild(int* out, int* x) { out[threadIdx.x + (blockIdx.x << 20)] = 1; }'
    x = poisoned(threads, np.int32) if arrays else None
    with ptxsim.profile() as profile, pytest.raises(ptxsim.MemoryFault, match=r"kernel\.cu:1$"):
        launch(source, 8, threads, x, x)
    assert profile.kernels == [] and profile.stopped == {"wild": 1}
    assert str(profile) == "wild: launches that a fault stopped, not counted: 1"


def test_launches_after_a_look_are_counted():
    source = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = 1; }'
    with ptxsim.profile() as profile:
        launch(source, 1, 32, poisoned(32, np.int32))
        assert profile.kernels[0].lines[0].global_store_requests == 1
        launch(source, 1, 32, poisoned(32, np.int32))
    assert profile.kernels[0].lines[0].global_store_requests == 2


PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_param_0) {
  .reg .b32 %r<4>; .reg .f32 %f<8>; .reg .b64 %rd<2>; .reg .pred %p<2>;
  INSTRUCTION
}"""


@pytest.mark.parametrize(
    "instruction, key",
    [
        ("fma.rn.ftz.f32 %f0, %f1, %f2, %f3;", "fma.f32"),
        ("ex2.approx.ftz.f32 %f0, %f1;", "ex2.f32"),
        ("rcp.approx.ftz.f32 %f0, %f1;", "rcp.approx.f32"),
        ("div.full.f32 %f0, %f1, %f2;", "div.full.f32"),
        ("mul.wide.s32 %rd0, %r1, 4;", "mul.wide.s32"),
        ("cvt.rn.f16x2.f32 %r0, %f1, %f2;", "cvt.f16x2.f32"),
        ("setp.lt.ftz.f32 %p0, %f1, %f2;", "setp.f32"),
        ("ld.global.nc.L1::no_allocate.v4.f32 {%f0, %f1, %f2, %f3}, [%rd0];", "ld.global"),
        ("ld.volatile.u32 %r0, [%rd0];", "ld.generic"),
        ("st.shared::cta.v2.b32 [%r0], {%r1, %r2};", "st.shared"),
        ("atom.global.relaxed.gpu.add.u32 %r0, [%rd0], %r1;", "atom.global.add.u32"),
        ("red.add.u32 [%rd0], %r1;", "red.generic.add.u32"),
        ("cp.async.cg.shared.global.L2::128B [%r0], [%rd0], 16;", "cp.async"),
        ("cp.async.wait_group 1;", "cp.async.wait_group"),
        ("bar.sync 0;", "bar.sync"),
        ("bar.warp.sync 0xffffffff;", "bar.warp.sync"),
        ("shfl.sync.bfly.b32 %r0|%p0, %r1, 1, 31, -1;", "shfl.bfly"),
        ("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r0, %r1}, [%r2];", "ldmatrix.x2"),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
            "{%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2}, {%f0, %f1, %f2, %f3};",
            "mma.m16n8k8.f16",
        ),
        ("shf.l.wrap.b32 %r0, %r1, %r2, 3;", "shf.l.b32"),
        ("ret;", "ret"),
    ],
)
def test_opcodes(instruction, key):
    """What picks the unit stays, roundings, orders and hints of caches go."""
    (found,) = parse(PTX.replace("INSTRUCTION", instruction)).functions["k"].code
    assert opcode_key(found) == key
    assert source_of(found) == ("PTX", 7)  # without .loc: the line of PTX
