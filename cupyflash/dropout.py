"""Which weights dropout keeps: random bits of Philox4x32-10, as the kernels draw them.

Philox (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) has no state: a counter of
128 bits and a key of 64 give 128 random bits. So the bits of a pair follow from where it is, whatever the tiles are.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash._lengths import batches_and_heads
from cupyflash._options import NO_ORIGIN, checked_dropout, checked_origin, checked_seed, drop_threshold

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def dropout_mask(shape: Sequence[int], dropout_p: float, seed: int, *, origin: Sequence[int] = NO_ORIGIN) -> np.ndarray:
    """The weights that :func:`cupyflash.attention` keeps, True, and those that it drops, bit for bit.

    Parameters
    ----------
    shape : tuple of ints
        Of the scores, (..., L, S), with the leading dimensions of the result. With 4 or more dimensions axis -3 is
        heads. A smaller L or S gives a part of the same mask.
    dropout_p, seed
        As they were given to the call.
    origin : (batch, head, query, key)
        As it was given to the call.

    Returns
    -------
    numpy.ndarray
        bool. A pair (i, j) of head h and batch b is kept where word j % 4 of the 4 that Philox4x32-10 makes of the
        counter (j // 4, i, h, b) and the key (seed % 2**32, seed // 2**32) is at least round(dropout_p * 2**32). b
        counts the leading dimensions, without heads, in C order; h is 0 where there are none. All four count from
        ``origin``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what is allowed.

    Examples
    --------
    >>> dropout_mask((2, 6), 0.5, seed=7)
    array([[ True,  True, False, False, False,  True],
           [False, False,  True,  True, False, False]])
    >>> kept = dropout_mask((2, 8, 100, 100), 0.1, seed=7)
    >>> kept.shape, round(float(kept.mean()), 2)
    ((2, 8, 100, 100), 0.9)
    """
    *leading, rows, columns = _checked_shape(shape)
    threshold = np.uint64(drop_threshold(checked_dropout(dropout_p, checked_seed(seed))[0]))
    num_batches, num_heads = batches_and_heads(tuple(leading))
    first_batch, first_head, first_query, first_key = checked_origin(origin, (num_batches, num_heads, rows, columns))
    mask = np.empty((*leading, rows, columns), bool)
    skipped = first_key % 4
    row, group = np.ogrid[first_query : first_query + rows, first_key // 4 : -(-(first_key + columns) // 4)]
    if mask.size:
        for number, matrix in enumerate(mask.reshape(-1, rows, columns)):
            batch, head = divmod(number, num_heads)
            words = philox((group, row, first_head + head, first_batch + batch), (seed % 2**32, seed >> 32))
            matrix[...] = np.stack(words, axis=-1).reshape(rows, -1)[:, skipped : skipped + columns] >= threshold
    return mask


def philox(counter: Sequence[Any], key: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The 4 words, uint64 arrays below 2**32, of a counter of 4 words and a key of 2; words of the counter broadcast.

    >>> [f"{int(word):08x}" for word in philox((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    for number in range(ROUNDS):
        key0, key1 = (np.uint64((word + number * step) % 2**32) for word, step in zip(key, KEY_STEPS, strict=True))
        product0, product1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ key0,
            product1 & _WORD,
            (product0 >> _HALF) ^ c3 ^ key1,
            product0 & _WORD,
        )
    return c0, c1, c2, c3


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape: expected (..., L, S), not {shape!r}")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"shape: expected whole numbers, not {shape!r}")
        if size < 0:
            raise ValueError(f"shape: {size} in {shape!r} is negative")
    if len(shape) < 2:
        raise ValueError(f"shape: {shape!r} has fewer than the 2 dimensions of (..., L, S)")
    return tuple(int(size) for size in shape)
