"""What the number formats and the instructions of the kernels err by, and sums and products made of them.

Products of n terms by Higham (2002) for float32 in any order and by the block-truncation model of tensor cores (Fasi
et al. 2021; Khattak and Mikaitis 2025); ex2, rcp and lg2 with the errors that the PTX ISA states, exp, log and tanh
with those of the CUDA C++ Programming Guide. The kernels flush float32 subnormals to zero (``-ftz=true``): every
flushed quantity adds 2^-126 of its own scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cupyflash._arrays import FLOAT32, FLOAT64
from cupyflash._problem import Problem

U32 = 2.0**-24
FLUSH = 2.0**-126  # below it float32 kernels compute with 0
U64 = 2.0**-53
EXP_ERROR = 5 * U32  # ex2.approx: 2 ulp from the correctly rounded value
TANH_ULP = 2
MIN_KEY_TILE = 32  # the smallest BLOCK_N on tensor cores: no row is rescaled more often than ceil(S / 32) times
MAX_KEY_TILE = 128
FMA_TILES = (16, 64)  # the fewest and the most rows of a tile that float32 and float64 kernels sum over
ROW_LANES = 16  # share the keys of a tile there
ILL_CONDITIONED = 0.25  # how far the weight of a key may be off, against the row's largest, for a bound to be claimed
SLACK = 1 + 1e-4  # what is of second order: roundings here, and in the reference before its last


@dataclass(frozen=True)
class Precision:
    """Unit roundoff, half the smallest subnormal, and the first value that rounds to infinity."""

    unit: float
    underflow: float
    overflow: float

    @staticmethod
    def of(dtype: np.dtype) -> Precision:
        info = ml_dtypes.finfo(dtype)
        unit = float(info.eps) / 2
        return Precision(unit, float(info.smallest_subnormal) / 2, float(info.max) * (1 + unit / 2))


@dataclass(frozen=True)
class Arithmetic:
    """What kernels compute in: its unit roundoff, and what an operation may lose at most where it underflows."""

    unit: float
    flush: float

    @staticmethod
    def of(dtype: np.dtype) -> Arithmetic:
        """float64 rounds to multiples of 2^-1074 there, exp by 2 of them; float32 flushes, as operand, too."""
        return Arithmetic(U64, 2.0**-1072) if dtype == FLOAT64 else Arithmetic(U32, FLUSH)


def gamma(n, unit: float):
    """Relative error of n roundings in a row: n u / (1 - n u)."""
    product = np.multiply(n, unit)
    return np.where(product < 1, product / np.maximum(1 - product, unit), np.inf)


def dot_error(n):
    """Error of a product of n terms with a live float32 accumulator, relative to the sum of their magnitudes.

    Blocks of w terms truncated with e extra bits lose 2 ceil(n / w) (w 2^-e + 1) u. That is largest for w = 4, e = 0,
    10 ceil(n / 4) u, which is also above gamma(n + 1), the bound for round-to-nearest in any order.
    """
    return 10 * np.ceil(np.divide(n, 4)) * U32


def largest(problem: Problem) -> float:
    return float(np.finfo(problem.lse_dtype).max)


def rounding_of(dtype: np.dtype, magnitude: np.ndarray) -> np.ndarray:
    """Of a value that is stored in the dtype: by u |x|, or by half the spacing of subnormals and at most by |x|.

    A float32 subnormal is flushed.
    """
    element = Precision.of(dtype)
    underflow = FLUSH if dtype == FLOAT32 else element.underflow
    return np.maximum(element.unit * magnitude, np.minimum(magnitude, underflow))


def conversion_error(problem: Problem, array) -> float:
    """Of a float64 bias, slope or sink that a kernel reads as float32, relative."""
    return U32 if array.dtype == FLOAT64 and problem.dtype != FLOAT64 else 0.0


def claimed(bound: np.ndarray) -> np.ndarray:
    """A bound that is itself beyond float64, inf - inf or 0 inf, claims nothing."""
    return np.where(np.isnan(bound), np.inf, bound)
