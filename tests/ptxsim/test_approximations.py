"""The approximate instructions: special values exactly, everything else within the error the ISA documents."""

import math
from fractions import Fraction

import pytest

from . import exact
from .instructions import Instruction, InstructionTable

F32 = exact.F32


def agree(expected, got):
    """Same special value: NaN, an infinity, or a zero with its sign."""
    if math.isnan(expected):
        return math.isnan(got)
    return got == expected and exact.negative(got) == exact.negative(expected)


def within_ulps(limit, fmt=F32, ftz=False):
    """Accept results within `limit` ulp of the value rounded to the format (flushed where .ftz says so)."""

    def accept(value, got):
        expected = exact.convert(value, fmt)
        if ftz:
            if abs(value) < 2 * float(fmt.min_normal):
                return abs(got) <= 2 * float(fmt.min_normal) and exact.flushed(got, fmt) == got
            expected = exact.flushed(expected, fmt)
        if not math.isfinite(expected) or expected == 0:
            return agree(expected, got) or (expected == 0 and not ftz and abs(got) <= limit * float(fmt.min_subnormal))
        return math.isfinite(got) and abs(Fraction(got) - Fraction(expected)) <= limit * exact.ulp(expected, fmt)

    return accept


def within_relative(limit):
    def accept(value, got):
        if not math.isfinite(value) or value == 0:
            return agree(value, got)
        return math.isfinite(got) and abs(got - value) <= limit * abs(value)

    return accept


def exp2(x):
    if math.isnan(x) or x == math.inf:
        return x
    return math.inf if x >= 128 else 0.0 if x == -math.inf or x < -200 else 2.0**x


def log2(x):
    if math.isnan(x) or x < 0:
        return math.nan
    return -math.inf if x == 0 else x if x == math.inf else math.log2(x)


def log2_accept(value, got):
    """Absolute 2**-22 for arguments in (0.5, 2), relative 2**-22 elsewhere."""
    if math.isfinite(value) and abs(value) < 1:
        return abs(got - value) <= 2.0**-22
    return within_relative(2.0**-22)(value, got)


def reciprocal(x):
    return math.nan if math.isnan(x) else math.copysign(math.inf, x) if x == 0 else 1 / x


def reciprocal_sqrt(x):
    if math.isnan(x) or x < 0:
        return math.nan
    return math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x)


def square_root(x):
    return math.nan if math.isnan(x) or x < 0 else x if x == 0 else math.sqrt(x)


def flush_input(function):
    return lambda x: function(exact.flushed(x))


ARGUMENTS = (
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 2.0, 127.0, -126.0, -127.0, -149.0, 3e38, -3e38),
    *(exact.convert(s * k / 97, F32) for k in range(1, 1600, 3) for s in (8, -8, 0.3)),
    *(exact.convert(2.0**-k * 1.7, F32) for k in range(10, 148)),
)
POSITIVE = (
    *(0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, -1e-40, 3e38, 2.0**-149, 2.0**-126, 1.0, 0.5, 2.0),
    *(exact.convert(2.0**k * m, F32) for k in range(-140, 128, 3) for m in (1.0, 1.37, 1.9999999)),
    *(exact.convert(0.5 + k / 331, F32) for k in range(500)),
)


def single():
    one = "f32 -> f32"

    def table(name, function, accept, values):
        yield Instruction(f"{name}.approx.f32", one, function, accept=accept(False), values=(values,))
        yield Instruction(f"{name}.approx.ftz.f32", one, flush_input(function), accept=accept(True), values=(values,))

    yield from table("ex2", exp2, lambda ftz: within_ulps(2, ftz=ftz), ARGUMENTS)
    yield from table("lg2", log2, lambda ftz: log2_accept, POSITIVE)
    yield from table("rcp", reciprocal, lambda ftz: within_ulps(1, ftz=ftz), (*ARGUMENTS, *POSITIVE))
    yield from table("rsqrt", reciprocal_sqrt, lambda ftz: within_relative(2.0**-22.9), POSITIVE)
    yield from table("sqrt", square_root, lambda ftz: within_relative(2.0**-22), POSITIVE)
    yield Instruction(
        "rsqrt.approx.f64", "f64 -> f64", reciprocal_sqrt, accept=within_relative(2.0**-51), values=(POSITIVE,)
    )
    tanh = Instruction("tanh.approx.f32", one, math.tanh, accept=within_relative(2.0**-11), values=(ARGUMENTS,))
    yield tanh


