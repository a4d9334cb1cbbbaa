"""Attention over Dask arrays, backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from operator import add
from typing import Any

import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from cupyflash import Gradients
from cupyflash import attention_backward as _attention_backward
from cupyflash._arrays import FLOAT64
from cupyflash._gradients import NAMES, backward_problem
from cupyflash._plan import given
from cupyflash.distributed._graph import Key, Tasks, array_of, joined
from cupyflash.distributed._grid import Grid, check_options, dask_arrays, validated
from cupyflash.distributed._operands import KEYS, QUERIES


def attention_backward(dout, q, k, v, out, lse, *, dlse=None, **options) -> Gradients:
    """:func:`cupyflash.attention_backward` of Dask arrays: a graph, which computes nothing yet.

    Each chunk of queries meets the chunks of keys that it sees in a task of its own, with the out and lse of all keys.
    The gradient of a chunk is the sum of what those tasks give, each in its operand's dtype and within the bound of
    such a call, two by two in a tree of fixed shape, in float32 (for float64 in float64), rounded once more to the
    operand's dtype. In float16 what one task gives may overflow where the sum does not.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse : dask.array.Array
        As for :func:`cupyflash.attention_backward`, each in chunks of its own; head_dim is one chunk.
    **options
        As they were given to :func:`cupyflash.distributed.attention`, without ``return_lse``.

    Returns
    -------
    Gradients
        Of Dask arrays.

    Raises
    ------
    TypeError, ValueError
        As :func:`cupyflash.distributed.attention`.

    Examples
    --------
    >>> from dask import array as da
    >>> from cupyflash.distributed import attention
    >>> q, k, v = da.random.default_rng(0).standard_normal((3, 2, 48, 8), chunks=(1, 1, 16, 8)).astype(np.float16)
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = attention_backward(da.ones_like(out), q, k, v, out, lse)
    >>> bool(np.allclose(dv.sum(axis=-2).compute(), 48, atol=0.1))  # each query hands its dout to the keys, in parts
    True
    """
    check_options(options)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, **given(dlse=dlse)}
    arrays, aux = dask_arrays(inputs, options)
    problem, _ = validated(backward_problem, arrays, aux, options)
    grid = Grid.of(problem, arrays, aux)
    token = tokenize(*arrays.values(), options)
    tasks: Tasks = {}
    terms: dict[str, dict[tuple[int, ...], list[Key]]] = defaultdict(lambda: defaultdict(list))
    for row in grid.rows():
        for pair, names in _pairs(grid, row):
            place = tuple(pair[dim] for dim in (*grid.leading_dims, QUERIES, KEYS))
            key = f"attention-backward-pair-{token}", *place
            tasks[key] = grid.task(_attention_backward, pair, names, {})
            for name in NAMES:
                if name[1:] in names:
                    term = f"attention-{name}-term-{token}", *place
                    tasks[term] = partial(_term, name), key
                    terms[name][grid.operands[name[1:]].block(pair)].append(term)
    totals = {name: _totals(grid, tasks, terms[name], name, token) for name in NAMES if name[1:] in grid.operands}
    work = HighLevelGraph.from_collections(f"attention-backward-{token}", tasks, grid.collections)
    return Gradients(
        **{
            name: array_of(work, f"attention-{name}-{token}", total, operand.chunks, q._meta, operand.dtype)
            for name, total in totals.items()
            for operand in [grid.operands[name[1:]].array]
        }
    )


def _pairs(grid: Grid, row: Mapping[Any, int]) -> list[tuple[Mapping[Any, int], tuple[str, ...]]]:
    """The pairs of a chunk of queries, and the operands of each: a sink's gradient is of rows, and one pair's."""
    everything = tuple(grid.operands)
    without_sink = tuple(name for name in everything if name != "attn_sink")
    pairs = grid.seen_from(row)
    if not pairs and everything != without_sink:
        pairs = [{**row, KEYS: 0}]  # for the sink alone
    return [(pair, without_sink if number else everything) for number, pair in enumerate(pairs)]


def _totals(grid: Grid, tasks: Tasks, terms: Mapping[tuple[int, ...], list[Key]], name: str, token: str) -> Tasks:
    """Adds the sums of a gradient's terms; the tasks of its chunks."""
    operand = grid.operands[name[1:]].array
    chunks: Tasks = {}
    for block in np.ndindex(operand.numblocks):
        key = f"attention-{name}-{token}", *block
        if block in terms:
            total = joined(tasks, (f"attention-{name}-sum-{token}", *block), terms[block], add)
            chunks[key] = partial(_rounded, operand.dtype), total
        else:
            chunks[key] = np.zeros_like, (operand.name, *block)
    return chunks


def _term(name: str, gradients: Gradients) -> Any:
    """Of one gradient, in the dtype of sums."""
    gradient = getattr(gradients, name)
    return gradient if gradient.dtype == FLOAT64 else gradient.astype(np.float32)


def _rounded(dtype: np.dtype, gradient: Any) -> Any:
    return gradient.astype(dtype, copy=False)
