"""Shifts, logic, bit fields, permutes and counts against formulas on Python integers."""

import pytest

from .instructions import Instruction, InstructionTable

SHIFTS = (*range(35), 63, 64, 65, 255, 256, 0x80000000, 0xFFFFFFFF)
FIELDS = (0, 1, 2, 5, 15, 16, 31, 32, 33, 47, 63, 64, 65, 128, 255, 256 + 3, 0xFFFFFF08)


def bits_of(ptx_type):
    return int(ptx_type[1:])


def shifts():
    for t in ("b16", "b32", "b64"):
        n = bits_of(t)
        yield Instruction(
            f"shl.{t}", f"{t} u32 -> {t}", lambda a, b, n=n: a << b if b < n else 0, values=(None, SHIFTS)
        )
    for t in ("u16", "u32", "u64", "b32", "s16", "s32", "s64"):
        n = bits_of(t)
        yield Instruction(f"shr.{t}", f"{t} u32 -> {t}", lambda a, b, n=n: a >> min(b, n), values=(None, SHIFTS))


def funnel():
    def left(a, b, s):
        return (b << 32 | a) << s >> 32

    def right(a, b, s):
        return (b << 32 | a) >> s

    three, given = "b32 b32 u32 -> b32", (None, None, SHIFTS)
    yield Instruction("shf.l.wrap.b32", three, lambda a, b, c: left(a, b, c & 31), values=given)
    yield Instruction("shf.l.clamp.b32", three, lambda a, b, c: left(a, b, min(c, 32)), values=given)
    yield Instruction("shf.r.wrap.b32", three, lambda a, b, c: right(a, b, c & 31), values=given)
    yield Instruction("shf.r.clamp.b32", three, lambda a, b, c: right(a, b, min(c, 32)), values=given)


def lop3(table):
    def formula(a, b, c):
        out = 0
        for index in range(8):
            if table >> index & 1:
                out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        return out

    return formula


def logic():
    for t in ("b16", "b32", "b64"):
        two = f"{t} {t} -> {t}"
        yield Instruction(f"and.{t}", two, lambda a, b: a & b)
        yield Instruction(f"or.{t}", two, lambda a, b: a | b)
        yield Instruction(f"xor.{t}", two, lambda a, b: a ^ b)
        yield Instruction(f"not.{t}", f"{t} -> {t}", lambda a: ~a)
        yield Instruction(f"cnot.{t}", f"{t} -> {t}", lambda a: int(a == 0))
    for table in (0x00, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0xD8, 0x1B, 0xFF, 0x2D):
        text = f"lop3.b32 %0, %1, %2, %3, {table:#x};"
        yield Instruction(f"lop3 {table:#x}", "b32 b32 b32 -> b32", lop3(table), asm=text)


def extract(n, signed):
    """bfe: the field's top bit, clamped to the register's top bit, fills what lies beyond."""

    def formula(a, position, length):
        position, length = position & 255, length & 255
        word = a & (1 << n) - 1
        fill = bool(signed and length and word >> min(position + length - 1, n - 1) & 1)
        out = 0
        for i in range(n):
            inside = i < length and position + i < n
            out |= (word >> position + i & 1 if inside else fill) << i
        return out

    return formula


def insert(n):
    def formula(a, b, position, length):
        position, length = position & 255, length & 255
        out = b
        for i in range(length):
            if position + i < n:
                out = out & ~(1 << position + i) | (a >> i & 1 if i < n else 0) << position + i
        return out

    return formula


def fields():
    for t in ("u32", "s32", "u64", "s64"):
        formula = extract(bits_of(t), t[0] == "s")
        yield Instruction(f"bfe.{t}", f"{t} u32 u32 -> {t}", formula, values=(None, FIELDS, FIELDS))
    for t in ("b32", "b64"):
        few = (0, 1, 0xDEADBEEF, (1 << bits_of(t)) - 1, 0x55AA00FF)
        yield Instruction(f"bfi.{t}", f"{t} {t} u32 u32 -> {t}", insert(bits_of(t)), values=(few, few, FIELDS, FIELDS))


def permute(mode):
    def source_bytes(a, b):
        return [(b << 32 | a) >> 8 * k & 255 for k in range(8)]

    def selectors(c):
        low = c & 3
        return {
            "f4e": [low + k for k in range(4)],
            "b4e": [(low - k) % 8 for k in range(4)],
            "rc8": [low] * 4,
            "ecl": [max(k, low) for k in range(4)],
            "ecr": [min(k, low) for k in range(4)],
            "rc16": [2 * (low & 1), 2 * (low & 1) + 1] * 2,
        }[mode]

    def generic(a, b, c):
        source, out = source_bytes(a, b), 0
        for k in range(4):
            nibble = c >> 4 * k & 15
            byte = source[nibble & 7]
            out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * k
        return out

    def moded(a, b, c):
        source = source_bytes(a, b)
        return sum(source[s] << 8 * k for k, s in enumerate(selectors(c)))

    return moded if mode else generic


