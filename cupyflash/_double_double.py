"""Arrays of double-double numbers, unevaluated sums of two float64: about 106 bits over float64's range.

Addition and multiplication rest on error-free transformations (Knuth's two_sum; Dekker's two_product, which needs no
fused multiply-add). Relative errors are a few units of 2^-104; where the low part would be subnormal, what is below
2^-1074 is lost. Non-finite results are those of float64.
"""

from __future__ import annotations

import functools
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_TABLE_SIZE = 256  # exp tabulates 2^(j / 256)
_SIGNIFICANT_BITS = 136  # of the largest elements, in products of matrices
_TERMS_AT_ONCE = 2**18


class DoubleDouble(NDArrayOperatorsMixin):
    """An array of numbers high + low, in which high is the sum rounded to float64; low is 0 where high is not finite.

    Operators and the NumPy functions that :mod:`cupyflash.reference` is written with take it, also together with
    float64 arrays. ``np.asarray`` rounds to float64.

    >>> third = DoubleDouble(np.ones(1)) / 3
    >>> third.high, third.low
    (array([0.33333333]), array([1.85037171e-17]))
    >>> np.asarray(third * 3 - 1), np.asarray(np.exp(np.log(third)) - third) < 1e-30
    (array([0.]), array([ True]))
    """

    def __init__(self, high, low=None):
        self.high = np.asarray(high, np.float64)
        self.low = np.zeros_like(self.high) if low is None else low

    def __array__(self, dtype=None, copy=None):
        return np.array(self.high, dtype, copy=copy)

    def __array_ufunc__(self, ufunc, method, *operands, **options):
        if method != "__call__" or options or ufunc not in _UFUNCS:
            return NotImplemented
        with np.errstate(all="ignore"):
            return _UFUNCS[ufunc](*map(_double_double, operands))

    def __array_function__(self, function, types, operands, options):
        return _where(*operands, **options) if function is np.where else NotImplemented

    def __getitem__(self, index) -> DoubleDouble:
        return DoubleDouble(self.high[index], self.low[index])

    def __setitem__(self, index, values) -> None:
        values = _double_double(values)
        self.high[index], self.low[index] = values.high, values.low

    def __len__(self) -> int:
        return len(self.high)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    @property
    def ndim(self) -> int:
        return self.high.ndim

    @property
    def mT(self) -> DoubleDouble:
        return DoubleDouble(self.high.mT, self.low.mT)

    def reshape(self, *shape: int) -> DoubleDouble:
        return DoubleDouble(self.high.reshape(*shape), self.low.reshape(*shape))

    def max(self, axis: int, keepdims: bool = False, initial: float = -np.inf) -> DoubleDouble:
        high = self.high.max(axis=axis, keepdims=True, initial=initial)
        low = np.where(self.high == high, self.low, -np.inf).max(axis=axis, keepdims=True, initial=-np.inf)
        largest = DoubleDouble(high, _finite(low))
        return largest if keepdims else DoubleDouble(largest.high.squeeze(axis), largest.low.squeeze(axis))

    def sum(self, axis: int, keepdims: bool = False) -> DoubleDouble:
        """Pairwise: the error is relative to the sum of magnitudes."""
        terms = DoubleDouble(np.moveaxis(self.high, axis, 0), np.moveaxis(self.low, axis, 0))
        if not len(terms):
            terms = DoubleDouble(np.zeros((1, *terms.shape[1:])))
        while (count := len(terms)) > 1:
            half = (count + 1) // 2
            sums = terms[: count - half] + terms[half:]
            left = terms[count - half : half]
            terms = DoubleDouble(np.concatenate([sums.high, left.high]), np.concatenate([sums.low, left.low]))
        if not keepdims:
            return terms[0]
        return DoubleDouble(np.moveaxis(terms.high, 0, axis), np.moveaxis(terms.low, 0, axis))


def two_sum(a, b):
    """a + b rounded, and the error of that; 0 where there is no number."""
    total = a + b
    b_part = total - a
    return total, _finite((a - (total - b_part)) + (b - b_part))


def fast_two_sum(a, b):
    """The same where a = 0 or \\|a\\| >= \\|b\\|."""
    total = a + b
    return total, _finite(b - (total - a))


def two_product(a, b):
    """a * b rounded, and the error of that (up to underflow)."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    product = a * b
    return product, _finite(((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low)


def _halves(a):
    """a as a sum of two numbers of 26 bits; on the bits, for Veltkamp's product with 2^27 + 1 may overflow."""
    high = (a.view(np.int64) + 2**26 & -(2**27)).view(np.float64)
    return high, a - high


def _finite(x):
    finite = np.isfinite(x)
    return x if finite.all() else np.where(finite, x, 0.0)


def _double_double(x) -> DoubleDouble:
    return x if isinstance(x, DoubleDouble) else DoubleDouble(x)


