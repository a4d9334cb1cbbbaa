"""Bounds on the error of each element of the gradients, from the same building blocks as the forward ones.

The backward rebuilds P from lse, P^ = P (1 + w), where |w| <= exp(e) - 1 and e collects the errors of the score, of
lse and of the exponential; it is not normalised again, so that lse's error enters. With D = dP - delta,

    |dS^ - dS| <= P E_D + P |w| (|D| + E_D),    E_D = E_dP + E_delta

and for the tensor cores both P^ and dS^ are rounded to 16 bits. E_delta holds what the given out, rounded to its dtype,
moves rowsum(dout * out) by: in 16 bits mostly the largest term by far. The sums over keys, queries and broadcast
dimensions are one product with a live accumulator each; float32 and float64 sum each tile by itself first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial

import numpy as np

from cupyflash._config import WARP_SIZE
from cupyflash._gradients import Gradients, backward_problem
from cupyflash._problem import FLOAT64, HALF_TYPES, Align, Problem
from cupyflash.bounds.arithmetic import (
    EXP_ERROR,
    FLUSH,
    FMA_TILES,
    ILL_CONDITIONED,
    SLACK,
    U32,
    U64,
    Arithmetic,
    Precision,
    claimed,
    dot_error,
    gamma,
    largest,
)
from cupyflash.bounds.exact import Exact
from cupyflash.bounds.forward import weight_error
from cupyflash.bounds.naive import naive_errors, score_overflows
from cupyflash.bounds.scores import flushed_score
from cupyflash.reference.arrays import float64_on_host, on_host, returned_gradients, summed_to, wide
from cupyflash.reference.forward import exact_attention
from cupyflash.reference.scores import pair_scores

_MAX_EXPONENT = 50.0  # an error of the exponent beyond it is no bound at all


def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    grads_out=None,
) -> Gradients:
    """Largest error of each element of :func:`cupyflash.attention_backward`, against :mod:`cupyflash.reference`.

    Arguments, shapes and errors are those of :func:`cupyflash.attention_backward`; the bounds are float64 arrays of
    the gradients' shapes. The errors of the given out and lse count as they are. Where nothing is summed (a query that
    sees no key, a key that no query sees) the bound is 0.

    Examples
    --------
    >>> from cupyflash import attention_vjp, reference
    >>> dout, q, k, v = np.random.default_rng(0).standard_normal((4, 2, 16, 8)).astype(np.float16)
    >>> (out, lse), pullback = attention_vjp(q, k, v, return_lse=True)
    >>> exact = reference.attention_backward(dout, q, k, v, out, lse)
    >>> bounds = attention_backward(dout, q, k, v, out, lse)
    >>> all((abs(x - y) <= bound).all() for x, y, bound in zip(pullback(dout), exact, bounds))
    True
    """
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, softmax_scale=softmax_scale, causal=causal, align=align,
        grads_out=grads_out, gradient_dtype=FLOAT64,
    )  # fmt: skip
    return _returned(problem, _tiled_errors, (dout, q, k, v, out, lse, dlse), grads_out)


def attention_backward_terms(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
) -> dict[str, Gradients]:
    """What each source of error contributes to :func:`attention_backward`: the bounds that it has alone.

    Arguments are those of :func:`attention_backward`. A term holds NumPy arrays of the gradients' shapes, infinite
    where the bound is; to first order the terms sum to it. "delta" holds the error of the given out.

    Examples
    --------
    >>> from cupyflash import attention_vjp
    >>> dout, q, k, v = np.random.default_rng(0).standard_normal((4, 16, 8)).astype(np.float16)
    >>> (out, lse), _ = attention_vjp(q, k, v, return_lse=True)
    >>> terms = attention_backward_terms(dout, q, k, v, out, lse)
    >>> max(terms, key=lambda name: terms[name].dv.mean())
    'rounding of P'
    """
    problem, _ = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, softmax_scale=softmax_scale, causal=causal, align=align,
        gradient_dtype=FLOAT64,
    )  # fmt: skip
    shapes = [x.shape for x in (q, k, v)]
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = _Pairs.of(problem, dout, q, k, v, out, lse, dlse)
        errors = _tiled_errors(problem, pairs)
        given_lse = pairs.forward.weights * np.expm1(np.minimum(pairs.lse_error, _MAX_EXPONENT))
        none = _Errors(
            weights=np.zeros_like(errors.weights),
            stored_weights=np.zeros_like(errors.weights),
            dweights=np.zeros_like(errors.dweights),
            delta=np.zeros_like(errors.delta),
            dscore_rounding=np.zeros_like,
            arithmetic=Arithmetic(0.0, 0.0),
            accumulation=lambda rows, batches: 0.0,
        )
        sources = {
            "given lse": {"weights": given_lse, "stored_weights": given_lse},
            "scores and exponential": dict.fromkeys(("weights", "stored_weights"), errors.weights - given_lse),
            "rounding of P": {"stored_weights": errors.stored_weights - errors.weights},
            "dP": {"dweights": errors.dweights},
            "delta": {"delta": errors.delta},
            "rounding of dS": {"dscore_rounding": errors.dscore_rounding},
            "arithmetic": {"arithmetic": errors.arithmetic},
            "accumulation": {"accumulation": errors.accumulation},
        }
        least = _gradients(problem, pairs, none, shapes)
        alone = {name: _gradients(problem, pairs, replace(none, **x), shapes) for name, x in sources.items()}
        claimed = [np.isfinite(bound) for bound in _gradients(problem, pairs, errors, shapes)]
        terms = {name: [x - y for x, y in zip(bounds, least, strict=True)] for name, bounds in alone.items()}
    terms["rounding of the result"] = least
    return {
        name: Gradients(*(np.where(where, x, np.inf) for where, x in zip(claimed, bounds, strict=True)))
        for name, bounds in terms.items()
    }


def attention_naive_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    grads_out=None,
) -> Gradients:
    """The same for :func:`cupyflash.naive.attention_backward`, which rounds S, P, dP and dS to the inputs' dtype."""
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, softmax_scale=softmax_scale, causal=causal, align=align,
        grads_out=grads_out, gradient_dtype=FLOAT64,
    )  # fmt: skip
    return _returned(problem, _naive, (dout, q, k, v, out, lse, dlse), grads_out)


