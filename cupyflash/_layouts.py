"""What arrays look like, and strides of operands over the batch of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._arrays import address
from cupyflash._lengths import per_batch

MAX_BATCH_DIMS = 8
CHUNK_BYTES = 16  # that the kernels read and write at once


@dataclass(frozen=True, eq=False)
class Placeholder:
    """All that launches depend on of an array: neither its elements nor where it is.

    ``alignment`` is its address modulo CHUNK_BYTES. One that stands for an array to be made may ask for ``zeroed``
    memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    alignment: int = 0
    zeroed: bool = False

    @classmethod
    def of(cls, array: Any) -> Placeholder:
        return cls(array.shape, array.strides, array.dtype, address(array) % CHUNK_BYTES)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: np.dtype, *, zeroed: bool = False) -> Placeholder:
        strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
        return cls(shape, strides, dtype, zeroed=zeroed)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_contiguous(array: Any) -> bool:
    """Whether an array, or a placeholder, is C-contiguous; without elements it is, whatever its strides say."""
    if 0 in array.shape:
        return True
    expected = array.dtype.itemsize
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Layout:
    """Strides of one operand in elements; a broadcast dimension has stride 0."""

    batch_strides: tuple[int, ...]
    row_stride: int
    column_stride: int


def merge_batch_dims(
    shape: tuple[int, ...], *strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Merge neighbouring batch dimensions that every operand steps through as one; drop those of length 1.

    >>> merge_batch_dims((2, 3, 1, 4), (12, 4, 9, 1), (0, 0, 9, 5))
    ((6, 4), ((4, 1), (0, 5)))
    """
    sizes: list[int] = []
    columns: list[tuple[int, ...]] = []
    for size, column in zip(shape, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if columns and all(outer == inner * size for outer, inner in zip(columns[-1], column, strict=True)):
            sizes[-1] *= size
            columns[-1] = column
        else:
            sizes.append(size)
            columns.append(column)
    if len(sizes) > MAX_BATCH_DIMS:
        raise ValueError(
            f"q, k, v: {len(sizes)} leading dimensions remain where those that can be are merged, at most "
            f"{MAX_BATCH_DIMS} may; shape {shape}"
        )
    return tuple(sizes), tuple(zip(*columns, strict=True)) if columns else ((),) * len(strides)


def layout_of(array, leading_shape, grouped_heads, shared_heads: bool = False) -> Layout:
    """Of an array with leading dimensions as q's or the result's, with ``shared_heads`` as k's or v's."""
    *leading_strides, row_stride, column_stride = (stride // array.dtype.itemsize for stride in array.strides)
    missing = len(leading_shape) - len(leading_strides)
    strides = [0] * missing + [
        0 if size == 1 else stride for size, stride in zip(array.shape[:-2], leading_strides, strict=True)
    ]
    if grouped_heads:
        head_stride = strides.pop()
        strides += [head_stride, 0] if shared_heads else [head_stride * grouped_heads[1], head_stride]
    return Layout(tuple(strides), row_stride, column_stride)


def packed_layout(array, grouped_heads, shared_heads: bool = False) -> Layout:
    """Of a packed array (rows, heads, columns) over sequences and heads; where a sequence starts is for the kernel."""
    row_stride, head_stride, column_stride = (stride // array.dtype.itemsize for stride in array.strides)
    if array.shape[1] == 1:
        head_stride = 0
    heads = (head_stride,)
    if grouped_heads:
        heads = (head_stride, 0) if shared_heads else (head_stride * grouped_heads[1], head_stride)
    return Layout((0, *heads), row_stride, column_stride)


def operand_layout(name: str, array, leading_shape, grouped_heads) -> Layout:
    """Of an optional array, as an array of matrices: every dimension that it is broadcast over has stride 0."""
    strides = [
        0 if size == 1 else stride // array.dtype.itemsize
        for size, stride in zip(array.shape, array.strides, strict=True)
    ]
    if name in ("mask", "bias"):
        strides = [0] * (2 - len(strides)) + strides
        row_stride, column_stride = strides[-2:]
        del strides[-2:]
    else:
        row_stride = column_stride = 0
    if name in ("seqlens_q", "seqlens_k") and len(per_batch(leading_shape)) < len(leading_shape):
        strides.append(0)
    strides = [0] * (len(leading_shape) - len(strides)) + strides
    if grouped_heads:
        head_stride = strides.pop()
        strides += [head_stride * grouped_heads[1], head_stride]
    return Layout(tuple(strides), row_stride, column_stride)
