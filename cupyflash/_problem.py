"""Arguments of an attention call -> one validated, frozen problem, or an error that says why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from cupyflash._arrays import (
    ALL_TYPES,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    HALF_TYPES,
    LOG2_E,
    array_kind,
    check_dtype_and_shape,
    check_element_aligned,
    check_result,
    check_same_place,
)
from cupyflash._lengths import checked_lengths, per_batch
from cupyflash._numerics import Numerics
from cupyflash._options import (
    Align,
    Window,
    check_expression,
    check_flag,
    check_operand,
    check_split_size,
    checked_aux,
    checked_dropout,
    checked_numerics,
    checked_scale,
    checked_softcap,
    checked_window,
)

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "HALF_TYPES",
    "LOG2_E",
    "Align",
    "Layout",
    "Problem",
    "attention_problem",
    "check_dtype_and_shape",
    "check_element_aligned",
    "check_result",
    "check_same_place",
    "merge_batch_dims",
]

MAX_HEAD_DIM = 256
MAX_BATCH_DIMS = 8
MAX_SEQLEN = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """Strides of one operand in elements; a broadcast dimension has stride 0."""

    batch_strides: tuple[int, ...]
    row_stride: int
    column_stride: int


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention call.

    ``leading_shape`` is the result's. In ``batch_shape``, the shape that the layouts speak of, the query heads that
    share a key head are split off: (..., num_kv_heads, group), with stride 0 over the group in k and v.

    ``window`` has (None, 0) for a causal mask; a side that no key is beyond is None. ``operands`` are the optional
    arrays that were given: mask, bias, alibi_slopes, attn_sink as they are, seqlens_q and seqlens_k as int32 arrays on
    the host. ``layouts`` has one of each over ``batch_shape``, with 0 where it is broadcast; rows and columns are those
    of a mask and a bias. ``aux`` are the arrays that the expressions name. ``inputs`` are all arrays beside q, k and v,
    as they were given. Dropout and expressions count batches from ``first_batch``, which is the sequence's number where
    the call is one sequence of a packed batch.
    """

    kind: Literal["numpy", "cupy"]
    dtype: np.dtype
    leading_shape: tuple[int, ...]
    batch_shape: tuple[int, ...]
    grouped_heads: tuple[int, int] | None  # (num_kv_heads, group), where they differ
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    q: Layout
    k: Layout
    v: Layout
    window: Window
    bottom_right: bool
    softcap: float | None
    dropout_p: float
    seed: int
    score_mod: str | None
    mask_mod: str | None
    block_mask: Any
    split_size: int | None
    numerics: Numerics
    operands: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    aux: Mapping[str, Any]
    inputs: Mapping[str, Any]
    first_batch: int = 0

    @property
    def shift(self) -> int:
        """Query i is at key i + shift; with lengths, theirs take the place of seqlen_k - seqlen_q in each batch."""
        return self.seqlen_k - self.seqlen_q if self.bottom_right else 0

    @property
    def causal(self) -> bool:
        """Whether the window has a right edge."""
        return self.window[1] is not None

    @property
    def causal_shift(self) -> int:
        """Query i sees keys j <= i + causal_shift, where there is a right edge."""
        return self.shift + (self.window[1] or 0)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.leading_shape, self.seqlen_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.leading_shape, self.seqlen_q)

    @property
    def lse_dtype(self) -> np.dtype:
        return FLOAT64 if self.dtype == FLOAT64 else FLOAT32

    @property
    def num_batches(self) -> int:
        return math.prod(self.batch_shape)

    def layout(self, array: Any, shared_heads: bool = False) -> Layout:
        """Layout of an array with leading dimensions as q's or the result's, with ``shared_heads`` as k's or v's."""
        return _layout(array, self.leading_shape, self.grouped_heads, shared_heads)


