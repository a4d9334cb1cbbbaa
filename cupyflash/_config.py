"""Problem and architecture -> kernel, constants, tile sizes, grid, block and shared memory. Needs no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cupyflash import _numerics, _variant
from cupyflash._arrays import BFLOAT16, FLOAT64, HALF_TYPES
from cupyflash._problem import Problem
from cupyflash._user_functions import UserFunctions, user_functions
from cupyflash._variant import ELEMENT

MAX_BLOCKS = 2**31 - 1
THREADS_PER_BLOCK = 256  # of the kernels with one thread per element
WARP_SIZE = 32
KIB = 1024

#: Shared memory that one block may have, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_MEMORY_PER_BLOCK = {
    75: 64 * KIB,
    80: 163 * KIB,
    86: 99 * KIB,
    87: 163 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    100: 227 * KIB,
    103: 227 * KIB,
    110: 227 * KIB,
    120: 99 * KIB,
    121: 99 * KIB,
}


#: Tiles that :class:`cupyflash.Numerics` may ask for: key tiles divide every part of split keys.
TILE_ROWS, FMA_TILE_ROWS, TILE_COLUMNS = (32, 64, 128, 192, 256), (8, 16, 32, 64, 128), (16, 32, 64, 128)

LINE_BYTES = 128  # that rows of shared-memory tiles are whole multiples of


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one step of a block, and the warps that share the queries."""

    block_m: int
    block_n: int
    num_warps: int

    @property
    def defines(self) -> dict[str, int | str]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "NUM_WARPS": self.num_warps}


@dataclass(frozen=True)
class KernelConfig:
    """Everything about a launch but its arguments. ``file`` is the kernel's file, ``name`` its entry in it."""

    file: str
    name: str
    defines: Mapping[str, int | str] = field(hash=False)
    grid: int
    block: int
    shared_bytes: int = 0
    user_functions: UserFunctions | None = None


def shared_memory_per_block(arch: str) -> int:
    """Bytes of shared memory that a block may have on ``arch`` ("sm_80"); on an unknown one, the least since sm_80."""
    return SHARED_MEMORY_PER_BLOCK.get(compute_capability(arch), 99 * KIB)


def compute_capability(arch: str) -> int:
    """80 of "sm_80"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def check_architecture(dtype: np.dtype, arch: str) -> None:
    """Raise where the kernels for ``dtype`` cannot run on ``arch``."""
    if compute_capability(arch) < 75:
        raise RuntimeError(f"{arch}: the kernels need compute capability 7.5 or later")
    if dtype == BFLOAT16 and compute_capability(arch) < 80:
        raise TypeError(f"q: dtype bfloat16 needs sm_80 or later, and this is {arch}; use float16")


def flash_fwd_tile(head_dim: int, head_dim_v: int, arch: str) -> Tile:
    """Tile sizes for a pair of head dimensions. They never depend on lengths, so that neither do a row's bits.

    32 queries per warp read each key from shared memory half as often as 16 do; where their accumulators no longer
    fit the registers (sm_75, head_dim > 128), or the tile the shared memory, a warp has 16.
    """
    head_dim = max(head_dim, head_dim_v)
    if compute_capability(arch) < 80:
        return Tile(64, 64, 4) if head_dim <= 128 else Tile(64, 32, 4)
    if head_dim <= 64:
        return Tile(128, 128, 4)
    if head_dim <= 128:
        return Tile(128, 64, 4)
    return Tile(128, 64, 8) if shared_memory_per_block(arch) >= 128 * KIB else Tile(64, 64, 4)


def flash_fwd_defines(
    dtype: np.dtype, head_dim: int, head_dim_v: int, *, causal: bool, scale_positive: bool, arch: str
) -> dict[str, int | str]:
    """Compile-time constants of ``flash_fwd``.

    >>> flash_fwd_defines(np.dtype("float16"), 64, 50, causal=True, scale_positive=True, arch="sm_80")["HEAD_DIM_V"]
    64
    """
    tile = flash_fwd_tile(head_dim, head_dim_v, arch)
    return {
        "ELEMENT": ELEMENT[dtype],
        "HEAD_DIM": round_up(head_dim, 16),
        "HEAD_DIM_V": round_up(head_dim_v, 16),
        **tile.defines,
        "BAND_RIGHT": int(causal),
        "SCALE_POSITIVE": int(scale_positive),
    }


def forward(problem: Problem, arch: str, *, return_max: bool = False, num_parts: int | None = None) -> KernelConfig:
    """The forward kernel for the problem's dtype; ``num_parts``: where its keys are split."""
    kernel = flash_fwd if problem.dtype in HALF_TYPES else flash_fwd_fma
    config = kernel(problem, arch)
    options = _variant.defines(problem, return_max=return_max, split=num_parts is not None)
    options |= _numerics.defines(problem.numerics)
    return replace(config, defines={**config.defines, **options}, grid=grid_of(config.grid * (num_parts or 1)))


