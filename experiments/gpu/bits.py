"""How far two arrays of floating-point numbers are apart, in bits and in units in the last place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Of two arrays of one dtype and shape."""

    elements: int
    differ: int  # whose bits differ
    largest_ulp: int  # of those, where both are numbers; +0 and -0 are 0 apart
    one_is_nan: int  # of those, where one is NaN and the other is not
    largest: float  # absolute difference where both are finite


def difference(found: np.ndarray, expected: np.ndarray) -> Difference:
    """Of numbers of any float dtype that has a sign and a magnitude, or of integers, which have no ulp."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise ValueError(f"{found.dtype} {found.shape} is not compared with {expected.dtype} {expected.shape}")
    differ = bits_of(found) != bits_of(expected)
    found, expected = found[differ], expected[differ]
    if found.dtype.kind in "iub":
        distance = np.abs(found.astype(float) - expected.astype(float))
        return Difference(differ.size, len(found), 0, 0, float(distance.max(initial=0)))
    nan, expected_nan = (np.isnan(x.astype(np.float64)) for x in (found, expected))
    numbers, finite = ~(nan | expected_nan), np.isfinite(found) & np.isfinite(expected)
    distance = np.abs(found[finite].astype(np.float64) - expected[finite].astype(np.float64))
    return Difference(
        elements=differ.size,
        differ=len(found),
        largest_ulp=int(ulps(found[numbers], expected[numbers]).max(initial=0)),
        one_is_nan=int((nan != expected_nan).sum()),
        largest=float(distance.max(initial=0)),
    )


def bits_of(x: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many numbers of the dtype one has to step over to get from ``a`` to ``b``; infinity is the last of them.

    IEEE 754 orders magnitudes as their bits, subnormal ones too. Of NaN it says nothing.

    >>> ulps(np.array([1.0, 0.0, 5e-324]), np.array([1 + 2**-52, -0.0, -5e-324]))
    array([1, 0, 2], dtype=uint64)
    """
    sign = np.uint64(1 << 8 * a.dtype.itemsize - 1)
    a, b = (bits_of(x).astype(np.uint64) for x in (a, b))
    a_magnitude, b_magnitude = a & ~sign, b & ~sign
    apart = np.maximum(a_magnitude, b_magnitude) - np.minimum(a_magnitude, b_magnitude)
    return np.where((a ^ b) & sign, a_magnitude + b_magnitude, apart)
