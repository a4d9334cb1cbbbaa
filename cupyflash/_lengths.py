"""Lengths of padded batches: read once, checked on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash._arrays import check_element_aligned, check_same_place
from cupyflash._options import check_broadcasts

LENGTH_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def per_batch(leading_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The leading dimensions without heads, which are the last one of two or more.

    >>> per_batch((2, 8)), per_batch((3,)), per_batch(())
    ((2,), (3,), ())
    """
    return leading_shape[:-1] if len(leading_shape) >= 2 else leading_shape


def checked_lengths(
    arrays: Mapping[str, Any], longest: Mapping[str, int], leading_shape: tuple[int, ...], q: Any, kind: str
) -> dict[str, np.ndarray]:
    """Host int32 copies of seqlens_q and seqlens_k, those that are given, all between 0 and the longest."""
    for name, array in arrays.items():
        check_integers(name, array, q, kind)
        check_broadcasts(name, array.shape, per_batch(leading_shape))
    checked = {}
    for name, lengths in zip(arrays, on_host(kind, *arrays.values()), strict=True):
        outside = (lengths < 0) | (lengths > longest[name])
        if outside.any():
            index = tuple(int(i) for i in np.argwhere(outside)[0])
            raise ValueError(f"{name}: {lengths[index]} at index {index} is not between 0 and {longest[name]}")
        checked[name] = lengths.astype(np.int32)
    return checked


def check_integers(name: str, array: Any, q: Any, kind: str) -> None:
    check_same_place(array, name, q, kind)
    if array.dtype not in LENGTH_DTYPES or not array.dtype.isnative:
        raise TypeError(f"{name}: dtype {array.dtype.str}, expected int32 or int64")
    check_element_aligned(array, name)


def on_host(kind: str, *arrays: Any) -> list[np.ndarray]:
    """Copies of integer arrays as int64 NumPy arrays; from a GPU in one transfer."""
    if kind == "numpy" or not arrays:
        return [array.astype(np.int64) for array in arrays]
    import cupy

    with arrays[0].device:
        joined = cupy.concatenate([array.astype(np.int64).ravel() for array in arrays]).get()
    ends = np.cumsum([array.size for array in arrays])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(joined, ends), arrays, strict=True)]
