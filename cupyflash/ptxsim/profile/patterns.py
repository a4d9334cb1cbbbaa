"""What the addresses of warps cost: sectors of global memory, wavefronts of shared memory, turns of atomics.

A pattern is the 32 addresses of a warp relative to its first active lane's, INACTIVE for lanes that do not act.
Often all warps have one and the same, and what it costs is worked out once.
"""

import numpy as np

WARP = 32
SECTOR_SHIFT = 5
INACTIVE = -(1 << 62)  # no relative address comes near it
_REMEMBERED = 1 << 14  # patterns


class Warps:
    """The addresses of the warps in which a lane acts.

    `which`: those warps (None: all), `count`: how many, `lanes`: how many lanes act, `base`: (count,) the address that
    a warp's pattern is relative to, a multiple of `unit`; `alike`: whether all have the same pattern; `pattern`: that
    one, (1, 32), or those of all, (count, 32).
    """

    def __init__(self, address, active, unit):
        rows = address.reshape(-1, WARP)
        self.which = None
        mask = None if active is None else np.packbits(active, bitorder="little").view("<u4")
        if mask is not None and not mask.all():
            self.which = np.flatnonzero(mask)
            rows, mask, active = rows[self.which], mask[self.which], active.reshape(-1, WARP)[self.which]
        self.count = rows.shape[0]
        if active is None or (mask == 0xFFFFFFFF).all():
            self.lanes = rows.size
            self.base = rows[:, 0] & -unit
            relative = rows - self.base[:, None]
        else:
            self.lanes = int(np.count_nonzero(active))
            first = np.log2(mask & -mask.astype(np.int64)).astype(np.intp)  # position of the lowest one
            self.base = rows[np.arange(self.count), first] & -unit
            relative = np.where(active.reshape(-1, WARP), rows - self.base[:, None], INACTIVE)
        self.alike = self.count == 1 or bool((relative[1:] == relative[0]).all())
        self.pattern = relative[:1] if self.alike else relative


class Costs:
    """What warps cost together; where all share one pattern, its cost is remembered."""

    def __init__(self):
        self.known = {}

    def sectors(self, warps, size):
        """Of requests of global memory: how many sectors, and the fewest that hold the distinct bytes of each request;
        which they are: positions of warps and numbers of sectors, arrays that broadcast.
        """
        number, fewest, row, step = self.of(_sectors, warps, size)
        first = warps.base >> SECTOR_SHIFT
        if warps.alike:
            return number * warps.count, fewest * warps.count, np.arange(warps.count)[:, None], first[:, None] + step
        return number, fewest, row, first[row] + step

    def wavefronts(self, warps, size):
        """Wavefronts of shared accesses, and of ones without bank conflicts, which is one for each phase."""
        return self.summed(_wavefronts, warps, size)

    def least_wavefronts(self, warps, size):
        """As many wavefronts as one bank needs if all phases of an access could be served together."""
        return self.summed(_least_wavefronts, warps, size)[0]

    def passes(self, warps, size):
        """Turns that atomics take: of each warp, the most lanes that have one address."""
        return self.summed(_passes, warps, size)[0]

    def summed(self, cost, warps, size):
        times = warps.count if warps.alike else 1
        return [times * value for value in self.of(cost, warps, size)]

    def of(self, cost, warps, size):
        if not warps.alike:
            return cost(warps.pattern, size)
        key = (cost, size, warps.pattern.tobytes())
        if key not in self.known:
            if len(self.known) == _REMEMBERED:
                self.known.clear()
            self.known[key] = cost(warps.pattern, size)
        return self.known[key]


def _first(ordered):
    """Where rows in order, with INACTIVE in front, have another value for the first time."""
    first = ordered != INACTIVE
    first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return first


def _sectors(pattern, size):
    address = np.sort(pattern, axis=1)
    first = _first(address)
    held = np.bitwise_count(np.packbits(first).view(np.uint32)).astype(np.int64) * size
    first[:, 1:] &= address[:, 1:] >> SECTOR_SHIFT != address[:, :-1] >> SECTOR_SHIFT
    at = np.flatnonzero(first)
    return at.size, int((-(-held >> SECTOR_SHIFT)).sum()), at // WARP, address.ravel()[at] >> SECTOR_SHIFT


def _wavefronts(pattern, size):
    """A phase is as many lanes as make 128 bytes, at most 32. It accesses whole units, of 4 bytes or of `size`, and
    takes as many wavefronts as there are distinct units in one place modulo 128 bytes.
    """
    shift = max(size // 4, 1).bit_length() + 1
    worst = _worst(pattern, shift, 128 >> shift)
    return int(worst.sum()), int(np.count_nonzero(worst))


def _least_wavefronts(pattern, size):
    return (int(_worst(pattern, max(size // 4, 1).bit_length() + 1, WARP).sum()),)


def _worst(pattern, shift, lanes):
    """For each group of so many lanes: the most distinct units in one place."""
    places = 128 >> shift
    unit = (pattern >> shift).reshape(-1, lanes)
    unit[pattern.reshape(-1, lanes) == INACTIVE] = INACTIVE
    unit = np.sort(unit, axis=1)
    at = np.flatnonzero(_first(unit))
    place = at // lanes * places + (unit.ravel()[at] & places - 1)  # of its group, and there
    return np.bincount(place, minlength=unit.shape[0] * places).reshape(-1, places).max(1)


def _passes(pattern, size):
    address = np.sort(pattern, axis=1)
    first = _first(address)
    position = np.arange(WARP)
    start = np.maximum.accumulate(np.where(first, position, 0), axis=1)
    return (int(np.where(address != INACTIVE, position - start + 1, 0).max(1).sum()),)
