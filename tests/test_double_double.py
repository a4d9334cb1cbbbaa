"""Double-double arithmetic against exact fractions, and its exp and log against mpmath."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import _double_double
from cupyflash._double_double import DoubleDouble, two_product, two_sum

TINY = Fraction(2) ** -1074
seeds = st.integers(0, 2**32 - 1)
spreads = st.sampled_from([0, 5, 40, 300, 1000])  # binary exponents are drawn from a range of this size


def numbers(rng, shape, spread=0, offset=0, with_low=True, zeros=0.0):
    """Numbers below 2^offset in magnitude with all their bits."""
    mantissa = (1 + rng.integers(0, 2**52, shape) * 2.0**-52) * rng.choice([-0.5, 0.5], shape)
    high = np.ldexp(mantissa, rng.integers(-spread, 1, shape) + offset)
    high = np.where(rng.random(shape) < zeros, 0, high)
    return DoubleDouble(high, np.spacing(high) * rng.uniform(-0.49, 0.49, shape) * (high != 0) if with_low else None)


def exact(x):
    """An object array of fractions."""
    x = x if isinstance(x, DoubleDouble) else DoubleDouble(x)
    result = np.empty(x.shape, object)
    for index in np.ndindex(x.shape):
        result[index] = Fraction(float(x.high[index])) + Fraction(float(x.low[index]))
    return result


def assert_close(result, expected, magnitude, bits):
    """To 2^-bits of the magnitude, or what is lost below float64's range; and normalised."""
    error = np.abs(exact(result) - expected)
    assert (error <= np.abs(magnitude) * Fraction(2) ** -bits + 4 * TINY).all()
    np.testing.assert_array_equal(result.high + result.low, result.high)


@given(seed=seeds, spread=spreads, offset=st.sampled_from([-1000, 0, 500, 1023]))
def test_sums_and_products_with_their_errors_are_exact(seed, spread, offset):
    rng = np.random.default_rng(seed)
    a, b = (numbers(rng, (20,), spread, offset, with_low=False).high for _ in range(2))
    total, error = two_sum(a, b)
    finite = np.isfinite(total)
    assert (exact(total[finite]) + exact(error[finite]) == exact(a[finite]) + exact(b[finite])).all()
    b = np.ldexp(b, -offset)
    product, error = two_product(a, b)
    sure = np.isfinite(product) & (np.abs(product) > 2.0**-960) & (np.abs(a) < 2.0**1023)
    assert (exact(product[sure]) + exact(error[sure]) == exact(a[sure]) * exact(b[sure])).all()


@given(seed=seeds, spread=spreads)
def test_arithmetic(seed, spread):
    rng = np.random.default_rng(seed)
    a, b = (numbers(rng, (20,), spread // 3) for _ in range(2))
    exact_a, exact_b = exact(a), exact(b)
    assert_close(a + b, exact_a + exact_b, exact_a + exact_b, 104)
    assert_close(a - b, exact_a - exact_b, exact_a - exact_b, 104)
    assert_close(a * b, exact_a * exact_b, exact_a * exact_b, 103)
    assert_close(a / b, exact_a / exact_b, exact_a / exact_b, 103)
    assert_close(1 - a, 1 - exact_a, 1 - exact_a, 104)
    assert_close(a - a.high, exact_a - exact(a.high), exact_a - exact(a.high), 104)
    np.testing.assert_array_equal(a == b, exact_a == exact_b)
    np.testing.assert_array_equal(a != DoubleDouble(a.high), a.low != 0)


@given(seed=seeds, count=st.integers(0, 17), spread=spreads)
def test_sum(seed, count, spread):
    terms = numbers(np.random.default_rng(seed), (3, count, 2), spread, with_low=count % 2 == 0)
    magnitude = np.abs(exact(terms)).sum(axis=1)
    assert_close(terms.sum(axis=1), exact(terms).sum(axis=1), magnitude, 101)
    assert terms.sum(axis=-1, keepdims=True).shape == (3, count, 1)


def test_the_maximum_of_numbers_that_float64_cannot_tell_apart():
    low = np.array([[-1e-20, 3e-20, 2e-20, 4e-20], [5e-17, 6e-17, -4e-17, 0.0], [0.0, 0.0, 0.0, 1e-20]])
    x = DoubleDouble(np.array([[1.0, 1.0, 1.0, 0.5], [1.0, -2.0, 1.0, 1.0], [-np.inf, 0.0, np.nan, 1.0]]), low)
    largest = x.max(axis=-1, keepdims=True)
    np.testing.assert_array_equal(largest.high, [[1.0], [1.0], [np.nan]])
    np.testing.assert_array_equal(largest.low, [[3e-20], [5e-17], [0.0]])
    for nothing in DoubleDouble(np.full((2, 3), -np.inf)), DoubleDouble(np.zeros((2, 0))):
        largest = nothing.max(axis=1, initial=-np.inf)
        np.testing.assert_array_equal(largest.high, [-np.inf, -np.inf])
        np.testing.assert_array_equal(largest.low, [0, 0])


shapes = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7, 65, 300]), st.integers(1, 3))


