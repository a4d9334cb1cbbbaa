"""Errors of the steps of the tiled forward kernels, in the terms of :mod:`cupyflash.bounds.forward`."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

import numpy as np

from cupyflash import _variant
from cupyflash._arrays import HALF_TYPES
from cupyflash._numerics import TILE_STEP
from cupyflash._problem import Problem
from cupyflash.bounds.arithmetic import (
    EXP_ERROR,
    FLUSH,
    FMA_TILES,
    MAX_KEY_TILE,
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
    split: Error = 0.0  # of the exponents by which parts of the keys are joined, absolute
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
    "split": ["split"],
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
        "split": problem.split_size is None,
    }
    return {name: fields for name, fields in TERMS.items() if not absent.get(name, False)}


def tiled_errors(problem: Problem, exact: Exact) -> Errors:
    """Of the kernel for the problem's dtype."""
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


def exp_error(problem: Problem, instruction: float) -> float:
    """Of the exponential that :class:`cupyflash.Numerics` asks for, relative, in kernels whose own errs so."""
    polynomials = {"poly3": 8.77e-5, "poly5": 8.6e-8}  # the largest distance on [0, 1], evaluated densely
    exp = problem.numerics.exp
    if exp in polynomials:  # the fraction, and the multiply-adds of which the last count most
        return polynomials[exp] + 6 * U32
    return 2 * Arithmetic.of(problem.dtype).unit if exp == "accurate" else instruction


def base_2_error(problem: Problem) -> int:
    """Roundings of an exponent of e that a polynomial for powers of 2 takes: log2(e), and the product with it."""
    return 2 if problem.numerics.exp.startswith("poly") and problem.dtype not in HALF_TYPES else 0


