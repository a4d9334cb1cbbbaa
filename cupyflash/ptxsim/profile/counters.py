"""The observer that counts what a launch does."""

import numpy as np

from ..group import WARP
from ..observer import Observer
from .patterns import Costs, Warps, passes, sectors, wavefronts
from .sectors import NumberSet, SectorMap
from .static import source_of

_WINDOW = np.uint64(60)
_INSIDE = np.uint64(2**60 - 1)
_ABOVE_SECTORS = 48  # bits of a sector's number
_SPACES = {0: "global", 1: "shared", 2: "local"}  # of a generic address, by window


class Counters(Observer):
    """Counts of one launch, by basic block and by instruction; the results add them up by source line."""

    def __init__(self, launch):
        self.launch = launch
        self.runs = {}  # index of a block -> [warps, lanes]
        self.counted = {}  # instruction -> counter -> count
        self.costs = Costs()
        self.block_load_sectors = 0
        self.sectors = None

    def begin(self, chunk):
        if self.sectors is None:
            segments = self.launch.global_.segments
            self.sectors = SectorMap((int(s.start), int(s.stop)) for s in segments)
        self.thread_block = np.repeat(np.arange(chunk.count) << _ABOVE_SECTORS, chunk.pitch // WARP)
        self.in_block = NumberSet()  # thread block and sector of every load

    def end(self, chunk):
        self.block_load_sectors += self.in_block.members().size

    def count(self, ins, **counts):
        counted = self.counted.setdefault(ins, {})
        for name, count in counts.items():
            counted[name] = counted.get(name, 0) + count

    # -- control -------------------------------------------------------------------------------------
    def block(self, block, x):
        run = self.runs.setdefault(block.index, [0, 0])
        run[0] += x.warps
        run[1] += x.active

    def guarded(self, x, m, ins):
        acts = int(np.count_nonzero(m)) if m.size > 1 else x.active * bool(m[0])
        self.count(ins, predicated_off=x.active - acts)

    def branch(self, block, x, diverged):
        self.count(block.ending, branches=x.warps, divergent_branches=int(np.count_nonzero(diverged)))

    def barrier(self, lanes, chunk, ins):
        edges = np.searchsorted(lanes, np.arange(chunk.count + 1) * chunk.pitch)
        self.count(ins, barriers=int(np.count_nonzero(np.diff(edges))))

    # -- memory --------------------------------------------------------------------------------------
    def load(self, x, m, space, address, size, ins):
        self.access(x, m, space, address, size, "load", ins)

    def store(self, x, m, space, address, size, values, ins):
        self.access(x, m, space, address, size, "store", ins)

    def atomic(self, x, m, space, address, size, ins):
        self.access(x, m, space, address, size, "atomic", ins)

    def access(self, x, m, space, address, size, what, ins):
        active = _active(x, m)
        if active is _NOBODY:
            return
        address = np.broadcast_to(address, x.n)
        if space != "generic":
            self.in_space(x, active, space, address, size, what, ins)
            return
        window, inside = address >> _WINDOW, address & _INSIDE
        for number in np.unique(window if active is None else window[active]):
            there = window == number
            there = None if there.all() else there
            both = there if active is None else active if there is None else active & there
            self.in_space(x, both, _SPACES.get(int(number)), inside, size, what, ins)

    def in_space(self, x, active, space, address, size, what, ins):
        if what == "atomic":
            self.update(x, active, space, address, size, ins)
        elif space == "global":
            self.request(x, active, address, size, what, ins)
        elif space == "shared":
            self.phases(address, active, size, ins)
        elif space == "local" and "param" not in ins.modifiers:
            warps = Warps(address, active, 1)
            self.count(ins, local_requests=warps.count, **{f"local_{what}_bytes": warps.lanes() * size})

    def copy(self, x, m, address, size, shared, amount, ins):
        active = _active(x, m)
        if active is _NOBODY:
            return
        self.phases(np.broadcast_to(shared, x.n), active, size, ins)
        address, moved = np.broadcast_to(address, x.n), None
        if amount is not None:
            moved = np.broadcast_to(np.minimum(amount, size), x.n)
            active = moved > 0 if active is None else active & (moved > 0)
            if not active.any():
                return
        self.request(x, active, address, size, "load", ins, moved)

    def matrix_load(self, x, address, count, ins):
        self.phases(np.broadcast_to(address, x.n), None if count == 4 else x.lane < 8 * count, 16, ins)

    matrix_store = matrix_load

    def request(self, x, active, address, size, what, ins, moved=None):
        """A load or store of global memory. `moved`: bytes of each lane, if not `size`."""
        warps = Warps(address, active, 32)
        touched, ideal = self.costs.total(sectors, warps, size)
        moved = warps.lanes() * size if moved is None else int(moved[active].sum())
        names = ("requests", "bytes", "sectors", "ideal_sectors")
        counts = zip(names, (warps.count, moved, touched, ideal), strict=True)
        self.count(ins, **{f"global_{what}_{name}": count for name, count in counts})
        self.touch(x, warps, what, ins)

    def touch(self, x, warps, what, ins):
        """Remember the sectors."""
        number = self.costs.sectors(warps)
        self.sectors.mark((what, source_of(ins)), number)
        if what == "load":
            block = self.thread_block if x.lanes is None else self.thread_block[x.lanes[::WARP] // WARP]
            self.in_block.add(number + (block if warps.which is None else block[warps.which])[:, None])

    def phases(self, address, active, size, ins):
        """A load or store of shared memory."""
        warps = Warps(address, active, 4)
        found, ideal = self.costs.total(wavefronts, warps, size)
        self.count(ins, shared_requests=warps.count, shared_wavefronts=found, shared_ideal_wavefronts=ideal)

    def update(self, x, active, space, address, size, ins):
        """An atomic."""
        warps = Warps(address, active, 32)
        turns, touched = self.costs.total(passes, warps, size)
        self.count(ins, atomics=warps.count, atomic_lanes=warps.lanes(), atomic_passes=turns)
        if space == "global":
            self.count(ins, global_atomic_sectors=touched)
            self.touch(x, warps, "atomic", ins)


_NOBODY = object()


def _active(x, m):
    """The mask of lanes that act, None for all of the group, or _NOBODY."""
    if m is None:
        return None
    if m.size == 1:
        return None if m[0] else _NOBODY
    return m if m.any() else _NOBODY
