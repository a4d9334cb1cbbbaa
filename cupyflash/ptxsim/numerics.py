"""Floating-point instructions on arrays of lanes, correctly rounded where PTX leaves room.

float32 and float64 registers are NumPy floats. 16-bit values are decoded to float32, which holds
them exactly, and encoded again after the operation.
"""

import numpy as np

F32_NORMAL = 2.0**-126
F64_NORMAL = np.float64(2.0**-1022)
NAN_F32 = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
_F16_VALUES = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
_ONE = np.uint64(1)
_UPPER = np.uint64(0xFFFFFFFF00000000)
_SPLIT = np.array(2.0**27 + 1)


# -- tests of whole arrays: for a warp's lanes they take a fifth of the time of NumPy's reductions -------
def lowest(x):
    """The lowest element, NaN if there is one."""
    return x.item(x.argmin())


def highest(x):
    """The highest element, NaN if there is one."""
    return x.item(x.argmax())


some = highest  # of bools


# -- formats -----------------------------------------------------------------------------------------
def f16_to_f32(bits):
    """uint16 bits of binary16 as float32."""
    return _F16_VALUES.take(bits)


def bf16_to_f32(bits):
    """uint16 bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(x, rounding="rn"):
    """float32 or float64 to binary16 bits."""
    nearest = x.astype(np.float16)
    if rounding != "rn":
        nearest = _directed(nearest, x, rounding)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), nearest.view(np.uint16)) if some(nan) else nearest.view(np.uint16)


def to_bf16(x, rounding="rn"):
    """float32 or float64 to bfloat16 bits."""
    if x.dtype == np.float64:
        x = to_f32(x, "odd")
    bits = x.view(np.uint32)
    kept = bits >> np.uint32(16)
    if rounding == "rn":
        kept = (bits + (np.uint32(0x7FFF) + (kept & np.uint32(1)))) >> np.uint32(16)
    elif rounding in ("rm", "rp"):
        inexact = (bits & np.uint32(0xFFFF)) != 0
        away = inexact & (np.signbit(x) if rounding == "rm" else ~np.signbit(x))
        kept = kept + away.astype(np.uint32)
    kept = kept.astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), kept) if some(nan) else kept


def to_tf32(x, rounding="rna"):
    """Round to 10 mantissa bits (rna: ties away from zero)."""
    bits = x.view(np.uint32)
    if rounding == "rna":
        half = np.uint32(0x1000)
    elif rounding == "rn":
        half = np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    else:
        half = np.uint32(0)
    return np.where(np.isfinite(x), (bits + half) & np.uint32(0xFFFFE000), bits)


def finite_f16(bits):
    """The satfinite variants: infinities become the largest number."""
    return np.where(bits & np.uint16(0x7FFF) == np.uint16(0x7C00), bits - np.uint16(1), bits)


def finite_bf16(bits):
    return np.where(bits & np.uint16(0x7FFF) == np.uint16(0x7F80), bits - np.uint16(1), bits)


def finite_tf32(bits):
    return np.where(bits & np.uint32(0x7FFFFFFF) == np.uint32(0x7F800000), bits - np.uint32(0x2000), bits)


def to_f32(x, rounding="rn"):
    """float64 to float32. Mode `odd`: an inexact result gets an odd last bit, so that rounding
    it once more, to a shorter format, is as good as rounding x."""
    nearest = x.astype(np.float32)
    if rounding == "rn" or x.dtype == np.float32:
        return nearest
    if rounding == "odd":
        even = (nearest.view(np.uint32) & np.uint32(1)) == 0
        exact = (nearest == x) | np.isnan(x)
        other = np.nextafter(nearest, np.where(x > nearest, np.float32(np.inf), np.float32(-np.inf)))
        return np.where(exact | ~even, nearest, other)
    return _directed(nearest, x, rounding)


def _directed(nearest, x, rounding):
    """Correct a result rounded to nearest into one rounded toward zero (rz), down (rm) or up (rp)."""
    limit = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}[rounding]
    wide = nearest.astype(np.float64)
    wrong = {"rz": np.abs(wide) > np.abs(x), "rm": wide > x, "rp": wide < x}[rounding]
    return np.where(wrong, np.nextafter(nearest, nearest.dtype.type(limit)), nearest)


def pair(low, high):
    """Two uint16 arrays as uint32, the second in the high half."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def f16x2_to_f32(x):
    return _F16_VALUES.take(np.ascontiguousarray(x).view(np.uint16)).reshape(-1, 2)


