"""What the gradients' bounds are made of: exact values of each (query, key), and what the inputs rule out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash._problem import Problem
from cupyflash.bounds.arithmetic import largest
from cupyflash.bounds.exact import Exact
from cupyflash.reference.arrays import float64_on_host, on_host, wide
from cupyflash.reference.forward import exact_attention


@dataclass(frozen=True)
class Pairs:
    """Non-finite inputs are replaced by 0."""

    forward: Exact
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray  # as given
    lse: np.ndarray  # |lse| (query, 1); 0 where the row has neither keys nor a sink
    lse_error: np.ndarray  # of the given one
    delta: np.ndarray  # (query, 1): rowsum(dout * out) - dlse
    delta_error: np.ndarray  # (query, 1): from the error of the given out
    dweights: np.ndarray  # dP, without dropout
    dweight_magnitudes: np.ndarray  # |dout| . |v|
    dweight_factors: np.ndarray  # sum of |dout| and sum of |v|, together
    unbounded: np.ndarray  # (query, 1) bool: a row of which nothing is claimed, whatever the kernel

    @staticmethod
    def of(problem: Problem, dout, q, k, v, out, lse, dlse) -> Pairs:
        forward = Exact.of(problem, q, k, v)
        dout, out, lse = float64_on_host(dout, out, lse)
        lse = lse[..., None]
        dlse = np.zeros_like(lse) if dlse is None else float64_on_host(dlse)[0][..., None]
        q, k, v = (finite(x) for x in on_host(problem, q, k, v))
        bad_dout, bad_out = (~np.isfinite(x).all(axis=-1, keepdims=True) for x in (dout, out))
        # The zeros of a row that saw no key are multiplied with nothing.
        bad_dout = bad_dout & (forward.sees_keys | (out != 0).any(axis=-1, keepdims=True))
        nonfinite = forward.sees_nonfinite | ~np.isfinite(dlse) | bad_dout | bad_out
        dout, out = finite(dout), finite(out)
        exact_q, exact_k, exact_v, exact_dout = wide(problem.dtype, q, k, v, dout)
        exact_out, exact_lse, _ = exact_attention(problem, exact_q, exact_k, exact_v)
        exact_lse = exact_lse[..., None]
        lse_error = np.abs(np.asarray(np.where(forward.has_logits, lse - exact_lse, 0)))
        magnitudes = np.abs(dout) @ np.abs(v).mT
        # dP of a dropped pair is computed, too, and 0 times infinity would be no 0.
        overflows = np.where(forward.visible, np.maximum(forward.dropout, 1) * magnitudes, 0) >= largest(problem) / 4
        unbounded = nonfinite | forward.may_overflow | ~np.isfinite(lse_error) | overflows.any(axis=-1, keepdims=True)
        return Pairs(
            forward=forward,
            q=q,
            k=k,
            v=v,
            dout=dout,
            out=out,
            lse=np.abs(np.where(forward.has_logits, np.asarray(exact_lse), 0)),
            lse_error=finite(lse_error),
            delta=finite(np.asarray((exact_dout * exact_out).sum(axis=-1, keepdims=True) - finite(dlse))),
            delta_error=finite(np.abs(np.asarray((exact_dout * (out - exact_out)).sum(axis=-1, keepdims=True)))),
            dweights=np.where(forward.visible, np.asarray(exact_dout @ exact_v.mT), 0),
            dweight_magnitudes=np.where(forward.visible, magnitudes, 0),
            dweight_factors=np.abs(dout).sum(axis=-1, keepdims=True) + np.abs(v).sum(axis=-1, keepdims=True).mT,
            unbounded=unbounded & forward.has_logits,
        )


def finite(x: np.ndarray) -> np.ndarray:
    """With 0 in place of what is not."""
    return np.where(np.isfinite(x), x, 0)
