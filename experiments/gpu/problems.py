"""Problems that are timed: sizes, FLOP and bytes, and arrays of normal numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

FORWARD, BACKWARD = DIRECTIONS = "forward", "backward"
TORCH_DEVICE = "cuda"


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem. ``causal`` is for as many queries as keys."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    dtype: str = "float16"  # or bfloat16

    @property
    def arrays(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k, v and dout."""
        query = (self.batch, self.heads, self.seqlen_q, self.head_dim)
        key = (self.batch, self.kv_heads, self.seqlen_k, self.head_dim)
        return query, key, key, query

    def input_bytes(self, direction: str) -> int:
        """Of q, k and v, and of dout."""
        return 2 * sum(math.prod(shape) for shape in self.arrays[: 3 if direction == FORWARD else 4])

    def flops(self, direction: str) -> float:
        """Of the products: 4 L S D of each head, half of it where causal, and 2.5 times as many backward.

        So FlashAttention-2 counts. A backward has five products for the forward's two.

        >>> Shape(1, 1, 1, 1024, 1024, 64).flops(FORWARD) == 4 * 1024**2 * 64
        True
        """
        forward = 4 * self.seqlen_q * self.seqlen_k * self.head_dim * self.heads * self.batch
        return forward * (0.5 if self.causal else 1) * (1 if direction == FORWARD else 2.5)


class Problem:
    """A shape and normal numbers for it, on the GPU for each library that asks for them."""

    def __init__(self, shape: Shape, module: Any):
        self.shape, self.module = shape, module  # cupy

    @functools.cached_property
    def host(self) -> list[np.ndarray]:
        """q, k, v and dout."""
        return [normal(seed, sizes, self.shape.dtype) for seed, sizes in enumerate(self.shape.arrays)]

    @functools.cached_property
    def arrays(self) -> list[Any]:
        return [self.module.asarray(x) for x in self.host]

    @functools.cached_property
    def tensors(self) -> list[Any]:
        from experiments.examples.torch_bridge import as_tensor

        return [as_tensor(x).to(TORCH_DEVICE) for x in self.host]

    def load(self, package: str) -> list[Any]:
        """The arrays that a contender of this package takes."""
        return self.tensors if package == "torch" else self.arrays


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers; a long array repeats the first million of them, which takes no time."""
    return _numbers(seed, math.prod(shape), dtype).reshape(shape)


@functools.lru_cache(maxsize=8)
def _numbers(seed: int, size: int, dtype: str) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(min(size, 10**6 + 3), np.float32)
    return np.resize(numbers.astype(getattr(ml_dtypes, dtype, dtype)), size)  # which all problems of this size share
