"""Lengths of padded batches and offsets of packed ones: read once, checked on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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


def heads_of(leading_shape: tuple[int, ...]) -> int:
    """How many heads the leading dimensions of a result have.

    >>> heads_of((2, 8)), heads_of((3,)), heads_of(())
    (8, 1, 1)
    """
    return leading_shape[-1] if len(leading_shape) >= 2 else 1


def batches_and_heads(leading_shape: tuple[int, ...]) -> tuple[int, int]:
    """How many batches, over all leading dimensions without heads, and heads a result has.

    >>> batches_and_heads((2, 3, 8)), batches_and_heads((3,)), batches_and_heads(())
    ((6, 8), (3, 1), (1, 1))
    """
    num_heads = heads_of(leading_shape)
    return math.prod(leading_shape) // max(num_heads, 1), num_heads


def checked_lengths(
    arrays: Mapping[str, Any], longest: Mapping[str, int], leading_shape: tuple[int, ...], q: Any, kind: str
) -> dict[str, np.ndarray]:
    """Host int32 copies of seqlens_q and seqlens_k, those that are given, all between 0 and the longest."""
    for name, array in arrays.items():
        check_integers(name, array, q, kind)
        check_broadcasts(name, array.shape, per_batch(leading_shape))
    checked = {}
    for name, lengths in zip(arrays, on_host(kind, *arrays.values()), strict=True):
        _check_range(name, lengths, longest[name])
        checked[name] = lengths.astype(np.int32)
    return checked


@dataclass(frozen=True, eq=False)
class Packed:
    """Where sequences start in packed arrays: sequence b has the rows offsets[b] to offsets[b + 1].

    The offsets are int32 arrays (num_seqs + 1) on the host. Rows from the last offset to the total belong to none.
    """

    offsets_q: np.ndarray
    offsets_k: np.ndarray
    total_q: int
    total_k: int

    @classmethod
    def read(cls, cu_seqlens_q, cu_seqlens_k, total_q: int, total_k: int, q: Any, kind: str) -> Packed:
        arrays = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        for name, array in arrays.items():
            check_integers(name, array, q, kind)
            if array.ndim != 1 or array.size == 0:
                raise ValueError(f"{name}: shape {array.shape}, expected (number of sequences + 1,)")
        if len(cu_seqlens_q) != len(cu_seqlens_k):
            raise ValueError(f"cu_seqlens_k: {len(cu_seqlens_k)} offsets, but cu_seqlens_q has {len(cu_seqlens_q)}")
        offsets = on_host(kind, *arrays.values())
        for name, values, total in zip(arrays, offsets, (total_q, total_k), strict=True):
            _check_offsets(name, values, total)
        return cls(*(values.astype(np.int32) for values in offsets), total_q, total_k)

    @property
    def num_seqs(self) -> int:
        return len(self.offsets_q) - 1

    @property
    def used_q(self) -> int:
        """Rows that belong to a sequence."""
        return int(self.offsets_q[-1])

    @property
    def used_k(self) -> int:
        return int(self.offsets_k[-1])

    @property
    def longest_q(self) -> int:
        return int(np.diff(self.offsets_q).max(initial=0))

    @property
    def longest_k(self) -> int:
        return int(np.diff(self.offsets_k).max(initial=0))

    @property
    def same_lengths(self) -> bool:
        """Whether each sequence has as many queries as keys."""
        return np.array_equal(self.offsets_q, self.offsets_k)


def _check_offsets(name: str, offsets: np.ndarray, total: int) -> None:
    _check_range(name, offsets, total)
    if offsets[0] != 0:
        raise ValueError(f"{name}: starts at {offsets[0]}, expected 0")
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(f"{name}: {offsets[at]} at index {at} and then {offsets[at + 1]}; offsets must not fall")


def _check_range(name: str, numbers: np.ndarray, largest: int) -> None:
    outside = np.argwhere((numbers < 0) | (numbers > largest))
    if len(outside):
        index = tuple(int(i) for i in outside[0])
        where = index[0] if len(index) == 1 else index
        raise ValueError(f"{name}: {numbers[index]} at index {where} is not between 0 and {largest}")


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
