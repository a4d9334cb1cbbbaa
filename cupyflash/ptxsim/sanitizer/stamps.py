"""Stamps: which access of which thread touched a word last, in one 64-bit number for each word.

From the top: one bit for a cp.async that nobody has waited for, 31 for the number of the event, 2 for how many
threads have done the same, 30 for one of them, by its number among all lanes of the launch. Events are numbered
in the order that they are simulated in, so that "before a barrier" is one comparison of stamps.
"""

import numpy as np

from ..group import WARP

ONE, WARPMATES, BLOCKMATES, GRID = range(4)  # how many threads: one, several of its warp, of its block, of the grid
_EVENT, _MANY = np.uint64(32), np.uint64(30)
_LANE = np.uint64((1 << 30) - 1)
_PENDING = np.uint64(1 << 63)


def stamp(event, lanes, many=ONE, pending=False):
    """Stamps of one event for each lane."""
    return lanes.astype(np.uint64) & _LANE | np.uint64(pending << 63 | event << 32 | many << 30)


def latest(event):
    """The largest stamp of an event."""
    return np.uint64((event + 1 << 32) - 1)


def event_of(stamps):
    return (stamps & ~_PENDING) >> _EVENT


def many_of(stamps):
    return stamps >> _MANY & np.uint64(3)


def lane_of(stamps):
    return (stamps & _LANE).astype(np.int64)


def is_pending(stamps):
    return stamps >= _PENDING


def extent(lanes, pitch):
    """What stamps say of several lanes."""
    low, high = int(lanes.min()), int(lanes.max())
    return (
        ONE
        if low == high
        else WARPMATES
        if low // WARP == high // WARP
        else BLOCKMATES
        if low // pitch == high // pitch
        else GRID
    )


def together(old, new, pitch):
    """The new stamps, marked as standing for the threads of the old ones, too."""
    mine, theirs = lane_of(new), lane_of(old)
    many = np.where(
        mine // WARP == theirs // WARP, WARPMATES, np.where(mine // pitch == theirs // pitch, BLOCKMATES, GRID)
    )
    many = np.where(mine == theirs, ONE, many).astype(np.uint64)
    many = np.maximum(np.maximum(many, many_of(old)), many_of(new))
    return new & ~(np.uint64(3) << _MANY) | many << _MANY


class Shadow:
    """Stamps of the words of a space. A word is as long as the shortest access that the kernel has."""

    def __init__(self, name, size, word, pitch):
        self.name, self.word, self.pitch = name, word, pitch
        self.written = np.zeros(size // word, np.uint64)
        self.read = np.zeros(size // word, np.uint64)
        self.released = None  # see Order

    def rows(self, stamps, size):
        """One row of words for each element of an access."""
        return stamps.reshape(-1, size // self.word)

    def put(self, rows, index, stamps):
        """Store stamps, (n, 1) or (n, words). Where several lanes have one word, it stands for all of them.
        Returns whether there was such a word."""
        rows[index] = stamps
        whole = stamps.shape[1] == 1
        kept = rows[index, 0] if whole else rows.take(index, axis=0)
        stamps = stamps[:, 0] if whole else stamps
        lost = kept != stamps
        if not lost.any():
            return False
        at = np.nonzero(lost)
        where = (index[at[0]], *at[1:])
        both = together(stamps[at], kept[at], self.pitch)
        for many in (WARPMATES, BLOCKMATES, GRID):
            chosen = many_of(both) == many
            if chosen.any():
                values = both[chosen]
                rows[tuple(w[chosen] for w in where)] = values[:, None] if whole else values
        return True
