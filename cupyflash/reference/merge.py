"""Exact combination of partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash.merge import checked_parts
from cupyflash.reference.arrays import float64_on_host, placed, wide
from cupyflash.reference.forward import softmax, weighted_sum


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Attention over all keys from that over parts of them: what :func:`cupyflash.merge` is judged against.

    Arguments, meaning and errors are those of :func:`cupyflash.merge`. Returns out and lse in float64, of the kind of
    the given ones; from float64 parts they are computed with about 100 bits.

    Examples
    --------
    >>> merge([np.array([[1.0]]), np.array([[5.0]])], [np.log([3.0]), np.log([1.0])])
    (array([[2.]]), array([1.38629436]))
    """
    outs, lses = checked_parts(outs, lses)
    values = np.stack(float64_on_host(*outs), axis=-2)
    scores = np.stack(float64_on_host(*lses), axis=-1)[..., None, :]
    values, scores = wide(outs[0].dtype, values, scores)
    weights, lse, _ = softmax(scores, -np.inf)
    out = weighted_sum(weights, values, scores != -np.inf)
    return tuple(placed(outs[0], [np.asarray(out)[..., 0, :], np.asarray(lse)[..., 0]], [None, None]))
