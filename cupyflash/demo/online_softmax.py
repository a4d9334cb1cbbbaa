"""The online softmax in NumPy: what flash_fwd keeps of a row while the keys arrive tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash import attention, ptxsim
from cupyflash.demo import activations

#: Three tiles for 129 keys: key tiles of 64, those of sm_75.
ARCH, BLOCK_N = "sm_75", 64


@dataclass(frozen=True)
class Step:
    """State after one tile, each (...) float32."""

    row_max: np.ndarray  # m: largest score so far
    rescale: np.ndarray  # exp(m_old - m): the factor for all that was summed before this tile
    row_sum: np.ndarray  # l: sum of exp(score - m) so far

    @property
    def lse(self) -> np.ndarray:
        return self.row_max + np.log(self.row_sum)


def steps(scores: np.ndarray, block_n: int) -> list[Step]:
    """Running maximum, rescaling factor and sum of rows (..., S), all in float32.

    >>> [float(step.rescale) for step in steps(np.log([1.0, 2.0, 8.0, 4.0]), 2)]
    [0.0, 0.25]
    """
    scores = scores.astype(np.float32)
    row_max = np.full(scores.shape[:-1], -np.inf, np.float32)
    row_sum = np.zeros(scores.shape[:-1], np.float32)
    history = []
    for first in range(0, scores.shape[-1], block_n):
        tile = scores[..., first : first + block_n]
        new_max = np.maximum(row_max, tile.max(axis=-1))
        rescale = np.exp(row_max - new_max)
        row_sum = row_sum * rescale + np.exp(tile - new_max[..., None]).sum(axis=-1)
        row_max = new_max
        history.append(Step(row_max, rescale, row_sum))
    return history


def scaled_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q @ k.T / sqrt(head_dim) in float32."""
    q, k = q.astype(np.float32), k.astype(np.float32)
    return q @ np.swapaxes(k, -1, -2) * np.float32(q.shape[-1] ** -0.5)


def report() -> Iterator[str]:
    """A row whose maximum moves in each of its three tiles, beside the kernel's lse."""
    x = activations.load()[0]
    history = steps(scaled_scores(x.q, x.k), BLOCK_N)
    # The row that the last two tiles move most evenly: both factors far from 0 and from 1.
    moved = np.min([np.minimum(step.rescale, 1 - step.rescale) for step in history[1:]], axis=0)
    row = np.unravel_index(moved.argmax(), moved.shape)
    with ptxsim.settings(arch=ARCH):
        _, lse = attention(x.q, x.k, x.v, return_lse=True)

    head, query = (int(i) for i in row)
    yield f"\n3. A row, tile by tile: layer 0, text 0, head {head}, query {query}; {BLOCK_N} keys a tile, as on {ARCH}"
    yield "   keys          m   rescale exp(m_old - m)            l   m + ln l"
    for tile, step in enumerate(history):
        first, last = tile * BLOCK_N, min((tile + 1) * BLOCK_N, x.tokens) - 1
        yield (
            f"   {first:3}-{last:3} {step.row_max[row]:9.3f} {step.rescale[row]:24.4f} {step.row_sum[row]:12.4f} "
            f"{step.lse[row]:10.4f}"
        )
    yield f"   lse from the kernel: {lse[row]:.4f} (the table is float32 NumPy)"
