"""Bytes of device memory that a method moves, counted while its kernels run in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash import attention, naive, ptxsim

SECTOR_BYTES = 32
SEQLENS = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written, in sectors of 32 bytes.

    least : each launch reads and writes a sector once, as with a cache that never has to drop one
    requested : every request of a warp goes to device memory, as without any cache
    """

    least: int
    requested: int


def count(method: Callable, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options) -> Traffic:
    """Traffic of ``attention`` or ``naive.attention`` on these NumPy arrays.

    Q, K and V are read and O is written, 4 * 64 * 16 elements of 2 bytes:

    >>> count(attention, *inputs(64, 16)).least
    8192
    """
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    with ptxsim.profile() as profile:
        method(q, k, v, out=out, **options)
    return of_kernels(profile.kernels)


def of_kernels(kernels: Iterable[ptxsim.KernelProfile]) -> Traffic:
    """Traffic of profiled kernels, added up."""
    kernels = list(kernels)
    return Traffic(
        least=SECTOR_BYTES * sum(x.distinct_load_sectors + x.distinct_store_sectors for x in kernels),
        requested=SECTOR_BYTES * sum(x.global_load_sectors + x.global_store_sectors for x in kernels),
    )


def inputs(seqlen: int, head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v (seqlen, head_dim) float16, memory of its own for each."""
    values = np.random.default_rng(seqlen).standard_normal((3, seqlen, head_dim)).astype(np.float16)
    return tuple(x.copy() for x in values)


def report() -> Iterator[str]:
    """A line per length: the standard method at its least, ours at its least and at its most."""
    from cupyflash._cli.progress import progress_bar

    yield "\n2. Device memory moved, KiB, one head of head_dim 64, float16, counted in the simulator"
    yield "        N   standard method   ours   ratio   ours without any cache"
    for seqlen in SEQLENS:
        with progress_bar(f"counting, N = {seqlen}"):
            standard, ours = (count(method, *inputs(seqlen, 64)) for method in (naive.attention, attention))
        yield (
            f"   {seqlen:6} {standard.least / 1024:17,.0f} {ours.least / 1024:6,.0f} "
            f"{standard.least / ours.least:6.1f}x {ours.requested / 1024:24,.0f}"
        )
    yield "   The standard method is counted at its least, with a perfect cache: S and P still go out and back."