def _add(a, b):
    high, low = two_sum(a.high, b.high)
    high_of_low, low_of_low = two_sum(a.low, b.low)
    high, low = fast_two_sum(high, low + high_of_low)
    return DoubleDouble(*fast_two_sum(high, low + low_of_low))


def _negative(a):
    return DoubleDouble(-a.high, -a.low)


def _multiply(a, b):
    high, low = two_product(a.high, b.high)
    return DoubleDouble(*fast_two_sum(high, low + _finite(a.high * b.low + a.low * b.high)))


def _divide(a, b):
    """Long division, with two digits of 53 bits."""
    quotient = a.high / b.high
    rest = a - b * quotient
    return DoubleDouble(*fast_two_sum(quotient, _finite(rest.high / b.high)))


def _exp(x):
    """exp(m ln2 / 256 + r) = 2^(m // 256) 2^(m % 256 / 256) exp(r), where |r| <= ln2 / 512."""
    ln2_parts, inverse_factorials, powers_of_2 = _constants()
    clipped = np.clip(x.high, -1500.0, 1500.0)  # beyond it 0 and infinity
    x = DoubleDouble(clipped, np.where(clipped == x.high, x.low, 0.0))
    multiple = np.rint(_finite(clipped) * (_TABLE_SIZE / ln2_parts[0]))
    rest = x
    for part in ln2_parts:
        rest = rest - multiple * (part / _TABLE_SIZE)
    # Terms from r^5 on are below 2^-54: float64 holds them to 2^-107.
    result = np.zeros_like(rest.high)
    for inverse in reversed(inverse_factorials[5:10]):
        result = result * rest.high + inverse.high
    for inverse in reversed(inverse_factorials[:5]):
        result = rest * result + inverse
    exponent, index = np.divmod(multiple.astype(np.int64), _TABLE_SIZE)
    result = result * powers_of_2[index]
    return DoubleDouble(np.ldexp(result.high, exponent), np.ldexp(result.low, exponent))


def _log(x):
    """One step of Newton's method from float64; the error is a few units of 2^-104, absolute, or relative if larger.

    For numbers from 2^-1000 on.
    """
    start = np.log(x.high)
    step = x * np.exp(DoubleDouble(-start)) - 1  # exp(log x - start) - 1
    step = step - 0.5 * step.high**2
    return DoubleDouble(start) + DoubleDouble(_finite(step.high), step.low)


def _tanh(x):
    """(1 - exp(-2|x|)) / (1 + exp(-2|x|)); where that cancels, sinh by its series, divided by cosh."""
    size = _absolute(x)
    decay = _exp(-2 * size)
    large = (1 - decay) / (1 + decay)
    small = _where(size.high < 0.5, size, 0)
    _, inverse_factorials, _ = _constants()
    square = small * small
    # Relative to the sum, x^24 / 25! is below 2^-107.
    series = DoubleDouble(np.zeros_like(square.high))
    for inverse in reversed(inverse_factorials[1:24:2]):
        series = square * series + inverse
    growth = _exp(small)
    small = small * series / ((growth + 1 / growth) * 0.5)
    result = _where(size.high < 0.5, small, large)
    return _where(np.signbit(x.high), -result, result)


def _absolute(x):
    return _where(np.signbit(x.high), _negative(x), x)


def _maximum(a, b):
    """The larger one, or NaN where one is."""
    high = np.maximum(a.high, b.high)
    low = np.maximum(*(np.where(x.high == high, x.low, -np.inf) for x in (a, b)))
    return DoubleDouble(high, _finite(low))


def _where(condition, a, b):
    a, b = _double_double(a), _double_double(b)
    return DoubleDouble(np.where(condition, a.high, b.high), np.where(condition, a.low, b.low))


@functools.cache
def _constants():
    """ln 2 in parts of which the first two have 32 bits (so that small multiples are exact), 1 / k!, 2^(j / 256)."""

    def rounded(x: Fraction) -> tuple[float, float]:
        return float(x), float(x - Fraction(float(x)))

    with localcontext() as context:
        context.prec = 60
        ln2 = Fraction(Decimal(2).ln())
        powers = [rounded(Fraction((Decimal(2).ln() * j / _TABLE_SIZE).exp())) for j in range(_TABLE_SIZE)]
    parts = []
    for bits in 32, 64:
        part = Fraction(round((ln2 - sum(parts)) * 2**bits), 2**bits)
        parts.append(part)
    parts.append(ln2 - sum(parts))
    inverse, inverses = Fraction(1), []
    for k in range(24):
        inverses.append(DoubleDouble(*rounded(inverse)))
        inverse /= k + 1
    return [float(part) for part in parts], inverses, DoubleDouble(*map(np.array, zip(*powers, strict=True)))


