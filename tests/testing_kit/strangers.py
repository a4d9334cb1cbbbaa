"""Tiled attention in NumPy, forward and backward, and the same with one fault each of those that kernels have had.

Sums are float64, the weights that multiply v are rounded to the inputs' dtype. Where a fault is one of precision, what
it says is rounded on top. ``fault`` is a name of FORWARD_FAULTS or BACKWARD_FAULTS, or empty: then it is right.
"""

import numpy as np

from cupyflash.reference.arrays import summed_to

TILE = 64  # keys

FORWARD_FAULTS = (
    "out not rescaled",
    "row sum not rescaled",
    "first tile's maximum kept",  # right until a later score is far above it
    "no maximum subtracted",
    "causal mask one key too wide",
    "causal mask one key too narrow",
    "aligned top-left always",
    "aligned bottom-right always",
    "NaN where no key is seen",
    "NaN through scores of masked keys",
    "NaN through values of masked keys",
    "scores in float16",
    "out accumulated in the dtype",
    "row sum in float16",
    "exponential in float16",
    "softmax_scale ignored",
    "tail keys counted as zeros",
    "tail keys left out",
    "lse in base 2",
    "lse without the maximum",
    "heads of q in turn over those of k",
    "first key head for all",
    "heads of v reversed",
    "out truncated",
)
BACKWARD_FAULTS = (
    "dq without softmax_scale",
    "dk without softmax_scale",
    "delta forgotten",
    "dlse ignored",
    "dlse with the wrong sign",
    "causal mask forgotten",
    "aligned top-left in the backward",
    "dk and dv of a group's last head alone",
    "dk and dv of a group averaged",
    "dq of the last tile alone",
    "dP in float16",
    "dv from unrounded weights of base 2",
    "tail keys counted as zeros in dq",
)


def attention(q, k, v, *, softmax_scale, causal, align, return_lse, fault=""):
    """out and lse, a tile of keys after the other."""
    with np.errstate(all="ignore"):
        return _forward(q, k, v, softmax_scale, causal, align, fault)


def attention_vjp(q, k, v, *, softmax_scale, causal, align, return_lse, fault=""):
    """(out, lse), and the function of (dout, dlse) that gives dq, dk and dv."""
    results = attention(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align, return_lse=return_lse)

    def pullback(dout, dlse):
        with np.errstate(all="ignore"):
            return _backward(dout, dlse, q, k, v, *results, softmax_scale, causal, align, fault)

    return results, pullback


def _forward(q, k, v, softmax_scale, causal, align, fault):
    num_queries, num_keys, dtype = q.shape[-2], k.shape[-2], q.dtype
    scale = q.shape[-1] ** -0.5 if softmax_scale is None or fault == "softmax_scale ignored" else softmax_scale
    keys, values, queries = _heads(k, q, fault), _heads(v, q, fault), q.astype(np.float64)
    if fault == "heads of v reversed" and v.ndim > 2:
        values = values[..., ::-1, :, :]
    leading = np.broadcast_shapes(queries.shape[:-2], keys.shape[:-2], values.shape[:-2])
    row_max = np.full((*leading, num_queries, 1), -np.inf)
    row_sum, out = np.zeros(row_max.shape), np.zeros((*leading, num_queries, v.shape[-1]))
    for first in range(0, num_keys, TILE):
        tile_keys, tile_values = keys[..., first : first + TILE, :], values[..., first : first + TILE, :]
        seen = _seen(num_queries, num_keys, causal, align, fault)[:, first : first + TILE]
        if tile_keys.shape[-2] < TILE:
            if fault == "tail keys left out" and first:
                break
            if fault == "tail keys counted as zeros":
                tile_keys, tile_values, seen = _padded(tile_keys), _padded(tile_values), _padded(seen.T, not causal).T
        scores = _product(queries, _transposed(tile_keys))
        if fault == "scores in float16":
            scores = scores.astype(np.float16).astype(np.float64)
        scores = scores * scale
        scores = (
            scores + np.where(seen, 0, -np.inf)
            if fault == "NaN through scores of masked keys"
            else np.where(seen, scores, -np.inf)
        )
        new_max = np.maximum(row_max, scores.max(axis=-1, keepdims=True, initial=-np.inf))
        if fault == "first tile's maximum kept" and first:
            new_max = row_max
        if fault == "no maximum subtracted":
            new_max, scores = np.zeros_like(new_max), scores.astype(np.float32)
        # A row that has seen no key yet has the maximum -inf, which nothing may be subtracted from.
        shift = new_max if fault == "NaN where no key is seen" else np.where(np.isneginf(new_max), 0, new_max)
        rescale, weights = np.exp(row_max - shift), np.exp(scores - shift)
        if fault == "no maximum subtracted":
            rescale = 1.0
        if fault == "exponential in float16":
            weights = np.exp((scores - shift).astype(np.float16)).astype(np.float64)
        row_sum = row_sum * (1 if fault == "row sum not rescaled" else rescale) + weights.sum(axis=-1, keepdims=True)
        if fault == "row sum in float16":
            row_sum = row_sum.astype(np.float16).astype(np.float64)
        rounded = weights.astype(dtype).astype(np.float64)
        all_count = fault == "NaN through values of masked keys"
        out = out * (1 if fault == "out not rescaled" else rescale) + _product(rounded, tile_values, seen | all_count)
        if fault == "out accumulated in the dtype":
            out = out.astype(dtype).astype(np.float64)
        row_max = new_max
    out = out / np.where(row_sum == 0, 1, row_sum)
    lse = (np.log(row_sum) + (0 if fault == "lse without the maximum" else row_max))[..., 0]
    if fault == "lse in base 2":
        lse = lse / np.log(2)
    lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
    return (_truncated(out, dtype) if fault == "out truncated" else out.astype(dtype)), lse


