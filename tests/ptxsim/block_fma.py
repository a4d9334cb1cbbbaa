"""Arithmetic of tensor cores in Python integers: what the models of settings(mma=...) must give, written from their
description, one dot product at a time.
"""

import functools
import math

from . import exact

# name: (16-bit products at a time, bits below the largest term, least exponent that terms are aligned to)
TRUNCATIONS = {
    "volta": (4, 23, {"f32": None, "f16": -19}),
    "ampere": (8, 24, {"f32": -132, "f16": -20}),
    "ada": (8, 24, {"f32": -132, "f16": -20}),
    "hopper": (16, 25, {"f32": -133, "f16": -21}),
    "blackwell": (16, 25, {"f32": -133, "f16": -21}),
}
MODELS = ("exact", *TRUNCATIONS)
TF32 = exact.Format("tf32", 11, 127)  # the upper 19 bits of a float32
FORMATS = {"f16": (exact.F16, 5, 16), "bf16": (exact.BF16, 8, 16), "tf32": (TF32, 8, 19), "f32": (exact.F32, 8, 32)}
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}
INFINITY = {"f32": 0x7F800000, "f16": 0x7C00}


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


def not_finite(a, b, c, kind, output):
    """The NaN or infinity, in bits, that special operands make of the sum; None if there are none."""
    terms = [(x, y) for x, y in zip(a, b, strict=True) if special(x, kind) is not None or special(y, kind) is not None]
    terms = [as_float(x, kind) * as_float(y, kind) for x, y in terms]
    terms += [] if special(c, output) is None else [special(c, output)]
    if not terms:
        return None
    total = sum(terms)
    return NAN[output] if math.isnan(total) else INFINITY[output] | (total < 0) << FORMATS[output][2] - 1


def rounded(significand, exponent, nearest, output):
    """Bits of significand * 2**exponent, to nearest even or cut off, infinity where it is too large. Zero is +0."""
    fmt, _, width = FORMATS[output]
    least = fmt.min_exponent - fmt.precision + 1
    size, sign = abs(significand), (significand < 0) << width - 1
    last = max(exponent + size.bit_length() - fmt.precision, least)
    kept = shifted(size, exponent - last)
    rest = size - (kept << last - exponent) if last > exponent else 0
    half = 1 << last - exponent - 1 if rest else 1
    kept += nearest and (rest > half or (rest == half and kept % 2 == 1))
    # The exponent field grows by one where rounding carries, or where a subnormal's leading bit is the implicit one.
    return sign | min(kept + (last - least << fmt.precision - 1), INFINITY[output]) if size else 0


def terms_of(a, b, c, kind, output):
    """(significand, exponent, position of its last bit) of every product, and of the addend."""
    stored = FORMATS[kind][0].precision - 1
    for x, y in zip(a, b, strict=True):
        (p, e), (q, f) = fields(x, kind), fields(y, kind)
        yield p * q, e + f, e + f - 2 * stored
    p, e = fields(c, output)
    yield p, e, e - FORMATS[output][0].precision + 1


def dot(model, kind, a, b, c, output="f32"):
    """Bits of c + sum a_k b_k of one instruction; a, b: bits of `kind`, c: bits of the type of the output."""
    if kind == "tf32":
        a, b = ([x >> 13 for x in y] for y in (a, b))
    if model == "exact":
        return exact_dot(kind, a, b, c, output)
    width, fraction, floor = TRUNCATIONS[model]
    width = width // 2 if kind == "tf32" else width
    for at in range(0, len(a), width):
        c = truncated_dot(kind, a[at : at + width], b[at : at + width], c, fraction, floor[output], output)
    return c


def exact_dot(kind, a, b, c, output):
    found = not_finite(a, b, c, kind, output)
    if found is not None:
        return found
    terms = list(terms_of(a, b, c, kind, output))
    last = min(position for _, _, position in terms)
    total = sum(significand << position - last for significand, _, position in terms)
    if total == 0 and all(significand == 0 for significand, _, _ in terms):
        top = FORMATS[output][2] - 1
        signs = {(x ^ y) >> FORMATS[kind][2] - 1 for x, y in zip(a, b, strict=True)} | {c >> top}
        return 1 << top if signs == {1} else 0
    return rounded(total, last, True, output)


def truncated_dot(kind, a, b, c, fraction, floor, output):
    """One fused summation: cut off before, and after it cut off to float32 or rounded to float16."""
    found = not_finite(a, b, c, kind, output)
    if found is not None:
        return found
    terms = [term for term in terms_of(a, b, c, kind, output) if term[0] != 0]
    if not terms:
        return 0
    largest = max(exponent for _, exponent, _ in terms)
    last = (largest if floor is None else max(largest, floor)) - fraction
    total = sum(shifted(significand, position - last) for significand, _, position in terms)
    return rounded(total, last, output == "f16", output)
