"""From the errors of the backward's steps to those of the gradients.

With the score function's derivative f', the factor z of dropout and the distance a of ALiBi,

    dF = P (z dP - delta),   dS = f' dF,   dq = scale dS k,   dk = scale dS^T q,   dv = (z P)^T dout,
    dbias = sum dF,   dslope = -sum a dF,   dsink = -sum_i exp(sink - lse_i) delta_i.

P errs by P w, dP and delta by E_dP and E_delta, z dP by z E_dP and the two roundings of z and the product, so that

    |dF^ - dF| <= P E_D + P |w| (|D| + E_D),   D = z dP - delta,   E_D = z E_dP + E_z + E_delta + u |D|
    |dS^ - dS| <= |f'| |dF^ - dF| + E_f' |dF^| + u |dS|,

and for the tensor cores dS^ is then rounded to 16 bits, as is z P^. The sums for dbias, dslope and dsink are of the
float32 (or float64) dF^ before that rounding: n terms in any order err by gamma(n) of the sum of their magnitudes; a
row's part of dslope is summed first, over at most S keys, and then the rows' parts. a is exact up to 2^24. They are
rounded once, to the dtype of their operand. The sums over keys, queries and broadcast dimensions that dq, dk and dv
are, are one product with a live accumulator each; float32 and float64 sum each tile by itself first.

The bounds of dslope and dsink take the errors of all n pairs or queries to have one sign, and are about sqrt(n) times
the errors that are met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from cupyflash._gradients import Gradients
from cupyflash._problem import Problem
from cupyflash.bounds.arithmetic import ILL_CONDITIONED, SLACK, U64, Precision, gamma, largest, rounding_of
from cupyflash.bounds.backward_steps import StepErrors
from cupyflash.bounds.pairs import Pairs
from cupyflash.bounds.scores import has_function
from cupyflash.reference.arrays import summed_to
from cupyflash.reference.scores import distances


@dataclass(frozen=True)
class _Terms:
    """Of each pair or row, what a gradient is the sum of; 0 where nothing is claimed."""

    exact: np.ndarray
    error: np.ndarray
    touched: np.ndarray  # bool: adds something
    spoilt: np.ndarray  # bool: adds what nothing is claimed of

    @staticmethod
    def of(exact, error, touched, unbounded, shape) -> _Terms:
        where = touched & ~unbounded
        arrays = np.where(where, exact, 0), np.where(where, error, 0), touched, touched & unbounded
        return _Terms(*(np.broadcast_to(x, shape) for x in arrays))

    @property
    def mT(self) -> _Terms:
        return _Terms(*(x.mT for x in (self.exact, self.error, self.touched, self.spoilt)))


def num_terms(problem: Problem, operands: Mapping[str, Any]) -> dict[str, int]:
    """How many roundings the sums for the optional operands' gradients have in a row, in any order."""
    rows = math.prod((*problem.leading_shape, problem.seqlen_q))

    def summed(count: int, name: str) -> int:
        return count // max(math.prod(operands[name].shape), 1)

    counts = {name: summed(rows, name) for name in ("alibi_slopes", "attn_sink") if name in operands}
    if "alibi_slopes" in operands:  # each row's part, and then theirs
        counts["alibi_slopes"] += problem.seqlen_k + 2
    if "bias" in operands:
        counts["bias"] = summed(rows * problem.seqlen_k, "bias")
    return counts


def gradient_bounds(
    problem: Problem, pairs: Pairs, errors: StepErrors, operands: Mapping[str, Any], counts: Mapping[str, int]
) -> Gradients:
    """Of the gradients of the operands that are given by name: arrays of their shapes.

    ``counts`` are those of :func:`num_terms`; of all sequences where the problem is one of a packed batch.
    """
    forward = pairs.forward
    visible, weights, dropout = forward.visible, forward.weights, forward.dropout
    unit, flush = astuple(errors.arithmetic)
    dweights = np.abs(dropout * pairs.dweights)
    difference = dropout * pairs.dweights - pairs.delta
    difference_error = dropout * errors.dweights + errors.delta
    difference_error = difference_error + errors.dropout * (dweights + difference_error)
    difference_error = difference_error + unit * (np.abs(difference) + difference_error)
    upper = np.abs(difference) + difference_error
    dfinal = weights * difference
    error = weights * difference_error + errors.weights * upper
    error = error + unit * (np.abs(dfinal) + error) + 2 * flush * (1 + upper)

    dscores, dscore_error = dfinal, error
    if has_function(problem):
        dscores = errors.derivative * dfinal
        dscore_error = np.abs(errors.derivative) * error + errors.derivative_error * (np.abs(dfinal) + error)
        dscore_error = dscore_error + unit * (np.abs(dscores) + dscore_error) + flush
    dscore_error = dscore_error + errors.dscore_rounding(np.abs(dscores) + dscore_error)
    stored_weights = dropout * errors.stored_weights
    stored_weights = stored_weights + errors.dropout * (dropout * weights + stored_weights)

    overflows = np.abs(dscores) + dscore_error >= Precision.of(problem.dtype).overflow
    unbounded = visible & (overflows | (errors.weights > ILL_CONDITIONED))
    unbounded = pairs.unbounded | unbounded.any(axis=-1, keepdims=True)
    shape = (*problem.leading_shape, problem.seqlen_q, problem.seqlen_k)

    def terms(exact, error):
        return _Terms.of(exact, error, visible, unbounded, shape)

    dscores, final = terms(dscores, dscore_error), terms(dfinal, error)
    of_values = terms(dropout * weights, stored_weights)
    bounds = {
        "dq": _product(problem, errors, problem.softmax_scale, dscores, pairs.k, operands["q"]),
        "dk": _product(problem, errors, problem.softmax_scale, dscores.mT, pairs.q, operands["k"]),
        "dv": _product(problem, errors, 1.0, of_values.mT, pairs.dout, operands["v"]),
    }
    if "bias" in operands:
        bounds["dbias"] = _sum(problem, errors, final, gamma(counts["bias"], unit), operands["bias"])
    if "alibi_slopes" in operands:
        slopes, distance = operands["alibi_slopes"], distances(problem)
        weighted, accumulation = terms(distance * dfinal, distance * error), gamma(counts["alibi_slopes"], unit)
        bounds["dalibi_slopes"] = _sum_of_rows(problem, errors, weighted, accumulation, slopes)
    if "attn_sink" in operands:
        accumulation = gamma(counts["attn_sink"], unit)
        bounds["dattn_sink"] = _sink_bound(problem, pairs, errors, unbounded, accumulation, operands["attn_sink"])
    return Gradients(**bounds)


