"""set on 16-bit floats, one by one and in pairs, and the functions of cuda_fp16.h and cuda_bf16.h that need it."""

import ml_dtypes
import numpy as np
import pytest

from . import exact
from .instructions import Instruction, InstructionTable
from .launching import launch, poisoned
from .test_compare import float_comparisons


def forms(t, fmt):
    for name, compare in float_comparisons():
        for ftz in ("", ".ftz") if t == "f16" else ("",):

            def asked(a, b, f=compare, z=ftz):
                return bool(f(exact.flushed(a, fmt), exact.flushed(b, fmt)) if z else f(a, b))

            def one(a, b, f=asked):
                return float(f(a, b))

            def pair(a, b, f=asked):
                return float(f(a[0], b[0])), float(f(a[1], b[1]))

            def minus_one(a, b, f=asked):
                return -int(f(a, b))

            def masks(a, b, f=asked):
                return 0xFFFF * f(a[0], b[0]) | (0xFFFF * f(a[1], b[1])) << 16

            yield Instruction(f"set.{name}{ftz}.{t}.{t}", f"{t} {t} -> {t}", one)
            yield Instruction(f"set.{name}{ftz}.{t}x2.{t}x2", f"{t}x2 {t}x2 -> {t}x2", pair)
            yield Instruction(f"set.{name}{ftz}.u32.{t}x2", f"{t}x2 {t}x2 -> u32", masks)
            for to in ("u16", "s16", "u32", "s32"):
                yield Instruction(f"set.{name}{ftz}.{to}.{t}", f"{t} {t} -> {to}", minus_one)


TABLES = [InstructionTable(forms("f16", exact.F16)), InstructionTable(forms("bf16", exact.BF16), arch="sm_90")]


@pytest.mark.parametrize("table", TABLES, ids=["f16", "bf16"])
@pytest.mark.parametrize("part", range(4))
def test_comparisons(table, part):
    for instruction in table[part::4]:
        table.check(instruction)


FUNCTIONS = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void functions(const TYPE* x, TYPE* out, unsigned* mask, int n) {
  int i = threadIdx.x;
  out[i] = hexp(x[i]);
  out[n + i] = hlog(x[i]);
  out[2 * n + i] = __low2TYPE(__heq2(__halves2TYPE2(x[i], x[i]), __halves2TYPE2(x[0], x[i])));
  mask[i] = __hne2_mask(__halves2TYPE2(x[i], x[0]), __halves2TYPE2(x[1], x[i]));
}"""


@pytest.mark.parametrize(
    "ptx_type, dtype, arch", [("half", np.float16, "sm_80"), ("bfloat16", ml_dtypes.bfloat16, "sm_90")]
)
def test_functions_of_the_headers(ptx_type, dtype, arch):
    source = FUNCTIONS.replace("__low2TYPE", f"__low2{ptx_type}").replace("__halves2TYPE2", f"__halves2{ptx_type}2")
    source = source.replace("TYPE", "__half" if ptx_type == "half" else "__nv_bfloat16")
    x = np.concatenate([[0.5, 3.0, 1.0, 2.0], np.random.default_rng(0).uniform(0.01, 8, 92)]).astype(dtype)
    out, mask = poisoned((3, 96), np.uint16), poisoned(96, np.uint32)
    launch(source, 1, 96, x, out, mask, np.int32(96), arch=arch)
    out = out.view(dtype).astype(np.float64)
    wide = x.astype(np.float64)
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert (abs(out[0] - np.exp(wide)) <= unit * np.exp(wide)).all()
    assert (abs(out[1] - np.log(wide)) <= unit * np.maximum(abs(np.log(wide)), 2.0**-8)).all()
    np.testing.assert_array_equal(out[2], x == x[0])
    np.testing.assert_array_equal(mask, 0xFFFF * (x != x[1]) + (0xFFFF << 16) * (x != x[0]))
