"""What is asked of Dask arrays, and the chunks that they are brought to have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from dask import array as da

from cupyflash._arrays import array_kind, described
from cupyflash._problem import Problem

#: Dimensions of the scores by name. Leading ones are numbered from the last, which is -1, as in numpy.matmul.
Dim = int | str
QUERIES, KEYS, KEY_HEADS, HEAD_DIM = "queries", "keys", "key heads", "head_dim"
_LAST_DIMS = {
    **dict.fromkeys(("q", "dout", "out"), (QUERIES, HEAD_DIM)),
    **dict.fromkeys(("k", "v"), (KEYS, HEAD_DIM)),
    **dict.fromkeys(("lse", "dlse"), (QUERIES,)),
    **dict.fromkeys(("mask", "bias"), (QUERIES, KEYS)),
    **dict.fromkeys(("alibi_slopes", "attn_sink"), ()),
}
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Operand:
    """A Dask array and the dimensions that its axes are."""

    array: da.Array
    dims: tuple[Dim, ...]

    def block(self, place: Mapping[Dim, int]) -> tuple[int, ...]:
        """Which of its chunks belongs to a place in the grid: along an axis that is broadcast, its only one."""
        blocks = zip(self.dims, self.array.numblocks, strict=True)
        return tuple(place[dim] if count > 1 else 0 for dim, count in blocks)

    def key(self, place: Mapping[Dim, int]) -> tuple[Any, ...]:
        """The task that makes this chunk."""
        return self.array.name, *self.block(place)


def as_dask(name: str, array: Any, *, required: bool) -> da.Array:
    """An input as a Dask array of chunks with known sizes; only what is ``required`` to be one must be."""
    if not isinstance(array, da.Array):
        if required:
            raise TypeError(f"{name}: expected a dask.array.Array, not {described(array)}; use dask.array.from_array")
        array_kind(array, name)
        array = da.from_array(array, chunks=-1, asarray=False)
    if any(math.isnan(size) for sizes in array.chunks for size in sizes):
        raise ValueError(f"{name}: has chunks of unknown sizes; use {name}.compute_chunk_sizes()")
    return array


def check_same_kind(arrays: Mapping[str, da.Array]) -> None:
    """Raise unless the chunks of all are arrays of one kind."""
    kinds = {name: array_kind(array._meta, name) for name, array in arrays.items()}
    for name, kind in kinds.items():
        if kind != kinds["q"]:
            raise TypeError(f"{name}: {kind} chunks, but q has {kinds['q']} chunks; one call takes one kind")


def stand_in(array: da.Array) -> np.ndarray:
    """A NumPy array of the same shape and dtype, of one element's memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def in_common_chunks(
    arrays: Mapping[str, da.Array], problem: Problem, cuts: Mapping[Dim, set[int]]
) -> tuple[dict[str, Operand], dict[Dim, list[Span]]]:
    """The arrays, cut wherever one of them is and at ``cuts``; and for each dimension the spans of its chunks."""
    dims = {name: _dims(name, array, problem) for name, array in arrays.items()}
    ends: dict[Dim, set[int]] = {dim: set(places) for dim, places in cuts.items()}
    for name, array in arrays.items():
        for dim, length, chunks in zip(dims[name], array.shape, array.chunks, strict=True):
            if dim == HEAD_DIM and len(chunks) > 1:
                raise ValueError(
                    f"{name}: head_dim {length} is in chunks of {chunks}; expected one: rechunk({{-1: -1}})"
                )
            if length != 1:
                ends.setdefault(dim, set()).update(accumulate(chunks))
    if problem.grouped_heads:
        _join_heads(ends, problem.grouped_heads[1])
    lengths = {QUERIES: problem.seqlen_q, KEYS: problem.seqlen_k}
    lengths |= {axis - len(problem.leading_shape): size for axis, size in enumerate(problem.leading_shape)}
    if problem.grouped_heads:
        lengths[KEY_HEADS] = problem.grouped_heads[0]
    spans = {
        dim: list(pairwise(sorted({0, length, *ends.get(dim, ())}))) or [(0, 0)] for dim, length in lengths.items()
    }
    operands = {}
    for name, array in arrays.items():
        chunks = {
            axis: tuple(stop - start for start, stop in spans[dim])
            for axis, (dim, length) in enumerate(zip(dims[name], array.shape, strict=True))
            if dim != HEAD_DIM and length != 1
        }
        chunks |= {axis: 1 for axis, length in enumerate(array.shape) if length == 1}  # one chunk, no empty ones
        operands[name] = Operand(array.rechunk(chunks), dims[name])
    return operands, spans


def _dims(name: str, array: da.Array, problem: Problem) -> tuple[Dim, ...]:
    """Those of an array, which may miss leading ones, and of the pairs' dimensions the first."""
    last = _LAST_DIMS[name]
    last = last[max(len(last) - array.ndim, 0) :]
    leading: list[Dim] = list(range(len(last) - array.ndim, 0))
    if leading and problem.grouped_heads and name in ("k", "v"):
        leading[-1] = KEY_HEADS
    return *leading, *last


def _join_heads(ends: dict[Dim, set[int]], group: int) -> None:
    """Cut query heads and key heads so that each chunk of the former needs one of the latter.

    It is that of all its heads: either whole groups of them, or heads of one group.
    """
    key_ends = ends.setdefault(KEY_HEADS, set())
    query_ends = ends.setdefault(-1, set())
    key_ends.update(end for head in query_ends for end in (head // group, -(-head // group)))
    query_ends.update(end * group for end in key_ends)
