"""What the simulator does not know is refused before any lane runs, with its line in PTX and in CUDA C++."""

import re
from pathlib import Path

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim.instructions import document

from .fuzz.compare import launch_ptx
from .launching import launch, poisoned

REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<20>; .reg .f32 %f<20>; .reg .b64 %d<8>; .reg .f64 %g<4>;"
HEAD = """.version 8.8
.target sm_100
.address_size 64
.global .texref picture;
.visible .entry refused(.param .u64 out)
{
""".replace(".global .texref picture;\n", "")

UNKNOWN = [
    "wgmma.fence.sync.aligned;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %d0, %d1, 1, 1, 1, 0, 0;",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 128;",
    "tcgen05.mma.cta_group::1.kind::f16 [%r0], %d0, %d1, %r1, %p0;",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%d0], 16, [%r1], "
    "%h0;",
    "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], 16;",
    "cp.async.bulk.wait_group 0;",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r0], [%d0, {%r1, %r2}], [%r3];",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r0], 16;",
    "barrier.cluster.arrive.aligned;",
    "mapa.shared::cluster.u32 %r0, %r1, 0;",
    "getctarank.shared::cluster.u32 %r0, %r1;",
    "ld.shared::cluster.u32 %r0, [%r1];",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r0], %r1, [%r2];",
    "st.bulk.shared::cta [%d0], 16, 0;",
    "multimem.ld_reduce.global.add.f32 %f0, [%d0];",
    "setmaxnreg.inc.sync.aligned.u32 240;",
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r0], [%r1];",
    "tex.2d.v4.f32.s32 {%f0, %f1, %f2, %f3}, [%d0, {%r0, %r1}];",
    "suld.b.2d.b32.trap %r0, [%d0, {%r1, %r2}];",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f0, %f1, %f2, %f3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, "
    "{%f0, %f1, %f2, %f3};",
    "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, {%r0, %r1}, "
    "{%r2, %r3}, {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7};",
    "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r4, %r5}, "
    "{%r8, %r9}, {%f0, %f1, %f2, %f3}, %r0, 0x0;",
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r2];",
    "vadd.u32.u32.u32 %r0, %r1, %r2;",
    "vadd4.u32.u32.u32 %r0, %r1, %r2, %r3;",
    "szext.wrap.u32 %r0, %r1, %r2;",
    "pmevent 3;",
    "alloca.u32 %r0, %r1, 16;",
    "createpolicy.fractional.L2::evict_last.b64 %d0, 1.0;",
    "ld.global.L2::cache_hint.b32 %r0, [%d0], %d1;",
    "cvt.rn.satfinite.e4m3x2.f32 %h0, %f0, %f1;",
    "cvt.rs.f16x2.f32 %r0, %f0, %f1, %r1;",
    "shfl.up.b32 %r0, %r1, 1, 0;",
    "vote.all.pred %p0, %p1;",
    "atom.global.add.L2::cache_hint.u32 %r0, [%d0], %r1, %d1;",
    "lop3.or.b32 %r0|%p0, %r1, %r2, %r3, 0x80, %p1;",
    "prefetch.tensormap [%d0];",
    "elect.b32 %r0;",
    "discard.global.L2 [%d0], 128;",
]

