"""Attention over Dask arrays, forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
from dask import array as da
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from cupyflash import attention as _attention
from cupyflash import merge as _merge
from cupyflash._problem import attention_problem
from cupyflash.distributed._graph import Tasks, array_of, joined
from cupyflash.distributed._grid import Grid, aligned, check_options, dask_arrays, validated
from cupyflash.distributed._operands import QUERIES


def attention(
    q, k, v, *, return_lse: bool = False, return_max: bool = False, **options
) -> da.Array | tuple[da.Array, ...]:
    """:func:`cupyflash.attention` of Dask arrays: a graph, which computes nothing yet.

    Each chunk of queries meets each chunk of keys in a task of its own, except where all of their pairs are beyond
    ``causal``, ``window_size`` or lengths. What they give is joined by :func:`cupyflash.merge`, two by two, in a tree
    that depends on the number of chunks alone: bits depend on the chunks, not on the scheduler or on its workers.

    Parameters
    ----------
    q, k, v : dask.array.Array
        As for :func:`cupyflash.attention`, in chunks of any sizes along all dimensions but head_dim, which is one
        chunk. Where one is cut, all are: none is put together. Chunks are NumPy arrays, or all are CuPy arrays.
    mask, bias, alibi_slopes, attn_sink : dask.array.Array or array, optional
        In any chunks.
    dropout_p, seed, origin, score_mod, mask_mod, aux : optional
        As for :func:`cupyflash.attention`: places, L and S are those of the whole, and the same pairs are dropped.
        Arrays of ``aux``, Dask's or others, are put together, since an expression may index all of them. No
        :class:`cupyflash.BlockMask`.
    seqlens_q, seqlens_k : numpy.ndarray, optional
        What the graph is made by. Aligned bottom-right, batches whose S - L differ are cut into chunks of their own.
    softmax_scale, causal, window_size, align, softcap, split_size, numerics, return_lse, return_max : optional
        As for :func:`cupyflash.attention`; split_size within each chunk.

    Returns
    -------
    out : dask.array.Array, shape (..., L, Dv), the inputs' dtype, cut wherever one of the arguments is
    lse : dask.array.Array, with ``return_lse``
    max : dask.array.Array, with ``return_max``

    Of 16-bit inputs, what a pair of chunks gives is rounded to their dtype, and what two of them give, too: a part may
    overflow where the whole does not. :func:`cupyflash.bounds.attention_in_parts` bounds the result; its ``edges`` are
    the cuts of k, v, mask and bias along S.

    Raises
    ------
    TypeError, ValueError
        As :func:`cupyflash.attention`, now, not when the result is computed, but for an expression that does not
        compile; and for a head_dim in chunks, chunks of unknown sizes or chunks of two kinds.

    Examples
    --------
    >>> q, k, v = da.random.default_rng(0).standard_normal((3, 2, 48, 8), chunks=(1, 1, 16, 8)).astype(np.float16)
    >>> out = attention(q, k, v, causal=True)
    >>> out
    dask.array<attention-out, shape=(2, 48, 8), dtype=float16, chunksize=(1, 16, 8), chunktype=numpy.ndarray>
    >>> bool(np.allclose(out.compute(), _attention(*da.compute(q, k, v), causal=True), atol=2e-3))
    True
    """
    check_options(options)
    arrays, aux = dask_arrays({"q": q, "k": k, "v": v}, options)
    results = {"return_lse": return_lse, "return_max": return_max}
    problem = validated(attention_problem, arrays, aux, options | results)
    grid = Grid.of(problem, arrays, aux)
    token = tokenize(*arrays.values(), options, return_max)
    tasks: Tasks = {}
    ends = {}
    for row in grid.rows():
        number = tuple(row[dim] for dim in (*grid.leading_dims, QUERIES))
        ends[number] = _row(grid, row, tasks, (token, *number), return_max=return_max)
    work = HighLevelGraph.from_collections(f"attention-{token}", tasks, grid.collections)
    chunks = [[stop - start for start, stop in grid.spans[dim]] for dim in (*grid.leading_dims, QUERIES)]

    def result(name: str, index: int, dtype: np.dtype, *last: int) -> da.Array:
        taken = {
            (f"{name}-{token}", *number, *(0 for _ in last)): (getitem, end, index) for number, end in ends.items()
        }
        return array_of(work, f"{name}-{token}", taken, [*chunks, *([size] for size in last)], q._meta, dtype)

    found = [result("attention-out", 0, problem.dtype, problem.head_dim_v)]
    if return_lse:
        found.append(result("attention-lse", 1, problem.lse_dtype))
    if return_max:
        found.append(result("attention-max", 2, problem.lse_dtype))
    return tuple(found) if len(found) > 1 else found[0]


def _row(
    grid: Grid, row: Mapping[Any, int], tasks: Tasks, number: tuple[Any, ...], *, return_max: bool
) -> tuple[Any, ...]:
    """Adds the tasks of a chunk of queries; the key of its (out, lse), and max if asked for."""
    names = [name for name in grid.operands if name != "attn_sink"]
    token, *place = number
    parts = []
    for key_chunk, pair in enumerate(grid.seen_from(row)):
        key = f"attention-pair-{token}", *place, key_chunk
        tasks[key] = grid.task(_attention, pair, names, {"return_lse": True, "return_max": return_max})
        parts.append(key)
    if not parts:
        key = f"attention-pair-{token}", *place, "none"
        shape = *grid.sizes(row), grid.problem.head_dim_v
        tasks[key] = partial(_no_keys, shape, grid.problem.lse_dtype, 2 + return_max), grid.operands["q"].key(row)
        parts.append(key)
    result = joined(tasks, (f"attention-join-{token}", *place), parts, merged)
    if "attn_sink" in grid.operands:
        key = f"attention-sink-{token}", *place
        lengths = grid.lengths(row).get("seqlens_q")
        tasks[key] = partial(_with_sink, lengths), result, grid.operands["attn_sink"].key(row)
        result = key
    return result


def merged(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
    """The parts (out, lse), with max or without, of two sets of keys as one."""
    outs, lses, *largest = zip(one, other, strict=True)
    return *_merge(map(aligned, outs), map(aligned, lses)), *(np.maximum(*pair) for pair in largest)


def _no_keys(shape: tuple[int, ...], lse_dtype: np.dtype, number: int, q: Any) -> tuple[Any, ...]:
    """Of queries that see nothing; so many results."""
    nothing = np.full_like(q, -np.inf, shape=shape[:-1], dtype=lse_dtype)
    return np.zeros_like(q, shape=shape), *[nothing] * (number - 1)


def _with_sink(lengths: np.ndarray | None, part: Sequence[Any], sink: Any) -> tuple[Any, ...]:
    """A sink is one key more, whose value is 0: a part with out 0, of the queries that there are."""
    out, lse, *largest = part
    largest_lse = np.finfo(lse.dtype).max
    finite = np.isfinite(sink)  # a float64 sink that float32 does not hold stays a number, as in the kernels
    sink_lse = np.empty_like(lse)
    sink_lse[...] = np.where(finite, np.clip(sink, -largest_lse, largest_lse), sink)[..., None]
    if lengths is not None:
        for batch in np.ndindex(lengths.shape):
            sink_lse[(*batch, ..., slice(int(lengths[batch]), None))] = -np.inf
    return *merged((out, lse), (np.zeros_like(out), sink_lse)), *largest
