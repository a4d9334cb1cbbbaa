"""Few queries of heads that share their keys, stacked to rows of one matrix: keys are read once for all of them.

A row's bits are the same as without. No tile takes longer: the rows that other heads fill are empty otherwise.
Multi-query attention: Shazeer 2019; grouped: Ainslie et al. 2023.
"""

from __future__ import annotations

from dataclasses import replace

from cupyflash import _config, _variant
from cupyflash._arrays import HALF_TYPES
from cupyflash._layouts import Layout
from cupyflash._problem import Problem
from cupyflash._shapes import MAX_SEQLEN

_STACKED = ("query", "out")


def stacked(problem: Problem, layouts: dict[str, Layout], arch: str) -> tuple[Problem, dict[str, Layout]]:
    """The problem and its operands' layouts with heads stacked, or both as they are where that does not help.

    ``layouts`` are those of query, key, value and out as the kernel will read and write them.
    """
    axis = len(problem.batch_shape) - 1
    while axis >= 0 and problem.batch_shape[axis] == 1:
        axis -= 1
    if axis < 0 or not _rows_are_all_that_differs(problem):
        return problem, layouts
    heads = problem.batch_shape[axis]
    shared = all(layouts[name].batch_strides[axis] == 0 for name in ("key", "value"))
    evenly = all(_evenly_spaced(layouts[name], axis, problem.seqlen_q) for name in _STACKED)
    if not (shared and evenly and _helps(problem, heads, arch)):
        return problem, layouts

    def without_axis(values: tuple[int, ...]) -> tuple[int, ...]:
        return values[:axis] + values[axis + 1 :]

    def of_stack(name: str, layout: Layout) -> Layout:
        single_queries = name in _STACKED and problem.seqlen_q == 1
        row_stride = layout.batch_strides[axis] if single_queries else layout.row_stride
        return replace(layout, batch_strides=without_axis(layout.batch_strides), row_stride=row_stride)

    layouts = {name: of_stack(name, layout) for name, layout in layouts.items()}
    return replace(
        problem,
        leading_shape=without_axis(problem.batch_shape),
        grouped_heads=None,
        seqlen_q=heads * problem.seqlen_q,
        q=layouts["query"],
        k=layouts["key"],
        v=layouts["value"],
        stacked_heads=heads,
    ), layouts


def _rows_are_all_that_differs(problem: Problem) -> bool:
    """Whether heads may be stacked: nothing but a band looks at a row's query, and nothing at its head."""
    return (
        not problem.operands
        and problem.packed is None
        and not problem.dropout_p
        and not _variant.pair_by_pair(problem)
        and (problem.dtype in HALF_TYPES or problem.window == (None, None))
    )


def _evenly_spaced(layout: Layout, axis: int, rows: int) -> bool:
    """Whether the rows of all heads are as far from each other as those of one."""
    stride = layout.batch_strides[axis]
    return stride != 0 if rows == 1 else stride == rows * layout.row_stride


def _helps(problem: Problem, heads: int, arch: str) -> bool:
    """Whether a tile holds the queries of several heads, and all rows can be counted."""
    block_m = _config.forward(problem, arch).defines["BLOCK_M"]
    return 0 < problem.seqlen_q <= block_m // 2 and heads * problem.seqlen_q <= MAX_SEQLEN
