"""Where arrays would lie on a GPU, whose memory begins at multiples of 256 bytes, wherever malloc has put them here."""

import bisect

import numpy as np

from .patterns import SECTOR_SHIFT

_SECTOR = 1 << SECTOR_SHIFT


class Placement:
    """By how much addresses move so that the memory behind each array starts with a sector.

    Memory is what the last ndarray among an array's bases spans; where such spans overlap, they are one. Nothing that
    is counted depends on more of an address than its place within a sector and which sector that is: so memory moves by
    less than a sector, and if not all of it by the same, by one more than what lies below it, to meet none of that.
    """

    def __init__(self, arrays):
        spans = []  # [first byte, end]
        for start, stop in sorted(np.lib.array_utils.byte_bounds(_owner(a)) for a in arrays if a.size):
            if spans and start < spans[-1][1]:
                spans[-1][1] = max(stop, spans[-1][1])
            else:
                spans.append([start, stop])
        self.starts = [start for start, _ in spans]
        shifts = -np.array(self.starts, np.int64) % _SECTOR
        self.same = int(shifts[0]) if spans else 0
        self.shifts = None  # those of spans, if they are not the same
        if (shifts != self.same).any():
            self.shifts = shifts + _SECTOR * np.arange(shifts.size)

    def moved(self, address):
        """Addresses as counted; those of lanes that do not act, or outside all arrays, may be anything."""
        if self.shifts is None:
            return address + self.same if self.same else address
        number = self.number(int(address.min()))
        if int(address.max()) < (self.starts[number + 1] if number + 1 < len(self.starts) else 1 << 62):
            return address + self.shifts[number]
        return address + self.shifts[np.maximum(np.searchsorted(self.starts, address, side="right") - 1, 0)]

    def number(self, address):
        """The last span that starts at an address or below it, 0 if none does."""
        return max(bisect.bisect_right(self.starts, address) - 1, 0)

    def range_of(self, start, stop):
        """A range that holds the mapped bytes [start, stop) as counted, and none of any others."""
        if self.shifts is None:
            return start + self.same, stop + self.same
        return tuple(edge + int(self.shifts[self.number(byte)]) for edge, byte in ((start, start), (stop, stop - 1)))


def _owner(array):
    """The last ndarray among the bases of an array."""
    owner = base = array
    while (base := getattr(base, "base", None)) is not None:
        if isinstance(base, np.ndarray):
            owner = base
    return owner
