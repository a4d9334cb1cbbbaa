"""Functions of the simulated CuPy: NumPy's, for arrays of the device, and those that go between host and device."""

import functools

import numpy as np

from .array import computed_by, copied_to_device, from_either, ndarray, on_device, on_host
from .ufunc import UniversalFunction


def in_common(theirs, of_numpy):
    """What CuPy and NumPy have in common: types and constants as they are, functions for arrays of the device."""
    found = {}
    for name in dir(theirs):
        ours = getattr(of_numpy, name, None)
        if name.startswith("_") or ours is None:
            continue
        if ours is getattr(theirs, name):
            found[name] = ours
        elif isinstance(ours, np.ufunc):
            found[name] = UniversalFunction(ours)
        elif callable(ours) and not isinstance(ours, type):
            found[name] = computed_by(ours)
    return found


def comparison(function):
    """An assertion of NumPy's about arrays of host and device."""

    def compare(*args, **kwargs):
        return function(*map(_on_host_if_device, args), **kwargs)

    return compare


def _on_host_if_device(value):
    return value.get() if isinstance(value, ndarray) else value


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """A copy in host memory."""
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    host = np.asarray(a, order=order)
    if out is None:
        return host
    out[...] = host
    return out


def converting(function):
    """array, asarray, ...: the functions that copy from the host."""

    def convert(obj, *args, blocking=False, **kwargs):
        if isinstance(obj, ndarray):
            result = function(obj._host, *args, **kwargs)
            return obj if result is obj._host else on_device(result)
        if isinstance(obj, np.ndarray):
            return copied_to_device(function(obj, *args, **kwargs))
        return on_device(function(from_either(obj), *args, **kwargs))

    return convert


def empty(shape, dtype=float, order="C"):
    """An array whose elements the sanitizer takes for uninitialised until they are written."""
    return ndarray(shape, dtype, order=order)


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    """An array like another, uninitialised."""
    like = np.empty_like(on_host(prototype), dtype, order, shape=shape)
    return ndarray(like.shape, like.dtype, order="F" if like.flags.fnc else "C")


class Concatenation:
    """`cupy.r_` and `cupy.c_`: arrays, lists and numbers in one array; no ranges and directives, as CuPy has it."""

    def __init__(self, of_numpy):
        self._of_numpy = of_numpy

    def __getitem__(self, key):
        if any(isinstance(part, slice | str) for part in (key if isinstance(key, tuple) else (key,))):
            raise NotImplementedError("cupy.r_, cupy.c_: slices and strings")
        return on_device(self._of_numpy[from_either(key)])


def memoize(for_each_device=False):
    """Keep the results of a function, by its arguments."""
    return functools.cache
