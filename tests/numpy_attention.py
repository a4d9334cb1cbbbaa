"""Attention and its gradients by definition, in NumPy; a row's bits depend on nothing but what it sees."""

import numpy as np

from cupyflash.reference.arrays import summed_to


def attention(q, k, v, *, softmax_scale, causal, align, return_lse, compute=np.float64):
    """out and lse, computed in ``compute``."""
    assert return_lse
    with np.errstate(over="ignore", invalid="ignore"):
        weights, lse, _, seen = _softmax(q, k, softmax_scale, causal, align, compute)
        out = _product(weights, with_heads(v, q).astype(compute), seen).astype(q.dtype)
    lse = np.broadcast_to(lse, out.shape[:-1])
    return out, lse.astype(np.float64 if q.dtype == np.float64 else np.float32)


def attention_vjp(q, k, v, *, softmax_scale, causal, align, return_lse, compute=np.float64):
    """(out, lse), and the function of (dout, dlse) that gives dq, dk and dv."""
    options = {"softmax_scale": softmax_scale, "causal": causal, "align": align}
    results = attention(q, k, v, return_lse=return_lse, compute=compute, **options)
    weights, _, scale, seen = _softmax(q, k, **options, compute=compute)
    queries, keys, values = (x.astype(compute) for x in (q, with_heads(k, q), with_heads(v, q)))

    def pullback(dout, dlse):
        dout = dout.astype(compute)
        with np.errstate(over="ignore", invalid="ignore"):
            dweights = np.where(seen, _product(dout, _transposed(values)), 0)
            delta = _sum(weights * dweights)
            if dlse is not None:
                delta = delta - dlse.astype(compute)[..., None]
            dscores = np.where(seen, weights * (dweights - delta) * compute(scale), 0)
            gradients = (
                _product(dscores, keys, seen),
                _product(_transposed(dscores), queries, seen.T),
                _product(_transposed(weights), dout, seen.T),
            )
            return tuple(_summed_to(x, gradient) for x, gradient in zip((q, k, v), gradients, strict=True))

    return results, pullback


def _softmax(q, k, softmax_scale, causal, align, compute):
    """Weights, lse, the scale, and which keys each query sees."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    shift = k.shape[-2] - q.shape[-2] if align == "bottom-right" else 0
    queries, keys = np.ogrid[: q.shape[-2], : k.shape[-2]]
    seen = (keys <= queries + shift) | (not causal)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = _product(q.astype(compute), _transposed(with_heads(k, q).astype(compute))) * compute(scale)
        scores = np.where(seen, scores, -np.inf)
        row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.where(seen, np.exp(scores - np.where(row_max == -np.inf, 0, row_max)), 0)
        row_sum = _sum(weights)
        return weights / np.where(row_sum == 0, 1, row_sum), (row_max + np.log(row_sum))[..., 0], scale, seen


def _product(a, b, seen=True):
    """a @ b, each element summed in the order of its terms, of which those that are not ``seen`` add nothing."""
    seen = np.broadcast_to(seen, a.shape[-2:])
    acc = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        acc += np.where(seen[:, i, None], a[..., :, i, None] * b[..., i, None, :], 0)
    return acc


def _sum(x):
    return _product(x, np.ones((x.shape[-1], 1), x.dtype))


def _transposed(x):
    return np.swapaxes(x, -1, -2)


def with_heads(x, q):
    """Key heads repeated for the query heads that share them."""
    grouped = x.ndim > 2 and q.ndim > 2 and 1 < x.shape[-3] < q.shape[-3]
    return np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) if grouped else x


def _summed_to(operand, gradient):
    with np.errstate(over="ignore", invalid="ignore"):
        return summed_to(operand.shape, gradient).astype(operand.dtype)