@dataclass(frozen=True)
class _Pairs:
    """Exact values of each (query, key), and what they are made of; non-finite inputs are replaced by 0."""

    forward: Exact
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray  # as given
    lse: np.ndarray  # (query, 1); 0 where the row sees no key
    lse_error: np.ndarray  # of the given one
    delta: np.ndarray  # (query, 1): rowsum(dout * out) - dlse
    delta_error: np.ndarray  # (query, 1): from the error of the given out
    scores: np.ndarray  # 0 where masked
    dweights: np.ndarray  # dP
    dweight_magnitudes: np.ndarray  # |dout| . |v|
    dweight_factors: np.ndarray  # sum of |dout| and sum of |v|, together
    unbounded: np.ndarray  # (query, 1) bool: a row of which nothing is claimed, whatever the kernel

    @staticmethod
    def of(problem: Problem, dout, q, k, v, out, lse, dlse) -> _Pairs:
        forward = Exact.of(problem, q, k, v)
        dout, out, lse = float64_on_host(dout, out, lse)
        lse = lse[..., None]
        dlse = np.zeros_like(lse) if dlse is None else float64_on_host(dlse)[0][..., None]
        q, k, v = (_finite(x) for x in on_host(problem, q, k, v))
        nonfinite = forward.sees_nonfinite | ~np.isfinite(dlse)
        for rows in dout, out:
            nonfinite = nonfinite | ~np.isfinite(rows).all(axis=-1, keepdims=True)

        dout, out = _finite(dout), _finite(out)
        exact_q, exact_k, exact_v, exact_dout = wide(problem.dtype, q, k, v, dout)
        exact_out, exact_lse, _ = exact_attention(problem, exact_q, exact_k, exact_v)
        exact_lse = exact_lse[..., None]
        sees_keys = forward.visible.any(axis=-1, keepdims=True)
        lse_error = np.abs(np.asarray(np.where(sees_keys, lse - exact_lse, 0)))
        magnitudes = np.abs(dout) @ np.abs(v).mT
        overflows = np.where(forward.visible, magnitudes, 0) >= largest(problem) / 4
        unbounded = nonfinite | forward.may_overflow | ~np.isfinite(lse_error) | overflows.any(axis=-1, keepdims=True)
        return _Pairs(
            forward=forward,
            q=q,
            k=k,
            v=v,
            dout=dout,
            out=out,
            lse=np.where(sees_keys, np.asarray(exact_lse), 0),
            lse_error=_finite(lse_error),
            delta=_finite(np.asarray((exact_dout * exact_out).sum(axis=-1, keepdims=True) - _finite(dlse))),
            delta_error=_finite(np.abs(np.asarray((exact_dout * (out - exact_out)).sum(axis=-1, keepdims=True)))),
            scores=np.where(forward.visible, pair_scores(problem, q, k).final, 0),
            dweights=np.where(forward.visible, np.asarray(exact_dout @ exact_v.mT), 0),
            dweight_magnitudes=np.where(forward.visible, magnitudes, 0),
            dweight_factors=np.abs(dout).sum(axis=-1, keepdims=True) + np.abs(v).sum(axis=-1, keepdims=True).mT,
            unbounded=unbounded & sees_keys,
        )