@settings(max_examples=200)
@given(seed=seeds, shape=shapes, spread=st.tuples(spreads, spreads), with_low=st.tuples(st.booleans(), st.booleans()))
def test_matrix_products(seed, shape, spread, with_low):
    """Relative to the sum of the terms' magnitudes, however large the other elements of the matrices are."""
    rng = np.random.default_rng(seed)
    rows, terms, columns = shape
    a = numbers(rng, (2, rows, terms), spread[0], 400, with_low[0], zeros=0.2)
    b = numbers(rng, (terms, columns), spread[1], 300, with_low[1], zeros=0.2)
    exact_a, exact_b = exact(a), exact(b)
    for i in range(2):
        magnitude = np.abs(exact_a[i]) @ np.abs(exact_b)
        assert_close((a @ b)[i], exact_a[i] @ exact_b, magnitude, 101)


@given(seed=seeds, num_terms=st.integers(1, 5000), spread=spreads)
def test_products_of_slices_are_summed_without_error(seed, num_terms, spread):
    bits = _double_double._slice_bits(num_terms)
    largest = 2 ** (bits - 1)
    assert num_terms * largest**2 <= 2**53 < num_terms * (4 * largest) ** 2
    x = numbers(np.random.default_rng(seed), (2, 7), spread, offset=9)
    scaled, exponent = _double_double._scaled(x, axis=-1)
    slices = _double_double._slices(scaled, bits, 300)
    assert all((np.abs(part) <= largest).all() and (part == np.rint(part)).all() for part in slices)
    total = sum(exact(part) * Fraction(2) ** (-bits * (i + 1)) for i, part in enumerate(slices))
    assert (total == exact(scaled)).all()
    assert_close(x, total * Fraction(2) ** exponent, 0, 0)


def test_an_ill_conditioned_matrix_product():
    """Terms that cancel but for their last bits, beside elements that are 2^900 times larger."""
    rng = np.random.default_rng(0)
    a, b = (numbers(rng, shape, 60).high for shape in ((4, 50), (50, 3)))
    a = np.concatenate([a, -a, np.full((4, 1), 2.0**900), np.full((4, 1), 2.0**-900)], axis=1)
    b = np.concatenate([b, b * (1 + 2.0**-50), np.zeros((1, 3)), np.ones((1, 3))])
    product = DoubleDouble(a) @ DoubleDouble(b)
    magnitude = np.abs(exact(a)) @ np.abs(exact(b))
    assert_close(product, exact(a) @ exact(b), magnitude, 101)
    assert (np.abs(exact(a) @ exact(b)) < magnitude * 2.0**-45).all()


@pytest.mark.parametrize("function", ["exp", "log"])
def test_exp_and_log(function):
    rng = np.random.default_rng(1)
    if function == "exp":
        values = [numbers(rng, (300,), spread=60, offset=offset) for offset in (-60, 0, 4, 9)]
    else:
        values = [1 + numbers(rng, (300,), offset=-7), numbers(rng, (300,), spread=700, offset=400)]
        values[1] = np.where(values[1].high > 0, values[1], -values[1])
    for x in values:
        result = getattr(np, function)(x)
        with mpmath.workprec(300):
            for given, high, low in zip(exact(x), result.high, result.low, strict=True):
                right = getattr(mpmath, function)(mpmath.mpf(given.numerator) / given.denominator)
                error = abs(mpmath.mpf(float(high)) + mpmath.mpf(float(low)) - right)
                assert error <= 2.0**-102 * max(abs(right), function == "log")


@pytest.mark.parametrize("exponent", [-1000, -300, -60, -8, -2, -1, 0, 1, 3, 6, 9, 1000])
def test_tanh(exponent):
    """Relative, for small and large arguments, and about 1/2, where the formula changes."""
    rng = np.random.default_rng(2)
    x = numbers(rng, (200,), offset=exponent)
    result = np.tanh(x)
    with mpmath.workprec(1500):  # 1 - tanh of the largest ones does not count
        for given, high, low in zip(exact(x), result.high, result.low, strict=True):
            right = mpmath.tanh(mpmath.mpf(given.numerator) / given.denominator)
            error = abs(mpmath.mpf(float(high)) + mpmath.mpf(float(low)) - right)
            assert error <= 2.0**-102 * abs(right)


