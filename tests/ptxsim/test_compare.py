"""setp, set, selp, slct and predicate logic: every comparison, ordered and unordered, in every type."""

import math
import operator

import pytest

from . import exact
from .instructions import Instruction, InstructionTable

ORDERED = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


def float_comparisons():
    """The six ordered forms are false on NaN, the six unordered ones true; num and nan ask about NaN alone."""
    for name, compare in ORDERED.items():
        yield name, lambda a, b, f=compare: not (math.isnan(a) or math.isnan(b)) and f(a, b)
        yield name + "u", lambda a, b, f=compare: math.isnan(a) or math.isnan(b) or f(a, b)
    yield "num", lambda a, b: not (math.isnan(a) or math.isnan(b))
    yield "nan", lambda a, b: math.isnan(a) or math.isnan(b)


def setp(comparison, ptx_type):
    return f"{{ .reg .pred p; setp.{comparison}.{ptx_type} p, %1, %2; selp.u32 %0, 1, 0, p; }}"


def integers():
    for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
        for name, compare in ORDERED.items():

            def formula(a, b, f=compare):
                return int(f(a, b))

            yield Instruction(f"setp.{name}.{t}", f"{t} {t} -> u32", formula, asm=setp(name, t))
    for t in ("b16", "b32", "b64"):
        for name in ("eq", "ne"):

            def formula(a, b, f=ORDERED[name]):
                return int(f(a, b))

            yield Instruction(f"setp.{name}.{t}", f"{t} {t} -> u32", formula, asm=setp(name, t))
    for name, compare in UNSIGNED.items():

        def formula(a, b, f=compare):
            return int(f(a, b))

        yield Instruction(f"setp.{name}.u32", "u32 u32 -> u32", formula, asm=setp(name, "u32"))


def floats():
    for name, compare in float_comparisons():
        for t in ("f16", "f32", "f64"):

            def formula(a, b, f=compare):
                return int(f(a, b))

            yield Instruction(f"setp.{name}.{t}", f"{t} {t} -> u32", formula, asm=setp(name, t))

        def flushing(a, b, f=compare):
            return int(f(exact.flushed(a), exact.flushed(b)))

        yield Instruction(f"setp.{name}.ftz.f32", "f32 f32 -> u32", flushing, asm=setp(name + ".ftz", "f32"))


def predicates():
    """Combined with a third predicate, the complement in the second destination, and operations on predicates."""
    combine = {"and": lambda p, c: p and c, "or": lambda p, c: p or c, "xor": lambda p, c: bool(p) != bool(c)}
    for name, function in combine.items():
        text = (
            "{ .reg .pred p, q, r; .reg .u32 x, y; setp.ne.s32 r, %3, 0; "
            f"setp.lt.{name}.s32 p|q, %1, %2, r; selp.u32 x, 1, 0, p; selp.u32 y, 2, 0, q; or.b32 %0, x, y; }}"
        )

        def formula(a, b, c, f=function):
            return int(f(a < b, c != 0)) + 2 * int(f(not a < b, c != 0))

        flags = (None, None, (0, 1))
        yield Instruction(f"setp.lt.{name} p|q", "s32 s32 s32 -> u32", formula, asm=text, values=flags)
        negated = text.replace("%1, %2, r;", "%1, %2, !r;")

        def formula(a, b, c, f=function):
            return int(f(a < b, c == 0)) + 2 * int(f(not a < b, c == 0))

        yield Instruction(f"setp.lt.{name} p|q, !r", "s32 s32 s32 -> u32", formula, asm=negated, values=flags)
    logic = {
        "and.pred r, p, q;": lambda p, q: p and q,
        "or.pred r, p, q;": lambda p, q: p or q,
        "xor.pred r, p, q;": lambda p, q: p != q,
        "not.pred r, p;": lambda p, q: not p,
        "mov.pred r, q;": lambda p, q: q,
    }
    for line, function in logic.items():
        text = "{ .reg .pred p, q, r; setp.ne.s32 p, %1, 0; setp.ne.s32 q, %2, 0; " + line + " selp.s32 %0, 7, -3, r; }"

        def formula(a, b, f=function):
            return 7 if f(a != 0, b != 0) else -3

        yield Instruction(line, "s32 s32 -> s32", formula, asm=text, values=((0, 1), (0, 5)))


def set_and_select():
    for t in ("s32", "f32"):

        def yes(a, b):
            return -1 if a < b else 0

        yield Instruction(f"set.lt.u32.{t}", f"{t} {t} -> u32", yes)
        yield Instruction(f"set.lt.s32.{t}", f"{t} {t} -> s32", yes)
        yield Instruction(f"set.lt.f32.{t}", f"{t} {t} -> f32", lambda a, b: float(a < b))
    for t in ("b16", "u32", "s64", "f32", "f64"):
        text = f"{{ .reg .pred p; setp.ne.u32 p, %3, 0; selp.{t} %0, %1, %2, p; }}"

        def choose(a, b, c):
            return a if c else b

        yield Instruction(f"selp.{t}", f"{t} {t} u32 -> {t}", choose, asm=text, values=(None, None, (0, 1, 8)))
    yield Instruction("slct.s32.s32", "s32 s32 s32 -> s32", lambda a, b, c: a if c >= 0 else b)

    def by_float(a, b, c):
        return a if c >= 0 else b

    yield Instruction("slct.f32.f32", "f32 f32 f32 -> f32", by_float)


def classes():
    """testp asks what kind of number a float is."""
    for t, fmt in (("f32", exact.F32), ("f64", exact.F64)):
        for name, question in exact.float_kinds(fmt).items():
            text = f"{{ .reg .pred p; testp.{name}.{t} p, %1; selp.u32 %0, 1, 0, p; }}"

            def formula(x, q=question):
                return int(q(x))

            yield Instruction(f"testp.{name}.{t}", f"{t} -> u32", formula, asm=text)


def predicated():
    """@p and @!p write a register for the lanes that hold, and leave it alone for the others."""
    text = "{ .reg .pred p; setp.gt.s32 p, %1, %2; mov.b32 %0, 11; @p mov.b32 %0, %1; @!p add.s32 %0, %0, %2; }"
    yield Instruction("@p mov; @!p add", "s32 s32 -> s32", lambda a, b: a if a > b else 11 + b, asm=text)


def compiled():
    yield Instruction("c", "s32 s32 -> s32", lambda a, b: a if a > b else b, c="int(a) > int(b) ? a : b")

    def less(a, b):
        return int(exact.flushed(a) < exact.flushed(b))

    yield Instruction("c", "f32 f32 -> u32", less, c="a < b")
    yield Instruction("c", "f64 f64 -> u32", lambda a, b: int(not a <= b), c="!(a <= b)")
    yield Instruction("c", "f64 -> u32", lambda a: int(math.isnan(a)), c="a != a")


GROUPS = (integers, floats, predicates, set_and_select, classes, predicated, compiled)
TABLE = InstructionTable([instruction for group in GROUPS for instruction in group()])


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_comparisons(instruction):
    TABLE.check(instruction)