@dataclass(frozen=True)
class _Errors:
    """Absolute errors of one kernel's steps, for each (query, key) or (query, 1)."""

    weights: np.ndarray  # of P as dS is computed from it
    stored_weights: np.ndarray  # of P as it multiplies dout
    dweights: np.ndarray  # of dP
    delta: np.ndarray
    dscore_rounding: Callable[[np.ndarray], np.ndarray]  # of the magnitude of dS, to store it
    arithmetic: Arithmetic
    # Of a sum over (rows, batches) of products, relative to the sum of their magnitudes.
    accumulation: Callable[[int, int], float]


def _tiled_errors(problem: Problem, pairs: _Pairs) -> _Errors:
    return (_tiled if problem.dtype in HALF_TYPES else _fma)(problem, pairs)


def _tiled(problem: Problem, pairs: _Pairs) -> _Errors:
    """Errors of the tiled kernels: P from lse, float32 accumulators."""
    forward, head_dim_v = pairs.forward, problem.head_dim_v
    exponent = (
        dot_error(problem.head_dim) * forward.products
        + U32 * (2 * forward.scores + np.abs(pairs.scores - pairs.lse) + 2 * np.abs(pairs.lse) + 8)
        + pairs.lse_error
        + flushed_score(problem, forward, FLUSH)
        + EXP_ERROR
    )
    weights = forward.weights * np.expm1(np.minimum(exponent, _MAX_EXPONENT)) + FLUSH
    return _Errors(
        weights=weights,
        stored_weights=weights + _rounding(problem, forward.weights + weights),
        dweights=dot_error(head_dim_v) * pairs.dweight_magnitudes
        + np.minimum((head_dim_v + 2) * FLUSH, 2 * pairs.dweight_magnitudes),
        delta=_delta_error(problem, pairs),
        dscore_rounding=partial(_rounding, problem),
        arithmetic=Arithmetic.of(problem.dtype),
        accumulation=lambda rows, batches: dot_error(rows * batches),
    )