@dataclass(frozen=True)
class _Parts:
    """What splitting the keys changes: see :mod:`cupyflash.bounds.forward`. Without it all are 0."""

    num_parts: np.ndarray  # that a row sees
    num_keys: np.ndarray  # of a part
    exponent: np.ndarray | float

    @staticmethod
    def of(problem: Problem, exact: Exact, logarithm) -> _Parts:
        """``logarithm`` bounds the error of a part's lse by its maximum, the logarithm of its sum and itself."""
        size = problem.split_size
        if size is None:
            return _Parts(np.zeros_like(exact.num_keys), exact.num_keys, 0.0)
        unit = Arithmetic.of(problem.dtype).unit
        num_keys = np.minimum(exact.num_keys, size)
        log_sum, largest = np.log(np.maximum(num_keys, 1)), exact.row_max + exact.distance
        joined = unit * (exact.distance + np.log(np.maximum(exact.num_keys, 1)) + 5)  # its difference to lse, and exp
        return _Parts(exact.num_keys // size + 1, num_keys, logarithm(largest, log_sum, largest + log_sum) + joined)


def _sink_error(problem: Problem, exact: Exact, exponent, exp: float) -> Error:
    """Of its exponent and exponential. Where it joins parts, it is below their lse, not below their maximum."""
    error = sink_conversion_error(problem, exact) + exponent(exact.sink_distance) + exp
    if problem.split_size is None:
        return error
    return error + Arithmetic.of(problem.dtype).unit * np.log(np.maximum(exact.num_keys, 1))


def _key_tiles(problem: Problem, plain: tuple[int, int]) -> tuple[int, int]:
    """The fewest and the most keys of a tile. One that is given need not start where a row's keys are counted from."""
    tile = problem.numerics.tile
    return plain if tile is None else (TILE_STEP, tile[1])


def _tensor_core(problem: Problem, exact: Exact) -> Errors:
    """Online softmax in base 2, P rounded for the tensor cores, float32 accumulators."""
    element = Precision.of(problem.dtype)
    numerics, with_sink = problem.numerics, "attn_sink" in problem.operands
    # By how much a weight's logarithm may be above 0, where the maximum in use is an earlier one.
    above = numerics.rescale_threshold * math.log(2)

    def logarithm(row_max, log_sum, lse):
        return U32 * (4 * row_max + 7 * log_sum + 3 * lse + 11 * above) + 2.0**-22 + FLUSH

    parts = _Parts.of(problem, exact, logarithm)
    num_keys, num_parts = parts.num_keys, parts.num_parts
    smallest_tile, largest_tile = _key_tiles(problem, (MIN_KEY_TILE, MAX_KEY_TILE))
    num_tiles = np.ceil(num_keys / smallest_tile)
    exp = exp_error(problem, EXP_ERROR)
    final = _final_score_error(problem, exact)

    # The exponent's argument after q . k: the rounded scale, the fused multiply-add, the maximum's product and the
    # rescaling arguments, together 6 |x| + |m|; and 8 for what is of second order. A pair-by-pair kernel rounds s times
    # log2(e), |s| <= |m| + |x|, and has 3 |x| for that constant, the difference and the rescaling arguments.
    def exponent(distance):
        return U32 * (6 * distance + exact.row_max + 8 + above)

    score = final + exponent(exact.distance)
    # A weight that underflows is rounded absolutely, against a maximum that is itself off by the score error.
    near_max = np.where(exact.relative + exact.gap > -1, score, 0)
    shift = np.exp(2 * np.max(near_max, axis=-1, keepdims=True, initial=0) - exact.gap) / exact.row_sum
    in_two = numerics.p_dtype == "float32"  # P as the sum of two numbers: the second is rounded relative to u P
    if numerics.accumulate == "two-level":
        accumulation = dot_error((1 + in_two) * np.minimum(num_keys, largest_tile)) + 2 * num_tiles * U32
    else:
        accumulation = dot_error((1 + in_two) * num_keys) + num_tiles * U32
    return Errors(
        score=score,
        exponential=exp + (num_tiles + with_sink) * max(exp, EXP_ERROR),
        split=parts.exponent,
        sink=_sink_error(problem, exact, exponent, max(exp, EXP_ERROR)),
        row_sum=gamma(num_keys + num_tiles + 2 + with_sink + num_parts, U32),
        rounding=element.unit**2 if in_two else element.unit,
        underflow=(element.underflow + 2 * FLUSH) * shift,
        accumulation=accumulation + num_parts * U32,
        flushed=(exact.num_keys + np.ceil(exact.num_keys / smallest_tile) + 3 + 3 * num_parts) * FLUSH,
        # Reciprocal, 1 ulp, and product; the sink's factor, or the division after joining parts.
        normalisation=(3 + with_sink + (problem.split_size is not None)) * U32,
        dropout=2 * U32 if problem.dropout_p else 0.0,  # 1 / (1 - p), and the product with it
        logarithm=logarithm(exact.row_max, np.log(exact.row_sum), exact.lse),
        final_score=final,
        maximum=4 * U32 * exact.key_max + 2 * FLUSH,  # in base 2 and back
    )


def _fma(problem: Problem, exact: Exact) -> Errors:
    """In float32 or float64: online softmax in base e, each tile's P V summed by itself."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    numerics, with_sink = problem.numerics, "attn_sink" in problem.operands
    above = numerics.rescale_threshold * math.log(2)

    def logarithm(row_max, log_sum, lse):
        return unit * (4 * log_sum + 2 * lse + 2 + 6 * above) + 2 * flush

    parts = _Parts.of(problem, exact, logarithm)
    num_keys, num_parts = parts.num_keys, parts.num_parts
    smallest_tile, largest_tile = _key_tiles(problem, FMA_TILES)
    exp, base_2 = exp_error(problem, 5 * unit), base_2_error(problem)  # exp: 2 ulp
    num_tiles = np.ceil(num_keys / smallest_tile)
    final = _final_score_error(problem, exact)

    # The distance to the running maximum, the rescaling arguments, together 2 |x|, and 8 for what is of second order.
    def exponent(distance):
        return unit * ((2 + base_2) * distance + 8 + (1 + base_2) * above)

    of_one_sum = np.minimum(num_keys, largest_tile) if numerics.accumulate != "one-level" else num_keys
    num_lane_keys = -(-largest_tile // ROW_LANES)
    return Errors(
        score=final + exponent(exact.distance),
        exponential=exp + (num_tiles + with_sink) * max(exp, 5 * unit),
        split=parts.exponent,
        sink=_sink_error(problem, exact, exponent, max(exp, 5 * unit)),
        row_sum=gamma(num_tiles + num_lane_keys + int(math.log2(ROW_LANES)) + with_sink + num_parts, unit),
        rounding=0.0,
        underflow=2 * flush,
        accumulation=gamma(of_one_sum + num_tiles + num_parts, unit),
        flushed=(exact.num_keys + np.ceil(exact.num_keys / smallest_tile) + 3 + 3 * num_parts) * flush,
        normalisation=(1 + with_sink + (problem.split_size is not None)) * unit,
        dropout=3 * unit if problem.dropout_p else 0.0,  # in float64, 1 - p is rounded, too
        logarithm=logarithm(exact.row_max, np.log(exact.row_sum), exact.lse),
        final_score=final,
        maximum=flush,
    )
