"""Few queries of heads that share their keys, stacked to rows of one matrix: keys are read once for all of them.

A row's bits are the same as without. No tile takes longer: the rows that other heads fill are empty otherwise.
Multi-query attention: Shazeer 2019; grouped: Ainslie et al. 2023.

Where the rows of all heads are evenly spaced and nothing asks which head or query a row is, the call is one with a
head of many queries: with lengths of keys, a softcap or split keys, as with no option. Otherwise the tensor-core kernel
tells the rows apart (``STACKED`` in kernels_cu/variant.cuh), which serves every option but dropout and block masks.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from cupyflash import _config
from cupyflash._arrays import HALF_TYPES
from cupyflash._layouts import Layout
from cupyflash._problem import Problem
from cupyflash._shapes import MAX_SEQLEN
from cupyflash._user_functions import user_functions


def stacked(problem: Problem, layouts: dict[str, Layout], arch: str) -> tuple[Problem, dict[str, Layout]]:
    """The problem and its operands' layouts with heads stacked, or both as they are where that does not help.

    ``layouts`` are those of query, key, value and out as the kernel will read and write them.
    """
    axis = len(problem.batch_shape) - 1
    while axis >= 0 and problem.batch_shape[axis] == 1:
        axis -= 1
    if axis < 0 or not (_shared(problem, layouts, axis) and _helps(problem, axis, arch)):
        return problem, layouts
    if _are_one_head(problem, layouts, axis):
        return _as_one_head(problem, layouts, axis)
    if problem.dtype in HALF_TYPES and not problem.dropout_p and problem.block_mask is None:
        return replace(problem, stacked_heads=problem.batch_shape[axis]), layouts
    return problem, layouts


def _shared(problem: Problem, layouts: dict[str, Layout], axis: int) -> bool:
    """Whether all heads have the same keys, and as many of them."""
    lengths = [layout for name, layout in problem.layouts.items() if name in ("seqlens_q", "seqlens_k")]
    operands = [layouts["key"], layouts["value"], *lengths]
    return problem.packed is None and all(layout.batch_strides[axis] == 0 for layout in operands)


def _helps(problem: Problem, axis: int, arch: str) -> bool:
    """Whether a tile holds the queries of several heads, and all rows can be counted."""
    block_m = _config.forward(problem, arch).defines["BLOCK_M"]
    return 0 < problem.seqlen_q <= block_m // 2 and problem.batch_shape[axis] * problem.seqlen_q <= MAX_SEQLEN


def _are_one_head(problem: Problem, layouts: dict[str, Layout], axis: int) -> bool:
    """Whether rows are evenly spaced, of all heads as of each, and nothing looks at a row's query or head."""
    return (
        problem.window == (None, None)
        and problem.operands.keys() <= {"seqlens_k"}
        and not problem.dropout_p
        and user_functions(problem) is None
        and all(_evenly_spaced(layouts[name], axis, problem.seqlen_q) for name in ("query", "out"))
    )


def _evenly_spaced(layout: Layout, axis: int, rows: int) -> bool:
    """Whether the rows of all heads are as far from each other as those of one."""
    stride = layout.batch_strides[axis]
    return stride != 0 if rows == 1 else stride == rows * layout.row_stride


def _as_one_head(problem: Problem, layouts: dict[str, Layout], axis: int) -> tuple[Problem, dict[str, Layout]]:
    """The call whose heads are the rows of one."""

    def without_axis(values: tuple[int, ...]) -> tuple[int, ...]:
        return values[:axis] + values[axis + 1 :]

    def of_rows(name: str, layout: Layout) -> Layout:
        single_queries = name in ("query", "out") and problem.seqlen_q == 1
        row_stride = layout.batch_strides[axis] if single_queries else layout.row_stride
        return replace(layout, batch_strides=without_axis(layout.batch_strides), row_stride=row_stride)

    layouts, optional = (
        {name: of_rows(name, layout) for name, layout in group.items()} for group in (layouts, problem.layouts)
    )
    return replace(
        problem,
        leading_shape=without_axis(problem.batch_shape),
        grouped_heads=None,
        seqlen_q=problem.batch_shape[axis] * problem.seqlen_q,
        q=layouts["query"],
        k=layouts["key"],
        v=layouts["value"],
        layouts=MappingProxyType(optional),
    ), layouts
