"""Gradients of an attention call, and what is asked of the arguments that they are computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._problem import (
    Problem,
    attention_problem,
    check_dtype_and_shape,
    check_element_aligned,
    check_result,
    check_same_place,
)

NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients with respect to q, k and v, each of its operand's shape; unpacks and indexes like (dq, dk, dv).

    Those with respect to bias, alibi_slopes and attn_sink are attributes, None where that was not given.

    >>> dq, dk, dv = gradients = Gradients(1, 2, 3)
    >>> dk, gradients[1], gradients.dk
    (2, 2, 2)
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dalibi_slopes: Any = None
    dattn_sink: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dq, self.dk, self.dv))

    def __getitem__(self, index: int) -> Any:
        return (self.dq, self.dk, self.dv)[index]


def backward_problem(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    grads_out=None,
    gradient_dtype: np.dtype | None = None,
    **options,
) -> tuple[Problem, tuple[Any, Any, Any]]:
    """Validate the arguments of a backward call: the problem, and for each gradient an array to write or None."""
    problem = attention_problem(q, k, v, **options)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        inputs["dlse"] = dlse
    for name in ("dout", "out", "lse", "dlse"):
        if name in inputs:
            array = inputs[name]
            check_same_place(array, name, q, problem.kind)
            if name.endswith("lse"):
                check_dtype_and_shape(name, array, problem.lse_dtype, problem.lse_shape)
            else:
                check_dtype_and_shape(name, array, problem.dtype, problem.out_shape)
            check_element_aligned(array, name)

    if grads_out is None:
        return problem, (None, None, None)
    if not isinstance(grads_out, tuple | list | Gradients) or len(grads_out := tuple(grads_out)) != len(NAMES):
        raise TypeError(f"grads_out: expected (dq, dk, dv), each an array or None, not {_described(grads_out)}")
    for name, gradient, operand in zip(NAMES, grads_out, (q, k, v), strict=True):
        if gradient is not None:
            check_result(name, gradient, gradient_dtype or problem.dtype, operand.shape, inputs)
            inputs[name] = gradient
    return problem, grads_out


def made(device: Any, problem: Problem, operands: Sequence[Any], grads_out: Sequence[Any]) -> Gradients:
    """The arrays to write gradients to: those given, and new ones."""
    return Gradients(
        *(
            device.empty(operand.shape, problem.dtype) if given is None else given
            for operand, given in zip(operands, grads_out, strict=True)
        )
    )


def _described(grads_out: Any) -> str:
    name = type(grads_out).__name__
    return f"{len(grads_out)} items" if isinstance(grads_out, tuple | list) else name
