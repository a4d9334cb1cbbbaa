"""cvt between float formats: every rounding mode, flushing, clamping, packed halves, rounding to integral values."""

import math

import numpy as np
import pytest

from . import exact
from .instructions import Instruction, InstructionTable
from .test_convert_integers import FLOAT_MODES, INTEGER_MODES
from .test_half import FORMATS, relu
from .values import TYPES

F16, BF16, F32, F64 = exact.F16, exact.BF16, exact.F32, exact.F64


def around_ties(fmt):
    """Values whose rounding to `fmt` is hard: ties, their neighbours, subnormals of `fmt`, the overflow threshold."""
    step = exact.ulp(1.0, fmt)
    scales = (exact.Fraction(1), exact.Fraction(4, 3), fmt.min_normal, fmt.min_subnormal, fmt.max_finite)
    values = [0.0, math.inf, math.nan]
    for scale in scales:
        base = exact.Fraction(exact.convert(float(scale), fmt))
        spacing = exact.ulp(float(base), fmt) if base else step
        for quarters in range(-8, 9):
            for nudge in (-1, 0, 1):
                x = base + spacing * quarters / 4 + nudge * spacing / 4096
                values.append(exact.rounded(x, F64))
    return tuple([*values, *(-v for v in values)])


def inputs(source, target):
    """The hard values of the target, as far as the source format can hold them."""
    return (tuple(exact.convert(x, TYPES[source].fmt) for x in around_ties(TYPES[target].fmt)),)


def narrowing():
    for target, source, modes in (
        ("f16", "f32", ("rn", "rz")),
        ("bf16", "f32", ("rn", "rz")),
        ("f32", "f64", tuple(FLOAT_MODES)),
        ("f16", "f64", tuple(FLOAT_MODES)),
    ):
        for suffix in modes:

            def formula(x, t=target, m=FLOAT_MODES[suffix]):
                return exact.convert(x, TYPES[t].fmt, m)

            signature, values = f"{source} -> {target}", inputs(source, target)
            yield Instruction(f"cvt.{suffix}.{target}.{source}", signature, formula, values=values)
            yield Instruction(f"cvt.{suffix}.{target}.{source}", signature, formula)
    for target in FORMATS:

        def formula(x, t=target):
            return relu(exact.convert(x, FORMATS[t]))

        yield Instruction(f"cvt.rn.relu.{target}.f32", f"f32 -> {target}", formula, values=inputs("f32", target))

    def flushing(x):
        return exact.convert(exact.flushed(x), F16)

    yield Instruction("cvt.rn.ftz.f16.f32", "f32 -> f16", flushing)


def flushed_result(x):
    """float64 to flushed float32; what lies between the largest subnormal and the least normal is left open."""
    result = exact.convert(x, F32)
    return None if abs(x) < float(F32.min_normal) == abs(result) else exact.flushed(result)


def widening():
    yield Instruction("cvt.f32.f16", "f16 -> f32", lambda x: x)
    yield Instruction("cvt.ftz.f32.f16", "f16 -> f32", lambda x: x)
    yield Instruction("cvt.f64.f16", "f16 -> f64", lambda x: x)
    yield Instruction("cvt.f64.f32", "f32 -> f64", lambda x: x)
    yield Instruction("cvt.ftz.f64.f32", "f32 -> f64", exact.flushed)
    yield Instruction("cvt.rn.ftz.f32.f64", "f64 -> f32", flushed_result, values=inputs("f64", "f32"))


def integral(x, mode):
    """Rounded to an integral value of the same format; a zero result keeps the argument's sign."""
    if not math.isfinite(x):
        return x
    return math.copysign(float(exact.round_to_integer(exact.Fraction(x), mode)), x)


def to_integral():
    for suffix, mode in INTEGER_MODES.items():
        for t in ("f16", "f32", "f64"):
            halves = (
                *tuple(s * k / 4 for k in range(40) for s in (1, -1)),
                math.inf,
                -math.inf,
                math.nan,
                -0.0,
                1000.5,
            )

            def formula(x, m=mode):
                return integral(x, m)

            yield Instruction(f"cvt.{suffix}.{t}.{t}", f"{t} -> {t}", formula, values=(halves,))
            yield Instruction(f"cvt.{suffix}.{t}.{t}", f"{t} -> {t}", formula)

    def flushing(x):
        return integral(exact.flushed(x), "p")

    yield Instruction("cvt.rpi.ftz.f32.f32", "f32 -> f32", flushing)


TF32 = "{ .reg .b32 t; cvt.rna.tf32.f32 t, %1; mov.b32 %0, t; }"


def tf32(x, mode="na"):
    """Round to 10 explicit bits, ties away from zero unless told otherwise, exponent range of float32."""
    return x if not math.isfinite(x) else exact.convert(x, exact.Format("tf32", 11, 127), mode)


