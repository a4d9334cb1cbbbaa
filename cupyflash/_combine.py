"""Attention over parts of the keys, and the kernel that joins the parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyflash import _launch, _variant
from cupyflash._config import WARP_SIZE, KernelConfig, ceil_div, grid_of, round_up
from cupyflash._launch import Launch
from cupyflash._layouts import Layout
from cupyflash._options import SPLIT_STEP
from cupyflash._problem import Problem

_ROWS_PER_BLOCK = 4  # of flash_combine: one warp each


@dataclass(frozen=True, eq=False)
class Parts:
    """Results over parts of ``size`` keys each: out (count, rows, head_dim_v), lse and row_max (count, rows).

    They are float32, for float64 float64; ``row_max`` is None where it is not wanted.
    """

    size: int
    count: int
    out: Any
    lse: Any
    row_max: Any

    @classmethod
    def empty(cls, problem: Problem, device: Any, *, with_max: bool) -> Parts:
        # Parts may be as long as all keys, not longer: sizes are 32-bit numbers in the kernel.
        size = min(problem.split_size, max(round_up(problem.seqlen_k, SPLIT_STEP), SPLIT_STEP))
        count = max(ceil_div(problem.seqlen_k, size), 1)
        shape, dtype = (count, math.prod(problem.lse_shape)), problem.lse_dtype
        return cls(
            size,
            count,
            device.empty((*shape, problem.head_dim_v), dtype),
            device.empty(shape, dtype),
            device.empty(shape, dtype) if with_max else None,
        )

    @property
    def members(self) -> dict[str, Any]:
        """Values of ``VariantParams`` in the kernel that computes the parts."""
        return {
            "split_size": self.size,
            "num_splits": self.count,
            "num_rows": self.lse.shape[1],
            "partial_out": self.out,
        }


def params_dtype(variant: np.dtype = _launch.NO_VARIANT) -> np.dtype:
    """Parameters of ``flash_combine``."""
    sizes = ("num_parts", "num_batches", "seqlen_q", "seqlen_k", "head_dim_v", "band_left", "band_right")
    return np.dtype(
        [
            *((name, np.uint64) for name in ("partial_out", "partial_lse", "partial_max")),
            ("out", _launch.OPERAND),
            ("lse", np.uint64),
            ("batch", _launch.BATCH_SHAPE),
            ("num_rows", np.int64),
            *((name, np.int32) for name in sizes),
            ("variant", variant),
        ],
        align=True,
    )


def join(problem: Problem, device: Any, parts: Parts, out, out_layout: Layout, lse, row_max) -> Launch:
    """The launch that makes the call's results of its parts."""
    rows = _problem_of_rows(problem)
    arrays = {"out": out, **_variant.arrays(rows, device)}
    layouts = {"out": out_layout, **_variant.layouts(rows)}
    batch, operands = _launch.operands(rows.batch_shape, arrays, layouts)
    with_max = row_max is not None
    params = _launch.pack(
        params_dtype(_variant.params_dtype(rows, _launch.OPERAND, return_max=with_max)),
        partial_out=parts.out,
        partial_lse=parts.lse,
        partial_max=parts.row_max,
        out=operands["out"],
        lse=lse,
        batch=batch,
        num_rows=parts.lse.shape[1],
        num_parts=parts.count,
        num_batches=problem.num_batches,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        head_dim_v=problem.head_dim_v,
        variant=_variant.params(rows, operands, row_max=row_max),
    )
    defines = _variant.defines(rows, return_max=with_max)
    return Launch(
        config(problem.dtype, problem.lse_dtype, problem.num_batches * problem.seqlen_q, defines),
        *params,
    )


def config(dtype: np.dtype, partial: np.dtype, num_rows: int, defines: dict[str, Any]) -> KernelConfig:
    """``flash_combine`` for results of ``dtype`` from parts of dtype ``partial``."""
    constants = {"ELEMENT": _variant.ELEMENT[dtype], "PARTIAL": _variant.ELEMENT[partial], **defines}
    grid = grid_of(ceil_div(num_rows, _ROWS_PER_BLOCK))
    return KernelConfig("flash_combine", "flash_combine", constants, grid, _ROWS_PER_BLOCK * WARP_SIZE)


def _problem_of_rows(problem: Problem) -> Problem:
    """What is left of the options once each part is computed: which rows there are, and the sink."""
    kept = ("seqlens_q", "attn_sink")
    return replace(
        problem,
        window=(None, None),
        softcap=None,
        dropout_p=0.0,
        score_mod=None,
        mask_mod=None,
        block_mask=None,
        split_size=None,
        operands=MappingProxyType({name: problem.operands[name] for name in kept if name in problem.operands}),
        layouts=MappingProxyType({name: problem.layouts[name] for name in kept if name in problem.layouts}),
        aux=MappingProxyType({}),
        stacked_heads=1,
    )
