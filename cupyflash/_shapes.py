"""How q, k and v are laid out, and what they must have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cupyflash._arrays import ALL_TYPES, FLOAT32, FLOAT64, array_kind, check_element_aligned, check_same_place
from cupyflash._layouts import Layout, Placeholder, layout_of, packed_layout
from cupyflash._lengths import Packed

MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**31 - 1
_ALLOWED_TYPES = ", ".join(str(dtype) for dtype in ALL_TYPES)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """q, k and v of a call.

    ``leading_shape`` is the result's. In ``batch_shape``, the shape that the layouts speak of, the query heads that
    share a key head are split off: (..., num_kv_heads, group), with stride 0 over the group in k and v.

    A packed batch, whose arrays are (total, heads, columns), has the leading shape (num_seqs, num_heads), its longest
    sequences as seqlen_q and seqlen_k, and layouts with stride 0 over sequences: ``packed`` says where each starts.
    """

    kind: Literal["numpy", "cupy"]
    dtype: np.dtype
    leading_shape: tuple[int, ...]
    grouped_heads: tuple[int, int] | None  # (num_kv_heads, group), where they differ
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    q: Layout
    k: Layout
    v: Layout
    packed: Packed | None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (*self.leading_shape[:-1], *self.grouped_heads) if self.grouped_heads else self.leading_shape

    @property
    def rows_q(self) -> int:
        """Rows of q: packed, those of all sequences."""
        return self.packed.total_q if self.packed else self.seqlen_q

    @property
    def rows_k(self) -> int:
        """Rows of k and v."""
        return self.packed.total_k if self.packed else self.seqlen_k

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.packed:
            return self.packed.total_q, self.leading_shape[-1], self.head_dim_v
        return (*self.leading_shape, self.seqlen_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.packed:
            return self.leading_shape[-1], self.packed.total_q
        return (*self.leading_shape, self.seqlen_q)

    @property
    def lse_dtype(self) -> np.dtype:
        return FLOAT64 if self.dtype == FLOAT64 else FLOAT32

    @property
    def num_batches(self) -> int:
        return math.prod(self.batch_shape)

    def layout(self, array: Any, shared_heads: bool = False) -> Layout:
        """Layout of an array with dimensions as q's or the result's, with ``shared_heads`` as k's or v's."""
        if self.packed:
            return packed_layout(array, self.grouped_heads, shared_heads)
        return layout_of(array, self.leading_shape, self.grouped_heads, shared_heads)

    def row_values_layout(self, array: Any) -> Layout:
        """Layout of an array with one value per query, as lse."""
        order = -1 if self.packed else 1
        return self.layout(Placeholder((*array.shape[::order], 1), (*array.strides[::order], 0), array.dtype))


def arrangement_of(q, k, v) -> Arrangement:
    kind, dtype = _check_arrays(q, k, v)
    for name, array in ("q", q), ("k", k), ("v", v):
        if array.ndim < 2:
            raise ValueError(
                f"{name}: needs at least 2 dimensions (..., seqlen, head_dim), but has shape {array.shape}"
            )
    shapes = _shapes(q, k, v)
    seqlen_q, seqlen_k = q.shape[-2], v.shape[-2]
    if k.shape[-2] != seqlen_k:
        raise ValueError(f"v: seqlen_k {seqlen_k}, but k has {k.shape[-2]}; {shapes}")
    head_dim, head_dim_v = _head_dims(q, k, v)
    for name, size in ("q", seqlen_q), ("k", seqlen_k):
        if size > MAX_SEQLEN:
            raise ValueError(f"{name}: length {size} is more than {MAX_SEQLEN}; {shapes}")
    leading_shape, grouped_heads = _leading_shape(q, k, v)
    return Arrangement(
        kind=kind,
        dtype=dtype,
        leading_shape=leading_shape,
        grouped_heads=grouped_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        q=layout_of(q, leading_shape, grouped_heads),
        k=layout_of(k, leading_shape, grouped_heads, shared_heads=True),
        v=layout_of(v, leading_shape, grouped_heads, shared_heads=True),
        packed=None,
    )


def packed_arrangement_of(q, k, v, cu_seqlens_q, cu_seqlens_k) -> Arrangement:
    """Of a packed batch; the offsets are read from their device here."""
    kind, dtype = _check_arrays(q, k, v)
    for name, array in ("q", q), ("k", k), ("v", v):
        if array.ndim != 3:
            raise ValueError(f"{name}: needs 3 dimensions (total, heads, head_dim), but has shape {array.shape}")
    shapes = _shapes(q, k, v)
    (total_q, num_heads), (total_k, num_kv_heads) = q.shape[:2], k.shape[:2]
    if v.shape[0] != total_k:
        raise ValueError(f"v: {v.shape[0]} rows, but k has {total_k}; {shapes}")
    if v.shape[1] != num_kv_heads:
        raise ValueError(f"v: {v.shape[1]} heads, but k has {num_kv_heads}; {shapes}")
    if num_heads != num_kv_heads and (not num_kv_heads or num_heads % num_kv_heads):
        raise ValueError(f"k: {num_kv_heads} heads, but q's {num_heads} are not a multiple of them; {shapes}")
    head_dim, head_dim_v = _head_dims(q, k, v)
    for name, size in ("q", total_q), ("k", total_k):
        if size > MAX_SEQLEN:
            raise ValueError(f"{name}: {size} rows are more than {MAX_SEQLEN}; {shapes}")
    packed = Packed.read(cu_seqlens_q, cu_seqlens_k, total_q, total_k, q, kind)
    grouped_heads = (num_kv_heads, num_heads // num_kv_heads) if 1 < num_kv_heads < num_heads else None
    return Arrangement(
        kind=kind,
        dtype=dtype,
        leading_shape=(packed.num_seqs, num_heads),
        grouped_heads=grouped_heads,
        seqlen_q=packed.longest_q,
        seqlen_k=packed.longest_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        q=packed_layout(q, grouped_heads),
        k=packed_layout(k, grouped_heads, shared_heads=True),
        v=packed_layout(v, grouped_heads, shared_heads=True),
        packed=packed,
    )


def _check_arrays(q, k, v) -> tuple[Literal["numpy", "cupy"], np.dtype]:
    """Their kind and dtype."""
    arrays = {"q": q, "k": k, "v": v}
    kind = array_kind(q, "q")
    for name, array in arrays.items():
        check_same_place(array, name, q, kind)
    for name, array in arrays.items():
        if not array.dtype.isnative:
            raise TypeError(
                f"{name}: dtype {array.dtype.str} has foreign byte order; "
                f"use {name}.astype({name}.dtype.newbyteorder('='))"
            )
        if array.dtype not in ALL_TYPES:
            raise TypeError(f"{name}: dtype {array.dtype} is not one of {_ALLOWED_TYPES}")
        if array.dtype != q.dtype:
            raise TypeError(
                f"{name}: dtype {array.dtype}, but q has {q.dtype}; q, k and v share one of {_ALLOWED_TYPES}"
            )
        check_element_aligned(array, name)
    return kind, q.dtype


def _head_dims(q, k, v) -> tuple[int, int]:
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    shapes = _shapes(q, k, v)
    if k.shape[-1] != head_dim:
        raise ValueError(f"k: head_dim {k.shape[-1]}, but q has {head_dim}; {shapes}")
    for name, what, size in ("q", "head_dim", head_dim), ("v", "head_dim_v", head_dim_v):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: {what} {size} is not between 1 and {MAX_HEAD_DIM}; {shapes}")
    return head_dim, head_dim_v


def _shapes(q, k, v) -> str:
    return f"q {q.shape}, k {k.shape}, v {v.shape}"


def _leading_shape(q, k, v) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Leading dimensions of the result, and (num_kv_heads, group) where query heads share key heads."""
    leading_q, leading_k, leading_v = (array.shape[:-2] for array in (q, k, v))
    shapes = _shapes(q, k, v)
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
