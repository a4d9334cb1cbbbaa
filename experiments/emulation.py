"""Attention in NumPy, with roundings that no kernel here has: 8-bit weights, running sums kept in 16 bits.

:func:`standard` and :func:`tiled` are the algorithms of ``attention_naive.cu`` and ``flash_fwd.cu``, in float32; what
they round are arguments. With the kernels' own roundings they agree with the kernels but for the order of float32 sums
(tests/experiments/test_emulation.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cupyflash._arrays import BFLOAT16

LOG2_E = math.log2(math.e)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = float(ml_dtypes.finfo(FLOAT8).max)  # 448

Rounding = Callable[[np.ndarray], np.ndarray]  # float32 -> the float32 that the format holds


def exact(x: np.ndarray) -> np.ndarray:
    """Stays in float32."""
    return x


def to_float16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; beyond 65504 inf."""
    return x.astype(np.float16).astype(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even."""
    return x.astype(BFLOAT16).astype(np.float32)


def to_float8(x: np.ndarray) -> np.ndarray:
    """To e4m3, nearest, ties to even; beyond 448 it saturates, as the instruction ``cvt.rn.satfinite.e4m3x2`` does."""
    return np.clip(x, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8).astype(np.float32)


ROUNDINGS = {"float16": to_float16, "bfloat16": to_bfloat16, "float32": exact}


def fused(a: np.ndarray, b, c) -> np.ndarray:
    """a b + c of float32 numbers, rounded once (but for ties of float64)."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def scaled_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Q K^T / sqrt(d), products summed in float32."""
    return q.astype(np.float32) @ k.astype(np.float32).T * np.float32(q.shape[-1] ** -0.5)


def standard(scores: np.ndarray, v: np.ndarray, *, scores_to: Rounding, weights_to: Rounding) -> np.ndarray:
    """Softmax of whole rows, scores and weights rounded where they are stored; not rounded at the end."""
    scores = scores_to(scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights_to(weights / weights.sum(axis=-1, keepdims=True)) @ v.astype(np.float32)


@dataclass(frozen=True)
class Tiled:
    """What :func:`tiled` gives."""

    out: np.ndarray  # not rounded at the end
    lse: np.ndarray
    row_sum: np.ndarray  # l
    rescaled: np.ndarray  # (tile, row): whether the maximum was followed; not so in the first tile


def tiled(
    scores: np.ndarray,
    v: np.ndarray,
    *,
    tile: int,
    weights_to: Rounding,
    scale: float = LOG2_E,
    state_to: Rounding = exact,
    exp2: Callable[[np.ndarray], np.ndarray] = np.exp2,
    offset: float = 0.0,
    threshold: float = 0.0,
    normalise_each_tile: bool = False,
) -> Tiled:
    """Online softmax over tiles of keys.

    Parameters
    ----------
    scale : what makes powers of 2 of the scores, in the multiply-add that subtracts the maximum
    weights_to : rounding of a tile's weights before they multiply V; the row sum takes them unrounded
    state_to : rounding of maximum, row sum and output between tiles
    exp2 : 2^x in float32
    offset : weights are 2^offset times as large, which the division by the row sum undoes
    threshold : by how many powers of 2 the maximum may grow before it is followed
    normalise_each_tile : keep the output divided by the row sum (FlashAttention 1), not divide once (FlashAttention 2)
    """
    scale = np.float32(scale)
    v = v.astype(np.float32)
    row_max = np.full((len(scores), 1), -np.inf, np.float32)
    row_sum = np.zeros((len(scores), 1), np.float32)
    out = np.zeros((len(scores), v.shape[-1]), np.float32)
    rescaled = []
    for first in range(0, scores.shape[-1], tile):
        of_tile = scores[:, first : first + tile]
        tile_max = state_to(of_tile.max(axis=-1, keepdims=True) * scale)
        new_max = np.where(tile_max - row_max > threshold, tile_max, row_max)
        factor = exp2(row_max - new_max) if first else np.zeros_like(new_max)
        weights = exp2(fused(of_tile, scale, np.float32(offset) - new_max))
        rescaled.append((new_max > row_max)[:, 0] & (first > 0))
        old_sum, row_max = row_sum, new_max
        row_sum = state_to(old_sum * factor + weights.sum(axis=-1, keepdims=True))
        products = weights_to(weights) @ v[first : first + tile]
        if normalise_each_tile:
            out = state_to((out * old_sum * factor + products) / row_sum)
        else:
            out = state_to(out * factor + products)
    lse = (row_max - np.float32(offset) + np.log2(row_sum)) * np.float32(math.log(2))
    return Tiled(out if normalise_each_tile else out / row_sum, lse[:, 0], row_sum[:, 0], np.array(rescaled))


def as_kernel(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, tile: int, **choices) -> Tiled:
    """:func:`tiled` with the roundings of the kernel for the arrays' dtype.

    On tensor cores the exponent's multiply-add scales the scores; float32 kernels scale them before.
    """
    if v.dtype.itemsize == 2:
        scores, scale = q.astype(np.float32) @ k.astype(np.float32).T, q.shape[-1] ** -0.5 * LOG2_E
    else:
        scores, scale = scaled_scores(q, k) * np.float32(LOG2_E), 1.0
    return tiled(scores, v, scale=scale, tile=tile, weights_to=ROUNDINGS[v.dtype.name], **choices)
