"""Tasks: trees of them, and the Dask arrays that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dask import array as da
from dask.highlevelgraph import HighLevelGraph

Key = tuple[Any, ...]
Tasks = dict[Key, tuple[Any, ...]]


def joined(tasks: Tasks, key: Key, parts: Sequence[Key], join: Callable[[Any, Any], Any]) -> Key:
    """The key of all parts joined: two by two, level by level, a tree that depends on nothing but their number."""
    level = 0
    while len(parts) > 1:
        pairs, last = len(parts) // 2, parts[len(parts) // 2 * 2 :]
        keys = [(*key, level, number) for number in range(pairs)]
        for number, joint in enumerate(keys):
            tasks[joint] = join, parts[2 * number], parts[2 * number + 1]
        parts, level = [*keys, *last], level + 1
    return parts[0]


def array_of(
    work: HighLevelGraph, name: str, tasks: Tasks, chunks: Iterable[Iterable[int]], like: Any, dtype: np.dtype
) -> da.Array:
    """The Dask array whose chunks ``tasks`` take from what ``work`` computes; ``like`` is of its chunks' kind."""
    layers: Mapping[str, Any] = {**work.layers, name: tasks}
    needs = set(work.layers)
    graph = HighLevelGraph(layers, {**work.dependencies, name: needs})
    chunks = tuple(map(tuple, chunks))
    return da.Array(graph, name, chunks, meta=np.empty_like(like, shape=(0,) * len(chunks), dtype=dtype))
