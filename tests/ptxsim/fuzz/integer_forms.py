"""Integer, logic, bit and carry instructions on Python ints."""

import operator

from ..test_bits import extract, highest, insert, lop3, nth_set, permute
from ..test_integer_arithmetic import by_parts, distance, parts
from .forms import INTEGERS, bits_of, form

WORDS = ("u32", "s32", "u64", "s64")


def arithmetic():
    for t in INTEGERS:
        width, two, three = bits_of(t), f"{t} {t} -> {t}", f"{t} {t} {t} -> {t}"
        yield form(f"add.{t}", two, operator.add)
        yield form(f"sub.{t}", two, operator.sub)
        yield form(f"min.{t}", two, min)
        yield form(f"max.{t}", two, max)
        yield form(f"div.{t}", two, quotient)
        yield form(f"rem.{t}", two, lambda a, b: a - b * quotient(a, b) if b else None)
        yield form(f"sad.{t}", three, lambda a, b, c: c + abs(a - b))
        yield form(f"mul.lo.{t}", two, operator.mul)
        yield form(f"mul.hi.{t}", two, lambda a, b, n=width: a * b >> n)
        yield form(f"mad.lo.{t}", three, lambda a, b, c: a * b + c)
        yield form(f"mad.hi.{t}", three, lambda a, b, c, n=width: (a * b >> n) + c)
        if width < 64:
            double = f"{t[0]}{2 * width}"
            yield form(f"mul.wide.{t}", f"{t} {t} -> {double}", operator.mul)
            yield form(f"mad.wide.{t}", f"{t} {t} {double} -> {double}", lambda a, b, c: a * b + c)
    yield form("add.sat.s32", "s32 s32 -> s32", lambda a, b: clamped(a + b, "s32"))
    yield form("sub.sat.s32", "s32 s32 -> s32", lambda a, b: clamped(a - b, "s32"))
    for t in ("u16x2", "s16x2"):
        for name, operation in (("add", operator.add), ("min", min), ("max", max)):
            yield form(f"{name}.{t}", "b32 b32 -> b32", by_parts(operation, 2, t[0] == "s"))
    for name, operation in (("min", min), ("max", max)):

        def positive(a, b, f=operation):
            return max(f(a, b), 0)

        yield form(f"{name}.relu.s32", "s32 s32 -> s32", positive)
        yield form(f"{name}.relu.s16x2", "b32 b32 -> b32", by_parts(positive, 2, True))
    for t in ("s16", "s32", "s64"):
        yield form(f"abs.{t}", f"{t} -> {t}", abs)
        yield form(f"neg.{t}", f"{t} -> {t}", operator.neg)


def quotient(a, b):
    """Towards zero; open for a divisor of zero."""
    if b == 0:
        return None
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def clamped(value, t):
    n, signed = bits_of(t), t[0] == "s"
    low, high = (-(1 << n - 1), (1 << n - 1) - 1) if signed else (0, (1 << n) - 1)
    return min(max(value, low), high)


def carries():
    """Chains through the carry flag. A difference is a sum with the complement: set where nothing is borrowed."""
    for t in WORDS:
        width = bits_of(t)
        mask = (1 << width) - 1
        for opcode in ("add", "sub"):
            invert = mask if opcode == "sub" else 0

            def chain(a, b, carry=int(opcode == "sub"), mask=mask, invert=invert, n=width):
                total = (a & mask) + (b & mask ^ invert) + carry
                return total, total >> n

            yield from chained(opcode, t, f"{t} {t}", chain)

        for half in ("lo", "hi"):

            def multiply(a, b, c, carry=0, mask=mask, half=half, n=width):
                total = ((a * b >> n if half == "hi" else a * b) & mask) + (c & mask) + carry
                return total, total >> n

            yield from chained(f"mad.{half}", t, f"{t} {t} {t}", multiply)


def chained(name, t, sources, formula):
    opcode, *half = name.split(".")
    half = "".join(f".{h}" for h in half)
    yield form(f"{opcode}{half}.cc.{t}", f"{sources} -> {t}", formula, carry=("written",))
    yield form(f"{opcode}c{half}.{t}", f"{sources} -> {t}", formula, carry=("read",))
    yield form(f"{opcode}c{half}.cc.{t}", f"{sources} -> {t}", formula, carry=("read", "written"))


