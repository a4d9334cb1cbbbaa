"""Ready checks of a function ``fn(q, k, v, *, softmax_scale, causal, align, return_lse) -> (out, lse)``."""

import numpy as np
from hypothesis import assume

from cupyflash import bounds
from cupyflash.testing.assertions import assert_attention_within_bound, assert_same_bits


def check_nonfinite_values_reach_who_sees_them(fn, problem):
    """One NaN for each key and each column in turn: a query's element is spoilt if it sees the key, and only then.

    The problem is causal, with as many keys as queries.
    """
    q, k, v = problem.inputs()
    seqlen, columns = v.shape
    clean, _ = fn(q, k, v, return_lse=True, **problem.options)
    for first in range(0, seqlen, columns):
        keys = np.arange(first, min(first + columns, seqlen))
        spoilt = v.copy()
        spoilt[keys, keys - first] = np.nan
        out, _ = fn(q, k, spoilt, return_lse=True, **problem.options)
        expected = clean.copy()
        expected[:, keys - first] = np.where(
            keys <= np.arange(seqlen)[:, None], spoilt.dtype.type(np.nan), clean[:, keys - first]
        )
        np.testing.assert_array_equal(out.astype(np.float64), expected.astype(np.float64))


def check_nonfinite_values_change_only_rows_that_see_them(fn, problem, where):
    """Values (operand, position, value) put into the inputs leave every other row its bits."""
    inputs = problem.inputs()
    assume(all(array.size for array in inputs))
    clean, clean_lse = fn(*inputs, return_lse=True, **problem.options)
    spoilt = []
    for name, array in zip("qkv", inputs, strict=True):
        array = array.copy()
        for target, position, value in where:
            if target == name:
                array.reshape(-1)[position % array.size] = value
        spoilt.append(array)
    out, lse = fn(*spoilt, return_lse=True, **problem.options)
    assert_attention_within_bound(out, lse, *spoilt, **problem.options)
    unseen = np.isfinite(bounds.attention(*spoilt, return_lse=True, **problem.options)[1])
    assert_same_bits(out[unseen], clean[unseen])
    assert_same_bits(lse[unseen], clean_lse[unseen])
