"""Queries, keys and values of a sentence encoder on real text; see data/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np

LAYERS = (0, 5)
TEXTS = range(4)


@dataclass(frozen=True)
class Activations:
    """Attention inputs of one layer for one text, each (12 heads, tokens, head_dim 32) float16."""

    layer: int
    text: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def tokens(self) -> int:
        return self.q.shape[-2]


def load() -> list[Activations]:
    """Both layers of all texts.

    >>> [activations.tokens for activations in load() if activations.layer == 0]
    [129, 27, 32, 9]
    """
    with files("cupyflash").joinpath("data/minilm_qkv.npz").open("rb") as file, np.load(file) as arrays:
        return [
            Activations(layer, text, *(arrays[f"layer{layer}_text{text}_{operand}"] for operand in "qkv"))
            for layer in LAYERS
            for text in TEXTS
        ]
