"""Errors of the steps of the backward kernels, in the terms of :mod:`cupyflash.bounds.gradients`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np

from cupyflash import _variant
from cupyflash._arrays import HALF_TYPES
from cupyflash._config import WARP_SIZE
from cupyflash._problem import Problem
from cupyflash.bounds.arithmetic import (
    EXP_ERROR,
    FLUSH,
    FMA_TILES,
    U32,
    Arithmetic,
    Precision,
    dot_error,
    gamma,
    rounding_of,
)
from cupyflash.bounds.forward import weight_error
from cupyflash.bounds.naive import naive_errors, score_overflows
from cupyflash.bounds.pairs import Pairs
from cupyflash.bounds.scores import ScoreErrors, flushed_score, has_function, score_errors
from cupyflash.bounds.steps import base_2_error, exp_error, product_error, sink_conversion_error

MAX_EXPONENT = 50.0  # an error of the exponent beyond it is no bound at all


@dataclass(frozen=True)
class StepErrors:
    """Of one kernel's steps, absolute unless said, for each (query, key) or (query, 1)."""

    weights: np.ndarray  # of P as dS is computed from it
    stored_weights: np.ndarray  # of P as it multiplies dout
    dweights: np.ndarray  # of dP
    delta: np.ndarray
    derivative: np.ndarray | float  # of the score function: itself, and its error
    derivative_error: np.ndarray | float
    dropout: float  # of the scale of kept weights and its product, relative
    sink: np.ndarray | float  # of the sink's weight
    dscore_rounding: Callable[[np.ndarray], np.ndarray]  # of the magnitude of dS, to store it
    arithmetic: Arithmetic
    # Of a sum over (rows, batches) of products, relative to the sum of their magnitudes.
    accumulation: Callable[[int, int], float]


def tiled_errors(problem: Problem, pairs: Pairs) -> StepErrors:
    return (_tensor_core if problem.dtype in HALF_TYPES else _fma)(problem, pairs)


def _tensor_core(problem: Problem, pairs: Pairs) -> StepErrors:
    """P from lse in base 2, float32 accumulators."""
    forward, head_dim_v = pairs.forward, problem.head_dim_v
    function = _score_errors(problem, pairs, product_error(problem, forward))

    exp = max(EXP_ERROR, exp_error(problem, EXP_ERROR))
    in_two = problem.numerics.p_dtype == "float32"

    def stored(magnitude):
        """Of P and dS as they are rounded; as sums of two numbers, what the first leaves is rounded or flushed."""
        rest = rounding_of(problem.dtype, magnitude)
        return rounding_of(problem.dtype, rest) + np.minimum(rest, FLUSH) if in_two else rest

    # log2(e) and the product with it, for the score and for lse; their fused difference; ex2.
    def exponent(size, distance):
        return U32 * (2 * size + distance + 2 * pairs.lse + 8) + pairs.lse_error + exp

    error = function.score + exponent(forward.scores, _below_lse(pairs, forward.distance))
    weights = forward.weights * np.expm1(np.minimum(error, MAX_EXPONENT)) + FLUSH
    return StepErrors(
        weights=weights,
        stored_weights=weights + stored(forward.weights + weights),
        dweights=dot_error(head_dim_v) * pairs.dweight_magnitudes
        + np.minimum((head_dim_v + 2) * FLUSH, 2 * pairs.dweight_magnitudes),
        delta=_delta_error(problem, pairs),
        derivative=function.derivative,
        derivative_error=function.derivative_error,
        dropout=_dropout_error(problem),
        sink=_sink_error(problem, pairs, exponent),
        dscore_rounding=stored,
        arithmetic=Arithmetic.of(problem.dtype),
        accumulation=lambda rows, batches: float(dot_error((1 + in_two) * rows * batches)),
    )


