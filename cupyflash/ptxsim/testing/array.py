"""ndarray of the simulated device: NumPy computes with it, and host memory is as far from it as from CuPy's."""

import cupy
import numpy as np

from .memory import MemoryPointer, copied, placed, uninitialised

_REFUSED = "OSUMm"  # kinds of dtypes that no CuPy array has
_METHODS = {name for name in dir(cupy.ndarray) if not name.startswith("_") and hasattr(np.ndarray, name)} - {"flat"}


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the simulated device; where `cupy.ndarray` refuses a NumPy array, this one does.

    Its methods are those that `cupy.ndarray` and `numpy.ndarray` have in common, beside `get`, `set`, `data` and
    `device`; elements and sums are arrays without dimensions, not scalars, as CuPy's are.

    Raises
    ------
    TypeError
        Where host and device are mixed: `cupy.asarray(x)` and `x.get()` copy from one to the other.
    AttributeError
        For what CuPy's has and this one does not.

    >>> from cupyflash.ptxsim.testing import simulated_cupy
    >>> cp = simulated_cupy()
    >>> x = cp.arange(6, dtype=cp.float32).reshape(2, 3)
    >>> (2 * x).sum(axis=1)
    array([ 6., 24.], dtype=float32)
    >>> x + np.ones(3)
    Traceback (most recent call last):
        ...
    TypeError: Unsupported type <class 'numpy.ndarray'>: it lies in host memory; cupy.asarray(x) copies it to the device
    """

    __slots__ = ("__weakref__", "_host")

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        if memptr is not None:
            self._host = memptr.array(shape, dtype, strides, order)
        elif strides is not None:
            raise ValueError("strides: without memptr there is no memory that they could be of")
        else:
            self._host = uninitialised(shape, dtype, order)

    def __getattr__(self, name):
        if name not in _METHODS:
            known = hasattr(cupy.ndarray, name) and not name.startswith("__")
            reason = "not simulated, though CuPy's has it" if known else "no such attribute"
            raise AttributeError(f"cupy.ndarray.{name}: {reason}", name=name, obj=self)
        attribute = getattr(self._host, name)
        return computed_by(attribute) if callable(attribute) else on_device(attribute)

    # Numbers that NumPy computes much more often than arrays.
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    strides = property(lambda self: self._host.strides)

    @property
    def shape(self):
        return self._host.shape

    @shape.setter
    def shape(self, shape):
        self._host = self._host.reshape(shape, copy=False)

    @property
    def data(self):
        """The pointer to the element [0, ..., 0]."""
        return MemoryPointer.to(self._host)

    @property
    def device(self):
        from .device import Device

        return Device(0)

    def get(self, stream=None, order="C", out=None, blocking=True):
        """A copy in host memory."""
        if out is None:
            return np.array(self._host, order=order)
        out[...] = self._host
        return out

    def set(self, arr, stream=None):
        """Copy from host memory, of the same shape and dtype."""
        if not isinstance(arr, np.ndarray):
            raise TypeError(f"arr: {type(arr).__name__}, must be numpy.ndarray")
        if (arr.shape, arr.dtype) != (self.shape, self.dtype):
            raise ValueError(f"arr: {arr.shape} {arr.dtype}, must be {self.shape} {self.dtype}")
        self._host[...] = arr

    def __getitem__(self, index):
        index = from_either(index)
        found = self._host[index]
        if not isinstance(found, np.ndarray):  # an element: a view of it
            found = self._host[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        return on_device(found)

    def __setitem__(self, index, value):
        self._host[from_either(index)] = on_host(value)

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        return bool(self._host)

    def __int__(self):
        return int(self._host)

    def __float__(self):
        return float(self._host)

    def __complex__(self):
        return complex(self._host)

    def __index__(self):
        return self._host.__index__()

    def __repr__(self):
        return repr(self._host)

    def __str__(self):
        return str(self._host)

    def __format__(self, spec):
        return format(self._host, spec)

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        return self.copy()

    def __reduce__(self):
        return on_device, (self._host,)

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed; x.get() and cupy.asnumpy(x) copy it")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return computed_by(getattr(ufunc, method))(*inputs, **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        of_cupy = cupy
        for name in (*function.__module__.split(".")[1:], function.__name__):
            of_cupy = getattr(of_cupy, name, None)
        return computed_by(function)(*args, **kwargs) if of_cupy else NotImplemented


def on_host(value):
    """What NumPy is to compute with: the values of device arrays, also within lists and tuples."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"Unsupported type {type(value)}: it lies in host memory; cupy.asarray(x) copies it to the device"
        )
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return value


def from_either(value):
    """The same where CuPy takes arrays of the host as well: to copy them, and for indices."""
    if isinstance(value, np.ndarray):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(from_either, value))
    return on_host(value)


def on_device(value):
    """What CuPy would return where NumPy returned this: device arrays, also in place of NumPy's scalars."""
    if isinstance(value, np.ndarray):
        return _of(placed(value))
    if isinstance(value, np.generic):
        return _of(placed(np.asarray(value)))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(on_device, value))
    if type(value) in (list, tuple):
        return type(value)(map(on_device, value))
    return value


def copied_to_device(host):
    """A device array with the values of a host array, which it shares no memory with."""
    return _of(copied(host))


def _of(host):
    if host.dtype.kind in _REFUSED:
        raise ValueError(f"Unsupported dtype {host.dtype}")
    new = ndarray.__new__(ndarray)
    new._host = host
    return new


def computed_by(function):
    """The function of device arrays that a function of NumPy's makes; like CuPy's, without floating-point warnings."""

    def compute(*args, **kwargs):
        out = kwargs.get("out")
        with np.errstate(all="ignore"):
            result = function(*map(on_host, args), **{name: on_host(value) for name, value in kwargs.items()})
        if isinstance(out, tuple) and len(out) == 1:  # as ufuncs hand it on
            (out,) = out
        return out if isinstance(out, ndarray) else on_device(result)

    return compute
