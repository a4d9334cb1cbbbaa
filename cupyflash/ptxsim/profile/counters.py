"""The observer that counts what a launch does."""

import numpy as np

from ..group import WARP
from ..observer import Observer
from .patterns import SECTOR_SHIFT, Costs, Warps
from .placement import Placement
from .sectors import KeySet, SectorMap
from .static import source_of

_WINDOW_SHIFT = 60
_SPACES = {0: "global", 1: "shared", 2: "local"}  # of a generic address, by window
_ENOUGH = 4096  # lanes that are worked on together


class Counters(Observer):
    """Counts of one launch, by basic block and by instruction; the tally adds them up by source line.

    Accesses of one instruction are collected until there are enough lanes for NumPy.
    """

    def __init__(self, launch):
        self.launch = launch
        self.runs = {}  # index of a block -> [warps, lanes]
        self.counted = {}  # instruction -> counter -> count
        self.least_wavefronts = {}  # instruction -> what bounds count
        self.waiting = {}  # kind of access -> [lanes, accesses]
        self.costs = Costs()
        self.block_load_sectors = 0
        self.sectors = self.placement = None

    def begin(self, chunk):
        if self.sectors is None:
            self.placement = Placement(self.launch.arrays.values())
            segments = self.launch.global_.segments
            self.sectors = SectorMap(self.placement.range_of(int(s.start), int(s.stop)) for s in segments)
        self.blocks, size = chunk.count, self.sectors.size
        self.thread_block = np.repeat(np.arange(self.blocks) * size, chunk.pitch // WARP)
        self.in_block = KeySet(self.blocks * size)  # thread block and sector of every load

    def end(self, chunk):
        for kind, (_, accesses) in self.waiting.items():
            self.work_on(accesses, *kind)
        self.waiting.clear()
        self.block_load_sectors += self.in_block.count()

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
        if lanes.size == chunk.n:
            self.count(ins, barriers=chunk.count)
            return
        edges = np.searchsorted(lanes, np.arange(chunk.count + 1) * chunk.pitch)
        self.count(ins, barriers=int(np.count_nonzero(np.diff(edges))))

    # -- memory: what is collected --------------------------------------------------------------------
    def load(self, x, m, space, address, size, ins):
        self.collect("load", space, size, ins, x, m, address)

    def store(self, x, m, space, address, size, values, ins):
        self.collect("store", space, size, ins, x, m, address)

    def atomic(self, x, m, space, address, size, ins):
        self.collect("atomic", space, size, ins, x, m, address)

    def copy(self, x, m, address, size, shared, amount, ins):
        self.collect("store", "shared", size, ins, x, m, shared)
        self.collect("load", "global", size, ins, x, m, address, amount)

    def bulk_copy(self, x, transfer):
        """As if the lanes of the warp shared the rows."""
        warp = transfer.lanes // WARP
        turn = np.arange(warp.size) - np.searchsorted(warp, warp)  # lanes are in order
        for first in range(0, int(turn.max()) + 1, WARP):
            rows = (turn >= first) & (turn < first + WARP)
            lanes = warp[rows] * WARP + turn[rows] - first
            acts, target, source = np.zeros(x.n, bool), np.zeros(x.n, np.uint32), np.zeros(x.n, np.uint64)
            acts[lanes], target[lanes], source[lanes] = True, transfer.target[rows], transfer.source[rows]
            self.copy(x, acts, source, 16, target, None, transfer.ins)

    def matrix_load(self, x, address, count, ins):
        self.collect("load", "shared", 16, ins, x, None if count == 4 else x.lane < 8 * count, address)

    def matrix_store(self, x, address, count, ins):
        self.collect("store", "shared", 16, ins, x, None if count == 4 else x.lane < 8 * count, address)

    def collect(self, what, space, size, ins, x, m, address, amount=None):
        kind = (what, space, size, ins)
        waiting = self.waiting.setdefault(kind, [0, []])
        waiting[0] += x.n
        waiting[1].append((x, m, address, amount))
        if waiting[0] >= _ENOUGH:
            del self.waiting[kind]
            self.work_on(waiting[1], *kind)

    # -- memory: what it costs -------------------------------------------------------------------------
    def work_on(self, accesses, what, space, size, ins):
        groups = [x for x, _, _, _ in accesses]
        address = _joined([_spread(a, x) for x, _, a, _ in accesses])
        active = moved = None
        if any(m is not None for _, m, _, _ in accesses):
            active = _joined([_mask(m, x) for x, m, _, _ in accesses])
        if any(amount is not None for _, _, _, amount in accesses):
            amounts = (size if amount is None else np.minimum(amount, size) for _, _, _, amount in accesses)
            moved = _joined([np.broadcast_to(a, x.n) for x, a in zip(groups, amounts, strict=True)])
            active = moved > 0 if active is None else active & (moved > 0)
        if active is not None and not active.any():
            return
        if space != "generic":
            self.in_space(groups, active, space, address, size, what, ins, moved)
            return
        window, inside = address >> _WINDOW_SHIFT, address & (1 << _WINDOW_SHIFT) - 1
        for number in np.unique(window if active is None else window[active]):
            there = window == number
            there = None if there.all() else there if active is None else active & there
            self.in_space(groups, active if there is None else there, _SPACES.get(int(number)), inside, size, what, ins)

    def in_space(self, groups, active, space, address, size, what, ins, moved=None):
        if what == "atomic":
            self.update(groups, active, space, address, size, ins)
        elif space == "global":
            self.request(groups, active, address, size, what, ins, moved)
        elif space == "shared":
            address, active, times = self.repeated(address, active)
            warps = Warps(address, active, max(size, 4))
            found, ideal = (times * cost for cost in self.costs.wavefronts(warps, size))
            least = times * self.costs.least_wavefronts(warps, size)
            self.least_wavefronts[ins] = self.least_wavefronts.get(ins, 0) + least
            self.count(ins, shared_requests=times * warps.count, shared_wavefronts=found, shared_ideal_wavefronts=ideal)
        elif space == "local" and "param" not in ins.modifiers:
            warps = Warps(address, active, 1)
            self.count(ins, local_requests=warps.count, **{f"local_{what}_bytes": warps.lanes * size})

    def repeated(self, address, active):
        """Addresses and mask of one of equal parts, and how many there are: blocks do the same in shared memory."""
        parts = self.blocks
        if parts == 1 or address.size % (parts * WARP):
            return address, active, 1
        address_parts = address.reshape(parts, -1)
        if not (address_parts[1:] == address_parts[0]).all():
            return address, active, 1
        if active is None:
            return address_parts[0], None, parts
        active_parts = active.reshape(parts, -1)
        if not (active_parts[1:] == active_parts[0]).all():
            return address, active, 1
        return address_parts[0], active_parts[0], parts

    def request(self, groups, active, address, size, what, ins, moved):
        """Loads or stores of global memory. `moved`: bytes of each lane, if not `size`."""
        warps = Warps(self.placement.moved(address), active, 1 << SECTOR_SHIFT)
        touched, ideal, row, sector = self.costs.sectors(warps, size)
        moved = warps.lanes * size if moved is None else int(moved[active].sum())
        names = ("requests", "bytes", "sectors", "ideal_sectors")
        counts = zip(names, (warps.count, moved, touched, ideal), strict=True)
        self.count(ins, **{f"global_{what}_{name}": count for name, count in counts})
        self.touch(groups, warps, row, sector, what, ins)

    def touch(self, groups, warps, row, sector, what, ins):
        """Remember which sectors were touched."""
        place = self.sectors.positions(sector)
        self.sectors.mark((what, source_of(ins)), place)
        if what == "load":
            block = _joined([self.of_warps(x) for x in groups])
            self.in_block.add(place + (block if warps.which is None else block[warps.which])[row])

    def of_warps(self, x):
        """The thread block of each warp of a group, as the first of its keys."""
        return self.thread_block if x.lanes is None else self.thread_block[x.lanes[::WARP] // WARP]

    def update(self, groups, active, space, address, size, ins):
        """Atomics."""
        warps = Warps(self.placement.moved(address) if space == "global" else address, active, 1 << SECTOR_SHIFT)
        turns = self.costs.passes(warps, size)
        self.count(ins, atomics=warps.count, atomic_lanes=warps.lanes, atomic_passes=turns)
        if space == "global":
            touched, _, row, sector = self.costs.sectors(warps, size)
            self.count(ins, global_atomic_sectors=touched)
            self.touch(groups, warps, row, sector, "atomic", ins)


def _joined(arrays):
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _spread(address, x):
    """One int64 for each lane of a group."""
    address = address.view(np.int64) if address.dtype == np.uint64 else address.astype(np.int64)
    return address if address.size == x.n else np.broadcast_to(address, x.n)


def _mask(m, x):
    """One flag for each lane of a group."""
    return m if m is not None and m.size == x.n else np.broadcast_to(True if m is None else m, x.n)