def _fma(problem: Problem, pairs: Pairs) -> StepErrors:
    """In float32 or float64: P from lse in base e, each tile's sums by themselves."""
    forward, arithmetic = pairs.forward, Arithmetic.of(problem.dtype)
    unit, flush = astuple(arithmetic)
    if _variant.pair_by_pair(problem):
        error = product_error(problem, forward)
    else:  # q . k and the rounded scale: its product is part of the fused difference to lse
        error = gamma(problem.head_dim + 1, unit) * forward.products
        error = error + flushed_score(problem, forward, flush, forward.factors)
    function = _score_errors(problem, pairs, error)

    exp = max(5 * unit, exp_error(problem, 5 * unit))  # 2 ulp, and what is of second order
    base_2 = base_2_error(problem)

    # The difference to lse; exp.
    def exponent(size, distance):
        return unit * ((1 + base_2) * distance + 1) + exp + pairs.lse_error

    error = function.score + exponent(forward.scores, _below_lse(pairs, forward.distance))
    weights = forward.weights * np.expm1(np.minimum(error, MAX_EXPONENT)) + flush

    def accumulation(rows: int, batches: int) -> float:
        if problem.numerics.accumulate == "one-level":
            return float(gamma(rows * batches, unit))
        smallest_tile, largest_tile = FMA_TILES
        return float(gamma(min(rows, largest_tile) + batches * -(-rows // smallest_tile), unit))

    return StepErrors(
        weights=weights,
        stored_weights=weights,
        dweights=_dweight_error(problem, pairs),
        delta=_delta_error(problem, pairs),
        derivative=function.derivative,
        derivative_error=function.derivative_error,
        dropout=_dropout_error(problem),
        sink=_sink_error(problem, pairs, exponent),
        dscore_rounding=np.zeros_like,
        arithmetic=arithmetic,
        accumulation=accumulation,
    )


def naive_step_errors(problem: Problem, pairs: Pairs) -> StepErrors:
    """Of the standard method: S, P, dP and dS are stored in the dtype."""
    forward, arithmetic = pairs.forward, Arithmetic.of(problem.dtype)
    unit, flush = astuple(arithmetic)
    stored = partial(rounding_of, problem.dtype) if problem.dtype in HALF_TYPES else np.zeros_like
    steps = naive_errors(problem, forward)
    numerator = weight_error(forward, steps.score + steps.exponential)
    upper = forward.weights + numerator
    row_sum = numerator.sum(axis=-1, keepdims=True) + steps.row_sum * upper.sum(axis=-1, keepdims=True) + steps.flushed
    shrink = np.maximum(1 - row_sum, 0.5)
    weights = (numerator + row_sum * forward.weights) / shrink + 3 * unit * upper + flush
    weights = weights + stored(forward.weights + weights)

    dweights = _dweight_error(problem, pairs)
    dweights = dweights + stored(np.abs(pairs.dweights) + dweights)
    upper_dweights = np.abs(pairs.dweights) + dweights
    stored_overflows = score_overflows(problem, forward) | (upper_dweights >= Precision.of(problem.dtype).overflow)
    weights = np.where(stored_overflows, np.inf, weights)
    products = (forward.weights + weights) * upper_dweights
    delta = (
        (forward.weights * dweights + weights * upper_dweights).sum(axis=-1, keepdims=True)
        + gamma(problem.seqlen_k + 5, unit) * products.sum(axis=-1, keepdims=True)
        + (problem.seqlen_k + 5) * flush
    )
    return StepErrors(
        weights=weights,
        stored_weights=weights,
        dweights=dweights,
        delta=delta + unit * (np.abs(pairs.delta) + delta),
        derivative=1.0,
        derivative_error=0.0,
        dropout=0.0,
        sink=0.0,
        dscore_rounding=stored,
        arithmetic=arithmetic,
        accumulation=lambda rows, batches: float(gamma(rows * batches + 1, unit)),
    )


def _score_errors(problem: Problem, pairs: Pairs, error: np.ndarray) -> ScoreErrors:
    """Of the final score and of the score function's derivative."""
    return score_errors(problem, pairs.forward, error) if has_function(problem) else ScoreErrors(error, 1.0, 0.0)


def _below_lse(pairs: Pairs, below_max: np.ndarray) -> np.ndarray:
    return below_max + np.log(pairs.forward.row_sum)


def _dropout_error(problem: Problem) -> float:
    """1 / (1 - p), in float64 1 - p, too, and the product."""
    return 3 * Arithmetic.of(problem.dtype).unit if problem.dropout_p else 0.0


def _sink_error(problem: Problem, pairs: Pairs, exponent) -> np.ndarray | float:
    """Of exp(sink - lse)."""
    if "attn_sink" not in problem.operands:
        return 0.0
    forward, distance = pairs.forward, pairs.forward.sink_distance
    error = sink_conversion_error(problem, forward)
    error = error + exponent(forward.row_max + distance, _below_lse(pairs, distance))
    sink = forward.sink_weight
    return sink * np.expm1(np.minimum(error, MAX_EXPONENT)) + Arithmetic.of(problem.dtype).flush


def _dweight_error(problem: Problem, pairs: Pairs) -> np.ndarray:
    """Of dP by fused multiply-adds."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    flushed = flush * (problem.head_dim_v + 2 + pairs.dweight_factors)
    return gamma(problem.head_dim_v + 1, unit) * pairs.dweight_magnitudes + np.minimum(
        flushed, 2 * pairs.dweight_magnitudes
    )


def _delta_error(problem: Problem, pairs: Pairs) -> np.ndarray:
    """Of rowsum(dout * out) - dlse, from the given out: a warp, each lane by fused multiply-adds."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    dout, out = np.abs(pairs.dout), np.abs(pairs.out)
    num_roundings = min(problem.head_dim_v, -(-problem.head_dim_v // WARP_SIZE) + int(math.log2(WARP_SIZE)))
    error = pairs.delta_error + gamma(num_roundings, unit) * (dout * out).sum(axis=-1, keepdims=True)
    error = error + flush * (problem.head_dim_v + 2 + (dout + out).sum(axis=-1, keepdims=True))
    return error + unit * (np.abs(pairs.delta) + error)
