"""Exact attention of packed sequences: a loop over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash._arrays import FLOAT64
from cupyflash._gradients import NAMES, Gradients, checked_targets, without_results
from cupyflash._problem import Problem, varlen_problem
from cupyflash.reference.arrays import Numbers, float64_on_host, on_host, placed, returned, summed_to, wide
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
    problem = varlen_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, return_max=return_max, **options
    )
    total_q, num_heads, head_dim_v = problem.out_shape
    result = np.zeros((num_heads, total_q, head_dim_v))
    lse, row_max = np.full((2, num_heads, total_q), -np.inf)
    for sequence in sequences(problem, q, k, v):
        exact = exact_attention(sequence.problem, *sequence.numbers())
        for target, part in zip((result, lse, row_max), exact, strict=True):
            target[:, sequence.queries] = np.asarray(part)[0]
    return returned(problem, q, [result.swapaxes(0, 1), *[lse] * return_lse, *[row_max] * return_max], out)


def attention_varlen_backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *, dlse=None, grads_out=None, **options
) -> Gradients:
    """What :func:`cupyflash.attention_varlen_backward` is judged against.

    Arguments, shapes and meaning are those of :func:`cupyflash.attention_varlen_backward`, with float64 gradients.
    Those of arrays that sequences share are summed over them and rounded once. out and lse are checked for shape and
    dtype only, as in :func:`cupyflash.reference.attention_backward`.

    Examples
    --------
    >>> import cupyflash
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 9, 2, 8)).astype(np.float16)
    >>> offsets = np.array([0, 1, 7])
    >>> out, lse = cupyflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True)
    >>> dq, dk, dv = attention_varlen_backward(dout, q, k, v, out, lse, offsets, offsets)
    >>> bool((dv[0] == dout[0]).all()), bool((dk[7:] == 0).all())  # a sequence of one key; behind the last one
    (True, True)
    """
    problem = varlen_problem(q, k, v, cu_seqlens_q, cu_seqlens_k, **without_results(options))
    targets = checked_targets(problem, dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, gradient_dtype=FLOAT64)
    operands = {name: x for name, x in packed_operands(problem, q, k, v).items() if f"d{name}" in NAMES}
    totals = {name: wide(q.dtype, np.zeros(x.shape))[0] for name, x in operands.items()}
    dout, dlse = float64_on_host(heads_first(dout))[0], None if dlse is None else float64_on_host(dlse)[0]
    for sequence in sequences(problem, q, k, v):
        (sequence_dout,) = wide(q.dtype, dout[:, :, sequence.queries])
        sequence_dlse = None if dlse is None else dlse[None, :, sequence.queries]
        gradients = exact_gradients(sequence.problem, sequence_dout, *sequence.numbers(), sequence_dlse)
        for name, total in totals.items():
            part = total[sequence.parts[name]]
            total[sequence.parts[name]] = part + summed_to(part.shape, getattr(gradients, f"d{name}"))

    results = {f"d{name}": np.asarray(total) for name, total in totals.items()}
    results |= {name: results[name][0].swapaxes(0, 1) for name in ("dq", "dk", "dv")}
    arrays = placed(q, list(results.values()), [getattr(targets, name) for name in results])
    return Gradients(**dict(zip(results, arrays, strict=True)))


@dataclass(frozen=True)
class Sequence:
    """One sequence as a call of its own, with a batch of 1."""

    problem: Problem  # without layouts: nothing here lies in memory as it says
    queries: slice  # of the packed ones
    arrays: Mapping[str, Any]  # its parts of q, k, v and of the optional arrays that were given
    parts: Mapping[str, Index]  # the indices that take them

    def numbers(self) -> tuple[Numbers, ...]:
        """q, k and v."""
        return wide(self.problem.dtype, *on_host(self.problem, *(self.arrays[name] for name in "qkv")))


def sequences(problem: Problem, q, k, v) -> Iterator[Sequence]:
    """Those of a packed problem."""
    operands = packed_operands(problem, q, k, v)
    offsets_q, offsets_k = problem.packed.offsets_q.tolist(), problem.packed.offsets_k.tolist()
    every = slice(None)
    for number in range(problem.packed.num_seqs):
        queries, keys = slice(*offsets_q[number : number + 2]), slice(*offsets_k[number : number + 2])
        seqlen_q, seqlen_k = queries.stop - queries.start, keys.stop - keys.start
        per_head = (slice(number, number + 1), every)
        per_pair = (*per_head, slice(seqlen_q), slice(seqlen_k))
        parts = {"q": (..., queries, every), "k": (..., keys, every), "v": (..., keys, every)}
        for names, index in (("mask", "bias"), per_pair), (("alibi_slopes", "attn_sink"), per_head):
            parts |= {name: _part(operands[name].shape, index) for name in names if name in operands}
        arrays = {name: array[parts[name]] for name, array in operands.items()}
        alone = replace(
            problem,
            leading_shape=(1, problem.leading_shape[-1]),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            packed=None,
            operands={name: arrays[name] for name in problem.operands},
            layouts={},
            origin=(problem.origin[0] + number, *problem.origin[1:]),
        )
        yield Sequence(alone, queries, arrays, parts)


def packed_operands(problem: Problem, q, k, v) -> dict[str, Any]:
    """The arrays of which each sequence has its part, with (1, heads, tokens, head_dim) in q, k and v."""
    return {"q": heads_first(q), "k": heads_first(k), "v": heads_first(v), **problem.operands}


def heads_first(packed):
    """(total, heads, head_dim) as (1, heads, total, head_dim)."""
    return packed.swapaxes(0, 1)[None]


def _part(shape: tuple[int, ...], index: tuple[slice, ...]) -> Index:
    """What ``index`` takes of an array that is broadcast, as an index of the array itself, which has this shape."""
    own = index[len(index) - len(shape) :]
    return ..., *(slice(None) if size == 1 else part for size, part in zip(shape, own, strict=True))