WRONG_MODIFIERS = [
    "add.f32.xyz %f0, %f1, %f2;",
    "add.xyz.f32 %f0, %f1, %f2;",
    "add.rn.rz.f32 %f0, %f1, %f2;",
    "add.rn.rn.f32 %f0, %f1, %f2;",
    "add.ftz.f64 %g0, %g1, %g2;",
    "add.rz.f16 %h0, %h1, %h2;",
    "add.s32.f32 %f0, %f1, %f2;",
    "add.sat.u32 %r0, %r1, %r2;",
    "add.b32 %r0, %r1, %r2;",
    "mul.s32 %r0, %r1, %r2;",
    "mul.wide.s64 %d0, %d1, %d2;",
    "fma.f32 %f0, %f1, %f2, %f3;",
    "fma.rn.ftz.bf16 %h0, %h1, %h2, %h3;",
    "div.f32 %f0, %f1, %f2;",
    "ex2.f32 %f0, %f1;",
    "tanh.approx.ftz.f32 %f0, %f1;",
    "cvt.f32.s32 %f0, %r0;",
    "cvt.rn.f64.f32 %g0, %f0;",
    "cvt.rn.s32.f32 %r0, %f0;",
    "cvt.rn.relu.f32.f64 %f0, %g0;",
    "cvt.rna.rn.tf32.f32 %r0, %f0;",
    "setp.lo.s32 %p0, %r0, %r1;",
    "setp.ltu.u32 %p0, %r0, %r1;",
    "setp.eq.lt.s32 %p0, %r0, %r1;",
    "min.xorsign.f32 %f0, %f1, %f2;",
    "shl.s32 %r0, %r1, %r2;",
    "shf.l.b32 %r0, %r1, %r2, %r3;",
    "ld.global.v3.f32 {%f0, %f1, %f2}, [%d0];",
    "ld.global.shared.f32 %f0, [%d0];",
    "ld.relaxed.global.f32 %f0, [%d0];",
    "st.global.nc.f32 [%d0], %f0;",
    "atom.global.add.b32 %r0, [%d0], %r1;",
    "atom.global.add.s64 %d1, [%d0], %d2;",
    "red.global.exch.b32 [%d0], %r1;",
    "atom.global.min.f32 %f0, [%d0], %f1;",
    "atom.global.min.v4.f32 {%f0, %f1, %f2, %f3}, [%d0], {%f0, %f1, %f2, %f3};",
    "atom.shared.add.v2.f32 {%f0, %f1}, [%d0], {%f0, %f1};",
    "atom.global.min.noftz.f16x2 %r0, [%d0], %r1;",
    "red.global.add.noftz.v8.f16x2 [%d0], {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7};",
    "red.global.exch.b128 [%d0], %d1;",
    "ld.global.b128 %d0, [%d1];",
    "redux.sync.add.f32 %f0, %f1, 0xffffffff;",
    "bar.warp.arrive 0xffffffff;",
    "mbarrier.init.release.cta.shared.b64 [%r0], 1;",
    "mbarrier.arrive.noComplete.relaxed.cta.shared.b64 %d0, [%r0], 1;",
    "mbarrier.arrive.noComplete.shared.b64 %d0, [%r0];",
    "mbarrier.arrive.acquire.cta.shared.b64 %d0, [%r0];",
    "mbarrier.arrive.release.shared.b64 %d0, [%r0];",
    "mbarrier.test_wait.release.cta.shared.b64 %p0, [%r0], %d0;",
    "mbarrier.test_wait.shared.b64 %p0, [%r0], %d0, %r1;",
    "mbarrier.try_wait.shared::cluster.b64 %p0, [%r0], %d0;",
    "mbarrier.complete_tx.shared.u64 [%r0], %r1;",
    "cp.async.mbarrier.arrive.shared.b64 [%r0], 1;",
    "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, "
    "{%f0, %f1, %f2, %f3};",
]

WRONG_MODIFIERS += [
    "wmma.load.a.sync.aligned.col.m8n8k128.global.b1 {%r0}, [%d0], %r8;",
    "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.or.popc {%r0, %r1}, {%r2}, {%r3}, {%r0, %r1};",
    "wmma.load.a.sync.aligned.m16n16k16.global.f16 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%d0], %r8;",
    "wmma.load.a.sync.aligned.row.m16n16k8.global.f16 {%r0, %r1, %r2, %r3}, [%d0], %r8;",
    "wmma.mma.sync.aligned.row.m16n16k8.f32.tf32.tf32.f32 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, "
    "{%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7};",
    "wmma.mma.sync.aligned.row.col.m8n8k4.satfinite.f64.f64.f64.f64 {%g0, %g1}, {%g2}, {%g3}, {%g0, %g1};",
    "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, "
    "{%r4, %r5}, {%f0, %f1, %f2, %f3};",
]

WRONG_OPERANDS = [
    "mov.u32 %r0, %cluster_ctaid.x;",
    "mov.u32 %r0, %envreg3;",
    "mov.u64 %d0, undeclared;",
    "add.u32 %r0, %r1, %undeclared;",
    "ld.global.f32 %f0, [undeclared];",
    "ld.global.f32 %f0, [%d0, {%r0, %r1}];",
    "call (%r0), elsewhere, (%r1);",
    "call (%r0), %d0, (%r1), prototype;",
    "bra nowhere;",
    "add.f32 %f0, %f1;",
    "fma.rn.f32 %f0, %f1, %f2;",
    "mov.b64 {%r0, %r1}, {%r2, %r3};",
    "mbarrier.arrive.shared::cluster.b64 %d0, [%r0];",
]


