"""Problem and architecture -> launch configuration of the backward kernels. Needs no device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from cupyflash import _numerics, _variant
from cupyflash._arrays import FLOAT64, HALF_TYPES
from cupyflash._config import (
    KIB,
    LINE_BYTES,
    WARP_SIZE,
    KernelConfig,
    Tile,
    ceil_div,
    compute_capability,
    grid_of,
    one_thread_each,
    round_up,
    shared_memory_per_block,
)
from cupyflash._problem import Problem
from cupyflash._user_functions import user_functions
from cupyflash._variant import ELEMENT

ROWS_PER_BLOCK = 4  # of flash_bwd_delta: one warp each
MAX_ACCUMULATOR_ROW_BYTES = 512  # of dk or dv, where both are in one block's registers; fused multiply-adds


@dataclass(frozen=True)
class BackwardTile(Tile):
    """With the number of buffers for the tiles that a block does not own."""

    num_stages: int

    @property
    def defines(self) -> dict[str, int | str]:
        return {**super().defines, "NUM_STAGES": self.num_stages}


def flash_bwd_dkdv_tile(head_dim: int, head_dim_v: int, arch: str) -> Tile:
    """Tile sizes of ``flash_bwd_dkdv``: two warps share 16 or 32 keys, which each of them keeps in registers."""
    head_dim = max(head_dim, head_dim_v)
    if compute_capability(arch) < 80:
        if head_dim <= 64:
            return Tile(32, 64, 4)
        return Tile(16, 64, 8) if head_dim <= 128 else Tile(16, 32, 4)
    if head_dim <= 64:
        return Tile(64, 128, 8)
    return Tile(16, 64, 4) if head_dim <= 128 else Tile(16, 64, 8)


def flash_bwd_dq_tile(head_dim: int, head_dim_v: int, arch: str) -> BackwardTile:
    head_dim = max(head_dim, head_dim_v)
    if compute_capability(arch) < 80:
        if head_dim <= 64:
            return BackwardTile(64, 64, 4, 2)
        return BackwardTile(64, 32, 4, 2) if head_dim <= 128 else BackwardTile(32, 16, 2, 2)
    if head_dim <= 64:
        return BackwardTile(128, 64, 4, _num_stages(arch))
    if head_dim <= 128:
        return BackwardTile(128, 32, 4, 1)
    shared = shared_memory_per_block(arch)
    if shared < 128 * KIB:
        return BackwardTile(64, 16, 4, 2)
    return BackwardTile(128, 32, 8, 2) if shared >= 192 * KIB else BackwardTile(64, 32, 4, 2)


def flash_bwd_dkdv_fma_tile(dtype: np.dtype, head_dim: int, head_dim_v: int, arch: str) -> Tile:
    """Tile sizes of ``flash_bwd_dkdv_fma``, whose block owns ``block_n`` keys."""
    row_bytes = max(head_dim, head_dim_v) * dtype.itemsize
    turing = compute_capability(arch) < 80
    if row_bytes <= 256:
        return Tile(32, 64, 4) if turing and dtype == FLOAT64 else Tile(64, 64, 4)
    if row_bytes <= 512:
        return Tile(32, 32, 4) if turing else Tile(64, 32, 4)
    if row_bytes <= 1024:
        return Tile(16, 16, 4) if turing else Tile(32, 16, 4)
    return Tile(16, 4, 2) if turing else Tile(16, 8, 4)


def flash_bwd_dq_fma_tile(dtype: np.dtype, head_dim: int, head_dim_v: int, arch: str) -> Tile:
    """Tile sizes of ``flash_bwd_dq_fma``: those of the kernel for keys, with the roles exchanged."""
    tile = flash_bwd_dkdv_fma_tile(dtype, head_dim, head_dim_v, arch)
    return Tile(block_m=tile.block_n, block_n=tile.block_m, num_warps=tile.num_warps)


def _num_stages(arch: str) -> int:
    """One buffer where a second would take the room of a second block on the multiprocessor."""
    return 2 if shared_memory_per_block(arch) >= 128 * KIB else 1


def one_pass_for_keys_and_values(problem: Problem) -> bool:
    """Whether a block's registers hold the accumulators of dk and of dv: on tensor cores, always."""
    row_bytes = max(problem.head_dim, problem.head_dim_v) * problem.dtype.itemsize
    return problem.dtype in HALF_TYPES or row_bytes <= MAX_ACCUMULATOR_ROW_BYTES