def bf16x2_to_f32(x):
    return bf16_to_f32(np.ascontiguousarray(x).view(np.uint16).reshape(-1, 2))


def packed(bits):
    """(n, 2) uint16 to (n,) uint32."""
    return np.ascontiguousarray(bits).view(np.uint32).reshape(-1)


# -- modifiers -----------------------------------------------------------------------------------------
def flush(x):
    """Subnormal float32 to zero of the same sign, any NaN to the canonical one."""
    size = np.abs(x)
    if lowest(size) >= F32_NORMAL:  # no NaN, either
        return x
    subnormal = (size < F32_NORMAL) & (size > 0)
    return canonical(np.where(subnormal, np.copysign(np.float32(0), x), x) if some(subnormal) else x)


def flush_f16(x):
    """Values that are subnormal in binary16 to zero of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0**-14), np.copysign(np.float32(0), x), x)


def canonical(x):
    """Any NaN to the one that GPUs produce."""
    nan = np.isnan(x)
    return np.where(nan, NAN_F32, x) if some(nan) else x


def saturate(x):
    """To [0, 1]; NaN to +0."""
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)) + x.dtype.type(0)


def relu(x):
    """Negative to +0, NaN to canonical NaN."""
    return np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0)))


# -- arithmetic --------------------------------------------------------------------------------------
def odd_sum(a, b):
    """a + b in float64, rounded to odd."""
    s = a + b
    a_part = s - b
    error = (a - a_part) + (b - (s - a_part))
    bits = s.view(np.uint64)
    inexact = (error != 0) & np.isfinite(s) & (bits & _ONE == 0)
    away = (error > 0) == (s > 0)
    return np.where(inexact, np.where(away, bits + _ONE, bits - _ONE), bits).view(np.float64)


def add_f32_directed(a, b, rounding):
    return round_sum(a.astype(np.float64), b.astype(np.float64), rounding)


def round_sum(a, b, rounding):
    """a + b of float64, rounded once to float32, in any mode."""
    s = odd_sum(a, b)
    if rounding == "rm":  # an exact zero sum is -0 when rounding down, unless both are +0
        s = np.where((s == 0) & ~((a == 0) & (b == 0) & ~np.signbit(a) & ~np.signbit(b)), -0.0, s)
    return to_f32(s, rounding)


def mul_f32_directed(a, b, rounding):
    return to_f32(np.multiply(a, b, dtype=np.float64), rounding)


def two_sum(a, b):
    """a + b rounded, and what that leaves out."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def two_product(a, b):
    """a * b rounded, and what that leaves out."""
    p = a * b
    a_high, b_high = upper_half(a), upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def upper_half(x):
    """The upper 26 bits; x without them has 26 as well."""
    scaled = x * _SPLIT
    return scaled - (scaled - x)


def maximum_number(a, b):
    """The number if the other is NaN; +0 above -0."""
    return _one_of(np.fmax(a, b), a, b, np.bitwise_and)


def minimum_number(a, b):
    return _one_of(np.fmin(a, b), a, b, np.bitwise_or)


def _one_of(result, a, b, signs):
    if lowest(np.abs(result)) > 0:  # neither a zero nor a NaN
        return result
    kind = f"u{result.dtype.itemsize}"
    result = np.where(a == b, signs(a.view(kind), b.view(kind)).view(result.dtype), result)
    return canonical(result) if result.dtype == np.float32 else result


def with_nan(result, a, b):
    """The .NaN variants of min and max: NaN if either is."""
    return np.where(np.isnan(a) | np.isnan(b), NAN_F32 if result.dtype == np.float32 else np.nan, result)


def xor_sign(result, a, b):
    """The .xorsign.abs variants: magnitude of `result`, the sign of a * b."""
    signed = np.copysign(result, np.where(np.signbit(a) != np.signbit(b), result.dtype.type(-1), result.dtype.type(1)))
    return np.where(np.isnan(result), result, signed)


def fma_f16(a, b, c):
    """In float64 rounded to odd, for an encoder that rounds to nearest."""
    return odd_sum(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))


# -- reciprocals and roots ------------------------------------------------------------------------------
def rcp(x, rounding="rn"):
    return to_f32(1.0 / x.astype(np.float64), rounding) if x.dtype == np.float32 else 1.0 / x


def rsqrt(x):
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(x.dtype)


