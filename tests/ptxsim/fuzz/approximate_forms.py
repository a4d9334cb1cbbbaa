"""Functions that the ISA allows to be approximate: here their exact values, rounded once.

mpmath gives 200 bits; the simulator promises the nearest number wherever float64 arithmetic can find it.
"""

import functools
import math
from fractions import Fraction

import mpmath

from .. import exact
from .forms import TYPES, form

_PRECISE = mpmath.MPContext()
_PRECISE.prec = 200


def fraction(x):
    sign, mantissa, exponent, _ = x._mpf_
    return (-1) ** sign * int(mantissa) * Fraction(2) ** exponent


@functools.lru_cache(1 << 16)
def value(name, x):
    """The function at a finite float, as a Fraction of 200 good bits."""
    function = {"ex2": lambda v: _PRECISE.power(2, v), "lg2": lambda v: _PRECISE.log(v, 2)}.get(name)
    return fraction((function or getattr(_PRECISE, name))(_PRECISE.mpf(x)))


def ex2(x, fmt, ftz):
    if math.isnan(x) or x == math.inf:
        return x
    if x == -math.inf or x < -2000:
        return 0.0
    if x > 2000:
        return math.inf
    return finish(value("ex2", x), 0.0, fmt, ftz)


def lg2(x, fmt, ftz):
    if math.isnan(x) or x < 0:
        return math.nan
    return -math.inf if x == 0 else x if x == math.inf else finish(value("lg2", x), 0.0, fmt, ftz)


def odd(name):
    """sin and tanh: a zero keeps its sign."""

    def function(x, fmt, ftz):
        if math.isnan(x) or (math.isinf(x) and name == "sin"):
            return math.nan
        if math.isinf(x) or (abs(x) > 100 and name == "tanh"):
            return math.copysign(1.0, x)
        return x if x == 0 else finish(value(name, x), 0.0, fmt, ftz)

    return function


def cos(x, fmt, ftz):
    return finish(value("cos", x), 0.0, fmt, ftz) if math.isfinite(x) else math.nan


def finish(exact_value, zero, fmt, ftz):
    result = exact.rounded(exact_value, fmt, "n", zero)
    if ftz and abs(exact_value) < fmt.min_normal == abs(Fraction(result)) if math.isfinite(result) else False:
        return None
    return exact.flushed(result, fmt) if ftz else result


def rsqrt(x, fmt, ftz):
    if math.isnan(x) or x < 0:
        return math.nan
    if x == 0 or x == math.inf:
        return math.copysign(math.inf, x) if x == 0 else 0.0
    return finish(fraction(1 / _PRECISE.sqrt(_PRECISE.mpf(x))), 0.0, fmt, ftz)


FUNCTIONS = {"ex2": ex2, "lg2": lg2, "sin": odd("sin"), "cos": cos, "tanh": odd("tanh"), "rsqrt": rsqrt}


def functions():
    for name, function in FUNCTIONS.items():
        for flush in ("",) if name == "tanh" else ("", ".ftz"):

            def formula(x, f=function, flush=flush):
                return f(exact.flushed(x) if flush else x, exact.F32, bool(flush))

            yield form(f"{name}.approx{flush}.f32", "f32 -> f32", formula)
    for name, t, flush in (
        *(("ex2", t, "") for t in ("f16", "f16x2")),
        *(("ex2", t, ".ftz") for t in ("bf16", "bf16x2")),
        *(("tanh", t, "") for t in ("f16", "f16x2", "bf16", "bf16x2")),
    ):

        def formula(*x, f=FUNCTIONS[name], fmt=TYPES[t].fmt, flush=flush):
            y = tuple(f(v, fmt, bool(flush)) for v in (x[0] if isinstance(x[0], tuple) else x))
            return y if len(y) == 2 else y[0]

        yield form(f"{name}.approx{flush}.{t}", f"{t} -> {t}", formula)


def quotients():
    for flush in ("", ".ftz"):
        ftz = bool(flush)
        yield form(f"rcp.approx{flush}.f32", "f32 -> f32", lambda x, z=ftz: exact.div(1.0, x, ftz=z))
        yield form(f"sqrt.approx{flush}.f32", "f32 -> f32", lambda x, z=ftz: exact.sqrt(x, ftz=z))
        yield form(f"div.full{flush}.f32", "f32 f32 -> f32", lambda a, b, z=ftz: exact.div(a, b, ftz=z))
        yield form(f"div.approx{flush}.f32", "f32 f32 -> f32", lambda a, b, z=ftz: fast_quotient(a, b, z))


def fast_quotient(a, b, ftz):
    """div.approx takes the reciprocal of a divisor above 2**126 for zero."""
    if 2.0**126 < abs(b) < math.inf:
        if math.isnan(a) or math.isinf(a):
            return math.nan
        return -0.0 if exact.negative(a) != exact.negative(b) else 0.0
    return exact.div(a, b, ftz=ftz)


def upper_half(x):
    """A float64 without its low 32 bits."""
    t = TYPES["f64"]
    return t.decode(t.encode(x) >> 32 << 32)


def coarse():
    """The float64 reciprocals of which the upper 32 bits count: subnormals flushed, the rest rounded to 20 bits."""
    short = exact.Format("f64 in 32 bits", 21, 1023)

    def reciprocal(x):
        x = exact.flushed(upper_half(x), exact.F64)
        return exact.div(1.0, x, short, "n", True)

    def root(x):
        x = exact.flushed(upper_half(x), exact.F64)
        return rsqrt(x, short, True)

    yield form("rcp.approx.ftz.f64", "f64 -> f64", reciprocal)
    yield form("rsqrt.approx.ftz.f64", "f64 -> f64", root)


def all_forms():
    for group in (functions, quotients, coarse):
        yield from group()
