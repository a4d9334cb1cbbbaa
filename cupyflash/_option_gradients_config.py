"""Problem and architecture -> launch configuration of the kernels for gradients of bias, alibi_slopes and attn_sink."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash import _numerics, _variant
from cupyflash._arrays import FLOAT64, HALF_TYPES
from cupyflash._config import (
    LINE_BYTES,
    THREADS_PER_BLOCK,
    WARP_SIZE,
    KernelConfig,
    Tile,
    ceil_div,
    compute_capability,
    grid_of,
    round_up,
)
from cupyflash._problem import Problem
from cupyflash._user_functions import user_functions
from cupyflash._variant import ELEMENT


@dataclass(frozen=True)
class Sums:
    """What an element of a bias gradient is summed over beside batches: queries, where there is one row for all of
    them, keys, where there is one column for all of them."""

    queries: bool
    keys: bool


def flash_bwd_dbias_tile(head_dim: int, head_dim_v: int, arch: str) -> Tile:
    """Tile sizes of ``flash_bwd_dbias``: a thread has 32 elements or fewer of S, of dP and of the gradient."""
    head_dim = max(head_dim, head_dim_v)
    if head_dim <= 128:
        return Tile(64, 64, 4)
    return Tile(32, 16, 2) if compute_capability(arch) < 80 else Tile(64, 32, 4)


def flash_bwd_dbias_fma_tile(dtype: np.dtype, head_dim: int, head_dim_v: int, arch: str) -> Tile:
    """Tile sizes of ``flash_bwd_dbias_fma``."""
    row_bytes = max(head_dim, head_dim_v) * dtype.itemsize
    turing = compute_capability(arch) < 80
    if row_bytes <= 256:
        return Tile(32, 64, 4) if dtype == FLOAT64 else Tile(64, 64, 4)
    if row_bytes <= 512:
        return Tile(32, 64, 4) if not turing else Tile(32, 32, 4)
    if row_bytes <= 1024:
        return Tile(16, 16, 4) if turing else Tile(32, 32, 4)
    return Tile(8, 16, 2) if turing else Tile(16, 16, 4)


def flash_bwd_dbias(problem: Problem, arch: str, dtype: np.dtype, sums: Sums, num_owners: int) -> KernelConfig:
    """The kernel for the problem's dtype; ``dtype`` is the gradient's, of ``num_owners`` matrices."""
    half = problem.dtype in HALF_TYPES
    if half:
        tile = flash_bwd_dbias_tile(problem.head_dim, problem.head_dim_v, arch)
        unit, row_unit = 16, LINE_BYTES // 2
    else:
        tile = flash_bwd_dbias_fma_tile(problem.dtype, problem.head_dim, problem.head_dim_v, arch)
        unit = row_unit = LINE_BYTES // problem.dtype.itemsize
    row_q, row_v = (round_up(n, row_unit) * problem.dtype.itemsize for n in (problem.head_dim, problem.head_dim_v))
    key_side = row_q + row_v if half else max(row_q, row_v)  # the values and the keys take turns in one place
    shared_bytes = tile.block_m * (row_q + row_v) + tile.block_n * key_side
    name = "flash_bwd_dbias" if half else "flash_bwd_dbias_fma"
    return KernelConfig(
        file=name,
        name=name,
        defines={
            "ELEMENT": ELEMENT[problem.dtype],
            "HEAD_DIM": round_up(problem.head_dim, unit),
            "HEAD_DIM_V": round_up(problem.head_dim_v, unit),
            **tile.defines,
            "DBIAS": ELEMENT[dtype],
            "SUM_QUERIES": int(sums.queries),
            "SUM_KEYS": int(sums.keys),
            **_variant.defines(problem),
            **_numerics.defines(problem.numerics, backward=True),
        },
        grid=grid_of(
            (1 if sums.queries else ceil_div(problem.seqlen_q, tile.block_m))
            * (1 if sums.keys else ceil_div(problem.seqlen_k, tile.block_n))
            * num_owners
        ),
        block=tile.num_warps * WARP_SIZE,
        shared_bytes=shared_bytes,
        user_functions=user_functions(problem),
    )


def row_sum(
    problem: Problem, dtype: np.dtype, num_results: int, *, lengths: int, sink: np.dtype | None
) -> KernelConfig:
    """Sums of one value per query to ``num_results`` numbers of ``dtype``; of sinks of this dtype, or of other terms.

    ``lengths`` is the constant LENGTHS.
    """
    return KernelConfig(
        file="row_sum",
        name="row_sum",
        defines={
            "ELEMENT": ELEMENT[problem.lse_dtype],
            "RESULT": ELEMENT[dtype],
            "NUM_THREADS": THREADS_PER_BLOCK,
            "LENGTHS": lengths,
            **({} if sink is None else {"SINK": ELEMENT[sink]}),
        },
        grid=grid_of(num_results),
        block=THREADS_PER_BLOCK,
    )
