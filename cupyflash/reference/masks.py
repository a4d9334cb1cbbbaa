"""Which keys each query sees: everything that masks, intersected."""

from __future__ import annotations

import numpy as np

from cupyflash._lengths import per_batch
from cupyflash._problem import Problem
from cupyflash._score_mod import evaluate_mask
from cupyflash.reference.arrays import copied_to_host


def relative_positions(problem: Problem) -> np.ndarray:
    """j - (i + shift), how far key j is to the right of where query i stands; broadcasts to (..., L, S)."""
    query, key = _indices(problem)
    return key - (query + _shift(problem))


def visible_keys(problem: Problem) -> np.ndarray:
    """Bool, broadcasts to (..., L, S)."""
    position = relative_positions(problem)
    seen = np.ones((problem.seqlen_q, problem.seqlen_k), bool)
    left, right = problem.window
    if left is not None:
        seen = seen & (position >= -left)
    if right is not None:
        seen = seen & (position <= right)
    if "mask" in problem.operands:
        seen = seen & copied_to_host(problem.operands["mask"])
    if problem.mask_mod is not None:
        seen = seen & evaluate_mask(problem)
    _, key = _indices(problem)
    return seen & rows_within_length(problem) & (key < _lengths(problem, "seqlens_k", problem.seqlen_k))


def rows_within_length(problem: Problem) -> np.ndarray:
    """Bool, broadcasts to (..., L, 1): the queries that there are, i < seqlens_q."""
    query, _ = _indices(problem)
    return query < _lengths(problem, "seqlens_q", problem.seqlen_q)


def _indices(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    return np.ogrid[: problem.seqlen_q, : problem.seqlen_k]


def _shift(problem: Problem) -> np.ndarray:
    """How far query 0 stands from key 0."""
    if not problem.bottom_right:
        return np.full((), problem.offset)
    return _lengths(problem, "seqlens_k", problem.seqlen_k) - _lengths(problem, "seqlens_q", problem.seqlen_q)


def _lengths(problem: Problem, name: str, default: int) -> np.ndarray:
    """Of each batch, to broadcast with (..., L, S); all heads of a batch have one."""
    if name not in problem.operands:
        return np.full((), default)
    lengths = problem.operands[name].astype(int)
    heads = (1,) * (len(problem.leading_shape) - len(per_batch(problem.leading_shape)))
    return lengths.reshape(*lengths.shape, *heads, 1, 1)
