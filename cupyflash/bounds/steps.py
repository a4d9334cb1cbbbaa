"""Errors of the steps of the tiled forward kernels, in the terms of :mod:`cupyflash.bounds.forward`."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

import numpy as np

from cupyflash import _variant
from cupyflash._problem import HALF_TYPES, Problem
from cupyflash.bounds.arithmetic import (
    EXP_ERROR,
    FLUSH,
    FMA_TILES,
    MIN_KEY_TILE,
    ROW_LANES,
    U32,
    Arithmetic,
    Precision,
    conversion_error,
    dot_error,
    gamma,
)
from cupyflash.bounds.exact import Exact
from cupyflash.bounds.scores import flushed_score, has_function, score_errors

Error = np.ndarray | float


@dataclass(frozen=True)
class Errors:
    """The errors of one kernel's steps, as :mod:`cupyflash.bounds.forward` names them; relative unless said."""

    score: Error = 0.0  # of the exponent, absolute: all of it, or without the next one
    score_function: Error = 0.0  # of the exponent, absolute: of softcap, score_mod, bias and ALiBi themselves
    exponential: Error = 0.0  # of exp and of all rescaling factors together, natural log
    sink: Error = 0.0  # of the sink's exponent and exponential, absolute
    row_sum: Error = 0.0  # g
    rounding: Error = 0.0  # t
    underflow: Error = 0.0  # absolute part of t
    accumulation: Error = 0.0  # r
    flushed: Error = 0.0  # what flushing takes from the sums, absolute
    normalisation: Error = 0.0  # of the division by l at the end
    dropout: Error = 0.0  # of the scale of kept weights
    logarithm: Error = 0.0  # of ln l and its sum with the maximum, absolute
    final_score: Error = 0.0  # of the final score itself, absolute
    maximum: Error = 0.0  # of the largest score, absolute, beside what it errs by as a score


#: Sources of error as :func:`cupyflash.bounds.attention_terms` names them.
TERMS = {
    "scores": ["score"],
    "score function": ["score_function"],
    "exponential": ["exponential"],
    "sink": ["sink"],
    "row sum": ["row_sum"],
    "rounding of P": ["rounding", "underflow"],
    "accumulation": ["accumulation"],
    "flushing": ["flushed"],
    "normalisation": ["normalisation"],
    "dropout": ["dropout"],
    "logarithm": ["logarithm"],
}


def terms_of(problem: Problem) -> dict[str, list[str]]:
    """The sources that the problem has."""
    absent = {
        "score function": not has_function(problem),
        "sink": "attn_sink" not in problem.operands,
        "dropout": not problem.dropout_p,
    }
    return {name: fields for name, fields in TERMS.items() if not absent.get(name, False)}


def tiled_errors(problem: Problem, exact: Exact) -> Errors:
    return (_tensor_core if problem.dtype in HALF_TYPES else _fma)(problem, exact)