@given(seed=seeds, spread=spreads)
def test_magnitude_and_maximum(seed, spread):
    rng = np.random.default_rng(seed)
    a, b = (numbers(rng, (20,), spread) for _ in range(2))
    b.high[::2] = a.high[::2]  # the low part decides
    exact_a, exact_b = exact(a), exact(b)
    assert (exact(abs(a)) == np.abs(exact_a)).all()
    assert (exact(np.maximum(a, b)) == np.maximum(exact_a, exact_b)).all()
    assert (exact(np.maximum(a, 0)) == np.maximum(exact_a, 0)).all()


def test_assignment():
    rng = np.random.default_rng(3)
    x, part = DoubleDouble(np.zeros((3, 4))), numbers(rng, (2, 2))
    x[1:, ::2] = part
    assert (exact(x)[1:, ::2] == exact(part)).all() and not exact(x)[0].any() and not exact(x)[:, 1::2].any()
    x[1] = 3.0
    assert (exact(x)[1] == 3).all() and (exact(x)[2, ::2] == exact(part)[1]).all()


def test_known_values():
    one = DoubleDouble(np.ones(()))
    assert float(np.exp(one).high) == 2.718281828459045 and float(np.exp(one).low) == 1.4456468917292502e-16
    ln2 = np.log(one + one)
    assert float(ln2.high) == 0.6931471805599453 and float(ln2.low) == pytest.approx(2.3190468138462996e-17, rel=1e-14)
    assert exact(np.exp(one * 0)) == 1 and exact(np.log(one)) == 0


def test_what_is_not_finite_is_as_in_float64():
    values = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 1.7e308, -1.7e308, 5e-324])
    a, b = values[:, None], values
    with np.errstate(all="ignore"):
        for operation in np.add, np.subtract, np.multiply, np.true_divide:
            result, expected = operation(DoubleDouble(a), DoubleDouble(b)), operation(a, b)
            np.testing.assert_array_equal(
                np.where(np.isfinite(expected), 0, np.asarray(result)), np.where(np.isfinite(expected), 0, expected)
            )
            assert np.isfinite(result).tolist() == np.isfinite(expected).tolist()
            assert (result.low[~np.isfinite(expected)] == 0).all()
        extremes = np.array([-np.inf, np.inf, np.nan, -1e300, 1e300, -800.0, 800.0])
        np.testing.assert_array_equal(np.asarray(np.exp(DoubleDouble(extremes))), np.exp(extremes))
        np.testing.assert_array_equal(np.asarray(np.log(DoubleDouble(values[[0, 4, 6]]))), [-np.inf, np.inf, np.nan])
        np.testing.assert_array_equal(np.asarray(np.tanh(DoubleDouble(extremes))), np.tanh(extremes))
        np.testing.assert_array_equal(np.signbit(np.tanh(DoubleDouble(values[:2])).high), [False, True])
        np.testing.assert_array_equal(np.asarray(abs(DoubleDouble(values))), np.abs(values))
        largest = np.maximum(DoubleDouble(a), DoubleDouble(b))
        np.testing.assert_array_equal(largest.high, np.maximum(a, b))
        assert not largest.low.any()


def test_a_matrix_product_is_spoilt_only_where_it_meets_what_is_not_finite():
    rng = np.random.default_rng(2)
    a, b = (numbers(rng, (2, 4, 4)) for _ in range(2))
    clean = a @ b
    a.high[0, 1, 2], b.high[1, 0, 3] = np.inf, np.nan
    a.low[0, 1, 2] = b.low[1, 0, 3] = 0
    product = a @ b
    spoilt = np.zeros((2, 4, 4), bool)
    spoilt[0, 1], spoilt[1, :, 3] = True, True
    np.testing.assert_array_equal(np.isfinite(product), ~spoilt)
    np.testing.assert_array_equal(product.high[~spoilt], clean.high[~spoilt])
    np.testing.assert_array_equal(product.low[~spoilt], clean.low[~spoilt])


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty_matrix_products(shape):
    rows, terms, columns = shape
    product = DoubleDouble(np.ones((rows, terms))) @ DoubleDouble(np.ones((terms, columns)))
    np.testing.assert_array_equal(np.asarray(product), np.zeros((rows, columns)))


def test_other_functions_are_refused():
    x = DoubleDouble(np.ones(2))
    for function in np.sin, np.sort, lambda x: np.add(x, x, out=np.ones(2)):
        with pytest.raises(TypeError):
            function(x)
