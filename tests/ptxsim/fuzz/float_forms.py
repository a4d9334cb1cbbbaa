"""Floating-point arithmetic on exact rationals: every rounding mode, flushing, saturation, 16-bit pairs."""

import functools
import math

from .. import exact
from .forms import TYPES, form

MODES = {"": "n", ".rn": "n", ".rz": "z", ".rm": "m", ".rp": "p"}
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
OPERATIONS = {
    "add": (2, exact.add),
    "sub": (2, lambda a, b, *rest: exact.add(a, -b, *rest)),
    "mul": (2, exact.mul),
    "fma": (3, exact.fma),
    "mad": (3, exact.fma),
    "div": (2, exact.div),
    "rcp": (1, lambda a, *rest: exact.div(1.0, a, *rest)),
    "sqrt": (1, exact.sqrt),
}


def saturated(x):
    """To [0, 1]; NaN gives +0."""
    return x if x is None else 0.0 if math.isnan(x) or x <= 0 else min(x, 1.0)


def relu(x):
    return x if x is None or math.isnan(x) or x > 0 else 0.0


def flags(*names):
    """Every subset of modifiers, as text and as a set."""
    for pick in range(1 << len(names)):
        chosen = [name for k, name in enumerate(names) if pick >> k & 1]
        yield "".join(f".{name}" for name in chosen), set(chosen)


def rounded_operations():
    for opcode, (count, function) in OPERATIONS.items():
        modes = MODES if opcode in ("add", "sub", "mul") else {m: k for m, k in MODES.items() if m}
        for suffix, mode in modes.items():
            extra = () if opcode in ("div", "rcp", "sqrt") else ("sat",)
            for text, on in flags("ftz", *extra):

                def formula(*x, f=function, mode=mode, on=on):
                    y = f(*x, exact.F32, mode, "ftz" in on)
                    return saturated(y) if "sat" in on else y

                yield form(f"{opcode}{suffix}{text}.f32", "f32 " * count + "-> f32", formula)
            yield form(
                f"{opcode}{suffix}.f64",
                "f64 " * count + "-> f64",
                lambda *x, f=function, mode=mode: f(*x, exact.F64, mode, False),
            )


def lanewise(function, t):
    """A formula of one 16-bit format for the type, which may be a pair of them."""
    if not t.endswith("x2"):
        return function

    def both(*x):
        if not isinstance(x[0], tuple):
            return function(*x)
        return tuple(function(*part) for part in zip(*x, strict=True))

    return both


def halves():
    for t in HALVES:
        fmt, brain = TYPES[t].fmt, t.startswith("b")
        for opcode in ("add", "sub", "mul", "fma"):
            count, function = OPERATIONS[opcode]
            choices = [("", set())] if brain else [*flags("ftz", "sat")]
            if opcode == "fma":
                choices += [(".relu", {"relu"})] if brain else [(".relu", {"relu"}), (".ftz.relu", {"ftz", "relu"})]
            for suffix in ("", ".rn") if opcode != "fma" else (".rn",):
                for text, on in choices:

                    def formula(*x, f=function, fmt=fmt, on=on):
                        y = f(*x, fmt, "n", "ftz" in on)
                        return saturated(y) if "sat" in on else relu(y) if "relu" in on else y

                    yield form(f"{opcode}{suffix}{text}.{t}", f"{t} " * count + f"-> {t}", lanewise(formula, t))


def signs():
    for t in ("f32", "f64", *HALVES):
        fmt = TYPES[t].fmt
        for flush in ("", ".ftz") if t in ("f32", "f16", "f16x2") else ("",):

            def prepared(x, fmt=fmt, flush=flush):
                return exact.flushed(x, fmt) if flush else x

            def opposite(x, f=prepared):
                return None if math.isnan(x) else -f(x)

            def magnitude(x, f=prepared):
                return None if math.isnan(x) else abs(f(x))

            yield form(f"neg{flush}.{t}", f"{t} -> {t}", lanewise(opposite, t))
            yield form(f"abs{flush}.{t}", f"{t} -> {t}", lanewise(magnitude, t))
    for t in ("f32", "f64"):
        yield form(f"copysign.{t}", f"{t} {t} -> {t}", lambda a, b: None if math.isnan(b) else math.copysign(b, a))
        for name, question in exact.float_kinds(TYPES[t].fmt).items():
            yield form(f"testp.{name}.{t}", f"{t} -> pred", question)


def extremes():
    for name, function in (("min", exact.minimum), ("max", exact.maximum)):
        for t in ("f32", *HALVES):
            fmt = TYPES[t].fmt
            for flush in ("", ".ftz") if not t.startswith("b") else ("",):
                for nan in ("", ".NaN"):

                    def plain(*x, f=function, fmt=fmt, flush=flush, nan=nan):
                        x = [exact.flushed(v, fmt) if flush else v for v in x]
                        return functools.reduce(lambda a, b: f(a, b, bool(nan)), x)

                    def signed(*x, f=plain):
                        y = f(*map(abs, x))
                        sign = (-1.0) ** sum(exact.negative(v) for v in x)
                        return y if math.isnan(y) else math.copysign(y, sign)

                    two = f"{t} {t} -> {t}"
                    yield form(f"{name}{flush}{nan}.{t}", two, lanewise(plain, t))
                    yield form(f"{name}{flush}{nan}.xorsign.abs.{t}", two, lanewise(signed, t))
                    if t == "f32":
                        yield form(f"{name}{flush}{nan}.{t}", f"{t} {two}", plain)
                        magnitude = lambda *x, f=plain: f(*map(abs, x))  # noqa: E731
                        yield form(f"{name}{flush}{nan}.abs.{t}", f"{t} {two}", magnitude)
        yield form(f"{name}.f64", "f64 f64 -> f64", function)


def all_forms():
    for group in (rounded_operations, halves, signs, extremes):
        yield from group()