def product_error(problem: Problem, exact: Exact) -> np.ndarray:
    """Of softmax_scale q . k as the score function gets it, absolute; of a plain kernel, which scales in the exponent,
    without what scaling errs by."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    if problem.dtype not in HALF_TYPES:  # q . k, the rounded scale and the product with it
        error = gamma(problem.head_dim + 2, unit) * exact.products
        return error + flushed_score(problem, exact, flush, exact.factors)
    error = dot_error(problem.head_dim) * exact.products + flushed_score(problem, exact, flush)
    if _variant.pair_by_pair(problem):
        error = error + 2 * unit * np.where(exact.visible, np.abs(exact.scaled) + error, 0)
    return error


def _final_score_error(problem: Problem, exact: Exact) -> np.ndarray:
    error = product_error(problem, exact)
    return score_errors(problem, exact, error).score if has_function(problem) else error


def with_score_function_apart(problem: Problem, exact: Exact, errors: Errors) -> Errors:
    """The same errors, with those that softcap, score_mod, bias and ALiBi have of an exact q . k by themselves."""
    if not has_function(problem):
        return errors
    own = score_errors(problem, exact, np.zeros_like(exact.products)).score
    return replace(errors, score=errors.score - own, score_function=own)


def sink_conversion_error(problem: Problem, exact: Exact) -> Error:
    """Of its conversion to float32."""
    if "attn_sink" not in problem.operands:
        return 0.0
    return conversion_error(problem, problem.operands["attn_sink"]) * (exact.row_max + exact.sink_distance)


def _tensor_core(problem: Problem, exact: Exact) -> Errors:
    """Online softmax in base 2, P rounded for the tensor cores, float32 accumulators."""
    element = Precision.of(problem.dtype)
    num_keys, with_sink = exact.num_keys, "attn_sink" in problem.operands
    num_tiles = np.ceil(num_keys / MIN_KEY_TILE)
    final = _final_score_error(problem, exact)

    # The exponent's argument after q . k: the rounded scale, the fused multiply-add, the maximum's product and the
    # rescaling arguments, together 6 |x| + |m|; and 8 for what is of second order. A pair-by-pair kernel rounds s times
    # log2(e), |s| <= |m| + |x|, and has 3 |x| for that constant, the difference and the rescaling arguments.
    def exponent(distance):
        return U32 * (6 * distance + exact.row_max + 8)

    score = final + exponent(exact.distance)
    # A weight that underflows is rounded absolutely, against a maximum that is itself off by the score error.
    near_max = np.where(exact.relative + exact.gap > -1, score, 0)
    shift = np.exp(2 * np.max(near_max, axis=-1, keepdims=True, initial=0) - exact.gap) / exact.row_sum
    return Errors(
        score=score,
        exponential=(1 + num_tiles + with_sink) * EXP_ERROR,
        sink=sink_conversion_error(problem, exact) + exponent(exact.sink_distance) + EXP_ERROR,
        row_sum=gamma(num_keys + num_tiles + 2 + with_sink, U32),
        rounding=element.unit,
        underflow=(element.underflow + 2 * FLUSH) * shift,
        accumulation=dot_error(num_keys) + num_tiles * U32,
        flushed=(num_keys + num_tiles + 3) * FLUSH,
        normalisation=(3 + with_sink) * U32,  # reciprocal, 1 ulp, and product; the sink's factor
        dropout=2 * U32 if problem.dropout_p else 0.0,  # 1 / (1 - p), and the product with it
        logarithm=U32 * (4 * exact.row_max + 7 * np.log(exact.row_sum) + 3 * exact.lse) + 2.0**-22 + FLUSH,
        final_score=final,
        maximum=4 * U32 * exact.key_max + 2 * FLUSH,  # in base 2 and back
    )


def _fma(problem: Problem, exact: Exact) -> Errors:
    """In float32 or float64: online softmax in base e, each tile's P V summed by itself."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    num_keys, with_sink = exact.num_keys, "attn_sink" in problem.operands
    smallest_tile, largest_tile = FMA_TILES
    num_tiles = np.ceil(num_keys / smallest_tile)
    final = _final_score_error(problem, exact)

    # The distance to the running maximum, the rescaling arguments, together 2 |x|, and 8 for what is of second order.
    def exponent(distance):
        return unit * (2 * distance + 8)

    return Errors(
        score=final + exponent(exact.distance),
        exponential=(1 + num_tiles + with_sink) * 5 * unit,  # exp: 2 ulp
        sink=sink_conversion_error(problem, exact) + exponent(exact.sink_distance) + 5 * unit,
        row_sum=gamma(num_tiles + largest_tile // ROW_LANES + int(math.log2(ROW_LANES)) + with_sink, unit),
        rounding=0.0,
        underflow=2 * flush,
        accumulation=gamma(np.minimum(num_keys, largest_tile) + num_tiles, unit),
        flushed=(num_keys + num_tiles + 3) * flush,
        normalisation=(1 + with_sink) * unit,
        dropout=3 * unit if problem.dropout_p else 0.0,  # in float64, 1 - p is rounded, too
        logarithm=unit * (4 * np.log(exact.row_sum) + 2 * exact.lse + 2) + 2 * flush,
        final_score=final,
        maximum=flush,
    )
