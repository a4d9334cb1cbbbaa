"""The score of each pair, step by step, and its derivative."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash._problem import Problem
from cupyflash._score_mod import evaluate
from cupyflash.reference.arrays import Numbers, operand, pair_shape, wide
from cupyflash.reference.masks import relative_positions, visible_keys


@dataclass(frozen=True)
class Scores:
    """Arrays that broadcast to (..., L, S)."""

    final: Numbers  # what the softmax is taken of; -inf where the pair is removed
    derivative: Numbers | float  # of the final scores in softmax_scale * q . k, wherever the pair is seen

    @property
    def seen(self) -> np.ndarray:
        """Pairs that are not removed, neither by a mask nor by a score of -inf."""
        return self.final != -np.inf


def pair_scores(problem: Problem, q: Numbers, k: Numbers) -> Scores:
    """Scale, softcap, score_mod, bias, ALiBi, masks, in this order.

    A score_mod or a bias of -inf removes its pair like a mask, whatever other steps make of it. A score_mod is float64:
    its value and its derivative at the score rounded to float64, however precise the other steps are.
    """
    visible = visible_keys(problem)
    with np.errstate(invalid="ignore", over="ignore"):
        scores, derivative = problem.softmax_scale * (q @ k.mT), 1.0
        if problem.softcap is not None:
            scores, derivative = capped(scores, problem.softcap)
        if problem.score_mod is not None:
            value, factor = evaluate(problem, np.broadcast_to(np.asarray(scores), pair_shape(problem)))
            (scores,), derivative = wide(problem.dtype, value), factor * derivative
            visible = visible & (scores != -np.inf)
        if (bias := operand(problem, "bias")) is not None:
            scores = scores + bias
            visible = visible & (bias != -np.inf)
        if (slopes := operand(problem, "alibi_slopes")) is not None:
            scores = scores - slopes[..., None, None] * distances(problem)
    return Scores(np.where(visible, scores, -np.inf), derivative)


def capped(scores: Numbers, softcap: float) -> tuple[Numbers, Numbers]:
    """c tanh(s / c), and its derivative 1 - tanh^2(s / c) in a form that does not cancel."""
    ratio = scores / softcap
    decay = np.exp(-2 * np.abs(ratio))
    return softcap * np.tanh(ratio), 4 * decay / ((1 + decay) * (1 + decay))


def distances(problem: Problem) -> np.ndarray:
    """What ALiBi multiplies -slope with."""
    return np.abs(relative_positions(problem)).astype(np.float64)
