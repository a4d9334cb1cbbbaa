"""Which sectors of global memory have been touched: by lines of a launch, and by thread blocks."""

import bisect

import numpy as np

from .patterns import SECTOR_SHIFT

_MERGE_AT = 1 << 20  # waiting keys
_FLAGS_PER_KEY = 256  # so many flags are cleared and counted in the time that a key takes to sort


class SectorMap:
    """Flags of all sectors of the mapped memory, for each of several owners."""

    def __init__(self, segments):
        """`segments`: (start, stop) byte ranges in order."""
        ranges = []  # [first, last] sectors; neighbours that share a sector are one range
        for start, stop in segments:
            first, last = start >> SECTOR_SHIFT, (stop - 1) >> SECTOR_SHIFT
            if ranges and first <= ranges[-1][1]:
                ranges[-1][1] = max(last, ranges[-1][1])
            else:
                ranges.append([first, last])
        ranges = ranges or [[0, 0]]
        self.first = [first for first, _ in ranges]
        self.last = [last for _, last in ranges]
        sizes = [last - first + 1 for first, last in ranges]
        self.size = sum(sizes)
        self.shift = np.array(self.first) - np.cumsum([0, *sizes])[: len(sizes)]
        self.touched = {}  # owner -> flags

    def positions(self, sectors):
        """Places of sectors among the flags. An address that is not mapped may get any: its launch is about to fail."""
        number = bisect.bisect_right(self.first, int(sectors.min())) - 1
        if number >= 0 and sectors.max() <= self.last[number]:
            return sectors - self.shift[number]
        numbers = np.searchsorted(self.first, sectors, side="right") - 1
        return np.clip(sectors - self.shift[numbers], 0, self.size - 1)

    def mark(self, owner, positions):
        """Set flags of an owner."""
        if owner not in self.touched:
            self.touched[owner] = np.zeros(self.size, bool)
        self.touched[owner][positions] = True

    def counts(self):
        """Owner -> how many sectors it has touched."""
        return {owner: int(np.count_nonzero(flags)) for owner, flags in self.touched.items()}

    def union(self, *whats):
        """How many sectors have been touched by any owner `(what, ...)` of these."""
        flags = [touched for owner, touched in self.touched.items() if owner[0] in whats]
        return int(np.count_nonzero(np.logical_or.reduce(flags))) if flags else 0


class KeySet:
    """A set of integers below `size` that grows by arrays: flags if it is dense, else a sorted array."""

    def __init__(self, size):
        self.size, self.flags = size, None
        self.parts, self.waiting = [], 0

    def add(self, keys):
        self.parts.append(keys.ravel())
        self.waiting += keys.size
        if self.waiting > _MERGE_AT:
            self.merge()

    def merge(self):
        keys = np.concatenate([np.empty(0, np.int64), *self.parts])
        self.waiting = 0
        if self.flags is None and _FLAGS_PER_KEY * keys.size < self.size:
            keys.sort()
            self.parts = [keys[np.append(True, keys[1:] != keys[:-1])[: keys.size]]]
            return
        if self.flags is None:
            self.flags = np.zeros(self.size, bool)
        self.flags[keys] = True
        self.parts = []

    def count(self):
        """How many members it has."""
        self.merge()
        return self.parts[0].size if self.flags is None else int(np.count_nonzero(self.flags))