def permutes():
    words = (0, 0x03020100, 0x8091A2B3, 0x7F80FF01, 0x44556677, 0xFFFFFFFF)
    select = (0x3210, 0x7654, 0x5410, 0x7632, 0x1032, 0x0123, 0x8888, 0xFEDC, 0xBA98, 0xFFFF3210, 0x9F3C)
    three = "b32 b32 b32 -> b32"
    yield Instruction("prmt.b32", three, permute(None), values=(words, words, select))
    yield Instruction("prmt.b32", three, permute(None))
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        name = f"prmt.b32.{mode}"
        yield Instruction(name, three, permute(mode), values=(words, words, (0, 1, 2, 3, 7, 0xFFFFFFFE)))


def highest(n, signed, shift_amount):
    """bfind: the highest bit that differs from the sign; none gives all ones."""

    def formula(a):
        magnitude = ~a if signed and a < 0 else a
        found = magnitude.bit_length() - 1
        if found < 0:
            return -1
        return n - 1 - found if shift_amount else found

    return formula


def counts():
    for t in ("b32", "b64"):
        n = bits_of(t)
        yield Instruction(f"popc.{t}", f"{t} -> u32", lambda a: a.bit_count())
        yield Instruction(f"clz.{t}", f"{t} -> u32", lambda a, n=n: n - a.bit_length())
        yield Instruction(f"brev.{t}", f"{t} -> {t}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
    for t in ("u32", "s32", "u64", "s64"):
        n, signed = bits_of(t), t[0] == "s"
        yield Instruction(f"bfind.{t}", f"{t} -> u32", highest(n, signed, False))
        yield Instruction(f"bfind.shiftamt.{t}", f"{t} -> u32", highest(n, signed, True))


def nth_set(mask, base, offset):
    """The loop of the ISA's section on fns."""
    place, step, left = base, 1 if offset > 0 else -1, abs(offset)
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else 2**32 - 1
    while 0 <= place < 32:
        left -= mask >> place & 1
        if left == 0:
            return place
        place += step
    return 2**32 - 1


def find():
    """fns: set bits, counted from a base up or down."""
    bases, offsets = [*range(0, 32, 3), 31], [*range(-33, 34)]
    yield Instruction("fns.b32", "u32 u32 s32 -> u32", nth_set, values=(None, bases, offsets))
    yield Instruction("c", "u32 u32 s32 -> u32", nth_set, c="__fns(a, b, c)", values=(None, bases, offsets))


def masks():
    """bmsk: ones from a position on, as many as asked for; both clamped or both taken modulo 32."""
    two, given = "u32 u32 -> b32", (SHIFTS, SHIFTS)

    def clamped(p, n):
        return ((1 << min(n, 32)) - 1) << min(p, 32)

    def wrapped(p, n):
        return ((1 << (n & 31)) - 1) << (p & 31)

    yield Instruction("bmsk.clamp.b32", two, clamped, values=given)
    yield Instruction("bmsk.wrap.b32", two, wrapped, values=given)


def compiled():
    yield Instruction(
        "c", "b32 b32 b32 -> b32", lambda a, b, c: permute(None)(a, b, c & 0x7777), c="__byte_perm(a, b, c)"
    )
    yield Instruction("c", "b32 b32 -> b32", lambda a, b: (a ^ ~b) & (a | b), c="(a ^ ~b) & (a | b)")
    yield Instruction("c", "u32 -> u32", lambda a: (a & -a).bit_length(), c="__ffs(a)")
    yield Instruction("c", "u32 -> u32", lambda a: a << 7 | a >> 25, c="(a << 7) | (a >> 25)")
    yield Instruction("c", "s64 -> s64", lambda a: a >> 9, c="(long long)a >> 9")
    yield Instruction("c", "u32 -> u32", lambda a: int(f"{a:032b}"[::-1], 2), c="__brev(a)")


GROUPS = (shifts, funnel, logic, fields, permutes, counts, find, masks, compiled)
TABLE = InstructionTable(instruction for group in GROUPS for instruction in group())


@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_bit_operations(instruction):
    TABLE.check(instruction)
