"""Attention with every option, pair by pair in multiprecision numbers: independent of cupyflash.reference."""

from __future__ import annotations

import math

import mpmath
import numpy as np

BITS = 200


def attention(
    q, k, v, *, softmax_scale=None, causal=False, window_size=None, align=None, mask=None, bias=None, softcap=None,
    alibi_slopes=None, attn_sink=None, seqlens_q=None, seqlens_k=None, keep=None, dropout_p=0.0, score=None, sees=None,
):  # fmt: skip
    """out, lse and max, object arrays of mpmath numbers, of arrays with 4 dimensions (batch, head, position, column).

    ``keep`` is dropout's mask; ``score`` and ``sees`` are what score_mod and mask_mod say, as functions of
    (score, b, h, i, j, L, S) and (b, h, i, j, L, S).
    """
    batch, num_heads, num_queries, head_dim = q.shape
    _, num_kv_heads, num_keys, head_dim_v = v.shape
    pairs = (batch, num_heads, num_queries, num_keys)
    mask = np.broadcast_to(True if mask is None else mask, pairs)
    keep = np.broadcast_to(True if keep is None else keep, pairs)
    bias = np.broadcast_to(0.0 if bias is None else bias.astype(float), pairs)
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes.astype(float), pairs[:2])
    sinks = np.broadcast_to(-np.inf if attn_sink is None else attn_sink.astype(float), pairs[:2])
    lengths_q = np.broadcast_to(num_queries if seqlens_q is None else seqlens_q, batch)
    lengths_k = np.broadcast_to(num_keys if seqlens_k is None else seqlens_k, batch)
    left, right = window_size or (None, None)

    out = np.full((*pairs[:3], head_dim_v), mpmath.mpf(0), object)
    lse, largest = (np.full(pairs[:3], mpmath.mpf("-inf"), object) for _ in range(2))
    with mpmath.workprec(BITS):
        number = mpmath.mpf
        scale = number(1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale)
        for b, h, i in np.ndindex(*pairs[:3]):
            length_q, length_k = int(lengths_q[b]), int(lengths_k[b])
            if i >= length_q:
                continue
            position = i + (length_k - length_q if align == "bottom-right" else 0)
            key_head = h // (num_heads // num_kv_heads)
            scores = {}
            for j in range(length_k):
                if (causal or right == 0) and j > position:
                    continue
                if (left is not None and j < position - left) or (right is not None and j > position + right):
                    continue
                if not mask[b, h, i, j] or (sees and not sees(b, h, i, j, length_q, length_k)):
                    continue
                terms = zip(q[b, h, i].astype(float), k[b, key_head, j].astype(float), strict=True)
                s = scale * mpmath.fsum(number(x) * number(y) for x, y in terms)
                if softcap is not None:
                    s = softcap * mpmath.tanh(s / number(softcap))
                if score:
                    s = score(s, b, h, i, j, length_q, length_k)
                s += number(bias[b, h, i, j])
                if slopes is not None:
                    s -= number(slopes[b, h]) * abs(position - j)
                if s != -mpmath.inf:
                    scores[j] = s
            largest[b, h, i] = max(scores.values(), default=number("-inf"))
            total = mpmath.fsum([*map(mpmath.exp, scores.values()), mpmath.exp(number(sinks[b, h]))])
            lse[b, h, i] = mpmath.log(total) if total else number("-inf")
            for j, s in scores.items():
                if keep[b, h, i, j]:
                    weight = mpmath.exp(s) / total / (1 - number(dropout_p))
                    out[b, h, i] += weight * np.array([number(x) for x in v[b, key_head, j].astype(float)], object)
    return out, lse, largest
