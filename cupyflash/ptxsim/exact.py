"""float64 operations in rational arithmetic, lane by lane: directed roundings, and what overflows half-way."""

import math
from fractions import Fraction

import numpy as np

_RATIONAL = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
}
_PLAIN = {**_RATIONAL, "sqrt": np.sqrt}


def exact_f64(operation, rounding, *operands):
    """add, sub, mul, fma, div, rcp or sqrt of arrays, rounded once: rn, rz, rm or rp."""
    lanes = zip(*(np.broadcast_arrays(*operands)), strict=True)
    return np.array([_rounded(operation, rounding, *map(float, lane)) for lane in lanes])


def _rounded(operation, rounding, *x):
    with np.errstate(all="ignore"):
        plain = float(_PLAIN[operation](*map(np.float64, x)))
    if operation == "fma" and math.isinf(x[2]) and math.isfinite(x[0]) and math.isfinite(x[1]):
        return x[2]  # where the product alone overflows
    pole = (operation in ("div", "rcp") and x[-1] == 0) or (operation == "sqrt" and x[0] <= 0)
    if pole or not all(map(math.isfinite, x)):
        return plain
    if operation == "sqrt":
        return _directed(plain, rounding, lambda r: Fraction(r) ** 2 - Fraction(x[0]))
    exact = _RATIONAL[operation](*map(Fraction, x))
    if exact == 0:
        return _zero(operation, rounding, plain, x)
    result = _directed(_nearest(exact), rounding, lambda r: Fraction(r) - exact)
    return -abs(result) if exact < 0 else abs(result)  # a zero has the sign of what it stands for


def _nearest(exact):
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _directed(nearest, rounding, error):
    """Move a result that was rounded to nearest the wrong way; `error(r)` has the sign of r - exact."""
    if rounding == "rn":
        return nearest
    toward = {"rz": 0.0, "rm": -math.inf, "rp": math.inf}[rounding]
    too_high = nearest > 0 if math.isinf(nearest) else error(nearest) > 0
    too_low = nearest < 0 if math.isinf(nearest) else error(nearest) < 0
    away = (too_high and nearest > 0) or (too_low and nearest < 0)
    wrong = {"rz": away, "rm": too_high, "rp": too_low}[rounding]
    return math.nextafter(nearest, toward) if wrong else nearest


def _zero(operation, rounding, plain, x):
    """A sum that is exactly zero is -0 when rounding down, unless both terms are +0."""
    terms = {"add": x, "sub": (x[0], -x[-1]), "fma": (x[0] * x[-2], x[-1])}.get(operation)
    if rounding != "rm" or terms is None or all(t == 0 and math.copysign(1, t) > 0 for t in terms):
        return plain
    return -0.0
