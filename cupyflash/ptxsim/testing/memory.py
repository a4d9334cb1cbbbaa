"""Memory of the simulated device: arrays that lie as cudaMalloc would place them, and pointers into them."""

import weakref

import numpy as np

from ..memory import zeros_at
from ..sanitizer.fresh import ALIGNMENT, empty
from .partial import Partial

_device = weakref.WeakValueDictionary()  # id -> memory of the device
_exposed = weakref.WeakValueDictionary()  # id -> memory whose address somebody has asked for


def allocated(shape, dtype, order="C"):
    """A new array of zeros."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    return np.ndarray(shape, dtype, buffer=adopted(zeros_at(ALIGNMENT, size)), order=order)


def uninitialised(shape, dtype, order="C"):
    """A new array whose elements the sanitizer takes for uninitialised until they are written."""
    if order == "F":
        return uninitialised(tuple(np.atleast_1d(shape))[::-1], dtype).T
    return adopted(empty(shape, dtype))


def adopted(array):
    """The array, whose memory counts as the device's from now on."""
    memory = _memory_of(array)
    _device[id(memory)] = memory
    return array


def placed(array):
    """An array that lies in memory of the device, and may be written: the same elements if it does, else a copy.

    NumPy's results lie anywhere: a kernel's wide accesses would be aligned in one run and not in the next.
    """
    if id(_memory_of(array)) not in _device:
        return copied(array)
    if array.flags.writeable:
        return array
    return MemoryPointer.to(array).array(array.shape, array.dtype, array.strides)  # CuPy's views can all be written


def copied(array):
    """A new array with the values, and the order in memory, of another."""
    new = allocated(array.shape, array.dtype, "F" if array.flags.fnc else "C")
    new[...] = array
    return new


def address(array):
    return array.__array_interface__["data"][0]


def _memory_of(array):
    """The last array that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def exposed():
    """By name: memory that a kernel may reach through an address that is no argument, but a number in one."""
    return {f"memory at {address(memory):#x}": memory for memory in list(_exposed.values())}


class MemoryPointer(Partial):
    """An address in memory of the device, as `cupy.ndarray.data` is one.

    >>> from cupyflash.ptxsim.testing import simulated_cupy
    >>> cp = simulated_cupy()
    >>> x = cp.arange(4)
    >>> (x.data + 8).ptr == x[1:].data.ptr
    True
    >>> cp.ndarray(2, x.dtype, x.data + 16)
    array([2, 3])
    """

    __slots__ = ("_memory", "_offset")

    device_id = 0

    def __init__(self, memory, offset=0):
        self._memory, self._offset = memory, offset

    @classmethod
    def to(cls, array):
        """The pointer to the element [0, ..., 0] of an array."""
        memory = _memory_of(array)
        return cls(memory, address(array) - address(memory))

    @property
    def ptr(self):
        """The address; from here on kernels may touch the memory that it lies in."""
        _exposed[id(self._memory)] = self._memory
        return address(self._memory) + self._offset

    def __int__(self):
        return self.ptr

    def __add__(self, offset):
        return MemoryPointer(self._memory, self._offset + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset

    def array(self, shape, dtype, strides=None, order="C"):
        """An array in this memory that begins here; ValueError where it would leave it."""
        return np.ndarray(shape, dtype, self._memory.view(np.uint8), self._offset, strides, order)
