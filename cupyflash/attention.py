"""Exact attention, forward: one call for NumPy and CuPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cupyflash import _combine, _config, _launch, _packing, _plan, _stacking, _variant
from cupyflash._arrays import HALF_TYPES, LOG2_E
from cupyflash._block_mask import BlockMask
from cupyflash._combine import Parts
from cupyflash._launch import Launch
from cupyflash._numerics import Numerics
from cupyflash._options import NO_ORIGIN, Align, Window
from cupyflash._plan import Call, Plan, Planner
from cupyflash._problem import Problem, attention_problem


def attention(
    q,
    k,
    v,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = None,
    align: Align | None = None,
    mask=None,
    bias=None,
    softcap: float | None = None,
    alibi_slopes=None,
    attn_sink=None,
    seqlens_q=None,
    seqlens_k=None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    origin: tuple[int, int, int, int] = NO_ORIGIN,
    score_mod: str | None = None,
    mask_mod: str | BlockMask | None = None,
    aux: Mapping[str, Any] | None = None,
    split_size: int | None = None,
    numerics: Numerics | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    out=None,
):
    """softmax(softmax_scale * q @ k.T) @ v, without ever storing the scores.

    A generalised ufunc: ``(..., L, D), (..., S, D), (..., S, Dv) -> (..., L, Dv)``. Leading dimensions broadcast as in
    :func:`numpy.matmul`. With 4 or more dimensions axis -3 is heads, and the query's count may be a multiple of the
    key's: query head h then uses key head h // (num_heads // num_kv_heads).

    Per query i and key j, in this order::

        scale      s = softmax_scale * (q[i] . k[j])
        softcap    s = softcap * tanh(s / softcap)
        score_mod  s = score_mod(s)
        bias       s = s + bias[i, j]
        ALiBi      s = s - alibi_slope * |i + shift - j|
        masks      a pair that is masked by any of causal, window_size, mask, seqlens, mask_mod is removed, and so is
                   one with s = -inf
        sink       attn_sink is one more score of the row, with no value: neither scaled nor capped, part of lse
        softmax    w = exp(s - lse), lse = log(sum(exp(s)))
        dropout    w = w / (1 - dropout_p), or 0; lse is not changed
        result     out[i] = sum(w * v[j])

    shift is 0 for ``align="top-left"``, S - L for "bottom-right", else ``align`` itself; with lengths, each batch has
    its own L and S.

    Parameters
    ----------
    q, k, v : numpy.ndarray or cupy.ndarray
        One dtype, float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64; any strides. head_dim D and
        head_dim_v Dv are 1 to 256; L, S and the leading dimensions may be 0. NumPy arrays run in the simulator
        (:mod:`cupyflash.ptxsim`), CuPy arrays on their GPU and its current stream. Every other array is of the same
        kind and on the same device.
    softmax_scale : real number, optional
        Finite, zero and negative included; 1 / sqrt(D) by default.
    causal : bool
        Query i sees the keys j <= i + shift only. ``align`` says which::

            L = 2, S = 4      "bottom-right"   x x x .     "top-left"   x . . .
                              (shift = S - L)  x x x x     (shift = 0)  x x . .

    window_size : (left, right), optional
        Query i sees the keys i + shift - left <= j <= i + shift + right only; None leaves a side open. With ``causal``
        right is 0, whatever is given: a larger one is cut to 0.
    align : "bottom-right", "top-left" or int, optional
        Needed with ``causal``, ``window_size`` or ``alibi_slopes`` where L != S or lengths are given. A whole number is
        the key that query 0 is at, any from -(2**31 - 1) to 2**31 - 1: for some queries and some keys of longer ones.
    mask : bool array, optional
        True = attend. Broadcasts to (..., L, S), any strides.
    bias : array, optional
        Added to the scores. Broadcasts to (..., L, S), any strides; the inputs' dtype, float32 or float64. A large
        negative number is a number; -inf removes a pair. A row whose biases are all huge, as -1e9, is not resolved in
        float32: its out is the mean of v and what it gives to gradients is wrong, but finite, and 0 where its dout is
        0. Padding is for ``mask`` or -inf.
    softcap : real number, optional
        Positive.
    alibi_slopes, attn_sink : array, optional
        One number per head: broadcast to the leading dimensions of the result, (..., heads); the inputs' dtype,
        float32 or float64. A sink of -inf is none.
    seqlens_q, seqlens_k : int32 or int64 array, optional
        How many queries and keys of each batch there are, 0 to L and 0 to S; broadcast to the result's leading
        dimensions without heads. They are read on the host. A query beyond has out 0 and lse -inf; what lies beyond
        in q, k and v is not read.
    dropout_p : real number, seed : int
        The probability, 0 <= dropout_p < 1, to drop a weight, and 64 bits that decide which; ``seed`` is needed where
        ``dropout_p`` is not 0. :func:`dropout_mask` gives what is kept. A dropped key is seen all the same: its value
        counts as 0 * v[j].
    origin : (batch, head, query, key), optional
        What dropout and ``b``, ``h``, ``i``, ``j`` of expressions count from, in place of 0: for a part of a larger
        call, with which it then drops the same pairs. Batches are numbered over all leading dimensions without heads,
        in C order; three dimensions have a batch and no heads. ``L`` and ``S`` stay those of this call, and nothing
        else is shifted: the place of causal queries is told by ``align``.
    score_mod, mask_mod : str, optional
        CUDA C++ expressions: the new score, and whether to attend. They may use ``score`` (score_mod only), ``b`` and
        ``h`` (batch and head), ``i``, ``j``, ``L``, ``S`` (int; lengths of the batch) and names of ``aux``.
        ``score`` carries its derivative and converts to no other number. It has ``+ - * /``, comparisons, ``?:``, abs,
        fabs, min, max, fmin, fmax, exp, log, sqrt, tanh, sin, cos, isnan and pow with a constant exponent; what it
        meets is rounded to its type, float32 or for float64 inputs float64. ``-INFINITY`` removes a pair,
        ``NAN`` does not. A mask_mod may be a :class:`BlockMask`, from :func:`block_mask`: what it leaves nothing of is
        then skipped.
    aux : mapping of names to arrays, optional
        C-contiguous arrays that the expressions index, as ``name[n]``; constants: they get no gradient.
    split_size : int, optional
        Compute parts of this many keys, a multiple of 128, at the same time, and merge them: for few queries and many
        keys. None is one pass, always.
    numerics : Numerics, optional
        Choices of how to compute, for research.
    return_lse : bool
        Also return the natural log of each row's sum of exponentials, shape (..., L), float32 (float64 for
        float64).
    return_max : bool
        Also return each row's largest score, without the sink, shape and dtype as lse's; -inf where there is none.
    out : array, optional
        Where to write the result: its shape and dtype, any strides, no overlap with an input.

    Returns
    -------
    out : array of the inputs' kind, shape (..., L, Dv), their dtype, C-contiguous unless given
    lse : with ``return_lse``
    max : with ``return_max``

    Scores, sums and exponentials are float32, with subnormals flushed to 0, and the weights of 16-bit inputs are
    rounded to their dtype. Float64 is computed in float64 throughout. Neither float32 nor float64 uses tensor cores;
    their exponentials and logarithms are off by at most 2 units in the last place.
    A query that sees no key has out 0 and lse -inf, or that of its sink. What a removed pair holds, NaN included, has
    no influence. Results do not depend on the rest of the batch and are the same, bit for bit, each time.
    The first call compiles; :func:`cupyflash.warmup` does that ahead, and says how calls go into CUDA graphs.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched, naming the argument, its value and what is allowed.
    RuntimeError
        For CuPy arrays without a usable GPU.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 8)).astype(np.float16)
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, out.dtype, lse.shape, lse.dtype
    ((1, 2, 5, 8), dtype('float16'), (1, 2, 5), dtype('float32'))
    >>> bool((out[..., 0, :] == v[..., 0, :]).all())  # the first query sees one key
    True
    """
    call = forward_call(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        align=align,
        mask=mask,
        bias=bias,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        attn_sink=attn_sink,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        dropout_p=dropout_p,
        seed=seed,
        origin=origin,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux=aux,
        split_size=split_size,
        numerics=numerics,
        return_lse=return_lse,
        return_max=return_max,
        out=out,
    )
    return results_of(call)


def results_of(call: Call):
    """What :func:`attention` returns for a call."""
    results = tuple(call.run().values())
    return results if len(results) > 1 else results[0]


def forward_call(q, k, v, **options) -> Call:
    """The call of :func:`attention` with these arguments, validated."""
    inputs = {"q": q, "k": k, "v": v}
    flags = {name: options.get(name, False) for name in ("return_lse", "return_max")}
    return _plan.call(
        "forward",
        inputs,
        options,
        validated=lambda: attention_problem(**inputs, **options),
        arrays=lambda: (inputs | _plan.optional_arrays(options), _plan.given(out=options.get("out"))),
        planned=partial(forward_plan, **flags),
    )


def forward_plan(problem: Problem, planner: Planner, *, return_lse: bool, return_max: bool) -> Plan:
    """Of a forward call; the planner knows its arrays."""
    q, k, v = (planner.arguments[name] for name in ("q", "k", "v"))
    out = planner.arguments.get("out") or planner.empty(problem.out_shape, problem.dtype)
    lse = planner.empty(problem.lse_shape, problem.lse_dtype) if return_lse else None
    row_max = planner.empty(problem.lse_shape, problem.lse_dtype) if return_max else None
    launches = _launches(problem, planner, q, k, v, out, lse, row_max) if out.size else []
    return planner.plan(launches, _plan.given(out=out, lse=lse, max=row_max))


def _launches(problem: Problem, device: Planner, q, k, v, out, lse, row_max) -> list[Launch]:
    """Copies of what the kernel's 16-byte loads and stores cannot take, and the kernel between them."""
    before: list[Launch] = []
    after: list[Launch] = []
    arrays, layouts = {}, {}
    rows_q, rows_k = problem.rows_q, problem.rows_k
    for name, array, layout, rows, columns in (
        ("query", q, problem.q, rows_q, problem.head_dim),
        ("key", k, problem.k, rows_k, problem.head_dim),
        ("value", v, problem.v, rows_k, problem.head_dim_v),
        ("out", out, problem.layout(out), rows_q, problem.head_dim_v),
    ):
        is_result = name == "out"
        arrays[name], layouts[name], copies = _packing.in_chunks_or_packed(
            device, array, layout, problem.batch_shape, rows, columns, is_result=is_result
        )
        (after if is_result else before).extend(copies)
    problem, layouts = _stacking.stacked(problem, layouts, device.arch)

    arrays |= _variant.arrays(problem, device)
    layouts |= _variant.layouts(problem)
    batch, operands = _launch.operands(problem.batch_shape, arrays, layouts)
    # What the kernel stores: the results, or those of each part of the keys, for another kernel to join.
    with_max, parts = row_max is not None, None
    stored_lse, stored_max = lse, row_max
    if problem.split_size is not None:
        parts = Parts.empty(problem, device, with_max=with_max)
        stored_lse, stored_max = parts.lse, parts.row_max
        after.insert(0, _combine.join(problem, device, parts, arrays["out"], layouts["out"], lse, row_max))
    config = _config.forward(problem, device.arch, return_max=with_max, num_parts=parts.count if parts else None)
    variant = _variant.params_dtype(problem, _launch.OPERAND, return_max=with_max, split=parts is not None)
    if problem.dtype in HALF_TYPES:
        params_dtype, scales = _launch.flash_fwd_params(variant), {"scale_log2": problem.softmax_scale * LOG2_E}
    else:
        params_dtype, scales = _launch.flash_fwd_fma_params(problem.dtype, variant), {}
    params = _launch.pack(
        params_dtype,
        **{name: operands[name] for name in ("query", "key", "value", "out")},
        lse=stored_lse,
        batch=batch,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        **_variant.band(problem),
        **scales,
        scale=problem.softmax_scale,
        variant=_variant.params(problem, operands, stored_max, parts.members if parts else None),
    )
    return [*before, Launch(config, *params), *after]
