"""Problem and architecture -> launch configuration of the backward kernels. Needs no device."""

from __future__ import annotations

from dataclasses import dataclass

from cupyflash._config import (
    ELEMENT,
    WARP_SIZE,
    KernelConfig,
    ceil_div,
    compute_capability,
    grid_of,
    one_thread_each,
    round_up,
)
from cupyflash._problem import Problem

ROWS_PER_BLOCK = 4  # of flash_bwd_delta: one warp each
MAX_ACCUMULATOR_COLUMNS = 256  # of dk and dv together, in one block's registers


@dataclass(frozen=True)
class BackwardTile:
    """Queries and keys of one step, the warps that share the tile that a block owns, and the buffers of the other."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def flash_bwd_dkdv_tile(head_dim: int, head_dim_v: int, arch: str) -> BackwardTile:
    head_dim = max(head_dim, head_dim_v)
    if compute_capability(arch) < 80:
        if head_dim <= 64:
            return BackwardTile(32, 64, 4, 2)
        return BackwardTile(16, 64, 4, 2) if head_dim <= 128 else BackwardTile(16, 32, 2, 1)
    if head_dim <= 64:
        return BackwardTile(32, 128, 4, 2)
    return BackwardTile(32, 64, 4, 2) if head_dim <= 128 else BackwardTile(16, 64, 4, 2)


def flash_bwd_dq_tile(head_dim: int, head_dim_v: int, arch: str) -> BackwardTile:
    head_dim = max(head_dim, head_dim_v)
    if compute_capability(arch) < 80:
        if head_dim <= 64:
            return BackwardTile(64, 64, 4, 2)
        return BackwardTile(64, 32, 4, 2) if head_dim <= 128 else BackwardTile(32, 16, 2, 2)
    if head_dim <= 64:
        return BackwardTile(128, 64, 4, 2)
    return BackwardTile(128, 32, 4, 1) if head_dim <= 128 else BackwardTile(64, 16, 4, 2)


def one_pass_for_keys_and_values(problem: Problem) -> bool:
    """Whether a block's registers hold the accumulators of dk and of dv."""
    return round_up(problem.head_dim, 16) + round_up(problem.head_dim_v, 16) <= MAX_ACCUMULATOR_COLUMNS


def flash_bwd_delta(problem: Problem) -> KernelConfig:
    grid = ceil_div(problem.seqlen_q * problem.num_batches, ROWS_PER_BLOCK)
    return KernelConfig("flash_bwd_delta", "flash_bwd_delta", {"ELEMENT": ELEMENT[problem.dtype]}, grid_of(grid), 128)


def flash_bwd_dkdv(problem: Problem, arch: str, num_owners: int, *, with_dkey: bool, with_dvalue: bool) -> KernelConfig:
    """The kernel that owns a tile of keys of one of ``num_owners`` matrices of dk, dv or both."""
    tile = flash_bwd_dkdv_tile(problem.head_dim, problem.head_dim_v, arch)
    row = _row_elements(problem)
    stage_bytes = 2 * tile.block_m * row + 8 * tile.block_m  # queries and dout; lse and delta
    return KernelConfig(
        file="flash_bwd_dkdv",
        name="flash_bwd_dkdv",
        defines={**_defines(problem, tile), "WITH_DKEY": int(with_dkey), "WITH_DVALUE": int(with_dvalue)},
        grid=grid_of(ceil_div(problem.seqlen_k, tile.block_n) * num_owners),
        block=tile.num_warps * WARP_SIZE,
        shared_bytes=2 * tile.block_n * row + tile.num_stages * stage_bytes,
    )


def flash_bwd_dq(problem: Problem, arch: str, num_owners: int) -> KernelConfig:
    """The kernel that owns a tile of queries of one of ``num_owners`` matrices of dq."""
    tile = flash_bwd_dq_tile(problem.head_dim, problem.head_dim_v, arch)
    return KernelConfig(
        file="flash_bwd_dq",
        name="flash_bwd_dq",
        defines=_defines(problem, tile),
        grid=grid_of(ceil_div(problem.seqlen_q, tile.block_m) * num_owners),
        block=tile.num_warps * WARP_SIZE,
        shared_bytes=2 * (tile.block_m + tile.num_stages * tile.block_n) * _row_elements(problem),
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


def _defines(problem: Problem, tile: BackwardTile) -> dict[str, int | str]:
    return {
        "ELEMENT": ELEMENT[problem.dtype],
        "HEAD_DIM": round_up(problem.head_dim, 16),
        "HEAD_DIM_V": round_up(problem.head_dim_v, 16),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "NUM_WARPS": tile.num_warps,
        "NUM_STAGES": tile.num_stages,
        "CAUSAL": int(problem.causal),
    }


def _row_elements(problem: Problem) -> int:
    """Of a row of q or k and one of v or dout in shared tiles, whose rows are whole 128-byte lines."""
    return round_up(problem.head_dim, 64) + round_up(problem.head_dim_v, 64)
