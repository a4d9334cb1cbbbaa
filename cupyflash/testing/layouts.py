"""Ways an array can lie in memory, each surrounded by NaNs that no kernel may read or overwrite."""

import math
import mmap

import numpy as np
from hypothesis import strategies as st

from cupyflash import ptxsim
from cupyflash.testing.values import require_known

_MARGIN = 64  # elements before and behind


def _memory(shape, dtype, offset=0):
    """A C-contiguous array at a 128-byte boundary plus ``offset`` elements, with NaN in it and around it."""
    size = math.prod(shape)
    flat = ptxsim.empty(size + 2 * _MARGIN + offset, dtype)
    flat[...] = np.nan
    start = _MARGIN + offset
    return flat[start : start + size].reshape(shape)


def _plain(shape, dtype):
    return _memory(shape, dtype)


def _misaligned(shape, dtype):
    return _memory(shape, dtype, offset=1)


def _chunk_offset(shape, dtype):
    return _memory(shape, dtype, offset=8)


def _rows_before_heads(shape, dtype):
    """(B, L, H, D) in memory; a matrix alone has nothing to swap."""
    if len(shape) < 3:
        return _memory(shape, dtype)
    return np.swapaxes(_memory((*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype), -2, -3)


def _wide_rows(shape, dtype):
    """Columns 8 onwards of rows that are wider by whole chunks."""
    return _memory((*shape[:-1], -(-shape[-1] // 8) * 8 + 16), dtype)[..., 8 : 8 + shape[-1]]


def _odd_rows(shape, dtype):
    return _memory((*shape[:-1], shape[-1] | 1), dtype)[..., : shape[-1]]


def _every_other_row(shape, dtype):
    return _memory((*shape[:-2], 2 * shape[-2], shape[-1]), dtype)[..., ::2, :]


def _part_of_more_rows(shape, dtype):
    return _memory((*shape[:-2], shape[-2] + 5, shape[-1]), dtype)[..., 2 : 2 + shape[-2], :]


def _reversed_rows(shape, dtype):
    return _memory(shape, dtype)[..., ::-1, :]


def _reversed_everywhere(shape, dtype):
    return _memory(shape, dtype)[(slice(None, None, -1),) * len(shape)]


def _columns_first(shape, dtype):
    return np.swapaxes(_memory((*shape[:-2], shape[-1], shape[-2]), dtype), -1, -2)


def _every_third_column(shape, dtype):
    return _memory((*shape[:-1], 3 * shape[-1]), dtype)[..., 1::3]


def _reversed_axes(shape, dtype):
    return _memory(shape[::-1], dtype).transpose()


def _one_row(shape, dtype):
    """Stride 0 along the rows."""
    return _repeated(_memory((*shape[:-2], 1, shape[-1]), dtype), shape)


def _one_column(shape, dtype):
    return _repeated(_memory((*shape[:-1], 1), dtype), shape)


def _one_matrix(shape, dtype):
    """Stride 0 along every leading dimension."""
    return _repeated(_memory(shape[-2:], dtype), shape)


def _repeated(array, shape):
    """numpy.broadcast_to, writable."""
    return np.lib.stride_tricks.as_strided(array, shape, np.broadcast_to(array, shape).strides)


_VIEWS = {
    "plain": _plain,
    "rows before heads": _rows_before_heads,
    "wide rows": _wide_rows,
    "chunk offset": _chunk_offset,
    "misaligned": _misaligned,
    "odd rows": _odd_rows,
    "every other row": _every_other_row,
    "part of more rows": _part_of_more_rows,
    "reversed rows": _reversed_rows,
    "reversed everywhere": _reversed_everywhere,
    "columns first": _columns_first,
    "every third column": _every_third_column,
    "reversed axes": _reversed_axes,
    "one row": _one_row,
    "one column": _one_column,
    "one matrix": _one_matrix,
}
VIEWS = list(_VIEWS)
OUT_VIEWS = [view for view in VIEWS if not view.startswith("one ")]


def require_views(argument, views, allowed):
    """One view for each of ``allowed``, of those names."""
    if isinstance(views, str) or len(views) != len(allowed):
        raise ValueError(f"{argument}: {views!r} are not {len(allowed)} names")
    for view, names in zip(views, allowed, strict=True):
        require_known(argument, view, names)


def laid_out(array, view):
    """A copy of ``array`` in the layout; of what the "one ..." layouts repeat, they keep one value.

    >>> x = laid_out(np.arange(6.0).reshape(2, 3), "reversed rows")
    >>> x.strides, x[0].tolist()
    ((-24, 8), [0.0, 1.0, 2.0])
    """
    target = _VIEWS[view](array.shape, array.dtype)
    target[...] = array
    return target


def strided_arrays(shape, dtype, views=VIEWS):
    """Strategy of arrays of normal numbers, each in one of the layouts and between NaNs.

    >>> from hypothesis import find
    >>> find(strided_arrays((2, 3), np.float32, ["columns first"]), lambda x: True).strides
    (4, 8)
    """

    def drawn(view, seed):
        return laid_out(np.random.default_rng(seed).standard_normal(shape).astype(dtype), view)

    return st.builds(drawn, st.sampled_from(views), st.integers(0, 2**32 - 1))


def surroundings(array):
    """Every element of the memory that ``array`` is a view of, as bits, with the array's own set to 0.

    Equal before and after a call that writes nothing around ``array``; not for layouts that repeat elements.
    """
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    bits = memory.view(f"u{array.itemsize}").copy()
    own = np.zeros(bits.shape, bool)
    first = (array.ctypes.data - memory.ctypes.data) // array.itemsize
    offsets = np.array(first)
    for size, stride in zip(array.shape, array.strides, strict=True):
        offsets = offsets[..., None] + np.arange(size) * (stride // array.itemsize)
    own[offsets.ravel()] = True
    bits[own] = 0
    return bits


def spread_out(array):
    """The same values at strides of more than 2**31 elements, in address space that is mostly never touched."""
    *shape, columns = array.shape
    step = 2**31 + 64
    strides = [step * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    size = (step * math.prod(shape) + columns) * array.itemsize
    no_reserve = 0x4000  # MAP_NORESERVE: pages that are not touched need no memory
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    spread = np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, array.dtype), array.shape, [n * array.itemsize for n in (*strides, 1)]
    )
    spread[...] = array
    return spread
