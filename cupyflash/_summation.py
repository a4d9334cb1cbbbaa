"""Which matrices each matrix of a gradient is the sum over: batch dimensions that its operand does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupyflash import _launch
from cupyflash._layouts import Layout, merge_batch_dims


@dataclass(frozen=True)
class Summation:
    """Owner dimensions name a matrix of the gradient; over the reduced ones its terms are summed, in C order."""

    num_owners: int
    num_reduced: int
    shapes: Mapping[str, dict[str, Any]]  # "owner" and "reduced": values of BATCH_SHAPE
    strides: Mapping[str, dict[str, tuple[int, ...]]]  # operand -> its owner_stride and reduced_stride


def summed_dims(batch_shape: tuple[int, ...], gradient: Layout) -> tuple[bool, ...]:
    """For each batch dimension, whether the gradient has no extent in it. Arrays without elements do not count.

    >>> summed_dims((2, 3, 1, 4), Layout((8, 0, 0, 0), 1, 1))
    (False, True, False, True)
    """
    return tuple(size != 1 and stride == 0 for size, stride in zip(batch_shape, gradient.batch_strides, strict=True))


def summation(batch_shape: tuple[int, ...], gradient: Layout, operands: Mapping[str, Layout]) -> Summation:
    """Split the batch dimensions for one gradient, which may be among ``operands``.

    >>> by_key = summation((2, 3), Layout((8, 0), 4, 1), {"query": Layout((24, 8), 4, 1)})
    >>> by_key.num_owners, by_key.num_reduced, by_key.strides["query"]
    (2, 3, {'owner_stride': (24,), 'reduced_stride': (8,)})
    """
    counts, shapes = {}, {}
    strides: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in operands}
    for kind, is_summed in ("owner", False), ("reduced", True):
        axes = [axis for axis, summed in enumerate(summed_dims(batch_shape, gradient)) if summed == is_summed]
        counts[kind] = math.prod(batch_shape[axis] for axis in axes)
        if counts[kind] == 0:  # there is nothing to sum, and a kernel must not divide by such a size
            axes = []
        sizes, merged = merge_batch_dims(
            tuple(batch_shape[axis] for axis in axes),
            *(tuple(layout.batch_strides[axis] for axis in axes) for layout in operands.values()),
        )
        shapes[kind] = _launch.batch_shape(sizes)
        for name, batch_strides in zip(operands, merged, strict=True):
            strides[name][f"{kind}_stride"] = batch_strides
    return Summation(counts["owner"], counts["reduced"], shapes, strides)
