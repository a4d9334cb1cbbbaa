"""Differences in bits: planted ones are counted, and nothing else."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.gpu import bits

DTYPES = [np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def from_bits(dtype, *patterns):
    return np.array(patterns, f"u{dtype.itemsize}").view(dtype)


def neighbours(dtype):
    """All numbers that are not negative, up to infinity, of a 16-bit dtype; some of the others."""
    infinity = int(bits.bits_of(np.array([np.inf], dtype))[0])
    step = max(1, infinity // 4096)
    return from_bits(dtype, *range(0, infinity, step), infinity), step


@every_dtype
def test_steps_from_zero_to_infinity_are_counted(dtype):
    """Subnormal numbers, too; and twice as many from a number to its negative."""
    numbers, step = neighbours(dtype)
    counted = [n * step for n in range(len(numbers) - 1)]
    assert bits.ulps(numbers[:-1], np.zeros_like(numbers[:-1])).tolist() == counted
    negative = (-numbers.astype(np.float64)).astype(dtype)
    assert bits.ulps(numbers[:-1], negative[:-1]).tolist() == [2 * n for n in counted]


@given(a=st.floats(allow_nan=False, width=32), steps=st.integers(-1000, 1000))
def test_steps_of_nextafter_are_counted(a, steps):
    a = b = np.float32(a)
    for _ in range(abs(steps)):
        with np.errstate(over="ignore"):
            b = np.nextafter(b, np.float32(np.copysign(np.inf, steps)))
    counted = int(bits.ulps(np.array([a]), np.array([b]))[0])
    assert counted == abs(steps) or (np.isinf(b) and counted < abs(steps))


@every_dtype
def test_zeros_of_two_signs_differ_by_no_ulp(dtype):
    apart = bits.difference(np.array([0.0, -0.0], dtype), np.array([-0.0, -0.0], dtype))
    assert (apart.elements, apart.differ, apart.largest_ulp, apart.one_is_nan) == (2, 1, 0, 0)


@every_dtype
def test_nan(dtype):
    """One NaN is a difference of its own; two of them with other bits differ, and by nothing."""
    quiet = int(bits.bits_of(np.array([np.nan], dtype))[0])
    nan, other = from_bits(dtype, quiet, quiet | 1, quiet, quiet), from_bits(dtype, quiet, quiet, 0, 0)
    for apart in bits.difference(nan, other), bits.difference(other, nan):
        assert (apart.differ, apart.one_is_nan, apart.largest_ulp, apart.largest) == (3, 2, 0, 0.0)


@every_dtype
def test_infinity_is_one_step_beyond_the_largest(dtype):
    largest, infinity = np.array([ml_dtypes.finfo(dtype).max], dtype), np.array([np.inf], dtype)
    for apart in bits.difference(infinity, largest), bits.difference(largest, infinity):
        assert (apart.differ, apart.largest_ulp, apart.largest) == (1, 1, 0.0)
    assert bits.difference(-infinity, infinity).largest_ulp == 2 * int(bits.bits_of(infinity)[0])


@every_dtype
@given(data=st.data())
def test_planted_differences_are_found(dtype, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((7, 11)).astype(dtype)
    y = x.copy()
    places = data.draw(st.sets(st.integers(0, x.size - 1), max_size=5))
    steps = {place: data.draw(st.integers(1, 40)) for place in places}
    for place, step in steps.items():
        bits.bits_of(y).reshape(-1)[place] += step
    apart = bits.difference(y, x)
    assert (apart.elements, apart.differ) == (77, len(steps))
    assert apart.largest_ulp == max(steps.values(), default=0)
    distance = np.abs(x.astype(float) - y.astype(float)).max()
    assert apart.largest == distance


def test_integers_and_bools_have_no_ulp():
    apart = bits.difference(np.array([1, -5], np.int32), np.array([1, 7], np.int32))
    assert (apart.differ, apart.largest_ulp, apart.largest) == (1, 0, 12.0)
    assert bits.difference(np.array([True]), np.array([False])).differ == 1


def test_other_shapes_and_dtypes_are_refused():
    x = np.zeros(3, np.float32)
    for y in x[:2], x.astype(np.float64):
        with pytest.raises(ValueError, match="not compared"):
            bits.difference(x, y)
