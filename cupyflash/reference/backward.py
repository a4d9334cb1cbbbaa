"""Exact attention, backward."""

from __future__ import annotations

import numpy as np

from cupyflash._arrays import FLOAT64
from cupyflash._gradients import Gradients, backward_problem
from cupyflash._problem import Problem
from cupyflash.reference.arrays import Numbers, float64_on_host, on_host, returned_gradients, wide
from cupyflash.reference.forward import dropout_factor, sink_logits, softmax, weighted_sum
from cupyflash.reference.scores import distances, pair_scores


def attention_backward(dout, q, k, v, out, lse, *, dlse=None, grads_out=None, **options) -> Gradients:
    """Exact gradients, rounded to float64: what :func:`cupyflash.attention_backward` is judged against.

    Arguments, shapes, meaning and errors are those of :func:`cupyflash.attention_backward`; dout, q, k, v and out share
    one of float16, bfloat16, float32 and float64. The gradients, ``grads_out`` too, are float64, as precise as the
    results of :func:`attention`. out and lse are checked for shape and dtype only: the exact ones are computed again
    from q, k and v. A key whose score is -inf is removed like a masked one, and a pair that is masked adds nothing to
    any gradient, whatever its values are.

    Examples
    --------
    One query over two equal keys, with dout = 1: the output grows with the weight of the larger value.

    >>> from cupyflash import reference
    >>> q, k, v = np.ones((1, 1)), np.zeros((2, 1)), np.array([[2.0], [6.0]])
    >>> out, lse = reference.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = attention_backward(np.ones((1, 1)), q, k, v, out, lse)
    >>> dk, dv
    (array([[-1.],
           [ 1.]]), array([[0.5],
           [0.5]]))
    """
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, gradient_dtype=FLOAT64, **options
    )
    (dout,) = float64_on_host(dout)
    dlse = None if dlse is None else float64_on_host(dlse)[0]
    gradients = exact_gradients(problem, *wide(problem.dtype, dout, *on_host(problem, q, k, v)), dlse)
    return returned_gradients({"q": q, "k": k, "v": v, **problem.operands}, gradients, grads_out)


def exact_gradients(problem: Problem, dout: Numbers, q: Numbers, k: Numbers, v: Numbers, dlse) -> Gradients:
    """Of each head of the result on its own: nothing is summed over what broadcasts an operand."""
    scores, sink = pair_scores(problem, q, k), sink_logits(problem)
    seen, factor = scores.seen, dropout_factor(problem)
    weights, lse, _ = softmax(scores.final, sink)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.where(seen, weights, 0)  # a row with a NaN has it everywhere
        dweights = np.where(seen, factor * (dout @ v.mT), 0)
        delta = np.where(seen, weights * dweights, 0).sum(axis=-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse[..., None]
        dfinal = np.where(seen, weights * (dweights - delta), 0)  # dbias
        dscores = np.where(seen, dfinal * scores.derivative, 0)
        dsink = np.where(sink == -np.inf, 0, np.exp(sink - lse[..., None]) * delta)
        return Gradients(
            dq=problem.softmax_scale * weighted_sum(dscores, k, seen),
            dk=problem.softmax_scale * weighted_sum(dscores.mT, q, seen.mT),
            dv=weighted_sum((weights * factor).mT, dout, seen.mT),
            dbias=dfinal if "bias" in problem.operands else None,
            dalibi_slopes=-_sum(dfinal * distances(problem)) if "alibi_slopes" in problem.operands else None,
            dattn_sink=-_sum(dsink) if "attn_sink" in problem.operands else None,
        )


def _sum(x: Numbers) -> Numbers:
    """Over the last two axes."""
    return x.sum(axis=-1).sum(axis=-1)
