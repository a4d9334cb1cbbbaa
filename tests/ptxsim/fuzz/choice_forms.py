"""Comparisons, selections and moves."""

from ..exact import flushed
from ..test_compare import ORDERED as COMPARISONS
from ..test_compare import UNSIGNED, float_comparisons
from .forms import INTEGERS, TYPES, form

COMBINE = {"and": lambda p, q: p and q, "or": lambda p, q: p or q, "xor": lambda p, q: bool(p) != bool(q)}
FLOATS = ("f16", "bf16", "f32", "f64")


def comparisons():
    """(modifiers, type, function) of everything that setp and set can ask."""
    for t in INTEGERS:
        for name, f in COMPARISONS.items():
            yield name, t, f
        if t[0] == "u":
            for name, f in UNSIGNED.items():
                yield name, t, f
    for t in ("b16", "b32", "b64"):
        for name in ("eq", "ne"):
            yield name, t, COMPARISONS[name]
    for t in FLOATS:
        for name, f in float_comparisons():
            yield name, t, f
            if t in ("f16", "f32"):
                fmt = TYPES[t].fmt
                yield f"{name}.ftz", t, lambda a, b, f=f, fmt=fmt: f(flushed(a, fmt), flushed(b, fmt))


def predicates():
    for name, t, f in comparisons():
        comparison, ftz = name.split(".")[0], ".ftz" if "ftz" in name else ""
        yield form(f"setp.{name}.{t}", f"{t} {t} -> pred", lambda a, b, f=f: bool(f(a, b)))
        if t not in ("f16", "bf16"):
            yield form(f"setp.{name}.{t}", f"{t} {t} -> pred pred", lambda a, b, f=f: (bool(f(a, b)), not f(a, b)))
        for word, combine in COMBINE.items():

            def both(a, b, c, f=f, g=combine):
                return bool(g(f(a, b), c)), bool(g(not f(a, b), c))

            text = f"setp.{comparison}.{word}{ftz}.{t}"
            if t not in ("f16", "bf16"):
                yield form(text, f"{t} {t} pred -> pred pred", both)
            yield form(text, f"{t} {t} pred -> pred", lambda a, b, c, f=both: f(a, b, c)[0])


def sets():
    for name, t, f in comparisons():
        if t in ("f16", "bf16"):
            yield from half_sets(name, t, f)
            continue
        yield form(f"set.{name}.u32.{t}", f"{t} {t} -> u32", lambda a, b, f=f: -int(f(a, b)))
        yield form(f"set.{name}.s32.{t}", f"{t} {t} -> s32", lambda a, b, f=f: -int(f(a, b)))
        yield form(f"set.{name}.f32.{t}", f"{t} {t} -> f32", lambda a, b, f=f: float(f(a, b)))


def half_sets(name, t, f):
    """The result is 1.0, or all ones: of pairs, each half for itself."""
    for to in ("u16", "s16", "u32", "s32"):
        yield form(f"set.{name}.{to}.{t}", f"{t} {t} -> {to}", lambda a, b: -int(f(a, b)))
    yield form(f"set.{name}.{t}.{t}", f"{t} {t} -> {t}", lambda a, b: float(f(a, b)))
    pair = f"{t}x2"
    for to in ("u32", "s32"):

        def masks(a, b, sign=to[0] == "s"):
            bits = sum((0xFFFF << 16 * n) * bool(f(a[n], b[n])) for n in range(2))
            return bits - (1 << 32) if sign and bits >> 31 else bits

        yield form(f"set.{name}.{to}.{pair}", f"{pair} {pair} -> {to}", masks)
    yield form(f"set.{name}.{pair}.{pair}", f"{pair} {pair} -> {pair}", lambda a, b: tuple(map(float, map(f, a, b))))


def raw(t):
    """The type as which a value passes with all its bits, those of a NaN too."""
    return f"raw_{t}" if t in ("f32", "f64") else t if t == "pred" else f"b{TYPES[t].bits}"


def selections():
    for t in ("b16", "b32", "b64", *INTEGERS, "f32", "f64"):
        place = raw(t)
        yield form(f"selp.{t}", f"{place} {place} pred -> {place}", lambda a, b, p: a if p else b)
        yield form(f"slct.{t}.s32", f"{place} {place} s32 -> {place}", lambda a, b, c: a if c >= 0 else b)
        yield form(f"slct.{t}.f32", f"{place} {place} f32 -> {place}", lambda a, b, c: a if c >= 0 else b)
        yield form(f"slct.ftz.{t}.f32", f"{place} {place} f32 -> {place}", lambda a, b, c: a if flushed(c) >= 0 else b)


def moves():
    for t in ("pred", "b16", "b32", "b64", *INTEGERS, "f32", "f64"):
        yield form(f"mov.{t}", f"{raw(t)} -> {raw(t)}", lambda a: a)


def packs():
    """mov between a register and a vector of narrower ones, lowest first."""
    for whole, part in (("b32", "b16"), ("b64", "b32"), ("b64", "b16")):
        n, step = TYPES[whole].bits // TYPES[part].bits, TYPES[part].bits

        def pack(*x, step=step):
            return sum(v << step * k for k, v in enumerate(x))

        def unpack(a, n=n, step=step):
            return tuple(a >> step * k & (1 << step) - 1 for k in range(n))

        yield form(f"mov.{whole}", f"{part} " * n + f"-> {whole}", pack, vector="sources")
        yield form(f"mov.{whole}", f"{whole} -> " + f"{part} " * n, unpack, vector="results")


def all_forms():
    for group in (predicates, sets, selections, moves, packs):
        yield from group()