def _chosen_tile(problem: Problem, default: Tile, arch: str, shared_bytes: Callable[[Tile], int]) -> Tile:
    """The tile that the call asks for, or the default one."""
    if problem.numerics.tile is None:
        return default
    block_m, block_n = problem.numerics.tile
    rows, columns = (TILE_ROWS, TILE_COLUMNS) if problem.dtype in HALF_TYPES else (FMA_TILE_ROWS, TILE_COLUMNS)
    for name, size, allowed in ("block_m", block_m, rows), ("block_n", block_n, columns):
        if size not in allowed:
            raise ValueError(
                f"numerics: tile {problem.numerics.tile} has {name} {size}; for {problem.dtype} it is one of "
                f"{', '.join(map(str, allowed))}"
            )
    tile = Tile(block_m, block_n, 4 if block_m >= 64 or (block_m >= 16 and rows == FMA_TILE_ROWS) else 2)
    if shared_bytes(tile) > shared_memory_per_block(arch):
        raise ValueError(
            f"numerics: tile {problem.numerics.tile} needs {shared_bytes(tile)} bytes of shared memory for head_dim "
            f"{problem.head_dim} and head_dim_v {problem.head_dim_v}; {arch} has {shared_memory_per_block(arch)}"
        )
    return tile


def flash_fwd(problem: Problem, arch: str) -> KernelConfig:
    """The tensor-core forward kernel for float16 and bfloat16."""
    check_architecture(problem.dtype, arch)
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    # A row of a shared tile is whole 128-byte lines; the query tile's place is taken by the out tile at the end.
    row_q, row_v = round_up(head_dim, 64), round_up(head_dim_v, 64)

    def shared_bytes(tile: Tile) -> int:
        elements = tile.block_m * max(row_q, row_v) + tile.block_n * (row_q + row_v)
        return elements * problem.dtype.itemsize

    tile = _chosen_tile(problem, flash_fwd_tile(head_dim, head_dim_v, arch), arch, shared_bytes)
    return KernelConfig(
        file="flash_fwd",
        name="flash_fwd",
        defines={
            **flash_fwd_defines(
                problem.dtype,
                head_dim,
                head_dim_v,
                causal=problem.causal,
                scale_positive=problem.softmax_scale > 0 or _variant.pair_by_pair(problem),
                arch=arch,
            ),
            **tile.defines,
        },
        grid=grid_of(
            ceil_div(problem.seqlen_q * problem.stacked_heads, tile.block_m)
            * (problem.num_batches // problem.stacked_heads)
        ),
        block=tile.num_warps * WARP_SIZE,
        shared_bytes=shared_bytes(tile),
        user_functions=user_functions(problem),
    )


def flash_fwd_fma_tile(dtype: np.dtype, head_dim: int, head_dim_v: int, arch: str) -> Tile:
    """Tile sizes of ``flash_fwd_fma``; like :func:`flash_fwd_tile` they do not depend on lengths.

    A thread has 8 x 4 scores where its outputs leave room in the registers and the tiles in shared memory.
    """
    row_bytes = max(head_dim, head_dim_v) * dtype.itemsize
    turing = compute_capability(arch) < 80
    if row_bytes <= 256:
        return Tile(64, 64, 4)
    if row_bytes <= 512:
        return Tile(64, 32, 4) if turing or dtype == FLOAT64 else Tile(64, 64, 4)
    if row_bytes <= 1024:
        return Tile(32, 16, 4) if turing else Tile(32, 32, 4)
    return Tile(8, 16, 2) if turing else Tile(16, 16, 4)


def flash_fwd_fma_defines(
    dtype: np.dtype, head_dim: int, head_dim_v: int, *, causal: bool, arch: str
) -> dict[str, int | str]:
    """Compile-time constants of ``flash_fwd_fma``.

    >>> flash_fwd_fma_defines(np.dtype("float32"), 64, 50, causal=True, arch="sm_80")["HEAD_DIM_V"]
    64
    """
    tile = flash_fwd_fma_tile(dtype, head_dim, head_dim_v, arch)
    line = LINE_BYTES // dtype.itemsize
    return {
        "ELEMENT": ELEMENT[dtype],
        "HEAD_DIM": round_up(head_dim, line),
        "HEAD_DIM_V": round_up(head_dim_v, line),
        **tile.defines,
        "BAND_RIGHT": int(causal),
    }


def flash_fwd_fma(problem: Problem, arch: str) -> KernelConfig:
    """The forward kernel for float32 and float64."""
    check_architecture(problem.dtype, arch)
    dtype, head_dim, head_dim_v = problem.dtype, problem.head_dim, problem.head_dim_v
    row_q, row_v = (round_up(columns * dtype.itemsize, LINE_BYTES) for columns in (head_dim, head_dim_v))

    def shared_bytes(tile: Tile) -> int:
        """The keys and the values take turns in one place."""
        row_weights = round_up(tile.block_n * dtype.itemsize, LINE_BYTES)
        return tile.block_m * (row_q + row_weights) + tile.block_n * max(row_q, row_v)

    tile = _chosen_tile(problem, flash_fwd_fma_tile(dtype, head_dim, head_dim_v, arch), arch, shared_bytes)
    return KernelConfig(
        file="flash_fwd_fma",
        name="flash_fwd_fma",
        defines={
            **flash_fwd_fma_defines(dtype, head_dim, head_dim_v, causal=problem.causal, arch=arch),
            **tile.defines,
        },
        grid=grid_of(ceil_div(problem.seqlen_q, tile.block_m) * problem.num_batches),
        block=tile.num_warps * WARP_SIZE,
        shared_bytes=shared_bytes(tile),
        user_functions=user_functions(problem),
    )


def attention_naive(problem: Problem, arch: str) -> tuple[KernelConfig, KernelConfig, KernelConfig]:
    """The standard method: its scores, softmax and weighted_values kernels."""
    check_architecture(problem.dtype, arch)
    rows = problem.num_batches * problem.seqlen_q
    threads = {
        "scores": rows * problem.seqlen_k,
        "softmax": rows * WARP_SIZE,
        "weighted_values": rows * problem.head_dim_v,
    }
    return tuple(
        one_thread_each("attention_naive", name, {"ELEMENT": ELEMENT[problem.dtype]}, num_threads)
        for name, num_threads in threads.items()
    )


def strided_copy(shape: tuple[int, ...], dtype: np.dtype) -> KernelConfig:
    """A copy between two strided layouts of one shape."""
    return one_thread_each("strided_copy", "strided_copy", {"ELEMENT_BYTES": dtype.itemsize}, math.prod(shape))


def one_thread_each(file: str, name: str, defines: Mapping[str, int | str], num_threads: int) -> KernelConfig:
    """A kernel with one thread per number that it computes."""
    return KernelConfig(file, name, defines, grid_of(ceil_div(num_threads, THREADS_PER_BLOCK)), THREADS_PER_BLOCK)


def grid_of(num_blocks: int) -> int:
    """A one-dimensional grid, or ValueError where there are too many blocks for one."""
    if num_blocks > MAX_BLOCKS:
        raise ValueError(f"q: the call needs {num_blocks} thread blocks, more than the {MAX_BLOCKS} of one launch")
    return num_blocks


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b
