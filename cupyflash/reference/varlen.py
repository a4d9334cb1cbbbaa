"""Exact attention of packed sequences: a loop over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash._gradients import OPTIONAL, Gradients, gradient_targets
from cupyflash._problem import Problem, attention_problem
from cupyflash.reference.arrays import copied_to_host, float64_on_host, on_host, placed, summed_to, wide
from cupyflash.reference.backward import exact_gradients
from cupyflash.reference.forward import exact_attention

Index = tuple[Any, ...]


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse: bool = False, return_max: bool = False, out=None, **options
):
    """What :func:`cupyflash.attention_varlen` is judged against.

    Arguments, shapes and meaning are those of :func:`cupyflash.attention_varlen`. Results, ``out`` too, are float64 and
    as precise as those of :func:`cupyflash.reference.attention`.

    Examples
    --------
    Two sequences of one head, of 1 and 2 tokens; equal scores average the values:

    >>> q, k, v = np.zeros((3, 1, 1)), np.zeros((3, 1, 1)), np.array([3.0, 4.0, 6.0]).reshape(3, 1, 1)
    >>> offsets = np.array([0, 1, 3])
    >>> attention_varlen(q, k, v, offsets, offsets).ravel()
    array([3., 5., 5.])
    """
    total_q, num_heads, _ = q.shape
    result = np.zeros((num_heads, total_q, v.shape[-1]))
    lse, row_max = np.full((2, num_heads, total_q), -np.inf)
    for sequence in _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, options):
        exact = exact_attention(sequence.problem, *sequence.numbers())
        for target, part in zip((result, lse, row_max), exact, strict=True):
            target[:, sequence.queries] = np.asarray(part)[0]
    results = [result.swapaxes(0, 1), *[lse] * return_lse, *[row_max] * return_max]
    results = placed(q, results, [out, *[None] * (len(results) - 1)])
    return tuple(results) if len(results) > 1 else results[0]


def attention_varlen_backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *, dlse=None, grads_out=None, **options
) -> Gradients:
    """What :func:`cupyflash.attention_varlen_backward` is judged against.

    Gradients of what sequences share are summed over them, and rounded to float64 once. out and lse are not read, as
    in :func:`cupyflash.reference.attention_backward`.
    """
    operands = _operands(q, k, v, options)
    operands = {name: x for name, x in operands.items() if name in "qkv" or f"d{name}" in OPTIONAL}
    totals = {name: wide(q.dtype, np.zeros(x.shape))[0] for name, x in operands.items()}
    dout, dlse = float64_on_host(_heads_first(dout))[0], None if dlse is None else float64_on_host(dlse)[0]
    for sequence in _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, options):
        (sequence_dout,) = wide(q.dtype, dout[:, :, sequence.queries])
        sequence_dlse = None if dlse is None else dlse[None, :, sequence.queries]
        gradients = exact_gradients(sequence.problem, sequence_dout, *sequence.numbers(), sequence_dlse)
        for name, total in totals.items():
            part = total[sequence.parts[name]]
            total[sequence.parts[name]] = part + summed_to(part.shape, getattr(gradients, f"d{name}"))

    results = {f"d{name}": np.asarray(total) for name, total in totals.items()}
    results |= {name: results[name][0].swapaxes(0, 1) for name in ("dq", "dk", "dv")}
    targets = gradient_targets(grads_out)
    return Gradients(
        **dict(zip(results, placed(q, results.values(), [getattr(targets, name) for name in results]), strict=True))
    )


@dataclass(frozen=True)
class _Sequence:
    """One sequence as a call of its own, with a batch of 1."""

    problem: Problem
    queries: slice  # of the packed ones
    arrays: Mapping[str, Any]  # its parts of q, k, v, mask, bias, alibi_slopes, attn_sink, as far as given
    parts: Mapping[str, Index]  # the indices that take them

    def numbers(self):
        """q, k and v."""
        return wide(self.problem.dtype, *on_host(self.problem, *(self.arrays[name] for name in "qkv")))


def _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, options) -> Iterator[_Sequence]:
    operands = _operands(q, k, v, options)
    others = {name: value for name, value in options.items() if name not in operands}
    offsets_q, offsets_k = (copied_to_host(offsets).tolist() for offsets in (cu_seqlens_q, cu_seqlens_k))
    for number in range(len(offsets_q) - 1):
        queries, keys = slice(*offsets_q[number : number + 2]), slice(*offsets_k[number : number + 2])
        every = slice(None)
        per_head = (slice(number, number + 1), every)
        per_pair = (*per_head, slice(queries.stop - queries.start), slice(keys.stop - keys.start))
        parts = {"q": (..., queries, every), "k": (..., keys, every), "v": (..., keys, every)}
        for names, index in (("mask", "bias"), per_pair), (("alibi_slopes", "attn_sink"), per_head):
            parts |= {name: _part(operands[name].shape, index) for name in names if name in operands}
        arrays = {name: array[parts[name]] for name, array in operands.items()}
        problem = replace(attention_problem(**arrays, **others), first_batch=number)
        yield _Sequence(problem, queries, arrays, parts)


def _operands(q, k, v, options) -> dict[str, Any]:
    """The arrays of which each sequence has its part, with (1, heads, tokens, head_dim) in q, k and v."""
    names = ("mask", "bias", "alibi_slopes", "attn_sink")
    given = {name: options[name] for name in names if options.get(name) is not None}
    return {"q": _heads_first(q), "k": _heads_first(k), "v": _heads_first(v), **given}


def _heads_first(packed):
    return packed.swapaxes(0, 1)[None]


def _part(shape: tuple[int, ...], index: tuple[slice, ...]) -> Index:
    """What ``index`` takes of an array that is broadcast, as an index of the array itself, which has this shape."""
    own = index[len(index) - len(shape) :]
    return ..., *(slice(None) if size == 1 else part for size, part in zip(shape, own, strict=True))