def _fma(problem: Problem, pairs: _Pairs) -> _Errors:
    """Errors of the tiled kernels in float32 or float64: P from lse, each tile's sums by themselves."""
    forward, arithmetic = pairs.forward, Arithmetic.of(problem.dtype)
    unit, flush = astuple(arithmetic)
    # q . k and the rounded scale; the fused difference to lse; exp, 2 ulp, and 2 u for what is of second order.
    exponent = (
        gamma(problem.head_dim + 1, unit) * forward.products
        + unit * (np.abs(pairs.scores - pairs.lse) + 6)
        + pairs.lse_error
        + flushed_score(problem, forward, flush, forward.factors)
    )
    weights = forward.weights * np.expm1(np.minimum(exponent, _MAX_EXPONENT)) + flush

    def accumulation(rows: int, batches: int) -> float:
        smallest_tile, largest_tile = FMA_TILES
        return gamma(min(rows, largest_tile) + batches * -(-rows // smallest_tile), unit)

    return _Errors(
        weights=weights,
        stored_weights=weights,
        dweights=_dweight_error(problem, pairs),
        delta=_delta_error(problem, pairs),
        dscore_rounding=partial(_rounding, problem),
        arithmetic=arithmetic,
        accumulation=accumulation,
    )


def _dweight_error(problem: Problem, pairs: _Pairs) -> np.ndarray:
    """Of dP by fused multiply-adds."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    flushed = flush * (problem.head_dim_v + 2 + pairs.dweight_factors)
    return gamma(problem.head_dim_v + 1, unit) * pairs.dweight_magnitudes + np.minimum(
        flushed, 2 * pairs.dweight_magnitudes
    )


def _delta_error(problem: Problem, pairs: _Pairs) -> np.ndarray:
    """Of rowsum(dout * out) - dlse, from the given out: a warp, each lane by fused multiply-adds."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    dout, out = np.abs(pairs.dout), np.abs(pairs.out)
    num_roundings = min(problem.head_dim_v, -(-problem.head_dim_v // WARP_SIZE) + int(math.log2(WARP_SIZE)))
    error = pairs.delta_error + gamma(num_roundings, unit) * (dout * out).sum(axis=-1, keepdims=True)
    error = error + flush * (problem.head_dim_v + 2 + (dout + out).sum(axis=-1, keepdims=True))
    return error + unit * (np.abs(pairs.delta) + error)


def _naive(problem: Problem, pairs: _Pairs) -> _Errors:
    """Errors of the standard method: S, P, dP and dS are stored in the dtype."""
    forward, arithmetic = pairs.forward, Arithmetic.of(problem.dtype)
    unit, flush = astuple(arithmetic)
    steps = naive_errors(problem, forward)
    numerator = weight_error(forward, steps.score + steps.exponential)
    upper = forward.weights + numerator
    row_sum = numerator.sum(axis=-1, keepdims=True) + steps.row_sum * upper.sum(axis=-1, keepdims=True) + steps.flushed
    shrink = np.maximum(1 - row_sum, 0.5)
    weights = (numerator + row_sum * forward.weights) / shrink + 3 * unit * upper + flush
    weights = weights + _rounding(problem, forward.weights + weights)

    dweights = _dweight_error(problem, pairs)
    dweights = dweights + _rounding(problem, np.abs(pairs.dweights) + dweights)
    upper_dweights = np.abs(pairs.dweights) + dweights
    stored_overflows = score_overflows(problem, forward) | (upper_dweights >= Precision.of(problem.dtype).overflow)
    weights = np.where(stored_overflows, np.inf, weights)
    products = (forward.weights + weights) * upper_dweights
    delta = (
        (forward.weights * dweights + weights * upper_dweights).sum(axis=-1, keepdims=True)
        + gamma(problem.seqlen_k + 5, unit) * products.sum(axis=-1, keepdims=True)
        + (problem.seqlen_k + 5) * flush
    )
    return _Errors(
        weights=weights,
        stored_weights=weights,
        dweights=dweights,
        delta=delta + unit * (np.abs(pairs.delta) + delta),
        dscore_rounding=partial(_rounding, problem),
        arithmetic=arithmetic,
        accumulation=lambda rows, batches: gamma(rows * batches + 1, unit),
    )


def _rounding(problem: Problem, magnitude: np.ndarray) -> np.ndarray:
    """Of a value stored in the dtype: by u |x|, or by half the spacing of subnormals and never by more than |x|."""
    if problem.dtype not in HALF_TYPES:
        return np.zeros_like(magnitude)
    element = Precision.of(problem.dtype)
    return np.maximum(element.unit * magnitude, np.minimum(magnitude, element.underflow))


def _gradients(problem: Problem, pairs: _Pairs, errors: _Errors, shapes) -> list[np.ndarray]:
    """From the errors of the steps to those of dq, dk and dv."""
    visible, weights = pairs.forward.visible, pairs.forward.weights
    unit, flush = astuple(errors.arithmetic)
    difference = pairs.dweights - pairs.delta
    difference_error = errors.dweights + errors.delta
    difference_error = difference_error + unit * (np.abs(difference) + difference_error)
    upper = np.abs(difference) + difference_error
    dscores = weights * difference
    error = weights * difference_error + errors.weights * upper
    error = error + unit * (np.abs(dscores) + error) + 2 * flush * (1 + upper)
    overflow = Precision.of(problem.dtype).overflow
    error = error + errors.dscore_rounding(np.abs(dscores) + error)

    unbounded = visible & ((np.abs(dscores) + error >= overflow) | (errors.weights > ILL_CONDITIONED))
    unbounded = pairs.unbounded | unbounded.any(axis=-1, keepdims=True)
    claimed = visible & ~unbounded
    factor, stored_weights = problem.softmax_scale, errors.stored_weights
    error, stored_weights = (np.where(claimed, x, 0) for x in (error, stored_weights))
    dscores, weights = (np.where(claimed, x, 0) for x in (dscores, weights))
    touched = np.broadcast_to(visible, dscores.shape)
    spoilt = visible & unbounded

    def transposed(x):
        return x.mT

    return [
        _summed(problem, errors, factor, dscores, error, pairs.k, touched, spoilt, shapes[0]),
        _summed(
            problem, errors, factor, transposed(dscores), transposed(error), pairs.q,
            transposed(touched), transposed(spoilt), shapes[1],
        ),
        _summed(
            problem, errors, 1.0, transposed(weights), transposed(stored_weights), pairs.dout,
            transposed(touched), transposed(spoilt), shapes[2],
        ),
    ]  # fmt: skip


def _summed(problem: Problem, errors: _Errors, factor, terms, error, values, touched, spoilt, shape) -> np.ndarray:
    """Bound of factor * terms @ values, summed to an operand's shape and rounded to the dtype."""
    element, magnitudes = Precision.of(problem.dtype), np.abs(values)
    unit, flush = astuple(errors.arithmetic)
    rows, batches = terms.shape[-1], max(int(np.prod(terms.shape[:-2])), 1) // max(int(np.prod(shape[:-2])), 1)

    def summed(x):
        return summed_to(shape, np.broadcast_to(x, (*terms.shape[:-1], shape[-1])))

    exact = np.abs(factor * summed(terms @ values))
    upper_terms = np.abs(terms) + error
    magnitude = summed(upper_terms @ magnitudes)
    core = summed(error @ magnitudes) + errors.accumulation(rows, batches) * magnitude
    core = core + flush * (rows * batches + 2 + summed(upper_terms.sum(axis=-1, keepdims=True)))
    core = abs(factor) * core + flush
    core = core + 3 * unit * (exact + core)
    overflows = (magnitude * max(1, abs(factor)) >= largest(problem) / 4) | (exact + core >= element.overflow)
    core = core + _rounding(problem, exact + core) + U64 * exact  # the latter of the reference
    is_spoilt, is_touched = (summed(x.any(axis=-1, keepdims=True).astype(np.float64)) > 0 for x in (spoilt, touched))
    bound = np.where(is_spoilt | overflows, np.inf, SLACK * core)
    return np.where(is_touched, bound, 0)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0)


def _returned(problem: Problem, kernel_errors, arrays, grads_out) -> Gradients:
    operands = dict(zip("qkv", arrays[1:4], strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = _Pairs.of(problem, *arrays)
        bounds = _gradients(problem, pairs, kernel_errors(problem, pairs), [x.shape for x in operands.values()])
    return returned_gradients(operands, Gradients(*map(claimed, bounds)), grads_out)
