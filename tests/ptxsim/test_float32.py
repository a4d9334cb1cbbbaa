"""float32 arithmetic: correctly rounded in every mode, with and without flushing, judged in exact rationals."""

import math

import numpy as np
import pytest

from . import exact
from .instructions import Instruction, InstructionTable
from .values import specials

MODES = {"rn": "n", "rz": "z", "rm": "m", "rp": "p"}


def saturated(x):
    """.sat: clamp to [0, 1]; NaN and negative values give +0."""
    return 0.0 if math.isnan(x) or x <= 0 else min(x, 1.0)


def rounding(name, function, operands):
    """The instruction in all modes, plain and .ftz."""
    signature = "f32 " * operands + "-> f32"
    for suffix, mode in MODES.items():
        for flush in (False, True):
            text = f"{name}.{suffix}{'.ftz' if flush else ''}.f32"
            yield Instruction(text, signature, lambda *v, m=mode, z=flush: function(*v, mode=m, ftz=z))


def basic():
    yield from rounding("add", exact.add, 2)
    yield from rounding("sub", lambda a, b, **k: exact.add(a, -b, **k), 2)
    yield from rounding("mul", exact.mul, 2)
    yield from rounding("fma", exact.fma, 3)
    yield from rounding("div", exact.div, 2)
    yield from rounding("rcp", lambda a, **k: exact.div(1.0, a, **k), 1)
    yield from rounding("sqrt", exact.sqrt, 1)
    yield Instruction("add.f32", "f32 f32 -> f32", exact.add)
    yield Instruction("sub.ftz.f32", "f32 f32 -> f32", lambda a, b: exact.add(a, -b, ftz=True))
    yield Instruction("mul.f32", "f32 f32 -> f32", exact.mul)
    yield Instruction("mad.rn.f32", "f32 f32 f32 -> f32", exact.fma)


def saturating():
    yield Instruction("add.sat.f32", "f32 f32 -> f32", lambda a, b: saturated(exact.add(a, b)))
    yield Instruction("mul.rz.sat.f32", "f32 f32 -> f32", lambda a, b: saturated(exact.mul(a, b, mode="z")))
    yield Instruction("fma.rn.sat.f32", "f32 f32 f32 -> f32", lambda a, b, c: saturated(exact.fma(a, b, c)))
    yield Instruction("cvt.sat.f32.f32", "f32 -> f32", saturated)


def signs():
    yield Instruction("neg.f32", "f32 -> f32", lambda a: -a)
    yield Instruction("neg.ftz.f32", "f32 -> f32", lambda a: -exact.flushed(a))
    yield Instruction("abs.f32", "f32 -> f32", abs)
    yield Instruction("abs.ftz.f32", "f32 -> f32", lambda a: abs(exact.flushed(a)))
    yield Instruction("copysign.f32", "f32 f32 -> f32", lambda a, b: math.copysign(b, a))


def extremes():
    def flushing(function, propagate=False):
        return lambda a, b: function(exact.flushed(a), exact.flushed(b), propagate)

    two = "f32 f32 -> f32"
    yield Instruction("max.f32", two, exact.maximum)
    yield Instruction("min.f32", two, exact.minimum)
    yield Instruction("max.ftz.f32", two, flushing(exact.maximum))
    yield Instruction("min.ftz.f32", two, flushing(exact.minimum))
    yield Instruction("max.NaN.f32", two, lambda a, b: exact.maximum(a, b, True))
    yield Instruction("min.NaN.f32", two, lambda a, b: exact.minimum(a, b, True))
    yield Instruction("max.ftz.NaN.f32", two, flushing(exact.maximum, True))
    yield Instruction("min.ftz.NaN.f32", two, flushing(exact.minimum, True))


def compiled():
    """C++ operators as CuPy compiles them: flushed to zero, not fused."""
    two = "f32 f32 -> f32"
    yield Instruction("c", two, lambda a, b: exact.add(a, b, ftz=True), c="a + b")
    yield Instruction("c", two, lambda a, b: exact.mul(a, b, ftz=True), c="a * b")
    yield Instruction("c", two, lambda a, b: exact.div(a, b, ftz=True), c="a / b")
    yield Instruction("c", "f32 -> f32", lambda a: exact.sqrt(a, ftz=True), c="sqrtf(a)")
    yield Instruction("c", "f32 f32 f32 -> f32", lambda a, b, c: exact.fma(a, b, c, ftz=True), c="__fmaf_rn(a, b, c)")
    yield Instruction("c", two, lambda a, b: exact.add(a, b, mode="z", ftz=True), c="__fadd_rz(a, b)")
    yield Instruction("c", two, lambda a, b: exact.maximum(*map(exact.flushed, (a, b))), c="fmaxf(a, b)")
    yield Instruction("c", two, lambda a, b: exact.minimum(*map(exact.flushed, (a, b))), c="fminf(a, b)")


def separately(a, b, c):
    """The unfused a * b + c; None passes through where flushing leaves the product open."""
    product = exact.mul(a, b, ftz=True)
    return None if product is None else exact.add(product, c, ftz=True)


UNFUSED = Instruction("c", "f32 f32 f32 -> f32", separately, c="a * b + c")
GROUPS = (basic, saturating, signs, extremes, compiled)
TABLE = InstructionTable([instruction for group in GROUPS for instruction in group()] + [UNFUSED])


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_float32_arithmetic(instruction):
    TABLE.check(instruction)


def near_cancellation(rng, count, dtype):
    """a, b, c with c = -(a * b) up to a few last bits: where a second rounding would show."""
    a, b = rng.normal(size=(2, count)).astype(dtype)
    c = -(a * b)
    steps = rng.integers(-3, 4, count)
    bits = c.view(np.uint32 if dtype is np.float32 else np.uint64)
    return a, b, (bits + steps.astype(bits.dtype)).view(dtype)


FUSED = [one for one in TABLE if one.name.startswith("fma.r") and ".sat" not in one.name]


@pytest.mark.parametrize("instruction", FUSED, ids=str)
def test_fma_rounds_once_where_the_product_cancels(instruction):
    a, b, c = near_cancellation(np.random.default_rng(5), 800, np.float32)
    TABLE.check(instruction, [x.view(np.uint32) for x in (a, b, c)])


@pytest.mark.parametrize("instruction", FUSED, ids=str)
def test_fma_rounds_once_next_to_a_tie(instruction):
    """a * b is a tie of the addend's grid and a far smaller term breaks it: rounding in float64 first would lose it."""
    rng = np.random.default_rng(6)
    c = (1 + rng.integers(0, 1 << 23, 500) * 2.0**-23).astype(np.float32)
    half_ulp = np.float32(2.0**-12) * np.ones(500, np.float32)
    a = half_ulp * (1 + rng.choice([-1, 0, 1], 500) * 2.0**-23).astype(np.float32)
    b = np.float32(2.0**-12) * (1 + rng.choice([-1, 0, 1], 500) * 2.0**-23).astype(np.float32)
    signs = rng.choice([-1, 1], (2, 500)).astype(np.float32)
    TABLE.check(instruction, [x.astype(np.float32).view(np.uint32) for x in (a * signs[0], b, c * signs[1])])


def test_specials_cover_what_they_promise():
    values = specials("f32").view(np.float32)
    tiny = np.finfo(np.float32).tiny
    assert np.isnan(values).any() and np.isinf(values).sum() == 2
    assert ((values != 0) & (abs(values) < tiny)).sum() >= 6 and (values == 0).sum() == 2
