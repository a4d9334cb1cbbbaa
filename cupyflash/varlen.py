"""Attention on packed batches: sequences of any lengths one after the other, without padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from cupyflash import _launch, _plan
from cupyflash._gradients import Gradients, checked_targets, without_results
from cupyflash._options import check_flag
from cupyflash._problem import varlen_problem
from cupyflash.attention import forward_plan, results_of
from cupyflash.backward import backward_plan


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse: bool = False, return_max: bool = False, out=None, **options
):
    """:func:`cupyflash.attention` of each sequence of a packed batch with the keys and values of its own.

    Parameters
    ----------
    q : array, (total_q, num_heads, D)
        Queries of all sequences. Kinds, dtypes and strides are those of :func:`cupyflash.attention`.
    k, v : array, (total_k, num_kv_heads, D) and (total_k, num_kv_heads, Dv)
        num_heads is a multiple of num_kv_heads.
    cu_seqlens_q, cu_seqlens_k : int32 or int64 array, (num_seqs + 1,)
        Offsets: sequence b has the queries ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``, and the keys likewise. They
        start at 0 and do not fall; the last is at most the total. They are read on the host.
    return_lse, return_max
        Of shape (num_heads, total_q).
    out : array, optional
        Where to write the result.
    **options
        Those of :func:`cupyflash.attention` but ``seqlens_q`` and ``seqlens_k``, where the leading dimensions are
        (num_seqs, num_heads) and L and S the longest sequences': ``mask`` and ``bias`` broadcast to
        (num_seqs, num_heads, L, S) and are indexed by places within a sequence, ``alibi_slopes`` and ``attn_sink`` to
        (num_seqs, num_heads); a batch, for dropout and expressions, is a sequence. ``align`` is needed with a causal
        mask, a window or ALiBi unless each sequence has as many queries as keys.

    Returns
    -------
    out : array of the inputs' kind, (total_q, num_heads, Dv), their dtype, C-contiguous unless given
    lse : with ``return_lse``
    max : with ``return_max``

    In rows after the last sequence out is 0, lse and max -inf. Gradients are :func:`attention_varlen_backward`'s;
    :func:`attention_varlen_vjp` returns the result and a function that computes them.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :func:`cupyflash.attention`.

    Examples
    --------
    Three sequences, of 2, 0 and 3 tokens:

    >>> import numpy as np
    >>> from cupyflash import attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2, 16)).astype(np.float16)
    >>> offsets = np.array([0, 2, 2, 5])
    >>> out = attention_varlen(q, k, v, offsets, offsets, causal=True)
    >>> last = [np.swapaxes(x[2:5], 0, 1) for x in (q, k, v)]  # (num_heads, 3, head_dim)
    >>> bool((np.swapaxes(out[2:5], 0, 1) == attention(*last, causal=True)).all())
    True
    """
    problem = varlen_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, return_max=return_max, out=out, **options
    )
    arrays = {"q": q, "k": k, "v": v, **_plan.optional_arrays(options), **_plan.given(out=out)}
    planned = partial(forward_plan, return_lse=return_lse, return_max=return_max)
    results = results_of(_plan.new_call(problem, arrays, planned))
    out, *per_query = results if isinstance(results, tuple) else (results,)
    with _launch.device_of(problem.kind, q):
        _fill(out, problem.packed.used_q, 0)
        for values in per_query:
            _fill(values.T, problem.packed.used_q, -math.inf)
    return results


def attention_varlen_backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *, dlse=None, grads_out=None, **options
) -> Gradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)``, as :func:`cupyflash.attention_backward`, of a packed batch.

    Parameters
    ----------
    dout : array, (total_q, num_heads, Dv)
        Gradient with respect to out.
    q, k, v, cu_seqlens_q, cu_seqlens_k, **options
        As they were given to :func:`attention_varlen`, without ``return_lse``, ``return_max`` and ``out``.
    out, lse : array
        What it returned for them, with ``return_lse``.
    dlse : array, optional, (num_heads, total_q)
        Gradient with respect to lse.
    grads_out : (dq, dk, dv) or Gradients, optional
        Where to write the gradients.

    Returns
    -------
    Gradients
        Each has its operand's shape, kind and dtype. Rows after the last sequence are 0, whatever those of dout and
        dlse hold.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :func:`cupyflash.attention_backward`.

    Examples
    --------
    Two sequences, of 1 and 3 tokens, and a row that belongs to none:

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2, 16)).astype(np.float16)
    >>> offsets = np.array([0, 1, 4])
    >>> out, lse = attention_varlen(q, k, v, offsets, offsets, causal=True, return_lse=True)
    >>> dq, dk, dv = attention_varlen_backward(np.ones_like(out), q, k, v, out, lse, offsets, offsets, causal=True)
    >>> dv.shape, bool((dq[0] == 0).all()), bool((dv[4] == 0).all())  # the first query sees one key
    ((5, 2, 16), True, True)
    """
    problem = varlen_problem(q, k, v, cu_seqlens_q, cu_seqlens_k, **without_results(options))
    targets = checked_targets(problem, dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, **_plan.given(dlse=dlse)}
    arrays = inputs | _plan.optional_arrays(options) | _plan.given(**vars(targets))
    gradients = Gradients(**_plan.new_call(problem, arrays, backward_plan).run())
    with _launch.device_of(problem.kind, q):
        _fill(gradients.dq, problem.packed.used_q, 0)
        _fill(gradients.dk, problem.packed.used_k, 0)
        _fill(gradients.dv, problem.packed.used_k, 0)
    return gradients


def attention_varlen_vjp(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse: bool = False, return_max: bool = False, **options
) -> tuple[Any, Callable[..., Gradients]]:
    """``result, pullback`` of a packed batch, as :func:`cupyflash.attention_vjp`.

    result is what :func:`attention_varlen` returns for these arguments, with its ``options`` but ``out``.
    ``pullback(dout, dlse=None)`` is :func:`attention_varlen_backward` for this call. It keeps its inputs, out and lse,
    which must not be changed before it is called.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 2, 16)).astype(np.float16)
    >>> offsets = np.array([0, 1, 4])
    >>> out, pullback = attention_varlen_vjp(q, k, v, offsets, offsets, causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> bool((dq[:2] == 0).all())  # the first query of each sequence sees one key, whose weight is 1 whatever it is
    True
    """
    if "out" in options:
        raise TypeError("out: attention_varlen_vjp makes the array that its pullback keeps")
    check_flag("return_lse", return_lse)
    offsets = cu_seqlens_q, cu_seqlens_k
    out, lse, *row_max = attention_varlen(q, k, v, *offsets, return_lse=True, return_max=return_max, **options)

    def pullback(dout, dlse=None) -> Gradients:
        return attention_varlen_backward(dout, q, k, v, out, lse, *offsets, dlse=dlse, **options)

    results = (out, *([lse] if return_lse else []), *row_max)
    return (results if len(results) > 1 else out), pullback


def _fill(array, used: int, value: float) -> None:
    """Of the rows that belong to no sequence, where there are any."""
    if used < len(array):
        array[used:] = value
