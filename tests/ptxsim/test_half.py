"""float16 and bfloat16 arithmetic, scalar and packed, judged in exact rationals."""

import math

import numpy as np
import pytest

from . import exact
from .instructions import Instruction, InstructionTable

FORMATS = {"f16": exact.F16, "bf16": exact.BF16}


def relu(x):
    return x if math.isnan(x) else max(x, 0.0) + 0.0


def saturated(x):
    return 0.0 if math.isnan(x) or x <= 0 else min(x, 1.0)


def packed(function):
    """A scalar formula applied to the low and the high halves."""
    return lambda *pairs: tuple(function(*halves) for halves in zip(*pairs, strict=True))


def scalar_and_packed(name, operands, function, types):
    for t in types:

        def formula(*v, t=t):
            return function(*v, FORMATS[t])

        signature = " ".join([t] * operands) + f" -> {t}"
        yield Instruction(f"{name}.{t}", signature, formula)
        yield Instruction(f"{name}.{t}x2", signature.replace("16", "16x2"), packed(formula))


def arithmetic(types):
    """add, sub and mul: float16 everywhere, bfloat16 from sm_90."""
    yield from scalar_and_packed("add", 2, exact.add, types)
    yield from scalar_and_packed("add.rn", 2, exact.add, types)
    yield from scalar_and_packed("sub", 2, lambda a, b, f: exact.add(a, -b, f), types)
    yield from scalar_and_packed("mul", 2, exact.mul, types)


def sm80():
    both = ("f16", "bf16")
    yield from arithmetic(("f16",))
    yield from scalar_and_packed("fma.rn", 3, exact.fma, both)
    yield from scalar_and_packed("fma.rn.relu", 3, lambda a, b, c, f: relu(exact.fma(a, b, c, f)), both)
    yield from scalar_and_packed("add.sat", 2, lambda a, b, f: saturated(exact.add(a, b, f)), ("f16",))
    yield from scalar_and_packed("mul.ftz", 2, lambda a, b, f: exact.mul(a, b, f, ftz=True), ("f16",))
    yield from scalar_and_packed("neg", 1, lambda a, f: -a, both)
    yield from scalar_and_packed("abs", 1, lambda a, f: abs(a), both)
    yield from scalar_and_packed("fma.rn.sat", 3, lambda a, b, c, f: saturated(exact.fma(a, b, c, f)), ("f16",))
    yield from scalar_and_packed("max", 2, lambda a, b, f: exact.maximum(a, b), both)
    yield from scalar_and_packed("min", 2, lambda a, b, f: exact.minimum(a, b), both)
    yield from scalar_and_packed("max.NaN", 2, lambda a, b, f: exact.maximum(a, b, True), both)
    yield from scalar_and_packed("min.NaN", 2, lambda a, b, f: exact.minimum(a, b, True), both)


TABLES = {"sm_80": InstructionTable(sm80()), "sm_90": InstructionTable(arithmetic(("f16", "bf16")), arch="sm_90")}


@pytest.mark.parametrize("target, instruction", [(a, i) for a, t in TABLES.items() for i in t], ids=str)
def test_half_arithmetic(target, instruction):
    TABLES[target].check(instruction)


@pytest.mark.parametrize("name", ["add.f16", "mul.f16", "fma.rn.bf16", "max.f16"])
def test_nan_results_are_the_canonical_nan(name):
    """A 16-bit NaN result is 0x7fff whatever the payloads were."""
    table = TABLES["sm_80"]
    instruction = next(one for one in table if one.name == name)
    payloads = np.array([0x7FFF, 0xFFFF, 0x7FC1, 0xFFC0, 0x7FE0], np.uint16)
    results = table.run(instruction, [payloads] * len(instruction.operands))
    assert set(results.tolist()) == {0x7FFF}
