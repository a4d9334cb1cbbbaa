"""Bounds on the error of joined parts.

The parts' outs are the values and their lse the scores of :mod:`cupyflash.bounds.forward`, with x = lse_p - max lse:

    |O^ - O| <= (sum_p P_p |w_p| |V_p - O| + (gamma(n) + gamma(n - 1)) sum_p P_p (1 + |w_p|) max(|V_p|, |O|)) / D

with |w_p| <= exp(u |x| + 5 u) - 1 for the difference and exp (2 ulp), n multiply-adds in the numerator and n - 1
additions in the denominator; then the division, and the rounding to the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from cupyflash._arrays import FLOAT64, HALF_TYPES
from cupyflash.bounds.arithmetic import SLACK, U64, Arithmetic, Precision, claimed, gamma, rounding_of
from cupyflash.reference.arrays import float64_on_host, placed


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Largest error that each element of :func:`cupyflash.merge` may have, against :func:`cupyflash.reference.merge`.

    Arguments are those of :func:`cupyflash.merge`. Returns float64 arrays for out and lse, of the kind of the given
    ones: infinite where a part that has keys is not finite, 0 where none has any.

    Examples
    --------
    >>> out, lse = np.ones((2, 4, 8), np.float16), np.zeros((2, 4), np.float32)
    >>> bound, lse_bound = merge(out, lse)
    >>> bool((bound < 2.0**-10).all()), bool((lse_bound < 2.0**-20).all())
    (True, True)
    """
    dtype = np.dtype(outs[0].dtype)
    unit, flush = astuple(Arithmetic.of(dtype))
    values, scores = np.stack(float64_on_host(*outs), axis=-2), np.stack(float64_on_host(*lses), axis=-1)
    num_parts = scores.shape[-1]
    seen = scores > -np.inf
    bad_lse = (seen & ~np.isfinite(scores) | np.isnan(scores)).any(axis=-1)
    bad_values = (seen[..., None] & ~np.isfinite(values)).any(axis=-2)
    seen = seen | np.isnan(scores)
    values, scores = (np.where(np.isfinite(x), x, 0) for x in (values, scores))
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    largest = np.where(largest == -np.inf, 0, largest)
    with np.errstate(over="ignore", invalid="ignore"):
        relative = scores - largest
        row_sum = np.maximum(np.exp(relative).sum(axis=-1, keepdims=True), 1)
        weights = np.exp(relative) / row_sum
        moved_by = weights * np.expm1(np.minimum(unit * (np.where(seen, -relative, 0) + 6), 1))
        upper = weights + moved_by
        sum_error = gamma(num_parts, unit) * upper.sum(axis=-1) + (num_parts + 2) * flush
        denominator = 1 - moved_by.sum(axis=-1) - sum_error
        out = (weights[..., None] * values).sum(axis=-2)
        core = (moved_by[..., None] * np.abs(values - out[..., None, :])).sum(axis=-2)
        out = np.abs(out)
        core += (gamma(num_parts, unit) * upper[..., None] * np.abs(values)).sum(axis=-2)
        core += sum_error[..., None] * out + (num_parts + 2 + np.abs(values).sum(axis=-2)) * flush
        core = core / denominator[..., None]
        core += unit * (out + core) + flush
        overflows = out + core >= Precision.of(dtype).overflow
        limit = np.finfo(np.float64 if dtype == FLOAT64 else np.float32).max / 4
        overflows |= np.where(seen[..., None], np.abs(values), 0).sum(axis=-2) >= limit
        if dtype in HALF_TYPES:
            core += rounding_of(dtype, out + core)
        core = SLACK * (core + U64 * out)
        lse = np.abs(largest + np.log(row_sum))[..., 0]
        lse_bound = -np.log(denominator) + unit * (2 * np.log(row_sum[..., 0]) + lse + 2) + 2 * flush
        lse_bound = SLACK * (lse_bound + U64 * lse)
    has_keys = seen.any(axis=-1)
    core = np.where(bad_values | bad_lse[..., None] | overflows, np.inf, core)
    lse_bound = np.where(bad_lse, np.inf, lse_bound)
    results = np.where(has_keys[..., None], claimed(core), 0), np.where(has_keys, claimed(lse_bound), 0)
    return tuple(placed(outs[0], list(results), [None, None]))
