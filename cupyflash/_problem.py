"""Arguments of an attention call -> one validated, frozen problem, or an error that says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any

from cupyflash._arrays import check_result
from cupyflash._block_mask import BlockMask
from cupyflash._layouts import Layout, operand_layout
from cupyflash._lengths import batches_and_heads, checked_lengths
from cupyflash._numerics import Numerics
from cupyflash._options import (
    NO_ORIGIN,
    Window,
    check_expression,
    check_flag,
    check_operand,
    check_split_size,
    checked_aux,
    checked_dropout,
    checked_numerics,
    checked_origin,
    checked_scale,
    checked_softcap,
    checked_window,
)
from cupyflash._shapes import Arrangement, arrangement_of, packed_arrangement_of


@dataclass(frozen=True, eq=False)
class Problem(Arrangement):
    """One attention call.

    ``window`` has (None, 0) for a causal mask; a side that no key is beyond is None. Query 0 is at key ``offset``, or,
    where ``bottom_right``, the last query is at the last key. ``operands`` are the optional
    arrays that were given: mask, bias, alibi_slopes, attn_sink as they are, seqlens_q and seqlens_k as int32 arrays on
    the host. ``layouts`` has one of each over ``batch_shape``, with 0 where it is broadcast; rows and columns are those
    of a mask and a bias. ``aux`` are the arrays that the expressions name. ``inputs`` are all arrays beside q, k and v,
    as they were given. Dropout and expressions count batches, heads, queries and keys from ``origin``. The kernel
    stacks the queries of ``stacked_heads`` heads at a time, steps of the last dimension of the batch that is not 1
    (_stacking.py).
    """

    softmax_scale: float
    window: Window
    bottom_right: bool
    offset: int
    softcap: float | None
    dropout_p: float
    seed: int
    origin: tuple[int, int, int, int]
    score_mod: str | None
    mask_mod: str | None
    block_mask: BlockMask | None
    split_size: int | None
    numerics: Numerics
    operands: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    aux: Mapping[str, Any]
    inputs: Mapping[str, Any]
    stacked_heads: int = 1

    @property
    def shift(self) -> int:
        """Query i is at key i + shift; with lengths, theirs take the place of seqlen_k - seqlen_q in each batch."""
        return self.seqlen_k - self.seqlen_q if self.bottom_right else self.offset

    @property
    def causal(self) -> bool:
        """Whether the window has a right edge."""
        return self.window[1] is not None

    @property
    def causal_shift(self) -> int:
        """Query i sees keys j <= i + causal_shift, where there is a right edge."""
        return self.shift + (self.window[1] or 0)


def attention_problem(q, k, v, **options) -> Problem:
    """Validate the arguments of an attention call; see :func:`cupyflash.attention` for what they mean."""
    return _problem(q, k, v, arrangement_of(q, k, v), options)


def varlen_problem(q, k, v, cu_seqlens_q, cu_seqlens_k, **options) -> Problem:
    """The same of a packed batch; see :func:`cupyflash.attention_varlen`."""
    for name in ("seqlens_q", "seqlens_k"):
        if name in options:
            raise TypeError(f"{name}: is for padded batches; cu_{name} has the lengths of packed ones")
    arrangement = packed_arrangement_of(q, k, v, cu_seqlens_q, cu_seqlens_k)
    return _problem(q, k, v, arrangement, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def _problem(q, k, v, arrangement: Arrangement, options: Mapping[str, Any], **offsets) -> Problem:
    check_names(options)
    return _with_options(q, k, v, arrangement, offsets, **options)


def check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{name}: is not an option of attention; those are {', '.join(OPTIONS)}")


def _with_options(
    q,
    k,
    v,
    arrangement: Arrangement,
    offsets: Mapping[str, Any],
    *,
    softmax_scale=None,
    causal=False,
    window_size=None,
    align=None,
    mask=None,
    bias=None,
    softcap=None,
    alibi_slopes=None,
    attn_sink=None,
    seqlens_q=None,
    seqlens_k=None,
    dropout_p=0.0,
    seed=None,
    origin=NO_ORIGIN,
    score_mod=None,
    mask_mod=None,
    aux=None,
    split_size=None,
    numerics=None,
    return_lse=False,
    return_max=False,
    out=None,
) -> Problem:
    causal = check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_flag("return_max", return_max)
    softmax_scale = checked_scale(softmax_scale, arrangement.head_dim, arrangement.dtype)
    softcap = checked_softcap(softcap, arrangement.dtype)
    dropout_p, seed = checked_dropout(dropout_p, seed)
    counts = batches_and_heads(arrangement.leading_shape)
    origin = checked_origin(origin, (*counts, arrangement.seqlen_q, arrangement.seqlen_k))
    check_expression("score_mod", score_mod)
    if isinstance(mask, BlockMask):
        raise TypeError("mask: a BlockMask is given as mask_mod")
    block_mask = None
    if isinstance(mask_mod, BlockMask):
        block_mask, mask_mod = mask_mod, mask_mod.mask_mod
        if origin != NO_ORIGIN:
            raise ValueError(f"origin: {origin} with a BlockMask, which counts from 0; give the expression as mask_mod")
        block_mask.check_fits(arrangement, q, with_lengths=seqlens_q is not None or seqlens_k is not None)
        aux = block_mask.joined_aux(aux)
    check_expression("mask_mod", mask_mod)
    check_split_size(split_size)
    numerics = checked_numerics(numerics)

    kind, seqlen_q, seqlen_k = arrangement.kind, arrangement.seqlen_q, arrangement.seqlen_k
    lengths = _given(seqlens_q=seqlens_q, seqlens_k=seqlens_k)
    if lengths:
        varying = "seqlens_q or seqlens_k", "seqlens_k - seqlens_q"
    elif arrangement.packed and not arrangement.packed.same_lengths:
        varying = "cu_seqlens_q and cu_seqlens_k that differ", "its number of keys - its number of queries"
    else:
        varying = None
    window, bottom_right, offset = checked_window(
        causal, window_size, align, seqlen_q, seqlen_k, with_alibi=alibi_slopes is not None, varying=varying
    )
    operands = _given(mask=mask, bias=bias, alibi_slopes=alibi_slopes, attn_sink=attn_sink)
    for name, array in operands.items():
        per_pair = name in ("mask", "bias")
        shape = (*arrangement.leading_shape, seqlen_q, seqlen_k) if per_pair else arrangement.leading_shape
        check_operand(name, array, q, kind, shape)
    aux = checked_aux(aux, q, kind, with_expression=score_mod is not None or mask_mod is not None)
    inputs = {**operands, **lengths, **offsets, **{f"aux[{name!r}]": array for name, array in aux.items()}}
    if block_mask is not None:
        inputs["mask_mod"] = block_mask.bits
    operands |= checked_lengths(
        lengths, {"seqlens_q": seqlen_q, "seqlens_k": seqlen_k}, arrangement.leading_shape, q, kind
    )
    problem = Problem(
        **vars(arrangement),
        softmax_scale=softmax_scale,
        window=window,
        bottom_right=bottom_right,
        offset=offset,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=seed,
        origin=origin,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        split_size=None if split_size is None else int(split_size),
        numerics=numerics,
        operands=MappingProxyType(operands),
        layouts=MappingProxyType(
            {
                name: operand_layout(name, array, arrangement.leading_shape, arrangement.grouped_heads)
                for name, array in operands.items()
            }
        ),
        aux=MappingProxyType(aux),
        inputs=MappingProxyType(inputs),
    )
    if out is not None:
        check_result("out", out, problem.dtype, problem.out_shape, {"q": q, "k": k, "v": v, **inputs})
    return problem


#: What a call may be given beside arrays and offsets, with the values of what is not given.
OPTIONS = {
    name: parameter.default
    for name, parameter in signature(_with_options).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _given(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}
