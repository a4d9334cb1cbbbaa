"""Shadows of values: which of their halves are undefined, and where that came from.

The shadow of a register is None while all lanes are defined, else an array over lanes of 16 bits: 0 for a defined
lane, else the number of an origin (8 bits) and a bit for each half that is undefined. The larger of two shadows is
the more undefined one. A half is the unit of packed float16 and of the operands of mma; it is undefined if all of
its bytes are. Shadow bytes of memory are numbers of origins, too: 0 for a defined byte, UNWRITTEN for one that
nothing has written.
"""

import numpy as np

from ..group import WARP

UNWRITTEN = 1
LAST = 255  # the largest number of an origin
NONE = np.uint16(0)
HALVES = np.array([0x100, 0x200], np.uint16)  # low, high
WHOLE = np.uint16(0x300)
_ORIGIN = np.uint16(0xFF)


def or_none(shadow):
    return shadow if shadow.any() else None


def whole(shadow):
    """Without the lanes of which only a half is undefined."""
    return None if shadow is None else or_none(np.where(shadow >= WHOLE, shadow, NONE))


def grown(shadow):
    """Lanes of which any half is undefined are undefined altogether."""
    return np.where(shadow != 0, shadow | WHOLE, NONE)


def half(shadow, n):
    """The shadow of the low (0) or the high (1) half of a value as a value of its own."""
    return None if shadow is None else or_none(np.where(shadow & HALVES[n] != 0, shadow | WHOLE, NONE))


def pair(low, high):
    """The shadow of two values packed into one."""
    parts = [
        NONE if u is None else np.where(u >= WHOLE, u & _ORIGIN | HALVES[n], NONE) for n, u in enumerate((low, high))
    ]
    return or_none(_joined(*np.broadcast_arrays(*parts)))


def _joined(low, high):
    return (low | high) & WHOLE | np.maximum(low & _ORIGIN, high & _ORIGIN)


def of_bytes(words, size, unwritten):
    """Shadows of values of `size` bytes from their shadow bytes; `unwritten` numbers the origin of those that nothing
    has written."""
    parts = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, min(size, 2), -1)
    while parts.shape[-1] > 1:
        parts = np.minimum(parts[..., ::2], parts[..., 1::2])
    parts = parts[..., 0].astype(np.uint16)
    parts[parts == UNWRITTEN] = unwritten
    if size == 1:
        return np.where(parts[..., 0] != 0, parts[..., 0] | WHOLE, NONE)
    return _joined(*(np.where(parts[..., n] != 0, parts[..., n] | HALVES[n], NONE) for n in (0, 1)))


def to_bytes(x, shadows, size):
    """(lanes, values) shadow bytes, as unsigned integers of the values' size."""
    fill = _FILL[size]
    values = np.zeros((x.n, len(shadows)), fill.dtype)
    for n, u in enumerate(shadows):
        if u is not None:
            values[:, n] = (u & _ORIGIN).astype(fill.dtype) * fill[u >> 8]
    return values


def _ones(size, chosen):
    return int.from_bytes(bytes(int(chosen(byte)) for byte in range(size)), "little")


_FILL = {  # by the two bits: what spreads a number over the bytes of the halves that are undefined
    size: np.array(
        [
            0,
            _ones(size, lambda byte, size=size: 2 * byte + 1 < size),
            _ones(size, lambda byte, size=size: 2 * byte >= size),
            _ones(size, lambda _: True),
        ],
        f"u{size}",
    )
    for size in (1, 2, 4, 8)
}


def tiles(x, shadows):
    """(warps, 8, 4) shadow of fragment registers together."""
    together = np.zeros(x.n, np.uint16)
    for u in shadows:
        if u is not None:
            together = np.maximum(together, u)
    return together.reshape(-1, 8, WARP // 8)
