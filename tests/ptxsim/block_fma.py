"""Arithmetic of tensor cores in Python integers: what the models of settings(mma=...) must give, written from their
description, one dot product at a time.
"""

import functools
import math

from . import exact

# name: (products at a time, bits below the largest term, least exponent that terms are aligned to)
TRUNCATIONS = {
    "volta": (4, 23, None),
    "ampere": (8, 24, -132),
    "ada": (8, 24, -132),
    "hopper": (16, 25, -133),
    "blackwell": (16, 25, -133),
}
MODELS = ("exact", *TRUNCATIONS)
FORMATS = {"f16": (exact.F16, 5, 16), "bf16": (exact.BF16, 8, 16), "f32": (exact.F32, 8, 32)}
NAN = 0x7FFFFFFF
INFINITY = 0x7F800000


@functools.cache
def fields(bits, name):
    """A finite number as (significand with its sign, exponent): significand * 2**(exponent - stored bits)."""
    fmt, exponent_bits, width = FORMATS[name]
    stored = fmt.precision - 1
    field, rest = bits >> stored & (1 << exponent_bits) - 1, bits & (1 << stored) - 1
    significand = rest | bool(field) << stored
    return (-significand if bits >> width - 1 else significand), max(field, 1) + fmt.min_exponent - 1


def shifted(significand, places):
    """significand * 2**places, cut off toward zero."""
    if places >= 0:
        return significand << places
    return -(-significand >> -places) if significand < 0 else significand >> -places


@functools.cache
def special(bits, name):
    """NaN or an infinity as a float, None for a finite number."""
    fmt, exponent_bits, width = FORMATS[name]
    stored = fmt.precision - 1
    if bits >> stored & (1 << exponent_bits) - 1 != (1 << exponent_bits) - 1:
        return None
    return math.nan if bits & (1 << stored) - 1 else -math.inf if bits >> width - 1 else math.inf


def as_float(bits, name):
    """Zero, NaN and infinities; 1 with its sign for every other number."""
    found = special(bits, name)
    sign = -1.0 if bits >> FORMATS[name][2] - 1 else 1.0
    return found if found is not None else sign * bool(fields(bits, name)[0])


def not_finite(a, b, c, kind):
    """The NaN or infinity, in bits, that special operands make of the sum; None if there are none."""
    terms = [(x, y) for x, y in zip(a, b, strict=True) if special(x, kind) is not None or special(y, kind) is not None]
    terms = [as_float(x, kind) * as_float(y, kind) for x, y in terms]
    terms += [] if special(c, "f32") is None else [special(c, "f32")]
    if not terms:
        return None
    total = sum(terms)
    return NAN if math.isnan(total) else INFINITY | (total < 0) << 31


def to_f32(significand, exponent, nearest):
    """Bits of significand * 2**exponent, to nearest even or cut off; 2**128 and more is infinity. Zero is +0."""
    size, sign = abs(significand), (significand < 0) << 31
    last = max(exponent + size.bit_length() - 24, -149)
    kept = shifted(size, exponent - last)
    rest = size - (kept << last - exponent) if last > exponent else 0
    half = 1 << last - exponent - 1 if rest else 1
    kept += nearest and (rest > half or (rest == half and kept % 2 == 1))
    # The exponent field grows by one where rounding carries, or where a subnormal's leading bit is the implicit one.
    return sign | min(kept + (last + 149 << 23), INFINITY) if size else 0


def terms_of(a, b, c, kind):
    """(significand, exponent, position of its last bit) of every product, and of the addend."""
    stored = FORMATS[kind][0].precision - 1
    for x, y in zip(a, b, strict=True):
        (p, e), (q, f) = fields(x, kind), fields(y, kind)
        yield p * q, e + f, e + f - 2 * stored
    p, e = fields(c, "f32")
    yield p, e, e - 23


def dot(model, kind, a, b, c):
    """Bits of c + sum a_k b_k of one instruction; a, b: bits of `kind`, c: bits of a float32."""
    if model == "exact":
        return exact_dot(kind, a, b, c)
    width, fraction, floor = TRUNCATIONS[model]
    for at in range(0, len(a), width):
        c = truncated_dot(kind, a[at : at + width], b[at : at + width], c, fraction, floor)
    return c


def exact_dot(kind, a, b, c):
    found = not_finite(a, b, c, kind)
    if found is not None:
        return found
    terms = list(terms_of(a, b, c, kind))
    last = min(position for _, _, position in terms)
    total = sum(significand << position - last for significand, _, position in terms)
    if total == 0 and all(significand == 0 for significand, _, _ in terms):
        signs = {(x ^ y) >> 15 for x, y in zip(a, b, strict=True)} | {c >> 31}
        return 1 << 31 if signs == {1} else 0
    return to_f32(total, last, True)


def truncated_dot(kind, a, b, c, fraction, floor):
    """One fused summation, cut off before and after."""
    found = not_finite(a, b, c, kind)
    if found is not None:
        return found
    terms = [term for term in terms_of(a, b, c, kind) if term[0] != 0]
    if not terms:
        return 0
    largest = max(exponent for _, exponent, _ in terms)
    last = (largest if floor is None else max(largest, floor)) - fraction
    return to_f32(sum(shifted(significand, position - last) for significand, _, position in terms), last, False)
