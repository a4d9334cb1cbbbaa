"""cvt: between integers, between floats, and across."""

import math
from fractions import Fraction

from .. import exact
from .float_forms import flags, relu, saturated
from .forms import TYPES, form
from .integer_forms import clamped

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
ROUNDING = {"rn": "n", "rz": "z", "rm": "m", "rp": "p"}
INTEGRAL = {"rni": "n", "rzi": "z", "rmi": "m", "rpi": "p"}
TF32 = exact.Format("tf32", 11, 127)


def cvt(text, source, target, formula):
    return form(f"cvt{text}.{target}.{source}", f"{source} -> {target}", formula, wide=True)


def contains(target, source):
    """Whether a type has every value of another, so that there is nothing to clamp."""
    more = TYPES[target].bits - TYPES[source].bits
    return more > 0 if source[0] == "u" else more >= 0 and target[0] == "s"


def integers():
    for source in INTEGERS:
        for target in INTEGERS:
            if source != target:
                yield cvt("", source, target, lambda a: a)
                if not contains(target, source):
                    yield cvt(".sat", source, target, lambda a, t=target: clamped(a, t))
    for t in INTEGERS:
        yield cvt("", t, t, lambda a: a)


def to_integers():
    for source in FLOATS:
        for target in INTEGERS[2:] if source == "bf16" else INTEGERS:
            for suffix, mode in INTEGRAL.items():
                for text, on in flags(*{"f32": ("ftz", "sat"), "bf16": ()}.get(source, ("sat",))):

                    def formula(x, mode=mode, t=target, on=on):
                        if math.isnan(x):
                            return None
                        x = exact.flushed(x) if "ftz" in on else x
                        return exact.to_integer(x, TYPES[t].bits, t[0] == "s", mode)

                    yield cvt(f".{suffix}{text}", source, target, formula)


def from_integers():
    for source in INTEGERS:
        for target in FLOATS:
            if target == "bf16" and source.endswith("8"):
                continue
            for suffix, mode in ROUNDING.items():
                for text, on in flags(*{"f32": ("ftz", "sat"), "bf16": ()}.get(target, ("sat",))):

                    def formula(a, mode=mode, fmt=TYPES[target].fmt, on=on):
                        y = exact.rounded(Fraction(a), fmt, mode)
                        return saturated(y) if "sat" in on else y

                    yield cvt(f".{suffix}{text}", source, target, formula)


def between_floats():
    """Widening is exact; narrowing rounds; to the same type only integral roundings make sense."""
    for source, target, names in (
        ("f16", "f32", ("ftz", "sat")),
        ("f16", "f64", ("sat",)),
        ("f32", "f64", ("ftz", "sat")),
        ("bf16", "f32", ()),
        ("bf16", "f64", ()),
    ):
        for text, on in flags(*names):

            def formula(x, on=on, keep=source == "bf16", flush="ftz" in on and source == "f32"):
                if keep and math.isnan(x):
                    return None
                x = exact.flushed(x) if flush else x
                return saturated(x) if "sat" in on else x

            yield cvt(text, source, target, formula)
    for source, target, names in (
        ("f64", "f32", ("ftz", "sat")),
        ("f64", "f16", ("sat",)),
        ("f32", "f16", ("ftz", "sat")),
        ("f32", "bf16", ("ftz",)),
        ("f64", "bf16", ()),
        ("f16", "bf16", ()),
        ("bf16", "f16", ()),
    ):
        for suffix, mode in ROUNDING.items():
            for text, on in flags(*names):
                yield cvt(f".{suffix}{text}", source, target, narrowing(target, mode, on))


def narrowing(target, mode, on):
    fmt = TYPES[target].fmt

    def formula(x):
        if "ftz" in on and target != "f32":
            x = exact.flushed(x)
        y = exact.convert(x, fmt, mode)
        if "ftz" in on and target == "f32":
            if abs(x) < float(exact.F32.min_normal) == abs(y):
                return None
            y = exact.flushed(y)
        return saturated(y) if "sat" in on else y

    return formula


def same_type():
    for t in FLOATS:
        for suffix, mode in (("", None), *((f".{s}", m) for s, m in INTEGRAL.items())):
            for text, on in flags(*{"f32": ("ftz", "sat"), "bf16": ()}.get(t, ("sat",))):
                if t == "bf16" and not suffix:
                    continue

                def formula(x, mode=mode, on=on):
                    x = exact.flushed(x) if "ftz" in on else x
                    if math.isfinite(x) and mode:
                        x = math.copysign(float(exact.round_to_integer(Fraction(x), mode)), x)
                    return None if math.isnan(x) and "sat" not in on else saturated(x) if "sat" in on else x

                yield cvt(f"{suffix}{text}", t, t, formula)


def clipped(x, fmt, on):
    """.relu and .satfinite of the conversions to 16 bits."""
    y = relu(x) if "relu" in on else x
    if "satfinite" in on and math.isinf(y):
        y = math.copysign(float(fmt.max_finite), y)
    return y


def pairs():
    for t in ("f16", "bf16"):
        fmt = TYPES[t].fmt
        for suffix in ("rn", "rz"):
            for text, on in flags("relu", "satfinite"):

                def one(x, fmt=fmt, mode=ROUNDING[suffix], on=on):
                    return clipped(exact.convert(x, fmt, mode), fmt, on)

                if on:
                    yield cvt(f".{suffix}{text}", "f32", t, one)
                yield form(f"cvt.{suffix}{text}.{t}x2.f32", f"f32 f32 -> {t}x2", lambda a, b, f=one: (f(b), f(a)))
    for suffix, mode in (("rna", "na"), ("rn", "n"), ("rz", "z")):
        for text, on in flags("satfinite") if suffix == "rna" else flags("relu", "satfinite"):

            def formula(x, mode=mode, on=on):
                return None if math.isnan(x) else clipped(exact.convert(x, TF32, mode), TF32, on)

            yield cvt(f".{suffix}{text}", "f32", "tf32", formula)


def all_forms():
    for group in (integers, to_integers, from_integers, between_floats, same_type, pairs):
        yield from group()
