"""The exact reference: attention in float64, written as the definition."""

from __future__ import annotations

import numpy as np

from cupyflash._gradients import Gradients, backward_problem
from cupyflash._launch import Gpu
from cupyflash._problem import FLOAT64, Align, Problem, attention_problem, check_result


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
    """Attention in float64, from the inputs as they are: what :func:`cupyflash.attention` is judged against.

    Shapes, options, meaning and errors are those of :func:`cupyflash.attention`; q, k and v share one of float16,
    bfloat16, float32 and float64. Results are float64 of the inputs' kind (CuPy arrays are computed on the host and
    copied back), and so is ``out``. A key whose score is -inf is removed like a masked one. All scores are stored.

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
    return returned(problem, q, *_attention(problem, *on_host(problem, q, k, v)), return_lse, out)


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
    """Gradients in float64: what :func:`cupyflash.attention_backward` is judged against.

    Arguments, shapes, meaning and errors are those of :func:`cupyflash.attention_backward`; dout, q, k, v and out share
    one of float16, bfloat16, float32 and float64. The gradients, ``grads_out`` too, are float64. out and lse are
    checked for shape and dtype only: the exact ones are computed again from q, k and v. A key whose score is -inf is
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
    gradients = _attention_backward(problem, dout, *on_host(problem, q, k, v), dlse)
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
    """Float64 gradients per head, summed to their operands' shapes, as arrays of their kind and on their device."""
    results = [
        np.ascontiguousarray(summed_to(operand.shape, gradient))
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


def summed_to(shape: tuple[int, ...], gradient: np.ndarray) -> np.ndarray:
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


def visible_keys(problem: Problem) -> np.ndarray:
    """(L, S) bool: which keys each query sees."""
    if not problem.causal:
        return np.ones((problem.seqlen_q, problem.seqlen_k), bool)
    query, key = np.ogrid[: problem.seqlen_q, : problem.seqlen_k]
    return key <= query + problem.causal_shift


def scaled_scores(problem: Problem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """softmax_scale * q @ k.T, and -inf where the key is not visible."""
    with np.errstate(invalid="ignore", over="ignore"):
        scores = problem.softmax_scale * (q @ np.swapaxes(k, -1, -2))
    return np.where(visible_keys(problem), scores, -np.inf)


def softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and natural-log lse of each row; 0 and -inf where all scores are -inf."""
    row_max = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - np.where(row_max == -np.inf, 0, row_max))
    row_sum = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = row_max + np.log(row_sum)
        weights /= np.where(row_sum == 0, 1, row_sum)
    return weights, lse[..., 0]


def weighted_sum(weights: np.ndarray, values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """weights @ values, in which a pair that is not ``seen`` adds nothing, where 0 * inf would be NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        result = weights @ np.where(np.isfinite(values), values, 0)
        for idx in np.flatnonzero((~np.isfinite(values)).any(axis=(*range(values.ndim - 2), -1))):
            value = values[..., idx, None, :]
            added = seen[..., idx, None] & ~np.isfinite(value)
            result = result + np.where(added, weights[..., idx, None] * value, 0)
    return result


def _attention(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores = scaled_scores(problem, q, k)
    weights, lse = softmax(scores)
    return weighted_sum(weights, v, scores != -np.inf), lse


def _attention_backward(problem: Problem, dout, q, k, v, dlse) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of each head of the result on its own."""
    scores = scaled_scores(problem, q, k)
    seen = scores != -np.inf
    weights = np.where(seen, softmax(scores)[0], 0)  # a row with a NaN has it everywhere
    seen_by = np.swapaxes(seen, -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        dweights = np.where(seen, dout @ np.swapaxes(v, -1, -2), 0)
        delta = np.where(seen, weights * dweights, 0).sum(axis=-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse[..., None]
        dscores = problem.softmax_scale * np.where(seen, weights * (dweights - delta), 0)
    return (
        weighted_sum(dscores, k, seen),
        weighted_sum(np.swapaxes(dscores, -1, -2), q, seen_by),
        weighted_sum(np.swapaxes(weights, -1, -2), dout, seen_by),
    )
