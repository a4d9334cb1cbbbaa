"""Expressions for ``score_mod`` and ``mask_mod`` that problems choose from, and the arrays that they name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Expression:
    """CUDA C++, and the arrays that it indexes, made from a problem and a NumPy generator."""

    text: str
    arrays: Callable[[Any, np.random.Generator], dict[str, np.ndarray]] = lambda problem, rng: {}


def _reach(problem):
    """More than any i, j or i - j + S of a problem, whose origin's query is not before its key."""
    origin = problem.variants.origin or (0, 0, 0, 0)
    return problem.seqlen_q + problem.seqlen_k + origin[2] + 1


def _relative(problem, rng):
    return {"rel": rng.standard_normal(_reach(problem)).astype(np.float32)}


def _documents(problem, rng):
    """Which document each key is part of: they change at random places."""
    changes = rng.random(_reach(problem)) < 0.05
    return {"document": np.cumsum(changes).astype(np.int32)}


SCORE_EXPRESSIONS = {
    "identity": Expression("score"),
    "relative bias": Expression("score + rel[i - j + S]", _relative),
    "squared": Expression("0.125f * score * score"),
    "half": Expression("score * 0.5f"),
    "removed": Expression("i % 3 == 0 || (i + j) % 3 == 0 ? -INFINITY : score"),
    "distance": Expression("score - 0.125f * (h + 1) * abs(i - j)"),
}
MASK_EXPRESSIONS = {
    "documents": Expression("document[i] == document[j]", _documents),
    "causal": Expression("j <= i"),
    "checkered": Expression("(i + j + h + b) % 2 == 0"),
    "prefix": Expression("j < S / 2 || j <= i"),
}