def attention_problem(
    q,
    k,
    v,
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
    score_mod=None,
    mask_mod=None,
    aux=None,
    block_mask=None,
    split_size=None,
    numerics=None,
    return_lse=False,
    return_max=False,
    out=None,
) -> Problem:
    """Validate the arguments of an attention call; see :func:`cupyflash.attention` for what they mean."""
    causal = check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_flag("return_max", return_max)
    kind = _check_arrays(q, k, v)
    dtype = _check_dtypes(q, k, v)
    for name, array in ("q", q), ("k", k), ("v", v):
        check_element_aligned(array, name)
    seqlen_q, seqlen_k, head_dim, head_dim_v = _sizes(q, k, v)
    leading_shape, grouped_heads = _leading_shape(q, k, v)
    dropout_p, seed = checked_dropout(dropout_p, seed)
    check_expression("score_mod", score_mod)
    check_expression("mask_mod", mask_mod)
    check_split_size(split_size)
    window, bottom_right = checked_window(
        causal, window_size, align, seqlen_q, seqlen_k,
        with_alibi=alibi_slopes is not None,
        with_lengths=seqlens_q is not None or seqlens_k is not None,
    )  # fmt: skip
    softmax_scale = checked_scale(softmax_scale, head_dim, dtype)
    softcap = checked_softcap(softcap, dtype)
    numerics = checked_numerics(numerics)
    aux = checked_aux(aux, q, kind, with_expression=score_mod is not None or mask_mod is not None)

    pairs = {"mask": mask, "bias": bias}
    heads = {"alibi_slopes": alibi_slopes, "attn_sink": attn_sink}
    operands = {name: array for name, array in (*pairs.items(), *heads.items()) if array is not None}
    for name, array in operands.items():
        shape = (*leading_shape, seqlen_q, seqlen_k) if name in pairs else leading_shape
        check_operand(name, array, q, kind, shape)
    lengths = {name: array for name, array in (("seqlens_q", seqlens_q), ("seqlens_k", seqlens_k)) if array is not None}
    inputs = {**operands, **lengths, **{f"aux[{name!r}]": array for name, array in aux.items()}}
    operands |= checked_lengths(lengths, {"seqlens_q": seqlen_q, "seqlens_k": seqlen_k}, leading_shape, q, kind)
    problem = Problem(
        kind=kind,
        dtype=dtype,
        leading_shape=leading_shape,
        batch_shape=(*leading_shape[:-1], *grouped_heads) if grouped_heads else leading_shape,
        grouped_heads=grouped_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=softmax_scale,
        q=_layout(q, leading_shape, grouped_heads),
        k=_layout(k, leading_shape, grouped_heads, shared_heads=True),
        v=_layout(v, leading_shape, grouped_heads, shared_heads=True),
        window=window,
        bottom_right=bottom_right,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=seed,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        split_size=None if split_size is None else int(split_size),
        numerics=numerics,
        operands=MappingProxyType(operands),
        layouts=MappingProxyType(
            {name: _operand_layout(name, array, leading_shape, grouped_heads) for name, array in operands.items()}
        ),
        aux=MappingProxyType(aux),
        inputs=MappingProxyType(inputs),
    )
    if out is not None:
        check_result("out", out, dtype, problem.out_shape, {"q": q, "k": k, "v": v, **inputs})
    return problem


