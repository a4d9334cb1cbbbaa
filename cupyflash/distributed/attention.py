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
from cupyflash.distributed._grid import Grid, check_options, dask_arrays
from cupyflash.distributed._operands import QUERIES, stand_in


def attention(q, k, v, *, return_lse: bool = False, **options) -> da.Array | tuple[da.Array, da.Array]:
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
    seqlens_q, seqlens_k : numpy.ndarray, optional
        What the graph is made by. Aligned bottom-right, batches whose S - L differ are in chunks of their own.
    softmax_scale, causal, window_size, align, softcap, split_size, numerics, return_lse : optional
        As for :func:`cupyflash.attention`; split_size within each chunk.

    Returns
    -------
    out : dask.array.Array, shape (..., L, Dv), the inputs' dtype
    lse : dask.array.Array, with ``return_lse``

    Of 16-bit inputs, what a pair of chunks gives is rounded to their dtype, and what two of them give, too.

    Raises
    ------
    TypeError, ValueError
        As :func:`cupyflash.attention`, now, not when the result is computed; and for a head_dim in chunks, chunks of
        unknown sizes or chunks of two kinds.
    NotImplementedError
        For an option that has no meaning on chunks yet: dropout_p, score_mod, mask_mod, return_max.

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
    arrays = dask_arrays({"q": q, "k": k, "v": v}, options)
    problem = attention_problem(
        **{**options, **{name: stand_in(array) for name, array in arrays.items()}}, return_lse=return_lse
    )
    grid = Grid.of(problem, arrays)
    token = tokenize(*arrays.values(), options)
    tasks: Tasks = {}
    outs: Tasks = {}
    lses: Tasks = {}
    for row in grid.rows():
        number = tuple(row[dim] for dim in (*grid.leading_dims, QUERIES))
        result = _row(grid, row, tasks, (token, *number))
        outs[(f"attention-out-{token}", *number, 0)] = getitem, result, 0
        lses[(f"attention-lse-{token}", *number)] = getitem, result, 1
    work = HighLevelGraph.from_collections(
        f"attention-{token}", tasks, [operand.array for operand in grid.operands.values()]
    )
    chunks = [[stop - start for start, stop in grid.spans[dim]] for dim in (*grid.leading_dims, QUERIES)]
    like = q._meta
    out = array_of(work, f"attention-out-{token}", outs, [*chunks, [problem.head_dim_v]], like, problem.dtype)
    lse = array_of(work, f"attention-lse-{token}", lses, chunks, like, problem.lse_dtype)
    return (out, lse) if return_lse else out


def _row(grid: Grid, row: Mapping[Any, int], tasks: Tasks, number: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds the tasks of a chunk of queries; the key of its (out, lse)."""
    operands = {name: operand for name, operand in grid.operands.items() if name != "attn_sink"}
    token, *place = number
    parts = []
    for key_chunk, pair in enumerate(grid.seen_from(row)):
        key = f"attention-pair-{token}", *place, key_chunk
        call = partial(pair_result, tuple(operands), grid.options(pair))
        tasks[key] = call, *(operand.key(pair) for operand in operands.values())
        parts.append(key)
    if not parts:
        key = f"attention-pair-{token}", *place, "none"
        shape = *grid.sizes(row), grid.problem.head_dim_v
        tasks[key] = partial(_no_keys, shape, grid.problem.lse_dtype), grid.operands["q"].key(row)
        parts.append(key)
    result = joined(tasks, (f"attention-join-{token}", *place), parts, merged)
    if "attn_sink" in grid.operands:
        key = f"attention-sink-{token}", *place
        lengths = grid.lengths(row).get("seqlens_q")
        tasks[key] = partial(_with_sink, lengths), result, grid.operands["attn_sink"].key(row)
        result = key
    return result


def pair_result(names: Sequence[str], options: Mapping[str, Any], *arrays: Any) -> tuple[Any, Any]:
    """out and lse of a chunk of queries and one of keys."""
    return _attention(**arguments(names, options, arrays), return_lse=True)


def arguments(names: Sequence[str], options: Mapping[str, Any], arrays: Sequence[Any]) -> dict[str, Any]:
    """Of a call on chunks, with lengths where the chunks are."""
    given = dict(zip(names, map(aligned, arrays), strict=True))
    lengths = {name: np.array(value, like=given["q"]) for name, value in options.items() if name.startswith("seqlens")}
    return {**given, **options, **lengths}


def aligned(array: Any) -> Any:
    """What comes from another process may lie anywhere in the message that brought it."""
    return np.require(array, requirements=["ALIGNED"]) if isinstance(array, np.ndarray) else array


def merged(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    outs, lses = zip(one, other, strict=True)
    return _merge(map(aligned, outs), map(aligned, lses))


def _no_keys(shape: tuple[int, ...], lse_dtype: np.dtype, q: Any) -> tuple[Any, Any]:
    """Of queries that see nothing."""
    return np.zeros_like(q, shape=shape), np.full_like(q, -np.inf, shape=shape[:-1], dtype=lse_dtype)


def _with_sink(lengths: np.ndarray | None, part: tuple[Any, Any], sink: Any) -> tuple[Any, Any]:
    """A sink is one key more, whose value is 0: a part with out 0, of the queries that there are."""
    out, lse = part
    sink_lse = np.empty_like(lse)
    sink_lse[...] = sink[..., None]
    if lengths is not None:
        for batch in np.ndindex(lengths.shape):
            sink_lse[(*batch, ..., slice(int(lengths[batch]), None))] = -np.inf
    return merged(part, (np.zeros_like(out), sink_lse))
