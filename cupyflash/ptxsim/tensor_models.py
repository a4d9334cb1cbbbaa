"""What a tensor core computes: d = c + sum_k a_k b_k of one mma instruction, in the arithmetic of a GPU.

NVIDIA publishes no rounding rule. `exact` is the ideal, one rounding to nearest. The truncation models are those
that measurements of the hardware established (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA
tensor cores", 2021; Xie et al., "MMA-Sim", 2025): up to `width` products and the addend are aligned at the largest
exponent among them, cut off below, added exactly, and cut off again to the output's format.
"""

import dataclasses
import math

import numpy as np

from .numerics import odd_sum, to_f16, two_sum

_LEAST_EXPONENT = {
    "f16": -14,
    "bf16": -126,
    "tf32": -126,
    "f32": -126,
}  # of a normal number; subnormal ones have it, too
_NO_TERM = -10000  # exponent of a zero, which takes no part in the alignment
_CACHED = 1 << 15  # elements of the accumulator that are worked on together
_F32_DROPPED = np.uint64((1 << 29) - 1)  # bits of a float64 that a normal float32 has no room for


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Fused summation of `width` 16-bit products (half as many of tf32) and an addend, on a grid of 2**-fraction of the
    largest term.

    A term counts with the sum of its factors' exponents, so that it may be nearly 4 times as large as its power of
    two. `floor`: the least exponent that the grid is aligned to (None: whatever the terms have), for each type of the
    output. float16 is rounded to nearest.
    """

    width: int
    fraction: int
    floor: dict

    def steps(self, type_, length):
        """Products that an instruction of `length` along k sums at a time."""
        return min(self.width // 2 if type_ == "tf32" else self.width, length)

    def add(self, type_, output, left, right, c):
        """c + left right as float64 arrays; left (k, warps, rows, 1), right (k, warps, 1, columns), all finite."""
        a_exponents, b_exponents = (_exponents(x, _LEAST_EXPONENT[type_]) for x in (left, right))
        largest = _exponents(c, _LEAST_EXPONENT[output])
        exponent = np.empty_like(largest)
        for a, b in zip(a_exponents, b_exponents, strict=True):
            np.maximum(largest, np.add(a, b, out=exponent), out=largest)
        if self.floor[output] is not None:
            np.maximum(largest, self.floor[output], out=largest)
        largest[largest < _NO_TERM // 2] = 0  # nothing but zeros
        scale, unit = _power(self.fraction - largest), _power(largest - self.fraction)
        total, term = np.trunc(c * scale), np.empty_like(c)
        for a, b in zip(left, right, strict=True):
            np.multiply(a, b, out=term)
            np.multiply(term, scale, out=term)
            total += np.trunc(term, out=term)
        total *= unit
        total += 0.0  # integers have no -0
        return truncated_f32(total) if output == "f32" else to_f16(total).view(np.float16)


class Exact:
    """The sum rounded once, to nearest."""

    def steps(self, type_, length):
        return length

    def add(self, type_, output, left, right, c):
        """As Truncation.add. Every product is exact in float64, and so is each sum together with its error."""
        total = c
        rest = lost = None
        for a, b in zip(left, right, strict=True):
            total, error = two_sum(total, a * b)
            if not error.any():
                continue
            if rest is None:
                rest, lost = error, np.zeros_like(c)
            else:
                rest, error = two_sum(rest, error)
                lost += np.abs(error)
        if rest is None:
            return _nearest(total, output)
        result = np.where(rest == 0, total, odd_sum(total, rest))
        # What was lost decides nothing where it is below half an ulp and the result is not beside a tie.
        bits = result.view(np.uint64) & _F32_DROPPED
        tie = (bits > np.uint64((1 << 28) - 3)) & (bits < np.uint64((1 << 28) + 3))
        sure = (lost <= np.abs(result) * 2.0**-54) & ~tie & (np.abs(result) >= 2.0**-126)
        unsure = np.nonzero((lost != 0) & ~sure)  # never of float16, whose products span 80 bits
        if unsure[0].size:
            warp, row, column = unsure
            terms = np.vstack([c[unsure], left[:, warp, row, 0] * right[:, warp, 0, column]])
            result[unsure] = [_odd_total(column) for column in terms.T.tolist()]
        return _nearest(result, output)


_AMPERE = Truncation(8, 24, {"f32": -132, "f16": -20})
_HOPPER = Truncation(16, 25, {"f32": -133, "f16": -21})
MODELS = {
    "exact": Exact(),
    "volta": Truncation(4, 23, {"f32": None, "f16": -19}),
    "ampere": _AMPERE,
    "ada": _AMPERE,
    "hopper": _HOPPER,
    "blackwell": _HOPPER,
}


def multiply_add(model, type_, left, right, c, lengths, output="f32"):
    """c + left right as a chain of mma instructions makes it, one after another.

    left (warps, rows, k) and right (groups of warps that share one, k, columns) are float64, c (warps, rows, columns)
    is float32; `lengths` divides k among the instructions. Returns float32, or float16 for the `output` "f16".
    """
    model = MODELS[model]
    left = np.ascontiguousarray(left.transpose(2, 0, 1))[..., None]
    right = np.repeat(right.transpose(1, 0, 2), len(c) // len(right), axis=1)[:, :, None]
    result = np.empty(c.shape, np.float32 if output == "f32" else np.float16)
    together = max(1, _CACHED // (c.shape[1] * c.shape[2]))
    for first in range(0, len(c), together):
        warps = slice(first, first + together)
        value, at = c[warps], 0
        for length in lengths:
            step = model.steps(type_, length)
            for start in range(at, at + length, step):
                part = slice(start, start + step)
                value = _step(model, type_, output, left[part, warps], right[part, warps], value)
            at += length
        result[warps] = value
    return result


def _step(model, type_, output, left, right, c):
    """One fused summation. Infinities and NaN are what plain arithmetic makes of them."""
    c = c.astype(np.float64)
    if np.isfinite(left).all() and np.isfinite(right).all() and np.isfinite(c).all():
        return model.add(type_, output, left, right, c)
    plain = c + sum(a * b for a, b in zip(left, right, strict=True))
    finite = (np.where(np.isfinite(x), x, 0.0) for x in (left, right, c))
    return np.where(np.isfinite(plain), model.add(type_, output, *finite), _nearest(plain, output))


def _nearest(x, output):
    return x.astype(np.float32) if output == "f32" else to_f16(x).view(np.float16)


def _exponents(x, least):
    """Exponents as the fields of the format have them, in int16."""
    exponents = np.maximum(np.frexp(x)[1] - 1, least)
    return np.where(x == 0, _NO_TERM, exponents).astype(np.int16)


def _power(exponent):
    """2**exponent as float64, for exponents of normal numbers."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def truncated_f32(x):
    """float64 to float32, rounded toward zero, but to infinity from 2**128 on."""
    cut = (x.view(np.uint64) & ~_F32_DROPPED).view(np.float64)
    small = np.abs(x) < 2.0**-126
    if small.any():
        cut = np.where(small, np.trunc(x * 2.0**149) * 2.0**-149, cut)
    return cut.astype(np.float32)


def _odd_total(terms):
    """The exact sum of floats, rounded to odd."""
    total = math.fsum(terms)
    rest = math.fsum((*terms, -total))
    return float(odd_sum(np.array([total]), np.array([rest]))[0])
