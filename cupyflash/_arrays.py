"""What is asked of every array: its kind, device, dtype, alignment, and that results overlap nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
HALF_TYPES = (FLOAT16, BFLOAT16)
ALL_TYPES = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
LOG2_E = math.log2(math.e)
_OVERLAP_WORK = 100_000  # how long numpy.shares_memory may search before an overlap is assumed


def array_kind(array: Any, name: str) -> Literal["numpy", "cupy"]:
    """ "numpy" or "cupy"; TypeError for everything else."""
    if isinstance(array, cupy_array_type() or ()):
        return "cupy"
    type_name = _type_name(array)
    if isinstance(array, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{name}: {type_name} is not supported; use a plain numpy.ndarray")
    if isinstance(array, np.ndarray):
        return "numpy"
    if hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__"):
        raise TypeError(f"{name}: {type_name} is not supported; use cupy.from_dlpack(x), or numpy.from_dlpack(x)")
    hint = "; cupyflash.distributed takes them" if type_name.startswith("dask.array.") else ""
    raise TypeError(f"{name}: expected a numpy.ndarray or a cupy.ndarray, not {type_name}{hint}")


def cupy_array_type() -> type | None:
    """cupy.ndarray, or None: CuPy is never imported, for its arrays exist only once somebody has."""
    return getattr(sys.modules.get("cupy"), "ndarray", None)  # not there either while another thread imports it


def described(value: Any) -> str:
    """What a message says of a value that it did not expect: an array's type, shape and dtype, not its elements.

    >>> described(1.5), described(np.zeros((2, 3)))
    ('1.5', 'numpy.ndarray of shape (2, 3), dtype float64')
    """
    if isinstance(value, np.generic) or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return repr(value)
    return f"{_type_name(value)} of shape {tuple(value.shape)}, dtype {value.dtype}"


def check_same_place(array, name: str, q, kind: str) -> None:
    if array_kind(array, name) != kind:
        raise TypeError(f"{name}: {array_kind(array, name)} array, but q is a {kind} array; one call takes one kind")
    if kind == "cupy" and array.device.id != q.device.id:
        raise ValueError(f"{name}: on device {array.device.id}, but q is on device {q.device.id}")


def check_element_aligned(array, name: str) -> None:
    size = array.dtype.itemsize
    strides = [stride for length, stride in zip(array.shape, array.strides, strict=True) if length > 1]
    if array.size and (any(stride % size for stride in strides) or address(array) % size):
        raise ValueError(f"{name}: its elements do not lie at multiples of their {size} bytes; use {name}.copy()")


def check_result(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...], inputs: dict[str, Any]) -> None:
    """Raise unless the results of a call whose ``inputs`` start with q may be written to ``array``."""
    q = inputs["q"]
    check_same_place(array, name, q, array_kind(q, "q"))
    check_dtype_and_shape(name, array, dtype, shape)
    check_element_aligned(array, name)
    _check_writeable(name, array)
    if _may_overlap_itself(array):
        raise ValueError(f"{name}: elements overlap each other; shape {array.shape}, strides {array.strides} bytes")
    check_written({name: array}, inputs)


def check_written(results: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """What :func:`check_result` asks of arrays beside their looks; no two results may overlap either."""
    if not results:
        return
    others = {name: (array, *_byte_bounds(array)) for name, array in inputs.items()}
    for name, array in results.items():
        _check_writeable(name, array)
        low, high = _byte_bounds(array)
        for other_name, (other, other_low, other_high) in others.items():
            if low < other_high and other_low < high and _share_memory(array, other):
                raise ValueError(f"{name}: overlaps {other_name} in memory")
        others[name] = array, low, high


def _check_writeable(name: str, array: Any) -> None:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: is read-only")


def check_dtype_and_shape(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or not array.dtype.isnative:
        given = array.dtype if array.dtype.kind == "V" else array.dtype.str
        raise TypeError(f"{name}: dtype {given}, expected {dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: shape {array.shape}, expected {shape}")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _may_overlap_itself(array) -> bool:
    """False if each dimension steps over everything that the dimensions with smaller strides reach."""
    reach = array.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride < reach:
            return array.size > 1
        reach += (size - 1) * stride
    return False


def _byte_bounds(array) -> tuple[int, int]:
    """The first byte that elements may lie at, and the first after them."""
    if array.size == 0:
        return 0, 0
    low = high = address(array)
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high + array.dtype.itemsize


def _share_memory(a, b) -> bool:
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
            "data": (address(array), True),
        }


def _bytes_of(array) -> np.ndarray:
    return np.asarray(_Addresses(array))


def address(array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
