"""The exact reference: attention written as the definition.

Computed in float64, and for float64 inputs in double-double: either way far more precise than what is judged by it.
"""

from __future__ import annotations

import numpy as np

from cupyflash._double_double import DoubleDouble
from cupyflash._gradients import Gradients, backward_problem
from cupyflash._launch import Gpu
from cupyflash._problem import FLOAT64, Align, Problem, attention_problem, check_result

Numbers = np.ndarray | DoubleDouble


def attention(
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
    """Attention of the inputs as they are, exact up to the rounding to float64: what :func:`cupyflash.attention` is
    judged against.

    Shapes, options, meaning and errors are those of :func:`cupyflash.attention`; q, k and v share one of float16,
    bfloat16, float32 and float64. Results are float64 of the inputs' kind (CuPy arrays are computed on the host and
    copied back), and so is ``out``. For float64 inputs everything is computed with about 100 bits, and each result errs
    by little more than the one rounding at the end, 2^-53 of its own magnitude. A key whose score is -inf is removed
    like a masked one. All scores are stored.

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
    problem = attention_problem(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align, return_lse=return_lse)
    result, lse = exact_attention(problem, *wide(problem, *on_host(problem, q, k, v)))
    return returned(problem, q, np.asarray(result), np.asarray(lse), return_lse, out)


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
    """Exact gradients, rounded to float64: what :func:`cupyflash.attention_backward` is judged against.

    Arguments, shapes, meaning and errors are those of :func:`cupyflash.attention_backward`; dout, q, k, v and out share
    one of float16, bfloat16, float32 and float64. The gradients, ``grads_out`` too, are float64, as precise as the
    results of :func:`attention`. out and lse are checked for shape and dtype only: the exact ones are computed again
    from q, k and v. A key whose score is -inf is
    removed like a masked one, and a pair that is masked adds nothing to any gradient, whatever its values are.

    Examples
    --------
    One query over two equal keys, with dout = 1: the output grows with the weight of the larger value.

    >>> q, k, v = np.ones((1, 1)), np.zeros((2, 1)), np.array([[2.0], [6.0]])
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = attention_backward(np.ones((1, 1)), q, k, v, out, lse)
    >>> dk, dv
    (array([[-1.],
           [ 1.]]), array([[0.5],
           [0.5]]))
    """
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, softmax_scale=softmax_scale, causal=causal, align=align,
        grads_out=grads_out, gradient_dtype=FLOAT64,
    )  # fmt: skip
    (dout,) = float64_on_host(problem, dout)
    dlse = None if dlse is None else float64_on_host(problem, dlse)[0]
    gradients = exact_gradients(problem, *wide(problem, dout, *on_host(problem, q, k, v)), dlse)
    return returned_gradients(problem, (q, k, v), gradients, grads_out)


def returned(problem: Problem, q, result: np.ndarray, lse: np.ndarray, return_lse: bool, out):
    """Float64 results computed on the host, as arrays of the problem's shape, of q's kind and on its device."""
    result = np.ascontiguousarray(np.broadcast_to(result, problem.out_shape))
    lse = np.ascontiguousarray(np.broadcast_to(lse, problem.lse_shape))
    if out is not None:
        check_result("out", out, FLOAT64, problem.out_shape, {"q": q})
    if problem.kind == "cupy":
        with Gpu(q.device.id) as gpu:
            result, lse = gpu.from_host(result), gpu.from_host(lse)
            if out is not None:
                out[...] = result
    elif out is not None:
        out[...] = result
    result = result if out is None else out
    return (result, lse) if return_lse else result


def returned_gradients(problem: Problem, operands, gradients, grads_out) -> Gradients:
    """Gradients per head, summed to their operands' shapes, in float64 of the operands' kind and on their device."""
    results = [
        np.ascontiguousarray(np.asarray(summed_to(operand.shape, gradient)))
        for operand, gradient in zip(operands, gradients, strict=True)
    ]
    if problem.kind == "cupy":
        with Gpu(operands[0].device.id) as gpu:
            return _placed([gpu.from_host(result) for result in results], grads_out)
    return _placed(results, grads_out)


def _placed(results, targets) -> Gradients:
    for result, target in zip(results, targets, strict=True):
        if target is not None:
            target[...] = result
    return Gradients(*(result if target is None else target for result, target in zip(results, targets, strict=True)))


def summed_to(shape: tuple[int, ...], gradient: Numbers) -> Numbers:
    """Sum over the leading dimensions that broadcast an operand of this shape, and over heads that share its heads.

    >>> summed_to((2, 1, 1), np.arange(6.0).reshape(3, 2, 1, 1))[:, 0, 0]
    array([6., 9.])
    """
    own_shape = (1,) * (gradient.ndim - len(shape)) + shape
    for axis, size in enumerate(own_shape[:-2]):
        if gradient.shape[axis] != size:
            before, after = gradient.shape[:axis], gradient.shape[axis + 1 :]
            with np.errstate(invalid="ignore"):  # inf - inf, where an input is not finite
                gradient = gradient.reshape(*before, size, gradient.shape[axis] // size, *after).sum(axis=axis + 1)
    return gradient.reshape(shape)


def float64_on_host(problem: Problem, *arrays) -> tuple[np.ndarray, ...]:
    if problem.kind == "cupy":
        with Gpu(arrays[0].device.id):
            arrays = [array.get() for array in arrays]
    return tuple(array.astype(np.float64) for array in arrays)


def on_host(problem: Problem, q, k, v) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v as float64 NumPy arrays that broadcast: a key head is repeated for each query head that uses it."""
    q, k, v = float64_on_host(problem, q, k, v)
    if problem.grouped_heads:
        num_kv_heads, group = problem.grouped_heads
        k, v = (
            np.repeat(array, group, axis=-3) if array.ndim > 2 and array.shape[-3] == num_kv_heads else array
            for array in (k, v)
        )
    return q, k, v


def wide(problem: Problem, *arrays: np.ndarray) -> tuple[Numbers, ...]:
    """Float64 arrays as numbers in which results for the problem's dtype count as exact."""
    return tuple(DoubleDouble(array) for array in arrays) if problem.dtype == FLOAT64 else arrays


def visible_keys(problem: Problem) -> np.ndarray:
    """(L, S) bool: which keys each query sees."""
    if not problem.causal:
        return np.ones((problem.seqlen_q, problem.seqlen_k), bool)
    query, key = np.ogrid[: problem.seqlen_q, : problem.seqlen_k]
    return key <= query + problem.causal_shift


def scaled_scores(problem: Problem, q: Numbers, k: Numbers) -> Numbers:
    """softmax_scale * q @ k.T, and -inf where the key is not visible."""
    with np.errstate(invalid="ignore", over="ignore"):
        scores = problem.softmax_scale * (q @ k.mT)
    return np.where(visible_keys(problem), scores, -np.inf)


def softmax(scores: Numbers) -> tuple[Numbers, Numbers]:
    """Weights and natural-log lse of each row; 0 and -inf where all scores are -inf."""
    row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - np.where(row_max == -np.inf, 0, row_max))
    row_sum = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = row_max + np.log(row_sum)
        weights = weights / np.where(row_sum == 0, 1, row_sum)
    return weights, lse[..., 0]


