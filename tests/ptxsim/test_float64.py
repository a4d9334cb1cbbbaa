"""float64 arithmetic: correctly rounded in every mode, judged in exact rationals."""

import math

import numpy as np
import pytest

from . import exact
from .instructions import Instruction, InstructionTable
from .test_float32 import MODES, near_cancellation


def rounding(name, function, operands):
    """The instruction in all modes."""
    signature = "f64 " * operands + "-> f64"
    for suffix, mode in MODES.items():

        def formula(*v, m=mode):
            return function(*v, fmt=exact.F64, mode=m)

        yield Instruction(f"{name}.{suffix}.f64", signature, formula)


def basic():
    one, two = "f64 -> f64", "f64 f64 -> f64"
    yield from rounding("add", exact.add, 2)
    yield from rounding("sub", lambda a, b, **k: exact.add(a, -b, **k), 2)
    yield from rounding("mul", exact.mul, 2)
    yield from rounding("fma", exact.fma, 3)
    yield from rounding("mad", exact.fma, 3)
    yield from rounding("div", exact.div, 2)
    yield from rounding("rcp", lambda a, **k: exact.div(1.0, a, **k), 1)
    yield from rounding("sqrt", exact.sqrt, 1)
    yield Instruction("add.f64", two, lambda a, b: exact.add(a, b, exact.F64))
    yield Instruction("neg.f64", one, lambda a: -a)
    yield Instruction("abs.f64", one, abs)
    yield Instruction("copysign.f64", two, lambda a, b: math.copysign(b, a))
    yield Instruction("max.f64", two, exact.maximum)
    yield Instruction("min.f64", two, exact.minimum)


def compiled():
    two = "f64 f64 -> f64"
    yield Instruction("c", two, lambda a, b: exact.add(a, -b, exact.F64), c="a - b")
    yield Instruction("c", two, lambda a, b: exact.div(a, b, exact.F64), c="a / b")
    yield Instruction("c", "f64 f64 f64 -> f64", lambda a, b, c: exact.fma(a, b, c, exact.F64), c="fma(a, b, c)")
    yield Instruction("c", "f64 -> f64", lambda a: exact.sqrt(a, exact.F64), c="sqrt(a)")


TABLE = InstructionTable([*basic(), *compiled()])


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_float64_arithmetic(instruction):
    TABLE.check(instruction)


FUSED = [one for one in TABLE if one.name.startswith(("fma", "mad"))]


@pytest.mark.parametrize("instruction", FUSED, ids=str)
def test_fma_rounds_once_where_the_product_cancels(instruction):
    a, b, c = near_cancellation(np.random.default_rng(7), 800, np.float64)
    TABLE.check(instruction, [x.view(np.uint64) for x in (a, b, c)])


@pytest.mark.parametrize("instruction", FUSED, ids=str)
def test_fma_near_the_ends_of_the_range(instruction):
    """Products that overflow or underflow alone, with an addend that brings them back or decides the rounding."""
    rng = np.random.default_rng(8)
    count = 600
    a = rng.uniform(1, 2, count) * 2.0 ** rng.choice([1000, 600, -500, -537, -600], count)
    b = rng.uniform(1, 2, count) * 2.0 ** rng.choice([23, 20, -537, -500, -470], count)
    with np.errstate(all="ignore"):
        c = np.where(rng.random(count) < 0.5, -a * b, rng.normal(size=count) * 2.0 ** rng.integers(-1070, 1000, count))
    c = np.where(np.isfinite(c), c, -np.finfo(np.float64).max)
    TABLE.check(instruction, [np.ascontiguousarray(x).view(np.uint64) for x in (a, b, c)])
