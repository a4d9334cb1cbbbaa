"""PTX types as bits, and the adversarial inputs of each: zeros, limits, subnormals, infinities, NaNs, neighbours."""

import math
import struct
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from . import exact

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@dataclass(frozen=True)
class PtxType:
    """How a PTX type travels: its C type, asm constraint, width, and how bits become a Python value."""

    name: str
    bits: int
    c_type: str
    constraint: str
    kind: str  # "signed", "unsigned", "float" or "packed"
    fmt: exact.Format | None = None

    @property
    def dtype(self):
        return UNSIGNED[self.bits]

    def decode(self, bits):
        """An unsigned int of raw bits as the int, float or (low, high) pair that the instruction sees."""
        if self.kind == "signed":
            return bits - (1 << self.bits) if bits >> self.bits - 1 else bits
        if self.kind == "float":
            return bits_to_float(bits, self.fmt)
        if self.kind == "packed":
            return bits_to_float(bits & 0xFFFF, self.fmt), bits_to_float(bits >> 16, self.fmt)
        return bits

    def encode(self, value):
        """The raw bits of a value; integers wrap."""
        if self.kind == "float":
            return float_to_bits(value, self.fmt)
        if self.kind == "packed":
            return float_to_bits(value[0], self.fmt) | float_to_bits(value[1], self.fmt) << 16
        return int(value) & (1 << self.bits) - 1

    def same(self, expected, bits):
        """Whether raw `bits` are what was expected: equal bits, or NaN where NaN is expected."""
        if self.kind == "packed":
            half = TYPES[self.fmt.name]
            return all(e is None or half.same(e, bits >> s & 0xFFFF) for e, s in zip(expected, (0, 16), strict=True))
        if self.kind == "float" and math.isnan(expected):
            return math.isnan(self.decode(bits))
        return self.encode(expected) == bits


def bits_to_float(bits, fmt):
    """Raw bits of a format as the equal Python float."""
    if fmt is exact.F64:
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if fmt is exact.F32:
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    if fmt is exact.BF16:
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def float_to_bits(value, fmt):
    """Raw bits of a float that the format holds exactly."""
    if fmt is exact.F64:
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    if fmt is exact.F32:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if fmt is exact.BF16:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        assert not bits & 0xFFFF or math.isnan(value), value
        return bits >> 16
    return struct.unpack("<H", struct.pack("<e", value))[0]


def _types():
    for bits, c_type, constraint in ((16, "short", "h"), (32, "int", "r"), (64, "long long", "l")):
        yield PtxType(f"s{bits}", bits, f"unsigned {c_type}", constraint, "signed")
        yield PtxType(f"u{bits}", bits, f"unsigned {c_type}", constraint, "unsigned")
        yield PtxType(f"b{bits}", bits, f"unsigned {c_type}", constraint, "unsigned")
    yield PtxType("f16", 16, "unsigned short", "h", "float", exact.F16)
    yield PtxType("bf16", 16, "unsigned short", "h", "float", exact.BF16)
    yield PtxType("f32", 32, "float", "f", "float", exact.F32)
    yield PtxType("f64", 64, "double", "d", "float", exact.F64)
    yield PtxType("f16x2", 32, "unsigned int", "r", "packed", exact.F16)
    yield PtxType("bf16x2", 32, "unsigned int", "r", "packed", exact.BF16)


TYPES = {ptx_type.name: ptx_type for ptx_type in _types()}


def _integer_specials(bits):
    half = 1 << bits - 1
    pattern = int("5" * (bits // 4), 16)
    few = [0, 1, 2, 3, 7, 31, 32, 33, bits - 1, bits, bits + 1, 255, 256, half - 1, half, half + 1, pattern, ~pattern]
    return [v & 2 * half - 1 for v in [*few, -1, -2, -3, -31, -32, -255]]


def _float_specials(fmt):
    one_up, one_down = 1 + exact.ulp(1.0, fmt), 1 - exact.ulp(0.75, fmt)
    positive = [
        *(exact.Fraction(v) for v in (0.5, 1, 1.5, 2, 3, 7.5)),
        *(one_up, one_down, fmt.min_subnormal, fmt.min_normal - fmt.min_subnormal, fmt.min_normal),
        *(3 * fmt.min_subnormal, fmt.min_normal + fmt.min_subnormal, fmt.max_finite, fmt.max_finite / 2),
    ]
    values = [0.0, float("inf"), *(float(v) for v in positive)]
    return [float_to_bits(v, fmt) for v in (*values, *(-v for v in values), float("nan"))]


def specials(name):
    """The unsigned bit patterns a type must be tried on (packed types: its halves combined)."""
    ptx_type = TYPES[name]
    if ptx_type.kind == "packed":
        low = np.array(_float_specials(ptx_type.fmt), np.uint32)
        return low | np.roll(low, 3) << 16
    values = _float_specials(ptx_type.fmt) if ptx_type.fmt else _integer_specials(ptx_type.bits)
    return np.array(values, ptx_type.dtype)


def random_bits(name, rng, count):
    """Random patterns: uniform bits for half of them; floats near one and small integers for the rest."""
    ptx_type = TYPES[name]
    bits = rng.integers(0, 1 << ptx_type.bits, count, dtype=ptx_type.dtype)
    half = count // 2
    if ptx_type.kind in ("signed", "unsigned"):
        bits[:half] = rng.integers(0, 80, half)
    elif ptx_type.kind == "packed":
        pairs = rng.normal(size=(half, 2)) * 2.0 ** rng.integers(-4, 5, (half, 2))
        dtype = np.float16 if ptx_type.fmt is exact.F16 else ml_dtypes.bfloat16
        bits[:half] = pairs.astype(dtype).view(np.uint32)[:, 0]
    else:
        numbers = rng.normal(size=half) * 2.0 ** rng.integers(-4, 5, half)
        dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}[name]
        bits[:half] = numbers.astype(dtype).view(ptx_type.dtype)
    return bits
