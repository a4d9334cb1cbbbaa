"""cvt between integers, and between integers and floats, in both directions and every rounding mode."""

import math

import pytest

from . import exact
from .instructions import Instruction, InstructionTable
from .values import TYPES

INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
FLOAT_MODES = {"rn": "n", "rz": "z", "rm": "m", "rp": "p"}
INTEGER_MODES = {"rni": "n", "rzi": "z", "rmi": "m", "rpi": "p"}


def width(t):
    return int(t[1:])


def wrap(value, t):
    value &= (1 << width(t)) - 1
    return value - (1 << width(t)) if t[0] == "s" and value >> width(t) - 1 else value


def limits(t):
    n = width(t)
    return (-(1 << n - 1), (1 << n - 1) - 1) if t[0] == "s" else (0, (1 << n) - 1)


def clamp(value, t):
    low, high = limits(t)
    return min(max(value, low), high)


def register(t):
    """8-bit values travel in 32-bit registers: cvt uses the low byte and extends what it writes."""
    return t.replace("8", "32") if width(t) == 8 else t


def between_integers():
    for source in INTEGERS:
        for target in INTEGERS:
            signature = f"{register(source)} -> {register(target)}"

            def plain(a, s=source, t=target):
                return wrap(wrap(a, s), t)

            yield Instruction(f"cvt.{target}.{source}", signature, plain)
            if limits(source)[0] < limits(target)[0] or limits(source)[1] > limits(target)[1]:

                def saturating(a, s=source, t=target):
                    return clamp(wrap(a, s), t)

                yield Instruction(f"cvt.sat.{target}.{source}", signature, saturating)


def from_integers():
    for source in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"):
        for target in ("f16", "f32", "f64"):
            for suffix, mode in FLOAT_MODES.items():

                def formula(a, s=source, t=target, m=mode):
                    return exact.rounded(exact.Fraction(wrap(a, s)), TYPES[t].fmt, m)

                yield Instruction(f"cvt.{suffix}.{target}.{source}", f"{register(source)} -> {target}", formula)


def nan_result(source, target):
    """NaN gives 0, but the lowest bit pattern's top bit where either side has 64 bits of float or integer."""
    return 1 << width(target) - 1 if source == "f64" or width(target) == 64 else 0


def to_integer(source, target, mode, ftz=False):
    def formula(x):
        if math.isnan(x):
            return nan_result(source, target)
        return exact.to_integer(exact.flushed(x) if ftz else x, width(target), target[0] == "s", mode)

    return formula


def to_integers():
    for source in ("f16", "f32", "f64"):
        for target in ("s16", "u16", "s32", "u32", "s64", "u64"):
            for suffix, mode in INTEGER_MODES.items():
                text = f"cvt.{suffix}.{target}.{source}"
                yield Instruction(
                    text, f"{source} -> {target}", to_integer(source, target, mode), values=VALUES[source]
                )
    for target in ("s32", "u32", "s64", "u64"):
        formula = to_integer("f32", target, "p", ftz=True)
        yield Instruction(f"cvt.rpi.ftz.{target}.f32", f"f32 -> {target}", formula, values=VALUES["f32"])


def near_integers(fmt):
    """Halves, neighbours of the integer limits, and magnitudes far outside them."""
    powers = [2.0**k for k in (7, 8, 15, 16, 31, 32, 53, 62, 63, 64, 65)]
    halves = [k / 4 for k in range(-12, 13)] + [12345.5, 254.5, 255.5, 32767.5, 2147483647.5]
    around = [p * (1 + d * float(exact.ulp(1.0, fmt))) for p in powers for d in (-1, 0, 1)]
    tiny = [float(fmt.min_subnormal), 1e-30, float(fmt.max_finite), math.inf, 0.0]
    values = [exact.convert(x, fmt) for x in (*halves, *around, *tiny)]
    return (tuple([*values, *(-v for v in values), math.nan]),)


VALUES = {name: near_integers(TYPES[name].fmt) for name in ("f16", "f32", "f64")}


def compiled():
    yield Instruction("c", "f32 -> s32", to_integer("f32", "s32", "z", ftz=True), c="(int)a")
    yield Instruction("c", "f32 -> u64", to_integer("f32", "u64", "z", ftz=True), c="(unsigned long long)a")
    yield Instruction("c", "f32 -> s32", to_integer("f32", "s32", "n", ftz=True), c="__float2int_rn(a)")
    yield Instruction("c", "f64 -> s64", to_integer("f64", "s64", "m"), c="__double2ll_rd(a)")
    yield Instruction("c", "u32 -> f32", lambda a: exact.rounded(exact.Fraction(a), exact.F32), c="(float)a")
    yield Instruction(
        "c", "s64 -> f64", lambda a: exact.rounded(exact.Fraction(a), exact.F64), c="(double)(long long)a"
    )
    yield Instruction("c", "s32 -> s64", lambda a: a, c="(long long)(int)a")
    yield Instruction("c", "s16 -> s32", lambda a: a, c="(int)(short)a")
    yield Instruction("c", "u32 -> s32", lambda a: wrap(a, "s8"), c="(int)(signed char)a")


BETWEEN = InstructionTable(between_integers())
FROM = InstructionTable(from_integers())
TO = InstructionTable([*to_integers(), *compiled()])


@pytest.mark.parametrize("instruction", BETWEEN, ids=str)
def test_integer_to_integer(instruction):
    BETWEEN.check(instruction)


@pytest.mark.parametrize("instruction", FROM, ids=str)
def test_integer_to_float(instruction):
    FROM.check(instruction)


@pytest.mark.parametrize("instruction", TO, ids=str)
def test_float_to_integer(instruction):
    TO.check(instruction)
