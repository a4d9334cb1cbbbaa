"""IEEE 754 arithmetic in exact rationals: the arithmetic that simulated instructions are judged by.

A value of any format is carried as the Python float that equals it. Every operation computes the exact
rational result and rounds it once, so nothing here shares a rounding with the code under test.
"""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: bits of significand (the leading one included) and largest exponent."""

    name: str
    precision: int
    max_exponent: int

    @property
    def min_exponent(self):
        return 1 - self.max_exponent

    @property
    def min_normal(self):
        return Fraction(2) ** self.min_exponent

    @property
    def min_subnormal(self):
        return Fraction(2) ** (self.min_exponent - self.precision + 1)

    @property
    def max_finite(self):
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.max_exponent


F16 = Format("f16", 11, 15)
BF16 = Format("bf16", 8, 127)
F32 = Format("f32", 24, 127)
F64 = Format("f64", 53, 1023)


def floor_log2(x):
    """The exponent e with 2**e <= x < 2**(e + 1), for a positive Fraction."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e - 1 if x < Fraction(2) ** e else e


def round_to_integer(x, mode):
    """Round a Fraction to an int: nearest-even (n), to zero (z), down (m), up (p), nearest-away (na)."""
    down = math.floor(x)
    rest = x - down
    if mode == "n":
        return down + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2))
    if mode == "na":
        return down + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and x > 0))
    if mode == "z":
        return down + (rest != 0 and x < 0)
    return down + (mode == "p" and rest != 0)


def rounded(x, fmt, mode="n", zero=0.0):
    """The Fraction `x` in format `fmt`, as a float; `zero` is what an exact zero becomes."""
    if x == 0:
        return zero
    quantum = Fraction(2) ** (max(floor_log2(abs(x)), fmt.min_exponent) - fmt.precision + 1)
    result = round_to_integer(x / quantum, mode) * quantum
    sign = -1.0 if x < 0 else 1.0
    if abs(result) > fmt.max_finite:
        away = mode in ("n", "na") or mode == ("p" if x > 0 else "m")
        return sign * (math.inf if away else float(fmt.max_finite))
    return math.copysign(float(result), sign)


def flushed(x, fmt=F32):
    """Subnormals of `fmt` become a zero of their sign."""
    return math.copysign(0.0, x) if 0 < abs(x) < float(fmt.min_normal) else x


def _flushed_result(exact, result, fmt):
    """Flush a result; None where the value is tiny before rounding and normal after it, which the ISA leaves open."""
    if abs(exact) < fmt.min_normal and abs(result) == float(fmt.min_normal):
        return None
    return flushed(result, fmt)


def _finish(exact, zero, fmt, mode, ftz):
    result = rounded(exact, fmt, mode, zero)
    return _flushed_result(exact, result, fmt) if ftz else result


def _sum_zero(a_negative, b_negative, mode):
    if a_negative == b_negative:
        return -0.0 if a_negative else 0.0
    return -0.0 if mode == "m" else 0.0


def negative(x):
    """Whether the sign bit of `x` is set."""
    return math.copysign(1.0, x) < 0


def add(a, b, fmt=F32, mode="n", ftz=False):
    """a + b rounded once."""
    if ftz:
        a, b = flushed(a, fmt), flushed(b, fmt)
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    zero = _sum_zero(negative(a), negative(b), mode) if a == b == 0 else (-0.0 if mode == "m" else 0.0)
    return _finish(Fraction(a) + Fraction(b), zero, fmt, mode, ftz)


def mul(a, b, fmt=F32, mode="n", ftz=False):
    """a * b rounded once."""
    if ftz:
        a, b = flushed(a, fmt), flushed(b, fmt)
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    zero = -0.0 if negative(a) != negative(b) else 0.0
    return _finish(Fraction(a) * Fraction(b), zero, fmt, mode, ftz)


def fma(a, b, c, fmt=F32, mode="n", ftz=False):
    """a * b + c rounded once."""
    if ftz:
        a, b, c = flushed(a, fmt), flushed(b, fmt), flushed(c, fmt)
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    product = Fraction(a) * Fraction(b)
    product_negative = negative(a) != negative(b)
    if product == 0 and c == 0:
        zero = _sum_zero(product_negative, negative(c), mode)
    else:
        zero = -0.0 if mode == "m" else 0.0
    return _finish(product + Fraction(c), zero, fmt, mode, ftz)


def div(a, b, fmt=F32, mode="n", ftz=False):
    """a / b rounded once."""
    if ftz:
        a, b = flushed(a, fmt), flushed(b, fmt)
    sign = -1.0 if negative(a) != negative(b) else 1.0
    if math.isnan(a) or math.isnan(b) or (a == b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    if math.isinf(a) or b == 0:
        return sign * math.inf
    if math.isinf(b) or a == 0:
        return sign * 0.0
    return _finish(Fraction(a) / Fraction(b), sign * 0.0, fmt, mode, ftz)


def sqrt(a, fmt=F32, mode="n", ftz=False):
    """The square root of a rounded once."""
    if ftz:
        a = flushed(a, fmt)
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    scale = 1 << 700
    square = Fraction(a) * scale * scale
    root = math.isqrt(square.numerator // square.denominator)
    sticky = Fraction(1, 2) if Fraction(root) ** 2 != square else 0
    return _finish(Fraction(root + sticky) / scale, 0.0, fmt, mode, ftz)


def maximum(a, b, propagate_nan=False):
    """max of PTX: a NaN loses to a number unless `propagate_nan`, and +0 is larger than -0."""
    if math.isnan(a) or math.isnan(b):
        return math.nan if propagate_nan or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    if a == b == 0:
        return -0.0 if negative(a) and negative(b) else 0.0
    return max(a, b)


def minimum(a, b, propagate_nan=False):
    """min of PTX: the mirror image of `maximum`."""
    return -maximum(-a, -b, propagate_nan)


def convert(x, fmt, mode="n"):
    """A float rounded to `fmt`, keeping zeros' signs, infinities and NaN."""
    if not math.isfinite(x) or x == 0:
        return x
    return rounded(Fraction(x), fmt, mode)


def to_integer(x, bits, signed, mode="z"):
    """cvt from float to integer: rounded, then clamped to the type's range; the caller decides about NaN."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if math.isinf(x):
        return high if x > 0 else low
    return min(max(round_to_integer(Fraction(x), mode), low), high)


def ulp(x, fmt=F32):
    """The spacing of `fmt` at the float x, as a Fraction."""
    if x == 0:
        return fmt.min_subnormal
    return Fraction(2) ** (max(floor_log2(abs(Fraction(x))), fmt.min_exponent) - fmt.precision + 1)


def float_kinds(fmt):
    """What testp asks of a float: name -> predicate."""
    tiny = float(fmt.min_normal)
    return {
        "finite": math.isfinite,
        "infinite": math.isinf,
        "number": lambda x: not math.isnan(x),
        "notanumber": math.isnan,
        "normal": lambda x: math.isfinite(x) and abs(x) >= tiny,
        "subnormal": lambda x: 0 < abs(x) < tiny,
    }
