"""Arguments of an attention call -> one validated, frozen problem, or an error that says why."""

from __future__ import annotations

import math
import numbers
import sys
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
HALF_TYPES = (FLOAT16, BFLOAT16)
ALL_TYPES = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
MAX_HEAD_DIM = 256
MAX_BATCH_DIMS = 8
MAX_SEQLEN = 2**31 - 1
LOG2_E = math.log2(math.e)
_OVERLAP_WORK = 100_000  # how long numpy.shares_memory may search before an overlap is assumed

Align = Literal["bottom-right", "top-left"]


@dataclass(frozen=True)
class Layout:
    """Strides of one operand in elements; a broadcast dimension has stride 0."""

    batch_strides: tuple[int, ...]
    row_stride: int
    column_stride: int


@dataclass(frozen=True)
class Problem:
    """One attention call.

    ``leading_shape`` is the result's. In ``batch_shape``, the shape that the layouts speak of, the query heads that
    share a key head are split off: (..., num_kv_heads, group), with stride 0 over the group in k and v.
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
    causal: bool
    causal_shift: int
    softmax_scale: float
    q: Layout
    k: Layout
    v: Layout

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
    align=None,
    return_lse=False,
    out=None,
) -> Problem:
    """Validate the arguments of an attention call; see :func:`cupyflash.attention` for what they mean."""
    for name, value in ("causal", causal), ("return_lse", return_lse):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name}: expected True or False, not {value!r}")
    kind = _check_arrays(q, k, v)
    dtype = _check_dtypes(q, k, v)
    for name, array in ("q", q), ("k", k), ("v", v):
        check_element_aligned(array, name)
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

    leading_shape, grouped_heads = _leading_shape(q, k, v)
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
        causal=_check_causal(causal, align, seqlen_q, seqlen_k),
        causal_shift=seqlen_k - seqlen_q if align == "bottom-right" else 0,
        softmax_scale=_check_scale(softmax_scale, head_dim, dtype),
        q=_layout(q, leading_shape, grouped_heads),
        k=_layout(k, leading_shape, grouped_heads, shared_heads=True),
        v=_layout(v, leading_shape, grouped_heads, shared_heads=True),
    )
    if out is not None:
        check_result("out", out, dtype, problem.out_shape, {"q": q, "k": k, "v": v})
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


def array_kind(array: Any, name: str) -> Literal["numpy", "cupy"]:
    """ "numpy" or "cupy"; TypeError for everything else. Never imports CuPy: its arrays exist only if somebody did."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return "cupy"
    type_name = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
    if isinstance(array, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{name}: {type_name} is not supported; use a plain numpy.ndarray")
    if isinstance(array, np.ndarray):
        return "numpy"
    if hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__"):
        raise TypeError(f"{name}: {type_name} is not supported; use cupy.from_dlpack(x), or numpy.from_dlpack(x)")
    raise TypeError(f"{name}: expected a numpy.ndarray or a cupy.ndarray, not {type_name}")


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


def check_same_place(array, name: str, q, kind: str) -> None:
    if array_kind(array, name) != kind:
        raise TypeError(f"{name}: {array_kind(array, name)} array, but q is a {kind} array; one call takes one kind")
    if kind == "cupy" and array.device.id != q.device.id:
        raise ValueError(f"{name}: on device {array.device.id}, but q is on device {q.device.id}")


def check_element_aligned(array, name: str) -> None:
    size = array.dtype.itemsize
    strides = [stride for length, stride in zip(array.shape, array.strides, strict=True) if length > 1]
    if array.size and (any(stride % size for stride in strides) or _address(array) % size):
        raise ValueError(f"{name}: its elements do not lie at multiples of their {size} bytes; use {name}.copy()")


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


def _check_causal(causal, align, seqlen_q: int, seqlen_k: int) -> bool:
    if align is not None and not (isinstance(align, str) and align in ("bottom-right", "top-left")):
        raise ValueError(f"align: {align!r} is not one of 'bottom-right', 'top-left', None")
    if causal and align is None and seqlen_q != seqlen_k:
        raise ValueError(
            f"align: a causal mask with seqlen_q {seqlen_q} and seqlen_k {seqlen_k} needs one of 'bottom-right' "
            f"(query i sees keys j <= i + {seqlen_k - seqlen_q}: the last query sees all, as in decoding) and "
            "'top-left' (query i sees keys j <= i)"
        )
    return bool(causal)


def _check_scale(softmax_scale, head_dim: int, dtype: np.dtype) -> float:
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(f"softmax_scale: expected a real number or None, not {softmax_scale!r}")
    try:
        scale = float(softmax_scale)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale: {softmax_scale!r} is not finite")
    arithmetic = FLOAT64 if dtype == FLOAT64 else FLOAT32
    smallest, largest = float(np.finfo(arithmetic).tiny), float(np.finfo(arithmetic).max) / LOG2_E
    if scale and not smallest <= abs(scale) <= largest:
        raise ValueError(
            f"softmax_scale: {softmax_scale!r} is neither 0 nor, in magnitude, between {smallest:.3g} and "
            f"{largest:.3g}, where {arithmetic} holds it and its product with log2(e) as normal numbers"
        )
    return scale


def check_result(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...], inputs: dict[str, Any]) -> None:
    """Raise unless the results of a call whose ``inputs`` start with q may be written to ``array``."""
    q = inputs["q"]
    check_same_place(array, name, q, array_kind(q, "q"))
    check_dtype_and_shape(name, array, dtype, shape)
    check_element_aligned(array, name)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: is read-only")
    if _may_overlap_itself(array):
        raise ValueError(f"{name}: elements overlap each other; shape {array.shape}, strides {array.strides} bytes")
    for other_name, other in inputs.items():
        if _share_memory(array, other):
            raise ValueError(f"{name}: overlaps {other_name} in memory")


def check_dtype_and_shape(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or not array.dtype.isnative:
        given = array.dtype if array.dtype.kind == "V" else array.dtype.str
        raise TypeError(f"{name}: dtype {given}, expected {dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: shape {array.shape}, expected {shape}")


def _may_overlap_itself(array) -> bool:
    """False if each dimension steps over everything that the dimensions with smaller strides reach."""
    reach = array.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride < reach:
            return array.size > 1
        reach += (size - 1) * stride
    return False


def _share_memory(a, b) -> bool:
    if a.size == 0 or b.size == 0:
        return False
    try:
        return np.shares_memory(_bytes_of(a), _bytes_of(b), max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Lets NumPy reason about the addresses of an array, on any device, without reading a byte of it."""

    def __init__(self, array):
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "data": (_address(array), True),
        }


def _bytes_of(array) -> np.ndarray:
    return np.asarray(_Addresses(array))


def _address(array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