def merge_batch_dims(
    shape: tuple[int, ...], *strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Merge neighbouring batch dimensions that every operand steps through as one; drop those of length 1.

    >>> merge_batch_dims((2, 3, 1, 4), (12, 4, 9, 1), (0, 0, 9, 5))
    ((6, 4), ((4, 1), (0, 5)))
    """
    sizes: list[int] = []
    columns: list[tuple[int, ...]] = []
    for size, column in zip(shape, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if columns and all(outer == inner * size for outer, inner in zip(columns[-1], column, strict=True)):
            sizes[-1] *= size
            columns[-1] = column
        else:
            sizes.append(size)
            columns.append(column)
    if len(sizes) > MAX_BATCH_DIMS:
        raise ValueError(
            f"q, k, v: {len(sizes)} leading dimensions remain where those that can be are merged, at most "
            f"{MAX_BATCH_DIMS} may; shape {shape}"
        )
    return tuple(sizes), tuple(zip(*columns, strict=True)) if columns else ((),) * len(strides)


def _check_arrays(q, k, v) -> Literal["numpy", "cupy"]:
    arrays = {"q": q, "k": k, "v": v}
    kind = array_kind(q, "q")
    for name, array in arrays.items():
        check_same_place(array, name, q, kind)
        if array.ndim < 2:
            raise ValueError(
                f"{name}: needs at least 2 dimensions (..., seqlen, head_dim), but has shape {array.shape}"
            )
    return kind


def _check_dtypes(q, k, v) -> np.dtype:
    allowed = ", ".join(str(dtype) for dtype in ALL_TYPES)
    for name, array in ("q", q), ("k", k), ("v", v):
        if not array.dtype.isnative:
            raise TypeError(
                f"{name}: dtype {array.dtype.str} has foreign byte order; "
                f"use {name}.astype({name}.dtype.newbyteorder('='))"
            )
        if array.dtype not in ALL_TYPES:
            raise TypeError(f"{name}: dtype {array.dtype} is not one of {allowed}")
        if array.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {array.dtype}, but q has {q.dtype}; q, k and v share one of {allowed}")
    return q.dtype


def _sizes(q, k, v) -> tuple[int, int, int, int]:
    """seqlen_q, seqlen_k, head_dim and head_dim_v."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    seqlen_q, head_dim = q.shape[-2:]
    seqlen_k, head_dim_v = v.shape[-2:]
    if k.shape[-1] != head_dim:
        raise ValueError(f"k: head_dim {k.shape[-1]}, but q has {head_dim}; {shapes}")
    if k.shape[-2] != seqlen_k:
        raise ValueError(f"v: seqlen_k {seqlen_k}, but k has {k.shape[-2]}; {shapes}")
    for name, what, size in ("q", "head_dim", head_dim), ("v", "head_dim_v", head_dim_v):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: {what} {size} is not between 1 and {MAX_HEAD_DIM}; {shapes}")
    for name, size in ("q", seqlen_q), ("k", seqlen_k):
        if size > MAX_SEQLEN:
            raise ValueError(f"{name}: length {size} is more than {MAX_SEQLEN}; {shapes}")
    return seqlen_q, seqlen_k, head_dim, head_dim_v


def _leading_shape(q, k, v) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Leading dimensions of the result, and (num_kv_heads, group) where query heads share key heads."""
    leading_q, leading_k, leading_v = (array.shape[:-2] for array in (q, k, v))
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    try:
        leading_kv = np.broadcast_shapes(leading_k, leading_v)
    except ValueError:
        raise ValueError(f"v: leading dimensions {leading_v} do not broadcast with k's {leading_k}; {shapes}") from None

    grouped_heads = None
    if max(len(leading_q), len(leading_kv)) >= 2 and leading_q and leading_kv:
        num_heads, num_kv_heads = leading_q[-1], leading_kv[-1]
        if num_kv_heads > 1 and num_heads not in (1, num_kv_heads):
            if num_heads % num_kv_heads:
                raise ValueError(f"k: {num_kv_heads} heads, but q's {num_heads} are not a multiple of them; {shapes}")
            grouped_heads = num_kv_heads, num_heads // num_kv_heads
            leading_kv = (*leading_kv[:-1], num_heads)
    try:
        return np.broadcast_shapes(leading_q, leading_kv), grouped_heads
    except ValueError:
        raise ValueError(
            f"k: leading dimensions {leading_kv} do not broadcast with q's {leading_q}; {shapes}"
        ) from None


def _layout(array, leading_shape, grouped_heads, shared_heads: bool = False) -> Layout:
    *leading_strides, row_stride, column_stride = (stride // array.dtype.itemsize for stride in array.strides)
    missing = len(leading_shape) - len(leading_strides)
    strides = [0] * missing + [
        0 if size == 1 else stride for size, stride in zip(array.shape[:-2], leading_strides, strict=True)
    ]
    if grouped_heads:
        head_stride = strides.pop()
        strides += [head_stride, 0] if shared_heads else [head_stride * grouped_heads[1], head_stride]
    return Layout(tuple(strides), row_stride, column_stride)


def _operand_layout(name: str, array, leading_shape, grouped_heads) -> Layout:
    """Of an optional array, as an array of matrices: every dimension that it is broadcast over has stride 0."""
    strides = [
        0 if size == 1 else stride // array.dtype.itemsize
        for size, stride in zip(array.shape, array.strides, strict=True)
    ]
    if name in ("mask", "bias"):
        strides = [0] * (2 - len(strides)) + strides
        row_stride, column_stride = strides[-2:]
        del strides[-2:]
    else:
        row_stride = column_stride = 0
    if name in ("seqlens_q", "seqlens_k") and len(per_batch(leading_shape)) < len(leading_shape):
        strides.append(0)
    strides = [0] * (len(leading_shape) - len(strides)) + strides
    if grouped_heads:
        head_stride = strides.pop()
        strides += [head_stride * grouped_heads[1], head_stride]
    return Layout(tuple(strides), row_stride, column_stride)