def coarse(function, x):
    """The float64 reciprocals with .approx.ftz: the upper 32 bits of x are the argument and of the result."""
    x = (x.view(np.uint64) & _UPPER).view(np.float64)
    result = function(np.where(np.abs(x) < F64_NORMAL, np.copysign(0.0, x), x)).view(np.uint64)
    rounded = ((result + (_ONE << np.uint64(31)) - _ONE + (result >> np.uint64(32) & _ONE)) & _UPPER).view(np.float64)
    return np.where(np.abs(rounded) < F64_NORMAL, np.copysign(0.0, rounded), rounded)


def div_approximate(a, b):
    """div.approx: a divisor above 2**126 has the reciprocal 0."""
    large = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(large, a * np.copysign(np.float32(0), b), a / b)


def sqrt_directed(x, rounding):
    wide = np.sqrt(x.astype(np.float64))
    return to_f32(wide, rounding)


def div_directed(a, b, rounding):
    return to_f32(a.astype(np.float64) / b.astype(np.float64), rounding)


# -- conversions between integers and floats ------------------------------------------------------------
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_integer(x, mode):
    """To an integral value, in the same format."""
    return _TO_INTEGER[mode](x)


def float_to_integer(x, dtype, mode):
    """Rounded, saturated. NaN gives 0, or only the top bit where either side has 64 bits."""
    dtype = np.dtype(dtype)
    info = np.iinfo(dtype)
    rounded = _TO_INTEGER[mode](x.astype(np.float64))
    nan = np.isnan(rounded)
    below, above = rounded <= float(info.min), rounded >= float(info.max) + (1.0 if dtype.itemsize == 8 else 0.0)
    inside = np.where(nan | below | above, 0.0, rounded)
    result = inside.astype(dtype)
    result = np.where(below, dtype.type(info.min), np.where(above, dtype.type(info.max), result))
    if nan.any():
        top = np.array([1 << (8 * dtype.itemsize - 1)], f"u{dtype.itemsize}").view(dtype)
        result = np.where(nan, top if dtype.itemsize == 8 or x.dtype == np.float64 else dtype.type(0), result)
    return result


def integer_to_float(a, dtype, rounding):
    """Integers to float32 or float64, in any rounding mode; `odd` (to float64) for an encoder that rounds once more."""
    if a.dtype.itemsize < 8 and (dtype == np.float32 or rounding == "odd"):
        wide = a.astype(np.float64)
        return wide if rounding == "odd" else to_f32(wide, rounding)
    if rounding == "rn":
        return a.astype(dtype)
    if dtype == np.float64 and rounding != "odd":
        return _directed_i64_to_f64(a, rounding)
    high = a & ~a.dtype.type(0x7FF)  # 53 bits: exact in float64, and so is the rest
    wide = odd_sum(high.astype(np.float64), (a - high).astype(np.float64))
    return wide if rounding == "odd" else to_f32(wide, rounding)


def _directed_i64_to_f64(a, rounding):
    nearest = a.astype(np.float64)
    top = np.float64(2.0 ** (64 if a.dtype.kind == "u" else 63))
    back = np.where(nearest >= top, 0.0, nearest).astype(a.dtype)
    too_high = (nearest >= top) | (back > a)
    too_low = ~too_high & (back < a)
    toward_zero_high = too_high & (nearest > 0)
    down = too_high if rounding == "rm" else toward_zero_high if rounding == "rz" else np.zeros_like(too_high)
    up = too_low if rounding == "rp" else too_low & (nearest < 0) if rounding == "rz" else np.zeros_like(too_low)
    return np.where(down, np.nextafter(nearest, -np.inf), np.where(up, np.nextafter(nearest, np.inf), nearest))


# -- comparisons ---------------------------------------------------------------------------------------
def ne_ordered(a, b):
    return (a < b) | (a > b)


def is_number(a, b):
    return ~(np.isnan(a) | np.isnan(b))


def is_nan(a, b):
    return np.isnan(a) | np.isnan(b)


def saturate_integer(a, dtype):
    """Clamp to the range of another integer type."""
    info = np.iinfo(dtype)
    own = np.iinfo(a.dtype)
    return np.clip(a, max(info.min, own.min), min(info.max, own.max)).astype(dtype)


# -- testp -----------------------------------------------------------------------------------------------
testp_finite = np.isfinite
testp_infinite = np.isinf
testp_notanumber = np.isnan


def testp_number(x):
    return ~np.isnan(x)


def testp_normal(x):
    return np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny)


def testp_subnormal(x):
    return (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)
