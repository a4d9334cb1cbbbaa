"""Errors of a final score and of its derivative, step by step: softcap, score_mod, bias, ALiBi.

With s = softmax_scale q . k, known to e, and the roundoff u of the arithmetic, each step adds to the error of what it
is given what it errs by itself:

    softcap     f = c tanh(s / c):      f' (e + 2 u |s|) + (2 + 2 ulp) |f|, where f' = 1 - tanh^2 is taken where the
                                        interval s -+ e has it largest. 2 u |s|: c as it is rounded, the division;
                                        2 |f| u: c again, the product; tanh errs by 2 ulp, 4 u
    score_mod                           a running error analysis of the expression (cupyflash._score_mod)
    bias        g = f + b:              e + u |g|, and u |b| where a float64 bias is read as float32
    ALiBi       h = g - a |j - i - shift|:  e + u |h|, and u a |j - i - shift| where a float64 slope is read as float32;
                                        the distance is exact, and the multiply-add is fused

The derivative of the softcap, 1 - t^2 from the rounded t = tanh(s / c), errs by 2 |t| dt + 2 u, where dt is the error
of t; bias and ALiBi have derivative 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash._problem import Problem
from cupyflash._score_mod import evaluate_with_error
from cupyflash.bounds.arithmetic import TANH_ULP, Arithmetic, conversion_error, largest
from cupyflash.bounds.exact import Exact
from cupyflash.reference.arrays import operand, pair_shape
from cupyflash.reference.scores import capped, distances


@dataclass(frozen=True)
class ScoreErrors:
    """Of each pair, absolute."""

    score: np.ndarray
    derivative: np.ndarray | float  # exact
    derivative_error: np.ndarray | float


def has_function(problem: Problem) -> bool:
    """Whether the final score is more than softmax_scale q . k."""
    given = problem.operands.keys() & {"bias", "alibi_slopes"}
    return bool(given) or problem.softcap is not None or problem.score_mod is not None


def score_errors(problem: Problem, exact: Exact, error: np.ndarray) -> ScoreErrors:
    """Of the final scores, from the error of softmax_scale q . k; 0 where masked."""
    unit, flush = (arithmetic := Arithmetic.of(problem.dtype)).unit, arithmetic.flush
    scores = exact.scaled
    derivative, derivative_error = 1.0, 0.0
    if problem.softcap is not None:
        scores, derivative, error, derivative_error = _capped(problem.softcap, scores, error, arithmetic)
    if problem.score_mod is not None:
        scores, error = (np.broadcast_to(x, pair_shape(problem)) for x in (scores, error))
        scores, factor, error, factor_error = evaluate_with_error(problem, scores, error)
        upper = np.abs(factor) + factor_error
        derivative_error = upper * derivative_error + np.abs(derivative) * (factor_error + unit * upper) + flush
        derivative = factor * derivative

    intermediate = np.abs(scores)
    if (bias := operand(problem, "bias")) is not None:
        scores = scores + bias
        error = error + conversion_error(problem, problem.operands["bias"]) * np.abs(bias) + 2 * flush
        error = error + unit * (np.abs(scores) + error)
        intermediate = np.maximum(intermediate, np.abs(scores))
    if (slopes := operand(problem, "alibi_slopes")) is not None:
        distance = distances(problem)
        removed_by = slopes[..., None, None] * distance
        scores = scores - removed_by
        error = error + conversion_error(problem, problem.operands["alibi_slopes"]) * np.abs(removed_by)
        error = error + flush * (1 + distance)
        error = error + unit * (np.abs(scores) + error)
    # A step that overflows downwards removes the pair, which is no error only if the final score is as low.
    limit = largest(problem) / 2
    error = np.where((intermediate >= limit) & ~(scores <= -limit), np.inf, error)
    return ScoreErrors(np.where(exact.visible, error, 0), derivative, derivative_error)


def _capped(cap: float, scores, error, arithmetic: Arithmetic):
    """The capped score, its derivative, and their errors."""
    unit, flush = arithmetic.unit, arithmetic.flush
    value, derivative = capped(scores, cap)
    moved = error + 2 * unit * (np.abs(scores) + error) + cap * flush
    _, steepest = capped(np.maximum(np.abs(scores) - moved, 0), cap)
    value_error = np.minimum(steepest * moved, 2 * cap)
    value_error = value_error + (2 + 2 * TANH_ULP) * unit * (np.abs(value) + value_error) + (1 + cap) * flush
    tanh = np.abs(value) / cap
    tanh_error = np.minimum(steepest * moved / cap, 2) + 2 * TANH_ULP * unit * tanh + flush
    return value, derivative, value_error, (2 * tanh + tanh_error) * tanh_error + 2 * unit


def flushed_score(problem: Problem, exact: Exact, flush: float, factors: np.ndarray | float = 0.0) -> np.ndarray:
    """What a score loses where products, partial sums or ``factors`` of q . k are flushed to zero."""
    lost = abs(problem.softmax_scale) * flush * (problem.head_dim + 2 + factors)
    return np.minimum(lost, 2 * exact.products)
