"""Bounds for the standard method, which rounds scores and weights to the inputs' dtype."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from cupyflash._arrays import HALF_TYPES
from cupyflash._options import Align
from cupyflash._problem import Problem, attention_problem
from cupyflash.bounds.arithmetic import Arithmetic, Precision, gamma
from cupyflash.bounds.exact import Exact
from cupyflash.bounds.forward import propagated, returned_bounds
from cupyflash.bounds.scores import flushed_score
from cupyflash.bounds.steps import Errors


def attention_naive(
    q,
    k,
    v,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    return_lse: bool = False,
    out=None,
):
    """What :func:`cupyflash.bounds.attention` is, for :func:`cupyflash.naive.attention`.

    Of use for any method that stores S and P in the inputs' dtype.

    Examples
    --------
    >>> from cupyflash import naive, reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 8)).astype(np.float16)
    >>> error = abs(naive.attention(q, k, v) - reference.attention(q, k, v))
    >>> bool((error <= attention_naive(q, k, v)).all())
    True
    """
    problem = attention_problem(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align, return_lse=return_lse)
    return returned_bounds(problem, _bounds, q, k, v, out, return_lse=return_lse)


def naive_errors(problem: Problem, exact: Exact) -> Errors:
    """S and P are stored in the dtype, everything between is float32 or float64."""
    element = Precision.of(problem.dtype)
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    num_keys = problem.seqlen_k
    return Errors(
        score=_stored_score_error(problem, exact) + unit * (2 * exact.distance + 8),
        exponential=6 * unit,
        row_sum=gamma(num_keys + 5, unit),
        rounding=element.unit if problem.dtype in HALF_TYPES else 0.0,
        underflow=element.underflow + 2 * flush,
        accumulation=gamma(num_keys + 3, unit),  # with the division by l
        flushed=(num_keys + 2) * flush,
        normalisation=0.0,
        logarithm=unit * (4 * np.log(exact.row_sum) + 2 * exact.lse + 2) + 2 * flush,
    )


def score_overflows(problem: Problem, exact: Exact) -> np.ndarray:
    """Rows in which a score that the standard method stores may overflow the dtype."""
    upper = exact.scores + _stored_score_error(problem, exact)
    return (upper >= Precision.of(problem.dtype).overflow).any(axis=-1, keepdims=True)


def _stored_score_error(problem: Problem, exact: Exact) -> np.ndarray:
    element = Precision.of(problem.dtype)
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    stored = element.unit if problem.dtype in HALF_TYPES else 0.0
    product_error = gamma(problem.head_dim + 1, unit) * exact.products
    return (
        product_error
        + (stored + 2 * unit) * (exact.scores + product_error)
        + element.underflow
        + flushed_score(problem, exact, flush, exact.factors)
    )


def _bounds(problem: Problem, exact: Exact) -> tuple[np.ndarray, ...]:
    overflows = score_overflows(problem, exact)
    return tuple(np.where(overflows, np.inf, x) for x in propagated(problem, exact, naive_errors(problem, exact)))