def dkdv(problem: Problem, arch: str, num_owners: int, *, with_dkey: bool, with_dvalue: bool) -> KernelConfig:
    """The kernel for the problem's dtype that owns keys of one of ``num_owners`` matrices of dk, dv or both."""
    kernel = flash_bwd_dkdv if problem.dtype in HALF_TYPES else flash_bwd_dkdv_fma
    return kernel(problem, arch, num_owners, with_dkey=with_dkey, with_dvalue=with_dvalue)


def dq(problem: Problem, arch: str, num_owners: int) -> KernelConfig:
    """The kernel for the problem's dtype that owns queries of one of ``num_owners`` matrices of dq."""
    kernel = flash_bwd_dq if problem.dtype in HALF_TYPES else flash_bwd_dq_fma
    config = kernel(problem, arch, num_owners)
    if "alibi_slopes" not in problem.operands:
        return config
    return replace(config, defines={**config.defines, "WITH_DSLOPE": 1})


def flash_bwd_delta(problem: Problem) -> KernelConfig:
    rows = math.prod(problem.lse_shape)
    defines = {"ELEMENT": ELEMENT[problem.dtype]}
    if lengths := _variant.lengths(problem):
        defines["LENGTHS"] = lengths
    if "attn_sink" in problem.operands:
        defines["SINK"] = 1
    return KernelConfig("flash_bwd_delta", "flash_bwd_delta", defines, grid_of(ceil_div(rows, ROWS_PER_BLOCK)), 128)


def flash_bwd_dkdv(problem: Problem, arch: str, num_owners: int, *, with_dkey: bool, with_dvalue: bool) -> KernelConfig:
    """The tensor-core kernel of dk and dv."""
    tile = flash_bwd_dkdv_tile(problem.head_dim, problem.head_dim_v, arch)
    row = _row_elements(problem)
    stage_bytes = 2 * tile.block_m * row + 8 * tile.block_m  # queries and dout; lse and delta
    exchange_bytes = 4 * tile.block_m * tile.block_n if with_dkey else 0
    return KernelConfig(
        file="flash_bwd_dkdv",
        name="flash_bwd_dkdv",
        defines={**_defines(problem, tile), "WITH_DKEY": int(with_dkey), "WITH_DVALUE": int(with_dvalue)},
        grid=grid_of(ceil_div(problem.seqlen_k, tile.block_n) * num_owners),
        block=tile.num_warps * WARP_SIZE,
        # A second stage takes the place of the keys and values.
        shared_bytes=2 * tile.block_n * row + stage_bytes + exchange_bytes,
        user_functions=user_functions(problem),
    )


def flash_bwd_dq(problem: Problem, arch: str, num_owners: int) -> KernelConfig:
    """The tensor-core kernel of dq."""
    tile = flash_bwd_dq_tile(problem.head_dim, problem.head_dim_v, arch)
    return KernelConfig(
        file="flash_bwd_dq",
        name="flash_bwd_dq",
        defines=_defines(problem, tile),
        grid=grid_of(ceil_div(problem.seqlen_q, tile.block_m) * num_owners),
        block=tile.num_warps * WARP_SIZE,
        shared_bytes=2 * (tile.block_m + tile.num_stages * tile.block_n) * _row_elements(problem),
        user_functions=user_functions(problem),
    )


