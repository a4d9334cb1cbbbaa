"""Exact attention, forward."""

from __future__ import annotations

import numpy as np

from cupyflash._problem import Problem, attention_problem
from cupyflash.dropout import dropout_mask
from cupyflash.reference.arrays import Numbers, on_host, operand, pair_shape, returned, wide
from cupyflash.reference.masks import rows_within_length
from cupyflash.reference.scores import pair_scores


def attention(q, k, v, *, return_lse: bool = False, return_max: bool = False, out=None, **options):
    """Attention of the inputs as they are, exact up to the rounding to float64: what :func:`cupyflash.attention` is
    judged against.

    Shapes, options, meaning and errors are those of :func:`cupyflash.attention`; q, k and v share one of float16,
    bfloat16, float32 and float64. Results are float64 of the inputs' kind (CuPy arrays are computed on the host and
    copied back), and so is ``out``. For float64 inputs everything is computed with about 100 bits, and each result errs
    by little more than the one rounding at the end, 2^-53 of its own magnitude; a score_mod, though, is float64 always.
    A key whose score is -inf is removed like a masked one. Options that say how a result is computed, not what it is
    (``split_size``, ``numerics``, ``block_mask``), change nothing. All scores are stored.

    Examples
    --------
    Equal scores average the visible values:

    >>> q, k, v = np.zeros((1, 2)), np.zeros((3, 2)), np.array([[1.0], [2.0], [6.0]])
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> out, np.exp(lse)
    (array([[3.]]), array([3.]))
    >>> attention(q, k, v, causal=True, align="top-left")
    array([[1.]])
    """
    problem = attention_problem(q, k, v, return_lse=return_lse, return_max=return_max, **options)
    result, lse, row_max = exact_attention(problem, *wide(problem.dtype, *on_host(problem, q, k, v)))
    results = [result, *[lse] * return_lse, *[row_max] * return_max]
    return returned(problem, q, results, out)


def exact_attention(problem: Problem, q: Numbers, k: Numbers, v: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """out, lse and row_max."""
    scores = pair_scores(problem, q, k)
    weights, lse, row_max = softmax(scores.final, sink_logits(problem))
    weights = np.where(scores.seen, weights * dropout_factor(problem), 0)
    return weighted_sum(weights, v, scores.seen), lse, row_max


def sink_logits(problem: Problem) -> np.ndarray | float:
    """The logit that each row has beside its keys, to broadcast with (..., L, 1); -inf where there is none."""
    logits = operand(problem, "attn_sink")
    return -np.inf if logits is None else np.where(rows_within_length(problem), logits[..., None, None], -np.inf)


def softmax(scores: Numbers, sink: np.ndarray | float) -> tuple[Numbers, Numbers, Numbers]:
    """Weights, natural-log lse and maximum of each row; 0 and -inf where all scores are -inf.

    The sink counts in the sum and in lse, not in the maximum.
    """
    row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    largest = np.maximum(row_max, sink)
    largest = np.where(largest == -np.inf, 0, largest)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(scores - largest)
        row_sum = weights.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
        lse = largest + np.log(row_sum)
        weights = weights / np.where(row_sum == 0, 1, row_sum)
    return weights, lse[..., 0], row_max[..., 0]


def dropout_factor(problem: Problem) -> Numbers | float:
    """What multiplies each weight: 1 / (1 - p), or 0 where it is dropped."""
    if not problem.dropout_p:
        return 1.0
    (probability,) = wide(problem.dtype, np.float64(problem.dropout_p))
    keep = dropout_mask(pair_shape(problem), problem.dropout_p, problem.seed, origin=problem.origin)
    return keep / (1 - probability)


def weighted_sum(weights: Numbers, values: Numbers, seen: np.ndarray) -> Numbers:
    """weights @ values, in which a pair that is not ``seen`` adds nothing, where 0 * inf would be NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        result = weights @ np.where(np.isfinite(values), values, 0)
        for idx in np.flatnonzero((~np.isfinite(values)).any(axis=(*range(values.ndim - 2), -1))):
            value = values[..., idx, None, :]
            added = seen[..., idx, None] & ~np.isfinite(value)
            result = result + np.where(added, weights[..., idx, None] * value, 0)
    return result
