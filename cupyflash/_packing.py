"""Packed copies of operands whose rows the tiled kernels cannot read or write in chunks of 16 bytes."""

from __future__ import annotations

import math
from typing import Any

from cupyflash import _config, _launch
from cupyflash._launch import Launch
from cupyflash._layouts import CHUNK_BYTES, Layout, Placeholder, is_contiguous, merge_batch_dims
from cupyflash._problem import Problem


def in_chunks(
    alignment: int, itemsize: int, layout: Layout, batch_shape: tuple[int, ...], rows: int, columns: int
) -> bool:
    """Whether every row is whole 16-byte chunks at multiples of 16 bytes; ``alignment`` is the first row's address."""
    chunk = CHUNK_BYTES // itemsize
    strides = [stride for size, stride in zip(batch_shape, layout.batch_strides, strict=True) if size > 1]
    if rows > 1:
        strides.append(layout.row_stride)
    return (
        layout.column_stride == 1
        and columns % chunk == 0
        and alignment == 0
        and all(stride % chunk == 0 for stride in strides)
    )


def in_chunks_or_packed(
    device,
    array: Placeholder,
    layout: Layout,
    batch_shape: tuple[int, ...],
    rows: int,
    columns: int,
    *,
    is_result: bool = False,
) -> tuple[Placeholder, Layout, list[Launch]]:
    """A placeholder itself, or a packed one and the copy that fills it, or that brings a result back from it."""
    matrices = batch_shape, rows, columns
    if array.size == 0 or in_chunks(array.alignment, array.dtype.itemsize, layout, *matrices):
        return array, layout, []
    other, other_layout = packed(device, array.dtype, layout, *matrices)
    if is_result:
        return other, other_layout, [copy(other, other_layout, array, layout, *matrices)]
    return other, other_layout, [copy(array, layout, other, other_layout, *matrices)]


def contiguous_rows(device, problem: Problem, array) -> tuple[Any, list[Launch]]:
    """An array of one value per query, or None, as a C-contiguous one, and the copy that makes it so."""
    if array is None or is_contiguous(array):
        return array, []
    target = device.empty(array.shape, array.dtype)
    layouts = [problem.row_values_layout(x) for x in (array, target)]
    return target, [copy(array, layouts[0], target, layouts[1], problem.batch_shape, problem.rows_q, 1)]


def packed(device, dtype, layout: Layout, batch_shape: tuple[int, ...], rows: int, columns: int) -> tuple[Any, Layout]:
    """An array of 0 with rows of whole chunks for the matrices of ``layout``; broadcast dimensions stay so.

    The kernels read whole chunks: what pads a row must be finite, or it would reach the scores as 0 * NaN.
    """
    own_shape = tuple(size if stride else 1 for size, stride in zip(batch_shape, layout.batch_strides, strict=True))
    row_stride = _config.round_up(columns, CHUNK_BYTES // dtype.itemsize)
    array = device.zeros((*own_shape, rows, row_stride), dtype)
    batch_strides = tuple(
        math.prod(own_shape[axis + 1 :]) * rows * row_stride if size > 1 else 0 for axis, size in enumerate(own_shape)
    )
    return array, Layout(batch_strides, row_stride, 1)


def copy(source, source_layout: Layout, target, target_layout: Layout, batch_shape, rows, columns) -> Launch:
    """Each matrix once: along a dimension that both sides broadcast, only the first."""
    shape = tuple(
        size if a or b else 1
        for size, a, b in zip(batch_shape, source_layout.batch_strides, target_layout.batch_strides, strict=True)
    )
    sizes, (source_strides, target_strides) = merge_batch_dims(
        shape, source_layout.batch_strides, target_layout.batch_strides
    )
    packed_params = _launch.pack(
        _launch.STRIDED_COPY,
        source=source,
        target=target,
        source_row_stride=source_layout.row_stride,
        source_column_stride=source_layout.column_stride,
        target_row_stride=target_layout.row_stride,
        target_column_stride=target_layout.column_stride,
        source_batch_stride=source_strides,
        target_batch_stride=target_strides,
        batch=_launch.batch_shape(sizes),
        num_batches=math.prod(sizes),
        rows=rows,
        columns=columns,
    )
    return Launch(_config.strided_copy((*sizes, rows, columns), source.dtype), *packed_params)