def refusal(instruction):
    """The message with which a kernel is refused whose 8th line is the instruction."""
    out = poisoned(32, np.uint32)
    before = out.copy()
    text = f"{HEAD}{REGISTERS}\nld.param.u64 %d7, [out]; st.global.u32 [%d7], 1;\n{instruction}\nret;\n}}\n"
    number = text.splitlines().index(instruction) + 1
    with pytest.raises((NotImplementedError, ptxsim.parse.ParseError)) as error:
        launch_ptx(text, "refused", (1,), (32,), (out,))
    np.testing.assert_array_equal(out, before)
    assert f"PTX line {number}" in str(error.value), error.value
    return str(error.value)


@pytest.mark.parametrize("instruction", [*UNKNOWN, *WRONG_MODIFIERS])
def test_unknown_instructions_and_modifiers(instruction):
    assert instruction.split()[0].rstrip(";") in refusal(instruction)


@pytest.mark.parametrize("instruction", WRONG_OPERANDS)
def test_operands_without_a_meaning(instruction):
    refusal(instruction)


@pytest.mark.parametrize(
    "instruction",
    [
        "min.f32 %f0, %f1, %f2, %f3;",
        "redux.sync.add.u32 %r0, %r1, 0xffffffff;",
        "redux.sync.min.f32 %f0, %f1, -1;",
        "elect.sync %r0|%p0, -1;",
    ],
)
def test_the_same_instruction_under_an_older_architecture(instruction):
    text = f"{HEAD}{REGISTERS}\n{instruction}\nret;\n}}\n"
    launch_ptx(text, "refused", (1,), (32,), (np.zeros(1),))
    with pytest.raises(NotImplementedError, match=r"needs sm_\d+ \(PTX line 7"):
        launch_ptx(text, "refused", (1,), (32,), (np.zeros(1),), arch="sm_75")


def test_the_document_says_what_the_table_says():
    assert (Path(ptxsim.__file__).parent / "INSTRUCTIONS.md").read_text() == document()


def test_the_line_of_the_source_is_named():
    source = """
    extern "C" __global__ void video(unsigned* out) {
      unsigned a = out[0], b;
      asm volatile("vadd.u32.u32.u32.sat %0, %1, %1;" : "=r"(b) : "r"(a));
      asm volatile("add.rn.rz.f32 %0, %0, %0;" : "+r"(b));
      out[1] = b;
    }"""
    with pytest.raises(NotImplementedError) as error:
        launch(source, 1, 1, np.zeros(2, np.uint32))
    assert re.search(r"vadd\S+ \(PTX line \d+, kernel.cu:4\)", str(error.value))
    assert re.search(r"add\.rn\.rz\.f32 \(PTX line \d+, kernel.cu:5\)", str(error.value))


def test_a_failed_assertion_stops_the_launch_with_its_text():
    source = """
    extern "C" __global__ void checked(const int* x, int* out) {
      assert(x[threadIdx.x] == 1);
      out[threadIdx.x] = 2;
    }"""
    x, out = np.ones(64, np.int32), poisoned(64, np.int32)
    launch(source, 1, 64, x, out)
    assert (out == 2).all()
    x[37] = 0
    with pytest.raises(
        ptxsim.SimulationError, match=r"thread 37\D.*line 3.*x\[threadIdx.x\] == 1|x\[threadIdx.x\] == 1"
    ):
        launch(source, 1, 64, x, out)


def test_a_trap_stops_and_a_breakpoint_does_not():
    text = f"{HEAD}{REGISTERS}\nbrkpt;\ntrap;\nret;\n}}\n"
    launch_ptx(text.replace("trap;\n", ""), "refused", (1,), (1,), (np.zeros(1),))
    with pytest.raises(ptxsim.SimulationError, match="trap"):
        launch_ptx(text, "refused", (1,), (1,), (np.zeros(1),))


LAUNCHING = """
extern "C" __global__ void child(int* x) { *x = 1; }
extern "C" __global__ void parent(int* x) {
  if (threadIdx.x == 0)
    child<<<1, 1>>>(x);
}"""


def test_kernels_that_launch_kernels():
    """With relocatable code they compile, and other kernels of the module run; without, NVRTC refuses them."""
    with pytest.raises(
        ptxsim.CompileError, match=r"(?s)kernel.cu\(5\).*device-side kernel launch.*dynamic parallelism"
    ):
        ptxsim.RawModule(code=LAUNCHING)
    relocatable = ptxsim.RawModule(code=LAUNCHING, options=("-rdc=true",))
    out = poisoned(1, np.int32)
    relocatable.get_function("child")((1,), (1,), (out,))
    assert out[0] == 1
    with pytest.raises(NotImplementedError, match=r"called at kernel.cu:5\).*dynamic parallelism"):
        relocatable.get_function("parent")
