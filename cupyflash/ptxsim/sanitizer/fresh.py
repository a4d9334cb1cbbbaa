"""Arrays whose elements count as uninitialised until something writes them."""

import weakref

import numpy as np

# Repeated over an array: NaN as float64, as two float32, and as four float16 or bfloat16, with rare payloads.
PATTERN = np.array([0xFFF6FFF9FFF3FFF5], np.uint64).view(np.uint8)

_fresh = {}  # id -> weak reference


def empty(shape, dtype=float):
    """An array like that of `numpy.empty`, of which `sanitize()` reports uninitialised reads.

    It is filled with a pattern that is NaN in every floating-point type. An element is uninitialised while it holds
    the pattern, whoever would have written it, NumPy or a kernel; of integers of one or two bytes, while the 8 bytes
    around it do. All other arrays count as initialised. Views and slices belong to their array.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : any numerical dtype

    Returns
    -------
    numpy.ndarray

    >>> import numpy as np
    >>> from cupyflash import ptxsim
    >>> source = '''
    ... extern "C" __global__ void half(const float* x, float* y) { y[threadIdx.x] = 0.5f * x[threadIdx.x]; }'''
    >>> x, y = ptxsim.empty(64, np.float32), ptxsim.empty(64, np.float32)
    >>> x[:40] = 1
    >>> with ptxsim.sanitize() as report:
    ...     ptxsim.RawModule(code=source).get_function("half")((1,), (64,), (x, y))
    >>> [finding.kind for finding in report.findings]
    ['uninitialised global memory']
    """
    array = np.empty(shape, dtype)
    if array.dtype.hasobject:
        raise TypeError(f"dtype: {array.dtype}, must not hold Python objects")
    array.reshape(-1).view(np.uint8)[...] = np.resize(PATTERN, array.nbytes)
    key = id(array)
    _fresh[key] = weakref.ref(array, lambda _: _fresh.pop(key, None))
    return array


def unwritten_bytes(segment):
    """For each byte of a segment of global memory 1 if it belongs to an uninitialised element; None if none does."""
    found = None
    for reference in list(_fresh.values()):
        array = reference()
        if array is None or not array.nbytes:
            continue
        start = array.ctypes.data
        low, high = max(start, int(segment.start)), min(start + array.nbytes, int(segment.stop))
        if low >= high:
            continue
        fresh = _holds_pattern(array)[low - start : high - start]
        if fresh.any():
            if found is None:
                found = np.zeros(segment.views[1].size, np.uint8)
            origin = int(segment.origin)
            found[low - origin : high - origin] = fresh
    return found


def _holds_pattern(array):
    data = array.reshape(-1).view(np.uint8)
    same = data == np.resize(PATTERN, data.size)
    unit = 8 if array.dtype.kind in "biu" and array.itemsize < 4 else array.itemsize
    whole = data.size // unit * unit
    same[whole:] = False
    same[:whole] = np.repeat(same[:whole].reshape(-1, unit).all(1), unit)
    return same