def flash_bwd_dkdv_fma(
    problem: Problem, arch: str, num_owners: int, *, with_dkey: bool, with_dvalue: bool
) -> KernelConfig:
    """The kernel of dk and dv for float32 and float64."""
    tile = flash_bwd_dkdv_fma_tile(problem.dtype, problem.head_dim, problem.head_dim_v, arch)
    row_q, row_v, row_weights = _row_bytes(problem, problem.head_dim, problem.head_dim_v, tile.block_m)
    owned = row_q + row_v if with_dkey else row_q
    return KernelConfig(
        file="flash_bwd_dkdv_fma",
        name="flash_bwd_dkdv_fma",
        defines={**_fma_defines(problem, tile), "WITH_DKEY": int(with_dkey), "WITH_DVALUE": int(with_dvalue)},
        grid=grid_of(ceil_div(problem.seqlen_k, tile.block_n) * num_owners),
        block=tile.num_warps * WARP_SIZE,
        # The queries and their dout take turns in one place.
        shared_bytes=tile.block_n * (owned + row_weights) + tile.block_m * max(row_q, row_v),
        user_functions=user_functions(problem),
    )


def flash_bwd_dq_fma(problem: Problem, arch: str, num_owners: int) -> KernelConfig:
    """The kernel of dq for float32 and float64."""
    tile = flash_bwd_dq_fma_tile(problem.dtype, problem.head_dim, problem.head_dim_v, arch)
    row_q, row_v, row_dscores = _row_bytes(problem, problem.head_dim, problem.head_dim_v, tile.block_n)
    return KernelConfig(
        file="flash_bwd_dq_fma",
        name="flash_bwd_dq_fma",
        defines=_fma_defines(problem, tile),
        grid=grid_of(ceil_div(problem.seqlen_q, tile.block_m) * num_owners),
        block=tile.num_warps * WARP_SIZE,
        # The values and the keys take turns in one place.
        shared_bytes=tile.block_m * (row_q + row_v + row_dscores) + tile.block_n * max(row_q, row_v),
        user_functions=user_functions(problem),
    )


def attention_naive_bwd(problem: Problem, name: str, num_owners: int) -> KernelConfig:
    """One kernel of the standard method, for ``num_owners`` matrices of what it computes."""
    rows = num_owners * (problem.seqlen_k if name in ("dkey", "dvalue") else problem.seqlen_q)
    columns = {
        "dweights": problem.seqlen_k,
        "dscores": WARP_SIZE,
        "dquery": problem.head_dim,
        "dkey": problem.head_dim,
        "dvalue": problem.head_dim_v,
    }
    return one_thread_each("attention_naive_bwd", name, {"ELEMENT": ELEMENT[problem.dtype]}, rows * columns[name])


def _defines(problem: Problem, tile: Tile) -> dict[str, int | str]:
    return {
        "ELEMENT": ELEMENT[problem.dtype],
        "HEAD_DIM": round_up(problem.head_dim, 16),
        "HEAD_DIM_V": round_up(problem.head_dim_v, 16),
        **tile.defines,
        **_variant.defines(problem),
        **_numerics.defines(problem.numerics, backward=True),
    }


def _row_elements(problem: Problem) -> int:
    """Of a row of q or k and one of v or dout in shared tiles, whose rows are whole 128-byte lines."""
    return round_up(problem.head_dim, 64) + round_up(problem.head_dim_v, 64)


def _fma_defines(problem: Problem, tile: Tile) -> dict[str, int | str]:
    line = LINE_BYTES // problem.dtype.itemsize
    return {
        "ELEMENT": ELEMENT[problem.dtype],
        "HEAD_DIM": round_up(problem.head_dim, line),
        "HEAD_DIM_V": round_up(problem.head_dim_v, line),
        **tile.defines,
        **_variant.defines(problem),
        **_numerics.defines(problem.numerics, backward=True),
    }


def _row_bytes(problem: Problem, *columns: int) -> tuple[int, ...]:
    """Of rows in shared tiles, which are whole lines."""
    return tuple(round_up(n * problem.dtype.itemsize, LINE_BYTES) for n in columns)