def _backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, align, fault):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    num_queries, num_keys, dtype = q.shape[-2], k.shape[-2], q.dtype
    queries, dout, lse = (x.astype(np.float64) for x in (q, dout, lse))
    keys, values = _heads(k, q, ""), _heads(v, q, "")
    seen = _seen(num_queries, num_keys, causal and fault != "causal mask forgotten", align, fault)
    delta = (dout * out.astype(np.float64)).sum(axis=-1, keepdims=True)
    if fault == "delta forgotten":
        delta = np.zeros_like(delta)
    if dlse is not None and fault != "dlse ignored":
        delta = delta - dlse.astype(np.float64)[..., None] * (-1 if fault == "dlse with the wrong sign" else 1)
    lse = np.where(np.isneginf(lse), 0, lse)[..., None]
    dq, dks, dvs = np.zeros((*out.shape[:-1], q.shape[-1])), [], []
    for first in range(0, num_keys, TILE):
        tile_keys, tile_values = keys[..., first : first + TILE, :], values[..., first : first + TILE, :]
        tile_seen = seen[:, first : first + TILE]
        scores = scale * _product(queries, _transposed(tile_keys))
        weights = np.where(tile_seen, np.exp(scores - lse), 0)
        if fault == "dv from unrounded weights of base 2":
            weights_of_dv = np.where(tile_seen, np.exp2(scores - lse), 0)
        else:
            weights_of_dv = weights.astype(dtype).astype(np.float64)
        dweights = _product(dout, _transposed(tile_values))
        if fault == "dP in float16":
            dweights = dweights.astype(np.float16).astype(np.float64)
        dscores = np.where(tile_seen, weights * (dweights - delta), 0).astype(dtype).astype(np.float64)
        moved = _product(dscores, tile_keys, tile_seen)
        if fault == "tail keys counted as zeros in dq" and 0 < tile_keys.shape[-2] < TILE:
            moved = moved + (np.exp(-lse) * (0 - delta)) * tile_keys[..., -1:, :]
        dq = moved if fault == "dq of the last tile alone" else dq + moved
        dks.append(_product(_transposed(dscores), queries, tile_seen.T))
        dvs.append(_product(_transposed(weights_of_dv), dout, tile_seen.T))
    full = out.shape[:-2]
    dk = np.concatenate([np.zeros((*full, 0, k.shape[-1])), *dks], axis=-2)
    dv = np.concatenate([np.zeros((*full, 0, v.shape[-1])), *dvs], axis=-2)
    dq = dq if fault == "dq without softmax_scale" else scale * dq
    dk = dk if fault == "dk without softmax_scale" else scale * dk
    dk, dv = (_of_group(x, operand, q, fault) for x, operand in ((dk, k), (dv, v)))
    return tuple(summed_to(x.shape, gradient).astype(x.dtype) for x, gradient in ((q, dq), (k, dk), (v, dv)))


def _of_group(gradient, operand, q, fault):
    """What a fault makes of the sum over the query heads that share a key head."""
    if not _is_grouped(operand, q) or "group" not in fault:
        return gradient
    group = q.shape[-3] // operand.shape[-3]
    apart = gradient.reshape(*gradient.shape[:-3], operand.shape[-3], group, *gradient.shape[-2:])
    return apart[..., -1, :, :] if "last head" in fault else apart.mean(axis=-3)


def _heads(x, q, fault):
    """Key heads repeated for the query heads that share them, in float64."""
    x = x.astype(np.float64)
    if not _is_grouped(x, q):
        return x
    group = q.shape[-3] // x.shape[-3]
    if fault == "heads of q in turn over those of k":
        return np.concatenate([x] * group, axis=-3)
    return x[..., :1, :, :] if fault == "first key head for all" else np.repeat(x, group, axis=-3)


def _is_grouped(x, q):
    return x.ndim > 2 and q.ndim > 2 and 1 < x.shape[-3] < q.shape[-3]


def _seen(num_queries, num_keys, causal, align, fault):
    if not causal:
        return np.ones((num_queries, num_keys), bool)
    is_top_left = (align != "bottom-right" and "bottom-right" not in fault) or "top-left" in fault
    shift = 0 if is_top_left else num_keys - num_queries
    shift += {"causal mask one key too wide": 1, "causal mask one key too narrow": -1}.get(fault, 0)
    queries, keys = np.ogrid[:num_queries, :num_keys]
    return keys <= queries + shift


def _padded(x, value=0):
    """To a whole tile of rows."""
    rows = np.full((*x.shape[:-2], TILE - x.shape[-2], x.shape[-1]), value, x.dtype)
    return np.concatenate([x, rows], axis=-2)


def _product(a, b, seen=True):
    """a @ b, of which terms that are not ``seen`` add nothing, whatever they are."""
    if np.isfinite(a).all() and np.isfinite(b).all():
        return a @ b
    seen = np.broadcast_to(seen, a.shape[-2:])
    return np.where(seen[..., None], a[..., :, :, None] * b[..., None, :, :], 0).sum(axis=-2)


def _transposed(x):
    return np.swapaxes(x, -1, -2)


def _truncated(x, dtype):
    """Rounded towards 0."""
    rounded = x.astype(dtype)
    beyond = np.abs(rounded.astype(np.float64)) > np.abs(x)
    return np.where(beyond, np.nextafter(rounded, dtype.type(0)), rounded)
