"""Bounds on the error of attention that is joined from parts of the keys.

Parts p of the keys have exact results O_p and lse_p, computed to within e_p and eps_p. With w_p = exp(lse_p - lse),
w'_p the same of what is computed, and O the exact result of all,

    sum_p w'_p O'_p - O = sum_p w'_p (O'_p - O_p) + sum_p (w'_p - w_p) (O_p - O),    |w'_p - w_p| <= w_p expm1(d_p + d),

where d = log sum_q w_q exp(d_q) and d_p is eps_p and what the logarithms err by on the way to the root of the tree of
merges; lse errs by d. On each level a merge of two (:mod:`cupyflash.bounds.merge`) adds one rounding to the dtype and a
few of float32 (for float64, of float64), relative to w_p sum_j P_j |V_j| over the part's keys; x_p = lse - lse_p is the
largest exponent that its weight has on the way. Which parts meet on a level, the bound does not ask. A sink is one more
part, with the value 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cupyflash._arrays import HALF_TYPES
from cupyflash._problem import Problem, attention_problem
from cupyflash.bounds.arithmetic import SLACK, Arithmetic, Precision, claimed
from cupyflash.bounds.forward import attention
from cupyflash.reference.arrays import float64_on_host, placed
from cupyflash.reference.forward import attention as exact_attention

#: Of a merge of two: twice 6 + x in its weights exp(-x), since both move, 2 in each sum, and the division.
ROUNDINGS = 17


def attention_in_parts(q, k, v, edges: Sequence[int], **options) -> tuple[Any, Any]:
    """Largest errors of out and lse of attention over parts of the keys that :func:`cupyflash.merge` joins two by two.

    ``edges``, increasing from 0 to S, are where the parts begin and end; they are joined in any tree of
    ceil(log2(number of parts)) levels, as by :func:`cupyflash.distributed.attention`. The other arguments are those of
    :func:`cupyflash.bounds.attention`, which bounds each part.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 16, 8)).astype(np.float32)
    >>> bound, lse_bound = attention_in_parts(q, k, v, [0, 4, 12, 16])
    >>> bool((bound > attention(q, k, v)).all() and (bound < 1e-4).all())
    True
    """
    problem = attention_problem(q, k, v, **options)
    if list(edges) != sorted({0, problem.seqlen_k, *edges}):
        raise ValueError(f"edges: {edges!r} do not increase from 0 to {problem.seqlen_k}")
    exact, lse = float64_on_host(*exact_attention(q, k, v, return_lse=True, **options))
    parts = [_Part.of_keys(q, k, v, keys, problem, options) for keys in pairwise(edges)]
    levels = int(np.ceil(np.log2(max(len(parts), 1))))
    if "attn_sink" in problem.operands:
        parts.append(_Part.of_sink(problem.operands["attn_sink"], exact))
        levels += 1  # it may join last
    arithmetic, element = Arithmetic.of(problem.dtype), Precision.of(problem.dtype)
    unit, flush = arithmetic.unit, arithmetic.flush
    to_dtype = element.unit if problem.dtype in HALF_TYPES else 0.0

    with np.errstate(over="ignore", invalid="ignore"):
        behind = [np.where(part.lse > -np.inf, lse - part.lse, np.inf) for part in parts]
        weights = [np.exp(-x) for x in behind]
        sizes = [np.where(np.isfinite(part.lse), np.maximum(np.abs(part.lse), np.abs(lse)), 0) for part in parts]
        moved = [
            part.lse_error + levels * (unit * ROUNDINGS * (1 + size) + 2 * flush)
            for part, size in zip(parts, sizes, strict=True)
        ]
        grown = [np.where(w > 0, w * np.expm1(d), 0) for w, d in zip(weights, moved, strict=True)]
        lse_error = np.log1p(np.sum(grown, axis=0))
        error = levels * (element.underflow + ROUNDINGS * flush * (1 + np.abs(exact)))
        for part, w, x, d in zip(parts, weights, behind, moved, strict=True):
            w, x, factor = w[..., None], x[..., None], np.expm1(d + lse_error)[..., None]
            added = (1 + factor) * part.error + factor * np.abs(part.out - exact)
            added += levels * (to_dtype + unit * (ROUNDINGS + 2 * x)) * (part.magnitude + part.error)
            error += np.where(w > 0, w * added, 0)
    has_keys = lse != -np.inf
    error, lse_error = claimed(SLACK * error), claimed(SLACK * lse_error)
    results = np.where(has_keys[..., None], error, 0), np.where(has_keys, lse_error, 0)
    return tuple(placed(q, results, [None, None]))


@dataclass(frozen=True, eq=False)
class _Part:
    """Exact out and lse of a part, how far what is computed may be from them, and sum_j P_j |V_j|."""

    out: np.ndarray
    lse: np.ndarray
    error: np.ndarray | float
    lse_error: np.ndarray | float
    magnitude: np.ndarray | float

    @classmethod
    def of_keys(cls, q, k, v, keys: tuple[int, int], problem: Problem, options: Mapping[str, Any]) -> _Part:
        """The whole call with a mask of all other keys, which knows nothing of offsets."""
        shape = (problem.seqlen_q, problem.seqlen_k)
        left = np.zeros(shape, bool, like=q)
        left[:, slice(*keys)] = True
        mask = left if options.get("mask") is None else left & options["mask"]
        options = {**options, "mask": mask, "attn_sink": None}
        results = (
            *exact_attention(q, k, v, return_lse=True, **options),
            *attention(q, k, v, return_lse=True, **options),
            exact_attention(q, k, abs(v), **options),
        )
        return cls(*float64_on_host(*results))

    @classmethod
    def of_sink(cls, sink: Any, exact: np.ndarray) -> _Part:
        logits = np.broadcast_to(float64_on_host(sink)[0][..., None], exact.shape[:-1])
        return cls(np.zeros_like(exact), logits, 0.0, 0.0, 0.0)