def _matmul(a, b):
    """Both operands cut into slices whose products float64 computes without error (Ozaki et al. 2012).

    Each row of a, and each column of b, is a sum of short integers times powers of two. Their products of equal weight
    are summed in float64, without error while they are integers up to 2^53. What is neglected is small against the
    largest of the row times the largest of the column; elements that are small against those, too, are summed term by
    term.
    """
    row_is_finite = np.isfinite(a.high).all(axis=-1, keepdims=True)
    column_is_finite = np.isfinite(b.high).all(axis=-2, keepdims=True)
    if not (row_is_finite.all() and column_is_finite.all()):
        finite = _matmul(np.where(row_is_finite, a, 0), np.where(column_is_finite, b, 0))
        return np.where(row_is_finite & column_is_finite, finite, a.high @ b.high)

    num_terms = a.shape[-1]
    if not num_terms or not a.high.size or not b.high.size:
        return DoubleDouble(a.high @ b.high)
    num_orders = next(n for n in range(1, _SIGNIFICANT_BITS) if n * _slice_bits(n * num_terms) >= _SIGNIFICANT_BITS)
    bits = _slice_bits(num_orders * num_terms)
    a_scaled, a_exponent = _scaled(a, axis=-1)
    b_scaled, b_exponent = _scaled(b, axis=-2)
    a_slices, b_slices = _slices(a_scaled, bits, num_orders), _slices(b_scaled, bits, num_orders)
    high = low = np.zeros(1)
    for order in range(num_orders):
        pairs = [(i, order - i) for i in range(order + 1) if i < len(a_slices) and order - i < len(b_slices)]
        if pairs:
            exact = sum(a_slices[i] @ b_slices[j] for i, j in pairs)
            high, error = two_sum(high, exact * 2.0 ** (-bits * (order + 2)))
            low = low + error
    exponent = a_exponent + b_exponent
    result = DoubleDouble(*fast_two_sum(high, low))
    result = DoubleDouble(np.ldexp(result.high, exponent), np.ldexp(result.low, exponent))

    small = np.abs(a_scaled.high) @ np.abs(b_scaled.high) < num_terms * 2.0**-32
    if small.any():
        small &= (a.high != 0).astype(np.float64) @ (b.high != 0).astype(np.float64) > 0
        _sum_term_by_term(result, a, b, np.nonzero(small))
    return result


def _slice_bits(num_terms: int) -> int:
    """So many that the sum of num_terms products of two integers up to 2^(bits - 1) is at most 2^53."""
    return (53 - (num_terms - 1).bit_length()) // 2 + 1


def _scaled(x, axis: int):
    """x 2^-exponent, below 1/2 along the axis, and the exponent."""
    exponent = np.frexp(np.abs(x.high).max(axis=axis, keepdims=True))[1] + 1
    return DoubleDouble(np.ldexp(x.high, -exponent), np.ldexp(x.low, -exponent)), exponent


def _slices(x, bits: int, count: int) -> list[np.ndarray]:
    """Integer matrices, at most ``count``, whose sum with weights 2^-bits, 2^-2bits ... is x, or close to it."""
    slices: list[np.ndarray] = []
    high, low = x.high, x.low
    while len(slices) < count and high.any():
        high, low = high * 2.0**bits, low * 2.0**bits
        slices.append(np.rint(high))
        high, low = fast_two_sum(high - slices[-1], low)
    return slices


def _sum_term_by_term(result, a, b, elements) -> None:
    batch_shape = result.shape[:-2]
    rows = [np.broadcast_to(x, (*batch_shape, *x.shape[-2:])) for x in (a.high, a.low)]
    columns = [np.broadcast_to(x.mT, (*batch_shape, *x.mT.shape[-2:])) for x in (b.high, b.low)]
    at_once = max(_TERMS_AT_ONCE // a.shape[-1], 1)
    for start in range(0, len(elements[0]), at_once):
        chunk = tuple(index[start : start + at_once] for index in elements)
        *batch, row, column = chunk
        terms = DoubleDouble(*(x[(*batch, row)] for x in rows)) * DoubleDouble(*(x[(*batch, column)] for x in columns))
        total = terms.sum(axis=-1)
        result.high[chunk], result.low[chunk] = total.high, total.low


_UFUNCS = {
    np.add: _add,
    np.subtract: lambda a, b: _add(a, _negative(b)),
    np.multiply: _multiply,
    np.true_divide: _divide,
    np.negative: _negative,
    np.exp: _exp,
    np.log: _log,
    np.tanh: _tanh,
    np.abs: _absolute,
    np.maximum: _maximum,
    np.matmul: _matmul,
    np.isfinite: lambda a: np.isfinite(a.high),
    np.equal: lambda a, b: (a.high == b.high) & (a.low == b.low),
    np.not_equal: lambda a, b: (a.high != b.high) | (a.low != b.low),
}
