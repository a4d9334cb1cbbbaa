"""The exact reference: attention in float64, written as the definition."""

from __future__ import annotations

import numpy as np

from cupyflash._launch import Gpu
from cupyflash._problem import Align, Problem, array_kind, attention_problem


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
    problem = attention_problem(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align)
    return returned(problem, q, *_attention(problem, *on_host(problem, q, k, v)), return_lse, out)


def returned(problem: Problem, q, result: np.ndarray, lse: np.ndarray, return_lse: bool, out):
    """Float64 results computed on the host, as arrays of the problem's shape, of q's kind and on its device."""
    result = np.ascontiguousarray(np.broadcast_to(result, problem.out_shape))
    lse = np.ascontiguousarray(np.broadcast_to(lse, problem.lse_shape))
    if out is not None:
        if array_kind(out, "out") != problem.kind:
            raise TypeError(f"out: {array_kind(out, 'out')} array, but q is a {problem.kind} array")
        if out.shape != problem.out_shape or out.dtype != np.float64:
            raise ValueError(f"out: {out.dtype} {out.shape}, expected float64 {problem.out_shape}")
    if problem.kind == "cupy":
        with Gpu(q.device.id) as gpu:
            result, lse = gpu.from_host(result), gpu.from_host(lse)
            if out is not None:
                out[...] = result
    elif out is not None:
        out[...] = result
    result = result if out is None else out
    return (result, lse) if return_lse else result


def on_host(problem: Problem, q, k, v) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v as float64 NumPy arrays that broadcast: a key head is repeated for each query head that uses it."""
    if problem.kind == "cupy":
        with Gpu(q.device.id):
            q, k, v = (array.get() for array in (q, k, v))
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
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


def _attention(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores = scaled_scores(problem, q, k)
    weights, lse = softmax(scores)
    with np.errstate(invalid="ignore", over="ignore"):
        out = weights @ np.where(np.isfinite(v), v, 0)
        # 0 * inf is NaN: non-finite values are added by hand, to the rows that see them.
        for key_idx in np.flatnonzero((~np.isfinite(v)).any(axis=(*range(v.ndim - 2), -1))):
            value = v[..., key_idx, None, :]
            seen = (scores[..., key_idx, None] != -np.inf) & ~np.isfinite(value)
            out = out + np.where(seen, weights[..., key_idx, None] * value, 0)
    return out, lse
