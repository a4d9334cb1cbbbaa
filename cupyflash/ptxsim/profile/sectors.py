"""Which sectors of global memory have been touched, and by which lines."""

import bisect

import numpy as np

_SHIFT = 5
_MERGE_AT = 1 << 20  # waiting numbers


class SectorMap:
    """One flag for each sector of the mapped memory, for each of several owners."""

    def __init__(self, segments):
        """`segments`: (start, stop) byte ranges in order."""
        self.ranges = []  # [first, last] sectors; neighbours that share a sector are one range
        for start, stop in segments:
            first, last = start >> _SHIFT, (stop - 1) >> _SHIFT
            if self.ranges and first <= self.ranges[-1][1]:
                self.ranges[-1][1] = max(last, self.ranges[-1][1])
            else:
                self.ranges.append([first, last])
        self.firsts = [first for first, _ in self.ranges]
        self.touched = {}  # owner -> {range: flags}

    def mark(self, owner, sectors):
        """Flag these sectors, an int64 array; any that are not mapped are left out (a fault is about to tell)."""
        low, high = int(sectors.min()), int(sectors.max())
        for number in range(max(bisect.bisect_right(self.firsts, low) - 1, 0), len(self.ranges)):
            first, last = self.ranges[number]
            if first > high:
                break
            within = sectors
            if low < first or high > last:
                within = sectors[(sectors >= first) & (sectors <= last)]
            flags = self.touched.setdefault(owner, {})
            if number not in flags:
                flags[number] = np.zeros(last - first + 1, bool)
            flags[number][within - first] = True

    def counts(self):
        """Owner -> how many sectors it has touched."""
        return {owner: _number(flags) for owner, flags in self.touched.items()}

    def union(self, what):
        """How many sectors have been touched by any owner `(what, ...)`."""
        together = {}
        for owner, touched in self.touched.items():
            if owner[0] == what:
                for number, flags in touched.items():
                    together[number] = together[number] | flags if number in together else flags
        return _number(together)


def _number(flags):
    return sum(int(np.count_nonzero(f)) for f in flags.values())


class NumberSet:
    """A set of integers that grows by arrays."""

    def __init__(self):
        self.parts, self.waiting = [], 0

    def add(self, numbers):
        self.parts.append(numbers.ravel())
        self.waiting += numbers.size
        if self.waiting > _MERGE_AT:
            self.parts, self.waiting = [self.members()], 0

    def members(self):
        """All of them, in order."""
        if not self.parts:
            return np.empty(0, np.int64)
        ordered = np.sort(np.concatenate(self.parts))  # several times faster than np.unique's hash table
        return ordered[np.append(True, ordered[1:] != ordered[:-1])]