def special():
    for target, fmt in FORMATS.items():
        for suffix in ("rn", "rz"):

            def formula(a, b, f=fmt, m=FLOAT_MODES[suffix]):
                return (exact.convert(b, f, m), exact.convert(a, f, m))

            text, values = f"cvt.{suffix}.{target}x2.f32", inputs("f32", target) * 2
            yield Instruction(text, f"f32 f32 -> {target}x2", formula, values=values)

        def clamped(a, b, f=fmt):
            return (relu(exact.convert(b, f)), relu(exact.convert(a, f)))

        yield Instruction(f"cvt.rn.relu.{target}x2.f32", f"f32 f32 -> {target}x2", clamped, values=values)
    yield Instruction("cvt.rna.tf32.f32", "f32 -> f32", tf32, asm=TF32, values=normal_floats())
    yield Instruction("cvt.sat.f32.f64", "f64 -> f32", unit_interval, asm="cvt.rn.sat.f32.f64 %0, %1;")


def finite(x, fmt):
    """.satfinite: what overflows, infinities included, becomes the largest finite value."""
    limit = float(fmt.max_finite)
    return x if math.isnan(x) else max(-limit, min(limit, exact.convert(x, fmt)))


def saturating():
    for target, fmt in FORMATS.items():

        def one(x, f=fmt):
            return finite(x, f)

        values = inputs("f32", target)
        yield Instruction(f"cvt.rn.satfinite.{target}.f32", f"f32 -> {target}", one, values=values)

        def pair(a, b, f=fmt):
            return (finite(b, f), finite(a, f))

        yield Instruction(f"cvt.rn.satfinite.{target}x2.f32", f"f32 f32 -> {target}x2", pair, values=values * 2)
    yield Instruction("cvt.sat.f16.f16", "f16 -> f16", lambda x: 0.0 if math.isnan(x) or x <= 0 else min(x, 1.0))
    yield Instruction("cvt.sat.f64.f64", "f64 -> f64", lambda x: 0.0 if math.isnan(x) or x <= 0 else min(x, 1.0))


def normal_floats():
    rng = np.random.default_rng(9)
    bits = rng.integers(0x30000000, 0x50000000, 500, dtype=np.uint32)
    bits[:200] = bits[:200] & 0xFFFFE000 | 0x1000
    return ([float(x) for x in bits.view(np.float32)] + [0.0, -0.0, math.inf, -math.inf],)


def unit_interval(x):
    return 0.0 if math.isnan(x) or x <= 0 else exact.convert(min(x, 1.0), F32)


def compiled():
    yield Instruction("c", "f64 -> f32", flushed_result, c="(float)a", values=inputs("f64", "f32"))
    yield Instruction("c", "f32 -> f64", exact.flushed, c="(double)a")
    yield Instruction("c", "f32 -> f32", lambda x: integral(exact.flushed(x), "m"), c="floorf(a)")
    yield Instruction("c", "f64 -> f64", lambda x: integral(x, "n"), c="rint(a)")


GROUPS = (narrowing, widening, to_integral, special, saturating, compiled)
TABLE = InstructionTable([instruction for group in GROUPS for instruction in group()])


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_float_to_float(instruction):
    TABLE.check(instruction)


BFLOAT = InstructionTable(
    [
        Instruction("cvt.f32.bf16", "bf16 -> f32", lambda x: x),
        Instruction("cvt.rn.bf16.s32", "s32 -> bf16", lambda a: exact.rounded(exact.Fraction(a), BF16)),
        Instruction("cvt.rn.bf16.f64", "f64 -> bf16", lambda x: exact.convert(x, BF16), values=inputs("f64", "bf16")),
    ],
    arch="sm_90",
)


TF32_MODES = InstructionTable(
    [
        Instruction(
            f"cvt.{suffix}.tf32.f32", "f32 -> f32", formula, asm=TF32.replace("rna", suffix), values=normal_floats()
        )
        for suffix, formula in (("rn", lambda x: tf32(x, "n")), ("rz", lambda x: tf32(x, "z")))
    ],
    arch="sm_90",
)


@pytest.mark.parametrize("instruction", TF32_MODES, ids=str)
def test_tf32_conversions_of_sm_90(instruction):
    TF32_MODES.check(instruction)


@pytest.mark.parametrize("instruction", BFLOAT, ids=str)
def test_bfloat16_conversions_of_sm_90(instruction):
    BFLOAT.check(instruction)


@pytest.mark.parametrize("name", ["cvt.rn.f16.f32", "cvt.rn.bf16.f32", "cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"])
def test_nan_becomes_the_canonical_nan(name):
    instruction = next(one for one in TABLE if one.name == name)
    payloads = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF], np.uint32)
    results = TABLE.run(instruction, [payloads] * len(instruction.operands))
    assert set(results.view(np.uint16).tolist()) == {0x7FFF}
