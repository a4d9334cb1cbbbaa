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
_MANY_BITS = np.uint64(3 << 30)
_PENDING = np.uint64(1 << 63)
_EVENT_BITS = np.uint64((1 << 63) - (1 << 32))
_ACCESS = _EVENT_BITS | _LANE
_WARP = np.uint64(WARP)


def stamp(event, numbers, many=ONE, pending=False):
    """Stamps of one event for threads with these numbers."""
    return numbers | np.uint64(pending << 63 | event << 32 | many << 30)


def latest(event):
    """The largest stamp of an event."""
    return np.uint64((event + 1 << 32) - 1)


def foreign(stamps, numbers, limit):
    """Which stamps, later than a limit, are not of the thread with this number alone, or of its copies under way."""
    found = (stamps & ~_EVENT_BITS) != numbers
    found &= stamps > limit
    return found


def event_of(stamps):
    return (stamps & ~_PENDING) >> _EVENT


def many_of(stamps):
    return stamps >> _MANY & np.uint64(3)


def lane_of(stamps):
    return (stamps & _LANE).astype(np.int64)


def alone(stamps):
    """Stamps of the threads that are named, without those that they stand for."""
    return stamps & _ACCESS


def is_pending(stamps):
    return stamps >= _PENDING


def extent(lanes, pitch):
    """What stamps say of several lanes; `pitch`: of a block, None if all are of one."""
    low, high = int(lanes.min()), int(lanes.max())
    return (
        ONE
        if low == high
        else WARPMATES
        if low // WARP == high // WARP
        else BLOCKMATES
        if pitch is None or low // pitch == high // pitch
        else GRID
    )


def together(old, new, pitch):
    """The new stamps, marked as standing for the threads of the old ones, too. The event is the earlier of the two:
    whoever is ordered behind that one may be behind the other, too, which is not known any more."""
    apart = (new ^ old) & _LANE
    many = (apart != 0).astype(np.uint64)
    many += apart >= _WARP
    if pitch is not None:
        many += (new & _LANE) // np.uint64(pitch) != (old & _LANE) // np.uint64(pitch)
    many <<= _MANY
    np.maximum(many, old & _MANY_BITS, out=many)
    np.maximum(many, new & _MANY_BITS, out=many)
    return many | np.minimum(old & _ACCESS, new & _ACCESS) | new & _PENDING


def saturated(stamps, many, limit):
    """Which stamps, later than a limit, already stand for as many threads as there can be."""
    found = (stamps & _MANY_BITS) == np.uint64(many << 30)
    found &= stamps > limit
    return found


class Shadow:
    """Stamps of the words of a space. A word is as long as the shortest access that the kernel has."""

    def __init__(self, name, size, word, pitch, most):
        """`pitch`: lanes for each block, None if nothing can be accessed by several; `most`: how many can."""
        self.name, self.word, self.pitch, self.most = name, word, pitch, most
        self.written = np.zeros(size // word, np.uint64)
        self.read = np.zeros(size // word, np.uint64)
        self.last_written = self.last_read = np.uint64(0)  # no stamp is larger
        self.released = None  # see Order
        self.coming = None  # the source of the last cp.async, by its address
        self.writers = None  # of words that several threads have written: a set of their numbers, as hashes

    def rows(self, stamps, size):
        """One row of words for each element of an access."""
        return stamps.reshape(-1, size // self.word)

    def put(self, rows, index, stamps):
        """Store stamps, (n, 1) or (n, words). Where several lanes have one word, it stands for all of them.
        Returns whether there was such a word."""
        if stamps.shape[1] == 1:  # one stamp for each row: rows as elements are faster
            return self.put_rows(rows, index, stamps[:, 0])
        rows[index] = stamps
        kept = rows.take(index, axis=0)
        lost = np.nonzero(kept != stamps)
        if not lost[0].size:
            return False
        both = together(kept[lost], stamps[lost], self.pitch)
        for chosen in _by_many(both):
            rows[index[lost[0][chosen]], lost[1][chosen]] = both[chosen]
        return True

    def put_rows(self, rows, index, stamps):
        words = rows.shape[1]
        flat = rows.reshape(-1)
        whole = flat if words == 1 else flat.view(f"V{8 * words}")
        whole[index] = _wide(stamps, words, whole.dtype)
        kept = flat.take(index * words)
        lost = np.flatnonzero(kept != stamps)
        if not lost.size:
            return False
        both = together(kept[lost], stamps[lost], self.pitch)
        for chosen in _by_many(both):
            whole[index[lost[chosen]]] = _wide(both[chosen], words, whole.dtype)
        return True

    def wrote(self, words, numbers):
        """Whether threads are among those that have written words, where several have; now and then one that is not."""
        if self.writers is None:
            return np.zeros(words.shape, bool)
        low, high = _hashes(numbers)
        return (self.writers[0][words] & low != 0) & (self.writers[1][words] & high != 0)

    def remember(self, words, numbers, warps, before, old):
        """Threads have written words, several each; so have, before them, those of the stamps `old` the words `before`.
        `warps`: whole warps have."""
        if self.writers is None:
            self.writers = np.zeros((2, self.written.size), np.uint64)
        several = many_of(old) != ONE
        for table, new, one in zip(self.writers, _hashes(numbers, warps), _hashes(old & _LANE), strict=True):
            kept = np.where(several, table[before], one)
            table[words] = 0
            np.bitwise_or.at(table, before, kept)
            np.bitwise_or.at(table, words, new)


def _hashes(numbers, warps=False):
    """Two sets, of 64 each, that numbers of threads are in."""
    low, high = numbers % np.uint64(64), numbers // np.uint64(64) % np.uint64(64)
    bits = np.uint64((1 << WARP) - 1) << low // _WARP * _WARP if warps else np.uint64(1) << low
    return bits, np.uint64(1) << high


def _wide(stamps, words, dtype):
    return stamps if words == 1 else np.repeat(stamps, words).view(dtype)


def _by_many(stamps):
    """Positions of the stamps that stand for several threads, the widest last, of these the earliest."""
    many, event = stamps & _MANY_BITS, stamps & _EVENT_BITS
    if (many == many[0]).all() and (event == event[0]).all():
        yield slice(None)
        return
    for each in (WARPMATES, BLOCKMATES, GRID):
        chosen = np.flatnonzero(many == np.uint64(each << 30))
        if chosen.size:
            yield chosen[np.argsort(event[chosen], kind="stable")[::-1]]
