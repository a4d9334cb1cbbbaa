"""What the forward's bounds are made of: the exact values of a call, and what its inputs rule out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash._arrays import LOG2_E
from cupyflash._problem import Problem
from cupyflash.bounds.arithmetic import MIN_KEY_TILE, largest
from cupyflash.reference.arrays import on_host, operand, wide
from cupyflash.reference.forward import dropout_factor, sink_logits
from cupyflash.reference.scores import pair_scores

_FURTHEST = 1e300  # that a score counts as below the maximum; its weight is 0 long before


@dataclass(frozen=True)
class Exact:
    """Rounded to float64; the last two axes are (query, key) or (query, column). Non-finite inputs are replaced by 0.

    m is the maximum of the scores and the sink, l the sum of exp(s - m) over both.
    """

    visible: np.ndarray  # (L, S) bool: pairs that are not removed
    scores: np.ndarray  # |s|, the final scores, 0 where masked
    scaled: np.ndarray  # softmax_scale q . k, of all pairs
    products: np.ndarray  # |softmax_scale| |q| . |k|, 0 where masked
    factors: np.ndarray  # sum of |q| and sum of |k|, together
    relative: np.ndarray  # x = s - m <= 0, -inf where masked
    row_max: np.ndarray  # |m|, with a last axis of length 1 as all that follow
    key_max: np.ndarray  # the absolute value of the maximum of the scores alone, 0 where there is none
    gap: np.ndarray  # m - that, 0 without a sink
    row_sum: np.ndarray  # l
    lse: np.ndarray  # |lse|, 0 where the row has neither keys nor a sink
    weights: np.ndarray  # P (query, key)
    dropout: np.ndarray | float  # what multiplies them before they meet V: 0 or 1 / (1 - p)
    values: np.ndarray  # V (key, column)
    out: np.ndarray  # O (query, column)
    sink: np.ndarray  # the sink's logit - m, -inf without one
    num_keys: np.ndarray  # from the first that the row sees, or the start of its tile, to the last
    sees_nonfinite: np.ndarray
    may_overflow: np.ndarray  # a score, or a step on the way to it, in the kernel's arithmetic

    @staticmethod
    def of(problem: Problem, q, k, v) -> Exact:
        q, k, v = on_host(problem, q, k, v)
        bad_q, bad_k, bad_v = (~np.isfinite(x).all(axis=-1, keepdims=True) for x in (q, k, v))
        given = pair_scores(problem, *wide(problem.dtype, q, k)).seen if bad_q.any() or bad_k.any() else False
        q, k, v = (np.where(np.isfinite(x), x, 0) for x in (q, k, v))
        pairs = pair_scores(problem, *wide(problem.dtype, q, k))
        visible = pairs.seen
        nonfinite = visible & ~np.isfinite(pairs.final)
        nonfinite = nonfinite | (visible | given) & (bad_q | bad_k.mT | bad_v.mT)
        final = np.where(nonfinite & visible, 0, pairs.final)
        sink = np.asarray(sink_logits(problem))
        bad_sink = np.isnan(sink) | (sink == np.inf)
        sink = np.where(bad_sink, -np.inf, sink)

        key_max = final.max(axis=-1, keepdims=True, initial=-np.inf)
        row_max = np.maximum(key_max, sink)
        key_max, row_max = (np.where(x == -np.inf, 0, x) for x in (key_max, row_max))
        sees_keys = visible.any(axis=-1, keepdims=True)
        relative, scores, gap, row_max, key_max = (
            np.asarray(x) for x in (final - row_max, final, row_max - key_max, row_max, key_max)
        )
        sink = sink - row_max
        row_sum = np.maximum(np.exp(relative).sum(axis=-1, keepdims=True) + np.exp(sink), 1)
        weights, dropout = np.exp(relative) / row_sum, np.asarray(dropout_factor(problem))

        magnitude = np.where(visible, np.abs(q) @ np.abs(k).mT, 0)
        scale = abs(problem.softmax_scale)
        overflows = (magnitude * max(1, scale * LOG2_E) >= largest(problem) / 2).any(axis=-1, keepdims=True)
        overflows = overflows | (np.abs(row_max) * LOG2_E >= largest(problem) / 2)
        if (slopes := operand(problem, "alibi_slopes")) is not None:  # beyond float32, infinite times a distance of 0
            overflows = overflows | (np.abs(slopes)[..., None, None] >= largest(problem) / 2) & sees_keys
        return Exact(
            visible=visible,
            scores=np.where(visible, np.abs(scores), 0),
            scaled=problem.softmax_scale * (q @ k.mT),
            products=scale * magnitude,
            factors=np.abs(q).sum(axis=-1, keepdims=True) + np.abs(k).sum(axis=-1, keepdims=True).mT,
            relative=relative,
            row_max=np.abs(row_max),
            key_max=np.abs(key_max),
            gap=np.where(sees_keys, gap, 0),
            row_sum=row_sum,
            lse=np.abs(row_max + np.log(row_sum)),
            weights=weights,
            dropout=dropout,
            values=v,
            out=(weights * dropout) @ v,
            sink=sink,
            num_keys=_num_keys(visible),
            sees_nonfinite=nonfinite.any(axis=-1, keepdims=True) | bad_sink,
            may_overflow=overflows,
        )

    @property
    def sees_keys(self) -> np.ndarray:
        return self.visible.any(axis=-1, keepdims=True)

    @property
    def has_logits(self) -> np.ndarray:
        """Whether the row has keys or a sink."""
        return self.sees_keys | (self.sink > -np.inf) | self.sees_nonfinite

    @property
    def sink_weight(self) -> np.ndarray:
        return np.exp(self.sink) / self.row_sum

    @property
    def sink_distance(self) -> np.ndarray:
        """How far the sink is below m, 0 where there is none."""
        return np.where(self.sink == -np.inf, 0, np.minimum(-self.sink, _FURTHEST))

    @property
    def distance(self) -> np.ndarray:
        """|x|, 0 where masked."""
        return np.where(self.visible, np.minimum(-self.relative, _FURTHEST), 0)


def _num_keys(visible: np.ndarray) -> np.ndarray:
    """Tiles without a visible key add nothing that is rounded; those of a row may start at any multiple of 32 keys."""
    seqlen_k = visible.shape[-1]
    key = np.arange(seqlen_k)
    first = np.where(visible, key, seqlen_k).min(axis=-1, keepdims=True, initial=seqlen_k)
    end = np.where(visible, key + 1, 0).max(axis=-1, keepdims=True, initial=0)
    return np.maximum(end - first // MIN_KEY_TILE * MIN_KEY_TILE, 0)
