"""Integer arithmetic of every width against Python's unbounded integers."""

import pytest

from .instructions import Instruction, InstructionTable


def truncated_div(a, b):
    """C and PTX division rounds toward zero, Python's rounds down."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bits_of(ptx_type):
    return int(ptx_type[1:])


def div(ptx_type):
    """Division by zero and the one overflow are unspecified: unchecked, but they must not stop the launch."""
    lowest = -(1 << bits_of(ptx_type) - 1)
    return lambda a, b: None if b == 0 or (a == lowest and b == -1) else truncated_div(a, b)


def rem(ptx_type):
    lowest = -(1 << bits_of(ptx_type) - 1)
    return lambda a, b: None if b == 0 or (a == lowest and b == -1) else a - b * truncated_div(a, b)


def four_bytes(word, ptx_type):
    """The bytes of a word, low first, signed where the type is."""
    return [x - 256 if ptx_type[0] == "s" and x > 127 else x for x in (word >> 8 * k & 255 for k in range(4))]


def saturated(low, high):
    return lambda x: min(max(x, low), high)


def basic():
    for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
        two, three, n = f"{t} {t} -> {t}", f"{t} {t} {t} -> {t}", bits_of(t)
        yield Instruction(f"add.{t}", two, lambda a, b: a + b)
        yield Instruction(f"sub.{t}", two, lambda a, b: a - b)
        yield Instruction(f"mul.lo.{t}", two, lambda a, b: a * b)
        yield Instruction(f"mul.hi.{t}", two, lambda a, b, n=n: a * b >> n)
        yield Instruction(f"mad.lo.{t}", three, lambda a, b, c: a * b + c)
        yield Instruction(f"mad.hi.{t}", three, lambda a, b, c, n=n: (a * b >> n) + c)
        yield Instruction(f"div.{t}", two, div(t))
        yield Instruction(f"rem.{t}", two, rem(t))
        yield Instruction(f"min.{t}", two, min)
        yield Instruction(f"max.{t}", two, max)
    for t in ("s16", "s32", "s64"):
        yield Instruction(f"neg.{t}", f"{t} -> {t}", lambda a: -a)
        yield Instruction(f"abs.{t}", f"{t} -> {t}", abs)


def widening():
    for t, wide in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
        yield Instruction(f"mul.wide.{t}", f"{t} {t} -> {wide}", lambda a, b: a * b)
        yield Instruction(f"mad.wide.{t}", f"{t} {t} {wide} -> {wide}", lambda a, b, c: a * b + c)


def special():
    s32 = saturated(-(1 << 31), (1 << 31) - 1)
    yield Instruction("add.sat.s32", "s32 s32 -> s32", lambda a, b: s32(a + b))
    yield Instruction("sub.sat.s32", "s32 s32 -> s32", lambda a, b: s32(a - b))
    for t, low24 in (("u32", lambda v: v & 0xFFFFFF), ("s32", lambda v: (v + 0x800000 & 0xFFFFFF) - 0x800000)):
        two, three = f"{t} {t} -> {t}", f"{t} {t} {t} -> {t}"
        yield Instruction(f"mul24.lo.{t}", two, lambda a, b, f=low24: f(a) * f(b))
        yield Instruction(f"mul24.hi.{t}", two, lambda a, b, f=low24: f(a) * f(b) >> 16)
        yield Instruction(f"mad24.lo.{t}", three, lambda a, b, c, f=low24: f(a) * f(b) + c)
    for a_type in ("u32", "s32"):
        for b_type in ("u32", "s32"):

            def formula(a, b, c, p=a_type, q=b_type):
                return c + sum(x * y for x, y in zip(four_bytes(a, p), four_bytes(b, q), strict=True))

            result = "s32" if "s32" in (a_type, b_type) else "u32"
            yield Instruction(f"dp4a.{a_type}.{b_type}", f"b32 b32 {result} -> {result}", formula)
    yield Instruction("sad.u32", "u32 u32 u32 -> u32", lambda a, b, c: c + abs(a - b))
    yield Instruction("sad.s32", "s32 s32 s32 -> s32", lambda a, b, c: c + abs(a - b))


def parts(word, count, signed):
    """The parts of a word, low first."""
    n = 32 // count
    return [x - (1 << n) if signed and x >> n - 1 else x for x in (word >> n * k & (1 << n) - 1 for k in range(count))]


def by_parts(function, count, signed=False):
    """`function` of each part of two words."""

    def formula(a, b):
        n = 32 // count
        both = zip(parts(a, count, signed), parts(b, count, signed), strict=True)
        return sum((function(x, y) & (1 << n) - 1) << n * k for k, (x, y) in enumerate(both))

    return formula


def distance(a, b):
    return abs(a - b)


def differences():
    """vabsdiff2 and vabsdiff4, which __vabsdiffu4 and __vsadu4 are made of."""
    for count in (2, 4):
        name, two, three = f"vabsdiff{count}.u32.u32.u32", "b32 b32 -> u32", "b32 b32 u32 -> u32"
        asm = f"{name} %0, %1, %2, 12345;"
        yield Instruction(name, two, by_parts(distance, count), asm=asm)

        def total(a, b, c, count=count):
            return c + sum(map(distance, parts(a, count, False), parts(b, count, False)))

        yield Instruction(f"{name}.add", three, total)
    yield Instruction("c", "b32 b32 -> b32", by_parts(lambda a, b: -(a > b), 4), c="__vcmpgtu4(a, b)")


def pairs():
    """Two integers in a word, and min and max that nothing below 0 leaves: what __viaddmax_s16x2_relu is made of."""
    two, operations = "b32 b32 -> b32", {"add": int.__add__, "min": min, "max": max}
    for name, operation in operations.items():
        for t in ("u16x2", "s16x2"):
            yield Instruction(f"{name}.{t}", two, by_parts(operation, 2, t[0] == "s"))
        if name != "add":

            def positive(a, b, f=operation):
                return max(f(a, b), 0)

            yield Instruction(f"{name}.relu.s32", "s32 s32 -> s32", positive)
            yield Instruction(f"{name}.relu.s16x2", two, by_parts(positive, 2, True))


def carrying():
    """A carry or borrow goes through the condition code from one instruction to the next."""
    four = "u32 u32 u32 u32 -> u32"
    add = "add.cc.u32 %0, %1, %2; addc.u32 %0, %3, %4;"
    yield Instruction("addc.u32", four, lambda a, b, c, d: c + d + (a + b >> 32), asm=add)
    subtract = "sub.cc.u32 %0, %1, %2; subc.u32 %0, %3, %4;"
    yield Instruction("subc.u32", four, lambda a, b, c, d: c - d - (a < b), asm=subtract)
    mixed = "{ .reg .u32 t; sub.cc.u32 t, %1, %2; addc.u32 %0, %3, %4; }"  # as sm_80's machine code has it
    yield Instruction("addc.u32", four, lambda a, b, c, d: c + d + (a >= b), asm=mixed)
    mixed = "{ .reg .u32 t; add.cc.u32 t, %1, %2; subc.u32 %0, %3, %4; }"
    yield Instruction("subc.u32", four, lambda a, b, c, d: c - d - 1 + (a + b >> 32), asm=mixed)
    borrowed = "{ .reg .u32 t; sub.cc.u32 t, %1, %2; subc.cc.u32 t, %3, %4; subc.u32 %0, 0, 0; }"
    yield Instruction("subc.cc.u32", four, lambda a, b, c, d: -(c - d - (a < b) < 0), asm=borrowed)
    chain = "{ .reg .u32 t; add.cc.u32 t, %1, %2; addc.cc.u32 t, %3, %4; addc.u32 %0, 0, 0; }"
    multiply = "{ .reg .u32 t; mad.lo.cc.u32 t, %1, %2, %3; madc.hi.u32 %0, %1, %2, %4; }"

    def wide(a, b, c, d):
        return (a * b + c + (d << 32)) >> 32

    yield Instruction("madc.hi.u32", four, wide, asm=multiply)
    yield Instruction("addc.cc.u32", four, lambda a, b, c, d: c + d + (a + b >> 32) >> 32, asm=chain)


def compiled():
    """The same operations as the compiler writes them."""
    yield Instruction("c", "s32 s32 -> s32", lambda a, b: a * b + a - b, c="int(a) * int(b) + int(a) - int(b)")
    yield Instruction("c", "s32 s32 -> s32", div("s32"), c="int(a) / int(b)")
    yield Instruction("c", "s64 s64 -> s64", rem("s64"), c="(long long)a % (long long)b")
    yield Instruction("c", "u32 u32 -> u64", lambda a, b: a * b, c="(unsigned long long)a * b")
    yield Instruction("c", "u64 u64 -> u64", lambda a, b: a * b >> 64, c="__umul64hi(a, b)")
    yield Instruction("c", "s32 -> s32", lambda a: truncated_div(a, 7), c="int(a) / 7")
    yield Instruction("c", "u64 -> u64", lambda a: a % 1000003, c="a % 1000003")
    yield Instruction("c", "u16 u16 -> u16", lambda a, b: a * b + 3, c="a * b + 3")


TABLE = InstructionTable([*basic(), *widening(), *special(), *differences(), *carrying(), *compiled()])
PAIRS = InstructionTable(pairs(), arch="sm_90")


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_integer_arithmetic(instruction):
    TABLE.check(instruction)


@pytest.mark.parametrize("instruction", PAIRS, ids=str)
def test_pairs_of_integers(instruction):
    PAIRS.check(instruction)
