"""A call's arrays as exact numbers on the host, and results as arrays of the caller's kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash._arrays import FLOAT64, check_result
from cupyflash._double_double import DoubleDouble
from cupyflash._gradients import Gradients
from cupyflash._launch import Gpu
from cupyflash._problem import Problem

Numbers = np.ndarray | DoubleDouble


def copied_to_host(array) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    with Gpu(array.device.id):
        return array.get()


def float64_on_host(*arrays) -> tuple[np.ndarray, ...]:
    return tuple(copied_to_host(array).astype(np.float64) for array in arrays)


def on_host(problem: Problem, q, k, v) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v as float64 NumPy arrays that broadcast: a key head is repeated for each query head that uses it."""
    q, k, v = float64_on_host(q, k, v)
    if problem.grouped_heads:
        num_kv_heads, group = problem.grouped_heads
        k, v = (
            np.repeat(array, group, axis=-3) if array.ndim > 2 and array.shape[-3] == num_kv_heads else array
            for array in (k, v)
        )
    return q, k, v


def operand(problem: Problem, name: str) -> np.ndarray | None:
    """bias, alibi_slopes or attn_sink in float64, which holds them exactly; None where it is not given."""
    return float64_on_host(problem.operands[name])[0] if name in problem.operands else None


def pair_shape(problem: Problem) -> tuple[int, ...]:
    """(..., L, S), one element for each pair of the call."""
    return (*problem.leading_shape, problem.seqlen_q, problem.seqlen_k)


def wide(dtype: np.dtype, *arrays: np.ndarray) -> tuple[Numbers, ...]:
    """Float64 arrays as numbers in which results for inputs of this dtype count as exact."""
    return tuple(DoubleDouble(array) for array in arrays) if dtype == FLOAT64 else arrays


def summed_to(shape: tuple[int, ...], gradient: Numbers) -> Numbers:
    """Sum over the dimensions that broadcast an operand of this shape, and over heads that share its heads.

    >>> summed_to((2, 1, 1), np.arange(6.0).reshape(3, 2, 1, 1))[:, 0, 0]
    array([6., 9.])
    """
    own_shape = (1,) * (gradient.ndim - len(shape)) + shape
    for axis, size in enumerate(own_shape):
        if gradient.shape[axis] != size:
            before, after = gradient.shape[:axis], gradient.shape[axis + 1 :]
            with np.errstate(invalid="ignore"):  # inf - inf, where an input is not finite
                gradient = gradient.reshape(*before, size, gradient.shape[axis] // size, *after).sum(axis=axis + 1)
    return gradient.reshape(shape)


def returned(problem: Problem, q, results: Sequence[Numbers], out=None):
    """out, and what else there is per query, in float64, of q's kind and on its device; a tuple if there are several.

    Examples
    --------
    >>> from cupyflash._problem import attention_problem
    >>> x = np.zeros((2, 1))
    >>> returned(attention_problem(x, x, x), x, [np.zeros(1), np.ones(2)])
    (array([[0.],
           [0.]]), array([1., 1.]))
    """
    if out is not None:
        check_result("out", out, FLOAT64, problem.out_shape, {"q": q})
    per_query = len(results) - 1
    shapes = [problem.out_shape, *[problem.lse_shape] * per_query]
    arrays = [np.broadcast_to(np.asarray(x), shape) for x, shape in zip(results, shapes, strict=True)]
    arrays = placed(q, arrays, [out, *[None] * per_query])
    return tuple(arrays) if per_query else arrays[0]


def returned_gradients(operands: Mapping[str, Any], gradients: Gradients, grads_out: Gradients) -> Gradients:
    """Gradients per head, summed to their operands' shapes, in float64 of the operands' kind and on their device.

    ``operands`` are named as arguments of :func:`cupyflash.attention`; gradients that are None stay None.
    """
    given = {name: gradient for name, gradient in vars(gradients).items() if gradient is not None}
    results = [np.asarray(summed_to(operands[name[1:]].shape, gradient)) for name, gradient in given.items()]
    targets = [getattr(grads_out, name) for name in given]
    return Gradients(**dict(zip(given, placed(operands["q"], results, targets), strict=True)))


def placed(q, results: Sequence[np.ndarray], targets: Sequence[Any]) -> list[Any]:
    """Each result in its target, or where that is None as a contiguous array of q's kind and on its device."""
    results = [np.array(result, order="C") for result in results]
    if isinstance(q, np.ndarray):
        return _filled(results, targets)
    with Gpu(q.device.id) as gpu:
        return _filled([gpu.from_host(result) for result in results], targets)


def _filled(results, targets) -> list[Any]:
    for result, target in zip(results, targets, strict=True):
        if target is not None:
            target[...] = result
    return [result if target is None else target for result, target in zip(results, targets, strict=True)]
