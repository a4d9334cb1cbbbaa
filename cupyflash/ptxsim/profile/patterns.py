"""What the addresses of a warp cost: sectors, wavefronts, turns of atomics.

A pattern is the 32 addresses of a warp relative to its first active lane's, INACTIVE for lanes that do not act.
Most warps of an instruction have one and the same: what a pattern costs is worked out once.
"""

import numpy as np

WARP = 32
SECTOR = 32
_SECTOR_SHIFT = 5
INACTIVE = -(1 << 62)  # no relative address comes near it
_PHASE_LANES = {8: 16, 16: 8}  # of a shared access, by its size; else 32
_HASH = np.random.default_rng(0).integers(1 << 62, size=WARP, dtype=np.int64) | 1


class Warps:
    """The addresses of the warps in which a lane acts.

    `which`: those warps (None: all of the group), `pattern`: (patterns, 32), `times`: how many warps have each,
    `base`: (warps,) the address, rounded down to `unit`, that a warp's pattern is relative to.
    """

    def __init__(self, address, active, unit):
        rows = address.view(np.int64) if address.dtype == np.uint64 else address.astype(np.int64)
        rows = rows.reshape(-1, WARP)
        self.rows, self.active, self.which = rows, None, None
        if active is not None and not active.all():
            active = active.reshape(-1, WARP)
            some = active.any(1)
            if not some.all():
                self.which = np.flatnonzero(some)
                self.rows, active = rows[self.which], active[self.which]
            self.active = active
            first = np.take_along_axis(self.rows, active.argmax(1)[:, None], 1)
        else:
            first = rows[:, :1]
        base = first & -unit
        relative = self.rows - base
        if self.active is not None:
            relative[~active] = INACTIVE
        self.base, self.count = base[:, 0], self.rows.shape[0]
        self.pattern, self.times = _distinct(relative)

    @property
    def alike(self):
        """Whether all warps have the same pattern."""
        return self.pattern.shape[0] == 1

    def lanes(self):
        """How many lanes act."""
        return WARP * self.count if self.active is None else int(np.count_nonzero(self.active))


def _distinct(rows):
    """The different rows, and how often each occurs."""
    if rows.shape[0] < 2 or (rows == rows[0]).all():
        return rows[:1], np.array([rows.shape[0]])
    _, index, inverse, times = np.unique(rows @ _HASH, return_index=True, return_inverse=True, return_counts=True)
    different = rows[index]
    if index.size < rows.shape[0] and not (different[inverse] == rows).all():  # two rows with one hash
        return rows, np.ones(rows.shape[0], np.int64)
    return different, times


class Costs:
    """Costs of patterns by name and access size; remembers those of patterns that all warps shared."""

    def __init__(self):
        self.known = {}

    def total(self, cost, warps, size):
        """The sum of `cost(patterns, size)`, an array with a row per pattern, over all warps: a list of ints."""
        if not warps.alike:
            return (warps.times @ cost(warps.pattern, size)).tolist()
        key = (cost, size, warps.pattern.tobytes())
        each = self.known.get(key)
        if each is None:
            each = self.known[key] = cost(warps.pattern, size)[0].tolist()
        return [warps.count * value for value in each]

    def sectors(self, warps):
        """Numbers of the sectors that each warp touches: (warps, n), with some more than once if patterns differ."""
        first = (warps.base >> _SECTOR_SHIFT)[:, None]
        if not warps.alike:
            number = warps.rows >> _SECTOR_SHIFT
            # Lanes that do not act repeat the first sector.
            return number if warps.active is None else np.where(warps.active, number, first)
        key = warps.pattern.tobytes()
        steps = self.known.get(key)
        if steps is None:
            pattern = warps.pattern[0]
            steps = self.known[key] = np.unique(pattern[pattern != INACTIVE] >> _SECTOR_SHIFT)
        return first + steps


def _new(ordered):
    """Where sorted rows have a value for the first time."""
    first = np.ones(ordered.shape, bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=first[:, 1:])
    return first


def sectors(pattern, size):
    """Sectors of a request of global memory, and the fewest that hold its distinct bytes."""
    address = np.sort(pattern, axis=1)
    acts = address != INACTIVE
    touched = (_new(address >> _SECTOR_SHIFT) & acts).sum(1)
    size_ = (_new(address) & acts).sum(1) * size
    return np.stack((touched, -(-size_ // SECTOR)), 1)


def wavefronts(pattern, size):
    """Wavefronts of a shared access, and of one without bank conflicts, which is one for each phase.

    A phase takes as many wavefronts as the bank with the most distinct words of 4 bytes.
    """
    lanes, words = _PHASE_LANES.get(size, WARP), max(size // 4, 1)
    word = (pattern >> 2)[:, :, None] + np.arange(words)
    word[pattern == INACTIVE] = INACTIVE
    word = np.sort(word.reshape(-1, lanes * words), axis=1)
    first = _new(word) & (word != INACTIVE)
    phase, at = np.nonzero(first)
    bank = word[phase, at] & 31
    per_bank = np.bincount(phase * 32 + bank, minlength=32 * word.shape[0]).reshape(-1, 32)
    worst = per_bank.max(1).reshape(pattern.shape[0], -1)
    return np.stack((worst.sum(1), (worst > 0).sum(1)), 1)


def passes(pattern, size):
    """Turns that an atomic takes: the most lanes that have one address. And the sectors it touches."""
    address = np.sort(pattern, axis=1)
    first = _new(address)
    start = np.maximum.accumulate(np.where(first, np.arange(WARP), 0), axis=1)
    turn = np.where(address != INACTIVE, np.arange(WARP) - start + 1, 0)
    touched = (_new(address >> _SECTOR_SHIFT) & (address != INACTIVE)).sum(1)
    return np.stack((turn.max(1), touched), 1)
