"""What every result must satisfy."""

import ml_dtypes
import numpy as np
from hypothesis import assume

from cupyflash import bounds, reference
from tests import layouts


def assert_within_bounds(problem, inputs, out, lse):
    """Every element of out and lse is as close to the reference as its bound says, and as finite."""
    exact, exact_lse = reference.attention(*inputs, return_lse=True, **problem.options)
    bound, lse_bound = bounds.attention(*inputs, return_lse=True, **problem.options)
    assert out.shape == exact.shape and out.dtype == inputs[0].dtype
    assert lse.shape == exact_lse.shape and lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
    assert_close("out", out.astype(np.float64), exact, bound)
    assert_close("lse", lse.astype(np.float64), exact_lse, lse_bound)
    return exact, bound


def assert_close(name, result, exact, bound):
    """Within the bound, equal where the reference is -inf, and not finite where it is not."""
    with np.errstate(invalid="ignore"):
        right = (np.abs(result - exact) <= bound) | (result == exact)
    claimed = np.isfinite(bound)
    wrong = np.where(claimed, ~right, ~np.isfinite(exact) & np.isfinite(result))
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.size} elements are wrong, the first at {first}: {result[first]!r}, "
            f"exact {exact[first]!r}, bound {bound[first]!r}"
        )


def assert_same_bits(a, b):
    """Equal bit patterns, NaN and the sign of zero included."""
    assert a.shape == b.shape and a.dtype == b.dtype
    integer = np.dtype(f"u{a.itemsize}")
    a, b = (np.ascontiguousarray(x).view(integer) for x in (a, b))
    different = np.argwhere(a != b)
    assert len(different) == 0, f"{len(different)} of {a.size} elements differ, the first at {different[0].tolist()}"


def run_poisoned(backend, problem, **options):
    """Inputs and results of a call whose out held NaN before; nothing around out is written."""
    inputs, out = problem.inputs(), problem.empty_out()
    before = layouts.surroundings(out)
    given, lse = backend.attention(*inputs, out=out, **problem.options, **options)
    assert given is out
    assert (layouts.surroundings(out) == before).all(), "memory around out was written"
    return inputs, out, lse


def assert_unbiased(out, exact):
    """Errors of positive results average to nothing: a truncated weight or result is below by 0.7 units."""
    unit = float(ml_dtypes.finfo(out.dtype).eps) / 2
    bias = np.mean((out.astype(np.float64) - exact) / (unit * exact))
    assert abs(bias) < 0.1, f"mean error {bias:+.3f} units"


def assert_nonfinite_values_reach_who_sees_them(backend, problem, arch):
    """One NaN for each key and each column in turn: a query's element is spoilt if it sees the key, and only then.

    The problem is causal, with as many keys as queries.
    """
    q, k, v = problem.inputs()
    seqlen, columns = v.shape
    clean, _ = backend.attention(q, k, v, arch=arch, **problem.options)
    for first in range(0, seqlen, columns):
        keys = np.arange(first, min(first + columns, seqlen))
        spoilt = v.copy()
        spoilt[keys, keys - first] = np.nan
        out, _ = backend.attention(q, k, spoilt, arch=arch, **problem.options)
        expected = clean.copy()
        expected[:, keys - first] = np.where(
            keys <= np.arange(seqlen)[:, None], spoilt.dtype.type(np.nan), clean[:, keys - first]
        )
        np.testing.assert_array_equal(out.astype(np.float64), expected.astype(np.float64))


def assert_only_rows_that_see_it_change(backend, problem, where):
    """Values (operand, position, value) put into the inputs leave every other row its bits."""
    inputs, clean, clean_lse = run_poisoned(backend, problem)
    assume(all(array.size for array in inputs))
    spoilt = []
    for name, array in zip("qkv", inputs, strict=True):
        array = array.copy()
        for target, position, value in where:
            if target == name:
                array.reshape(-1)[position % array.size] = value
        spoilt.append(array)
    out = problem.empty_out()
    out, lse = backend.attention(*spoilt, out=out, **problem.options)
    assert_within_bounds(problem, spoilt, out, lse)
    unseen = np.isfinite(bounds.attention(*spoilt, return_lse=True, **problem.options)[1])
    assert_same_bits(out[unseen], clean[unseen])
    assert_same_bits(lse[unseen], clean_lse[unseen])