def trigonometric():
    """Absolute error 2**-20.5 in [-pi, pi]; a zero keeps its sign under sin, infinities give NaN."""

    def accept(value, got):
        return math.isnan(got) if math.isnan(value) else abs(value - got) <= 2.0**-20.5

    angles = (*(exact.convert(math.pi * k / 201, F32) for k in range(-200, 201)), math.inf, -math.inf, math.nan)
    for name, function in (("sin", math.sin), ("cos", math.cos)):

        def formula(x, f=function):
            return f(x) if math.isfinite(x) else math.nan

        yield Instruction(f"{name}.approx.f32", "f32 -> f32", formula, accept=accept, values=(angles,))


def division():
    """div.full and div.approx: 2 ulp where the divisor is between 2**-126 and 2**126."""

    def quotient(a, b):
        return exact.div(a, b) if math.isnan(b) or b == 0 or 2.0**-126 <= abs(b) <= 2.0**126 else None

    def accept(value, got):
        return within_ulps(2)(value, got) or (abs(value) > 3.4e38 and abs(got) >= 3.4e38)

    for name in ("div.full.f32", "div.approx.f32"):
        yield Instruction(name, "f32 f32 -> f32", quotient, accept=accept)


def within_half(limit):
    """An absolute limit, as the ISA gives it for the 16-bit tanh."""
    return lambda value, got: math.isnan(got) if math.isnan(value) else abs(got - value) <= limit


def half():
    def accept_f16(value, got):
        expected = exact.convert(value, exact.F16)
        if not math.isfinite(expected) or expected == 0:
            return agree(expected, got) or abs(got) >= 65504 <= abs(value) or abs(got) <= 2.0**-23 >= abs(value)
        return abs(got - value) <= abs(value) * 2.0**-9.9 + 2.0**-24

    values = tuple(exact.convert(x, exact.F16) for x in ARGUMENTS if not math.isfinite(x) or abs(x) < 60000)
    yield Instruction("ex2.approx.f16", "f16 -> f16", exp2, accept=accept_f16, values=(values,))
    yield Instruction("tanh.approx.f16", "f16 -> f16", math.tanh, accept=within_half(2.0**-10.987), values=(values,))


def compiled():
    one = "f32 -> f32"
    ftz2 = within_ulps(2, ftz=True)
    yield Instruction("c", one, flush_input(exp2), c="exp2f(a)", accept=ftz2, values=(ARGUMENTS,))
    yield Instruction("c", one, flush_input(reciprocal), c="1.0f / a", accept=ftz2, values=(ARGUMENTS,))
    yield Instruction(
        "c", one, flush_input(reciprocal_sqrt), c="rsqrtf(a)", accept=within_relative(2.0**-22), values=(POSITIVE,)
    )
    exponents = tuple(x for x in ARGUMENTS if math.isnan(x) or abs(x) < 85 or math.isinf(x))
    yield Instruction(
        "c",
        one,
        lambda x: math.exp(exact.flushed(x)),
        c="expf(a)",
        accept=within_relative(2.0**-22),
        values=(exponents,),
    )
    yield Instruction(
        "c",
        one,
        lambda x: log2(exact.flushed(x)) * math.log(2) if x != 1 else 0.0,
        c="logf(a)",
        accept=within_relative(2.0**-22),
        values=(POSITIVE,),
    )


GROUPS = (single, trigonometric, division, half, compiled)
TABLE = InstructionTable([instruction for group in GROUPS for instruction in group()])


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_approximations(instruction):
    TABLE.check(instruction)


EXACT_POINTS = [
    ("ex2.approx.ftz.f32", 0.0, 1.0),
    ("ex2.approx.ftz.f32", -0.0, 1.0),
    ("ex2.approx.ftz.f32", -math.inf, 0.0),
    ("ex2.approx.ftz.f32", 1e-42, 1.0),
    ("rcp.approx.ftz.f32", 1e-42, math.inf),
    ("rcp.approx.ftz.f32", -math.inf, -0.0),
    ("lg2.approx.ftz.f32", 1e-42, -math.inf),
    ("rsqrt.approx.ftz.f32", -1e-42, -math.inf),
    ("tanh.approx.f32", -math.inf, -1.0),
    ("tanh.approx.f32", -0.0, -0.0),
]


@pytest.mark.parametrize("name, argument, expected", EXACT_POINTS)
def test_points_the_isa_fixes(name, argument, expected):
    import numpy as np

    instruction = next(one for one in TABLE if one.name == name)
    result = TABLE.run(instruction, [np.array([argument], np.float32).view(np.uint32)]).view(np.float32)[0]
    assert agree(expected, float(result)), result
