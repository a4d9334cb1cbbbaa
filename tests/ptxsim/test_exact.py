"""The yardstick itself: exact.py against NumPy's own arithmetic on the same bits."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from . import exact
from .values import specials

F32 = [float(x) for x in specials("f32").view(np.float32)]


def same(expected, got):
    return (math.isnan(expected) and math.isnan(got)) or (expected, exact.negative(expected)) == (
        got,
        exact.negative(got),
    )


@pytest.mark.parametrize("name, ufunc", [("add", np.add), ("mul", np.multiply), ("div", np.divide)])
def test_binary_operations_equal_numpy(name, ufunc):
    with np.errstate(all="ignore"):
        for a, b in itertools.product(F32, F32):
            expected = float(ufunc(np.float32(a), np.float32(b)))
            assert same(expected, getattr(exact, name)(a, b)), (name, a, b)


def test_sqrt_equals_numpy():
    with np.errstate(all="ignore"):
        for a in F32:
            assert same(float(np.sqrt(np.float32(a))), exact.sqrt(a)), a


@pytest.mark.parametrize(
    "fmt, dtype", [(exact.F16, np.float16), (exact.BF16, ml_dtypes.bfloat16), (exact.F32, np.float32)]
)
def test_conversion_equals_numpy(fmt, dtype):
    random = np.random.default_rng(3).integers(0, 2**63, 500).view(np.float64)
    with np.errstate(all="ignore"):
        for x in [float(v) for v in specials("f64").view(np.float64)] + [float(v) for v in random] + F32:
            # ml_dtypes casts float64 through float32; a value that float32 holds is rounded once.
            x = float(np.float32(x)) if dtype is ml_dtypes.bfloat16 else x
            assert same(float(np.asarray(x).astype(dtype)), exact.convert(x, fmt)), x


def test_directed_modes_bracket_the_exact_value():
    third = exact.Fraction(1, 3)
    down, up = exact.rounded(third, exact.F32, "m"), exact.rounded(third, exact.F32, "p")
    assert exact.Fraction(down) < third < exact.Fraction(up)
    assert exact.Fraction(up) - exact.Fraction(down) == exact.ulp(down)
    assert exact.rounded(third, exact.F32, "z") == down and exact.rounded(-third, exact.F32, "z") == -down


def test_fused_multiply_add_rounds_once():
    a = 1 + 2.0**-12
    assert exact.fma(a, a, -(1 + 2.0**-11)) == 2.0**-24
    assert exact.add(exact.mul(a, a), -(1 + 2.0**-11)) == 0
