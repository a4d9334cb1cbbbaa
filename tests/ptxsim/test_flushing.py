"""Subnormals on their way through code that mixes .ftz with instructions that keep them."""

import numpy as np
import pytest

from cupyflash import ptxsim

from . import exact
from .instructions import Instruction, InstructionTable
from .launching import SCHEDULES, launch, poisoned, schedule_name

BIG = 2.0**127
TINY = 2.0**-149
HALF_TINY = 2.0**-127


def scaled(x):
    """mul.ftz by 2**127: a kept subnormal would come back as a large number."""
    return exact.mul(x, BIG, ftz=True)


def chain(*lines):
    """Inline PTX over %1, %2 with two temporaries; its value ends up in t."""
    return "{ .reg .f32 t, u; .reg .b32 b; .reg .pred p; " + " ".join(lines) + " mov.f32 %0, t; }"


SCALE = "mul.ftz.f32 t, t, 0f7F000000;"
KEEP = "mul.f32 t, t, 0f7F000000;"


def chains():
    two = "f32 f32 -> f32"
    values = ((TINY, -TINY, HALF_TINY, -HALF_TINY, 2.0**-126, 1.0, 0.0, -0.0, 3 * TINY),) * 2

    def case(name, formula, *lines):
        return Instruction(name, two, formula, asm=chain(*lines), values=values)

    yield case("kept sum, then flushed", lambda a, b: scaled(exact.add(a, b)), "add.f32 t, %1, %2;", SCALE)

    def flushed_sum(a, b):
        return exact.mul(exact.add(a, b, ftz=True), BIG)

    yield case("flushed sum, then kept", flushed_sum, "add.ftz.f32 t, %1, %2;", KEEP)
    yield case("copy", lambda a, b: scaled(a), "mov.f32 t, %1;", SCALE)
    yield case("bits", lambda a, b: scaled(a), "mov.b32 b, %1;", "mov.b32 t, b;", SCALE)
    yield case("negation", lambda a, b: scaled(-a), "neg.f32 t, %1;", SCALE)
    yield case("magnitude", lambda a, b: scaled(abs(a)), "abs.f32 t, %1;", SCALE)
    yield case("maximum", lambda a, b: scaled(exact.maximum(a, b)), "max.f32 t, %1, %2;", SCALE)

    def larger(a, b):
        return scaled(a if a > b else b)

    yield case("selection", larger, "setp.gt.f32 p, %1, %2;", "selp.f32 t, %1, %2, p;", SCALE)

    def both(a, b):
        return scaled(a) if a > b else scaled(exact.add(b, b, ftz=True))

    yield case("two ways", both, "setp.gt.f32 p, %1, %2;", "add.ftz.f32 t, %2, %2;", "@p mov.f32 t, %1;", SCALE)
    yield case("a constant", lambda a, b: exact.mul(a, 0.0), "mul.ftz.f32 t, %1, 0f00400000;", KEEP)

    def constant(a, b):
        return exact.mul(exact.mul(a, HALF_TINY), 1.0)

    yield case("a kept constant", constant, "mul.f32 t, %1, 0f00400000;")

    def sum_with_constant(a, b):
        return exact.add(a, 0.0, ftz=True)

    yield case("a constant summand", sum_with_constant, "add.ftz.f32 t, %1, 0f00000001;")
    yield case("a moved constant", lambda a, b: 0.0, "mov.f32 t, 0f00400000;", SCALE)

    def third(a, b):
        return exact.fma(a, 1.0, b, ftz=True)

    yield case("fma of kept products", third, "mul.f32 t, %1, 0f3F800000;", "fma.rn.ftz.f32 t, t, 0f3F800000, %2;")

    def compared(a, b):
        return float(exact.flushed(a) < exact.flushed(b))

    yield case("comparison", compared, "setp.lt.ftz.f32 p, %1, %2;", "selp.f32 t, 0f3F800000, 0f00000000, p;")

    def kept_comparison(a, b):
        return float(a < b)

    yield case("kept comparison", kept_comparison, "setp.lt.f32 p, %1, %2;", "selp.f32 t, 0f3F800000, 0f00000000, p;")
    yield case("minimum, flushed", lambda a, b: exact.minimum(*map(exact.flushed, (a, b))), "min.ftz.f32 t, %1, %2;")


TABLE = InstructionTable(chains())


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_chains(instruction):
    TABLE.check(instruction)


@pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
def test_around_a_loop(settings):
    """A value is flushed on the way in, kept on the way round: each use must look again."""
    source = """
    extern "C" __global__ void loop(const float* x, float* out, int n) {
      int i = threadIdx.x;
      float v = x[i] + x[i], sum = 0.0f;
      for (int k = 0; k < n + i % 3; ++k) {
        sum += v * 1.7014118346046923e38f;
        asm volatile("mul.f32 %0, %0, 0f3F000000;" : "+f"(v));
      }
      out[i] = sum;
      if (i & 1) { asm volatile("mul.f32 %0, %0, 0f3F000000;" : "+f"(v)); out[i] += v * 1.7014118346046923e38f; }
      asm volatile("st.global.f32 [%0], %1;" :: "l"(out + 64 + i), "f"(v) : "memory");
    }"""
    x = np.ldexp(np.float32(1) + np.arange(64, dtype=np.float32) / 64, -120 - np.arange(64) % 8).astype(np.float32)
    out = poisoned(128, np.float32)
    launch(source, 1, 64, x, out, np.int32(5), **settings)
    for i in range(64):
        v, total = exact.add(float(x[i]), float(x[i]), ftz=True), 0.0
        for _ in range(5 + i % 3):
            total = exact.add(total, scaled(v), ftz=True)
            v = exact.mul(v, 0.5)
        if i & 1:
            v = exact.mul(v, 0.5)
            total = exact.add(total, scaled(v), ftz=True)
        assert (out[i], out[64 + i]) == (total, v), i


@pytest.mark.parametrize("options", [(), ("-ftz=false",), ("--use_fast_math", "--ftz=false")])
def test_compiled_code_flushes_whatever_the_options(options):
    """CuPy puts -ftz=true behind the options of the user, and the last one counts; inline PTX is left as it is."""
    source = """
    extern "C" __global__ void scale(const float* x, float* out) {
      out[0] = x[0] * 1.7014118346046923e38f;
      asm("mul.f32 %0, %1, 0f7F000000;" : "=f"(out[1]) : "f"(x[0]));
    }"""
    x, out = np.array([TINY], np.float32), poisoned(2, np.float32)
    ptxsim.RawModule(code=source, options=options).get_function("scale")((1,), (1,), (x, out))
    assert out.tolist() == [0, TINY * BIG]