def _sink_bound(problem: Problem, pairs: Pairs, errors: StepErrors, unbounded, accumulation, sinks) -> np.ndarray:
    unit, flush = astuple(errors.arithmetic)
    sink, size = pairs.forward.sink_weight, np.abs(pairs.delta)
    error = sink * errors.delta + errors.sink * (size + errors.delta)
    error = error + unit * (sink * size + error) + flush * (1 + size + errors.delta)
    shape = (*problem.leading_shape, problem.seqlen_q, 1)
    rows = _Terms.of(sink * pairs.delta, error, pairs.forward.sink > -np.inf, unbounded, shape)
    return _sum_of_rows(problem, errors, rows, accumulation, sinks)


def _sum_of_rows(problem: Problem, errors: StepErrors, terms: _Terms, accumulation, operand) -> np.ndarray:
    """Of an operand without rows and columns."""
    return _sum(problem, errors, terms, accumulation, operand[..., None, None])[..., 0, 0]


def _sum(problem: Problem, errors: StepErrors, terms: _Terms, accumulation, operand) -> np.ndarray:
    """Bound of a sum of pairs to an operand's shape, rounded to its dtype."""

    def summed(x):
        return summed_to(operand.shape, x)

    exact, magnitude = np.abs(summed(terms.exact)), summed(np.abs(terms.exact) + terms.error)
    core = summed(terms.error) + accumulation * magnitude
    core = core + errors.arithmetic.flush * (1 + summed(terms.touched.astype(np.float64)))
    return _rounded(problem, operand.dtype, exact, core, magnitude, summed, terms)


def _product(problem: Problem, errors: StepErrors, factor, terms: _Terms, values, operand) -> np.ndarray:
    """Bound of factor * terms @ values, summed to an operand's shape and rounded to the dtype."""
    magnitudes, shape = np.abs(values), operand.shape
    unit, flush = astuple(errors.arithmetic)
    leading = terms.exact.shape[:-2]
    rows, batches = terms.exact.shape[-1], max(math.prod(leading), 1) // max(math.prod(shape[:-2]), 1)

    def summed(x):
        return summed_to(shape, np.broadcast_to(x, (*terms.exact.shape[:-1], shape[-1])))

    exact = np.abs(factor * summed(terms.exact @ values))
    upper_terms = np.abs(terms.exact) + terms.error
    magnitude = summed(upper_terms @ magnitudes)
    core = summed(terms.error @ magnitudes) + errors.accumulation(rows, batches) * magnitude
    core = core + flush * (rows * batches + 2 + summed(upper_terms.sum(axis=-1, keepdims=True)))
    core = abs(factor) * core + flush
    core = core + 3 * unit * (exact + core)
    magnitude = magnitude * max(1, abs(factor))

    def summed_rows(x):
        return summed(x.any(axis=-1, keepdims=True).astype(np.float64))

    return _rounded(problem, problem.dtype, exact, core, magnitude, summed_rows, terms)


def _rounded(problem: Problem, dtype: np.dtype, exact, core, magnitude, summed, terms: _Terms) -> np.ndarray:
    """Infinite where a sum may overflow, or nothing is claimed of one of its terms; 0 where there is none."""
    overflows = (magnitude >= largest(problem) / 4) | (exact + core >= Precision.of(dtype).overflow)
    rounds = np.dtype(problem.lse_dtype).itemsize > dtype.itemsize
    core = core + (rounding_of(dtype, exact + core) if rounds else 0) + U64 * exact  # the latter of the reference
    is_spoilt, is_touched = (summed(x.astype(np.float64)) > 0 for x in (terms.spoilt, terms.touched))
    return np.where(is_touched, np.where(is_spoilt | overflows, np.inf, SLACK * core), 0)