def weighted_sum(weights: Numbers, values: Numbers, seen: np.ndarray) -> Numbers:
    """weights @ values, in which a pair that is not ``seen`` adds nothing, where 0 * inf would be NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        result = weights @ np.where(np.isfinite(values), values, 0)
        for idx in np.flatnonzero((~np.isfinite(values)).any(axis=(*range(values.ndim - 2), -1))):
            value = values[..., idx, None, :]
            added = seen[..., idx, None] & ~np.isfinite(value)
            result = result + np.where(added, weights[..., idx, None] * value, 0)
    return result


def exact_attention(problem: Problem, q: Numbers, k: Numbers, v: Numbers) -> tuple[Numbers, Numbers]:
    """out and lse."""
    scores = scaled_scores(problem, q, k)
    weights, lse = softmax(scores)
    return weighted_sum(weights, v, scores != -np.inf), lse


def exact_gradients(problem: Problem, dout, q, k, v, dlse) -> tuple[Numbers, Numbers, Numbers]:
    """Gradients of each head of the result on its own."""
    scores = scaled_scores(problem, q, k)
    seen = scores != -np.inf
    weights = np.where(seen, softmax(scores)[0], 0)  # a row with a NaN has it everywhere
    with np.errstate(invalid="ignore", over="ignore"):
        dweights = np.where(seen, dout @ v.mT, 0)
        delta = np.where(seen, weights * dweights, 0).sum(axis=-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse[..., None]
        dscores = np.where(seen, weights * (dweights - delta), 0)
        return (
            problem.softmax_scale * weighted_sum(dscores, k, seen),
            problem.softmax_scale * weighted_sum(dscores.mT, q, seen.mT),
            weighted_sum(weights.mT, dout, seen.mT),
        )
