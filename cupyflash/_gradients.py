"""Gradients of an attention call, and what is asked of the arguments that they are computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cupyflash._arrays import check_dtype_and_shape, check_element_aligned, check_result, check_same_place
from cupyflash._problem import Problem, attention_problem


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients with respect to q, k, v and, where they were given, bias, alibi_slopes and attn_sink.

    Each has its operand's shape; None belongs to what was not given. Unpacks and indexes like (dq, dk, dv).

    >>> dq, dk, dv = gradients = Gradients(1, 2, 3, dbias=4)
    >>> dk, gradients[1], gradients.dk, gradients.dbias, gradients.dattn_sink
    (2, 2, 2, 4, None)
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi_slopes: Any = None
    dattn_sink: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dq, self.dk, self.dv))

    def __getitem__(self, index: int) -> Any:
        return (self.dq, self.dk, self.dv)[index]


NAMES = tuple(field.name for field in fields(Gradients))
OPTIONAL = NAMES[3:]  # of operands that need not be given


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
) -> tuple[Problem, Gradients]:
    """Validate the arguments of a backward call: the problem, and for each gradient an array to write or None.

    ``options`` are those of :func:`cupyflash.attention` that say what is computed.
    """
    problem = attention_problem(q, k, v, **without_results(options))
    return problem, checked_targets(
        problem, dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, gradient_dtype=gradient_dtype
    )


def without_results(options: dict[str, Any]) -> dict[str, Any]:
    """Raise where an option says what a forward call returns."""
    for name in ("return_lse", "return_max"):
        if name in options:
            raise TypeError(f"{name}: {options[name]!r} is for the forward; a backward call returns gradients")
    return options


def checked_targets(
    problem: Problem, dout, q, k, v, out, lse, *, dlse=None, grads_out=None, gradient_dtype: np.dtype | None = None
) -> Gradients:
    """Validate the results of a forward call and what is given for them: for each gradient an array to write or None.

    Gradients have their operand's dtype unless ``gradient_dtype`` is given.
    """
    results = {"dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        results["dlse"] = dlse
    for name, array in results.items():
        check_same_place(array, name, q, problem.kind)
        if name.endswith("lse"):
            check_dtype_and_shape(name, array, problem.lse_dtype, problem.lse_shape)
        else:
            check_dtype_and_shape(name, array, problem.dtype, problem.out_shape)
        check_element_aligned(array, name)

    targets = targets_of(grads_out)
    inputs = {"q": q, "k": k, "v": v, **results, **problem.inputs}
    for name, operand in operands_of(problem, q, k, v).items():
        target = getattr(targets, name)
        if target is not None:
            check_result(name, target, gradient_dtype or operand.dtype, operand.shape, inputs)
            inputs[name] = target
    for name in OPTIONAL:
        if getattr(targets, name) is not None and name[1:] not in problem.operands:
            raise ValueError(f"{name}: an array in grads_out, but the call has no {name[1:]}; expected None")
    return targets


def operands_of(problem: Problem, q, k, v) -> dict[str, Any]:
    """Name of each gradient that the call has -> what it is the gradient with respect to."""
    optional = {name: problem.operands[name[1:]] for name in OPTIONAL if name[1:] in problem.operands}
    return {"dq": q, "dk": k, "dv": v, **optional}


def made(device: Any, problem: Problem, operands: Sequence[Any], grads_out: Gradients) -> Gradients:
    """The arrays to write gradients to: those given, and new ones; ``operands`` are q, k and v."""
    arrays = {}
    for name, operand in operands_of(problem, *operands).items():
        given = getattr(grads_out, name)
        arrays[name] = device.empty(operand.shape, operand.dtype) if given is None else given
    return Gradients(**arrays)


def targets_of(grads_out: Any) -> Gradients:
    """The arrays to write that a call gives."""
    if grads_out is None:
        return Gradients()
    if isinstance(grads_out, Gradients):
        return grads_out
    if not isinstance(grads_out, tuple | list) or len(grads_out) != 3:
        raise TypeError(
            f"grads_out: expected (dq, dk, dv) or Gradients, each an array or None, not {_described(grads_out)}"
        )
    return Gradients(*grads_out)


def _described(grads_out: Any) -> str:
    name = type(grads_out).__name__
    return f"{len(grads_out)} items" if isinstance(grads_out, tuple | list) else name
