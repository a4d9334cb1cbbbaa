"""Where the common chunks of Dask arrays are, and how far sums of gradients over them may be from the exact ones."""

from itertools import pairwise, product

import numpy as np

from cupyflash import bounds, reference

U32 = 2.0**-24


def edges(axis, *arrays):
    """Where the common chunks of Dask arrays begin and end along an axis, counted from the last."""
    lengths = [array.chunks[axis] for array in arrays if array.ndim >= -axis and array.shape[axis] != 1]
    return sorted({0, *(int(end) for chunks in lengths for end in np.cumsum(chunks))})


def gradients(dout, q, k, v, out, lse, batch_edges, head_edges, query_edges, key_edges, options):
    """Bounds on those gradients that sum over pairs of these chunks: each rounds what it adds, and sums in float32."""
    exact = reference.attention_backward(dout, q, k, v, out, lse, **options)
    names = [name for name, value in vars(exact).items() if value is not None and name != "dattn_sink"]
    errors = dict.fromkeys(names, 0.0)
    terms = dict.fromkeys(names, 0.0)
    blocks = list(product(*map(pairwise, (batch_edges, head_edges, query_edges, key_edges))))
    for batches, heads, queries, keys in blocks:
        of_block = _masked(options, out.shape[:-2], out.shape[-2], k.shape[-2], batches, heads, queries, keys)
        added = reference.attention_backward(dout, q, k, v, out, lse, **of_block)
        allowed = bounds.attention_backward(dout, q, k, v, out, lse, **of_block)
        for name in names:
            errors[name] = errors[name] + getattr(allowed, name)
            terms[name] = terms[name] + np.abs(getattr(added, name))
    levels = int(np.ceil(np.log2(len(blocks)))) + 1
    operands = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias"), "dalibi_slopes": options.get("alibi_slopes")}
    for name in names:
        unit = float(np.finfo(operands[name].dtype).eps) / 2
        errors[name] += levels * U32 * terms[name] + unit * (np.abs(getattr(exact, name)) + errors[name])
    return {name: (getattr(exact, name), errors[name]) for name in names}


def _masked(options, leading, seqlen_q, seqlen_k, batches=None, heads=None, queries=None, keys=None):
    """The options with a mask that leaves some of all pairs."""
    left = np.zeros((*leading, seqlen_q, seqlen_k), bool)
    left[tuple(slice(*part) if part else slice(None) for part in (batches, heads, queries, keys))] = True
    return {**options, "mask": left & options.get("mask", True)}
