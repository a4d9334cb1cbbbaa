"""Arrays whose elements count as uninitialised until something writes them."""

import weakref

import numpy as np

from ..memory import zeros_at

# Repeated over an array: NaN as float64, as two float32, and as four float16 or bfloat16, with rare payloads.
PATTERN = np.array([0xFFF6FFF9FFF3FFF5], np.uint64).view(np.uint8)

ALIGNMENT = 256  # bytes, as of what cudaMalloc returns
_fresh = {}  # id -> (weak reference to the memory, the array's dtype)


def empty(shape, dtype=float):
    """An array like that of `numpy.empty`, of which `sanitize()` reports uninitialised reads.

    It starts at a multiple of 256 bytes, as memory of a GPU does, and is filled with a pattern that is NaN in every
    floating-point type. An element is uninitialised while it holds the pattern, whoever would have written it, NumPy
    or a kernel; of integers of one or two bytes, while the 8 bytes around it do. All other arrays count as initialised.
    Views and slices belong to their array.

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
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"dtype: {dtype}, must not hold Python objects")
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    memory = zeros_at(ALIGNMENT, max(size, 0))
    memory[...] = np.resize(PATTERN, size)
    key = id(memory)
    _fresh[key] = weakref.ref(memory, lambda _: _fresh.pop(key, None)), dtype
    return np.ndarray(shape, dtype, buffer=memory)


def unwritten(array):
    """How many elements of an array, as `empty` returned it, are uninitialised."""
    return int(np.count_nonzero(_holds_pattern(array.reshape(-1).view(np.uint8), array.dtype))) // array.itemsize


def unwritten_bytes(segment):
    """For each byte of a segment of global memory 1 if it belongs to an uninitialised element; None if none does."""
    found = None
    for reference, dtype in list(_fresh.values()):
        memory = reference()
        if memory is None:
            continue
        start = memory.ctypes.data
        low, high = max(start, int(segment.start)), min(start + memory.size, int(segment.stop))
        if low >= high:
            continue
        fresh = _holds_pattern(memory, dtype)[low - start : high - start]
        if fresh.any():
            if found is None:
                found = np.zeros(segment.views[1].size, np.uint8)
            origin = int(segment.origin)
            found[low - origin : high - origin] = fresh
    return found


def _holds_pattern(data, dtype):
    same = data == np.resize(PATTERN, data.size)
    unit = 8 if dtype.kind in "biu" and dtype.itemsize < 4 else dtype.itemsize
    whole = data.size // unit * unit
    same[whole:] = False
    same[:whole] = np.repeat(same[:whole].reshape(-1, unit).all(1), unit)
    return same