def bits():
    for t in ("b16", "b32", "b64", "pred"):
        two, top = f"{t} {t} -> {t}", (1 << bits_of(t)) - 1
        yield form(f"and.{t}", two, operator.and_)
        yield form(f"or.{t}", two, operator.or_)
        yield form(f"xor.{t}", two, operator.xor)
        yield form(f"not.{t}", f"{t} -> {t}", lambda a, top=top: a ^ top)
        if t != "pred":
            yield form(f"cnot.{t}", f"{t} -> {t}", lambda a: a == 0)
            yield form(f"shl.{t}", f"{t} u32 -> {t}", lambda a, b: a << min(b, 64), small=(1,))
    for t in ("b16", "b32", "b64", *INTEGERS):
        yield form(f"shr.{t}", f"{t} u32 -> {t}", lambda a, b: a >> min(b, 64), small=(1,))
    for t in ("b32", "b64"):
        n = bits_of(t)
        yield form(f"popc.{t}", f"{t} -> u32", int.bit_count)
        yield form(f"clz.{t}", f"{t} -> u32", lambda a, n=n: n - a.bit_length())
        yield form(f"brev.{t}", f"{t} -> {t}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
        yield form(f"bfi.{t}", f"{t} {t} u32 u32 -> {t}", insert(n), small=(2, 3))
    for t in WORDS:
        n, signed = bits_of(t), t[0] == "s"
        yield form(f"bfe.{t}", f"{t} u32 u32 -> {t}", extract(n, signed), small=(1, 2))
        yield form(f"bfind.{t}", f"{t} -> u32", highest(n, signed, False))
        yield form(f"bfind.shiftamt.{t}", f"{t} -> u32", highest(n, signed, True))
    yield form("fns.b32", "u32 u32 s32 -> b32", nth_set, small=(1, 2))
    yield form("bmsk.clamp.b32", "u32 u32 -> b32", lambda p, n: (1 << min(n, 32)) - 1 << min(p, 32), small=(0, 1))
    yield form("bmsk.wrap.b32", "u32 u32 -> b32", lambda p, n: (1 << (n & 31)) - 1 << (p & 31), small=(0, 1))


def words():
    three = "b32 b32 u32 -> b32"
    for mode, amount in (("clamp", lambda c: min(c, 32)), ("wrap", lambda c: c & 31)):

        def left(a, b, c, f=amount):
            return (b << 32 | a) << f(c) >> 32

        def right(a, b, c, f=amount):
            return (b << 32 | a) >> f(c)

        yield form(f"shf.l.{mode}.b32", three, left, small=(2,))
        yield form(f"shf.r.{mode}.b32", three, right, small=(2,))
    for count in (2, 4):
        name = f"vabsdiff{count}.u32.u32.u32"
        difference = by_parts(distance, count)
        yield form(name, "u32 u32 u32 -> u32", lambda a, b, c, f=difference: f(a, b))

        def total(a, b, c, count=count):
            return c + sum(map(distance, parts(a, count, False), parts(b, count, False)))

        yield form(f"{name}.add", "u32 u32 u32 -> u32", total)
    for mode in (None, "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield form("prmt.b32" + (f".{mode}" if mode else ""), "b32 b32 b32 -> b32", permute(mode), small=(2,))
    yield form("lop3.b32", "b32 b32 b32 u32 -> b32", lambda a, b, c, table: lop3(table)(a, b, c), constant=256)
    for t in ("u32", "s32"):
        for half in ("lo", "hi"):
            product = low24(t, half)
            yield form(f"mul24.{half}.{t}", f"{t} {t} -> {t}", product)
            yield form(f"mad24.{half}.{t}", f"{t} {t} {t} -> {t}", lambda a, b, c, f=product: f(a, b) + c)
        for u in ("u32", "s32"):
            result = "u32" if t == u == "u32" else "s32"
            yield form(f"dp4a.{t}.{u}", f"b32 b32 {result} -> {result}", dot(t, u))
            for half in ("lo", "hi"):
                yield form(f"dp2a.{half}.{t}.{u}", f"b32 b32 {result} -> {result}", short_dot(t, u, half))


def low24(t, half):
    def factor(x):
        x &= 0xFFFFFF
        return x - (1 << 24) if t == "s32" and x >> 23 else x

    return lambda a, b: factor(a) * factor(b) >> (16 if half == "hi" else 0)


def part(x, k, bits, kind):
    """The k-th field of a word, signed or not."""
    field = x >> bits * k & (1 << bits) - 1
    return field - (1 << bits) if kind == "s32" and field >> bits - 1 else field


def dot(t, u):
    return lambda a, b, c: c + sum(part(a, k, 8, t) * part(b, k, 8, u) for k in range(4))


def short_dot(t, u, half):
    at = 2 if half == "hi" else 0
    return lambda a, b, c: c + sum(part(a, k, 16, t) * part(b, at + k, 8, u) for k in range(2))


def all_forms():
    for group in (arithmetic, carries, bits, words):
        yield from group()
