"""Lanes that run a basic block together, as translated code sees them."""

import numpy as np

from .errors import MemoryFault, SimulationError

WARP = 32


def both(m, g):
    """The lanes of a mask that may be None, for all, and of a predicate."""
    return g if m is None else m & g


class NotConverged(Exception):
    """A warp instruction names lanes that are not here yet. It is the first of its block, so the group can wait."""


class Group:
    """Whole warps, in which `mask` (None: every lane) is active. Arrays have one element for each of the n lanes."""

    def __init__(self, chunk, lanes, mask):
        self.chunk = chunk
        self.lanes = lanes  # positions in the chunk, None for all
        self.mask = mask
        self.n = chunk.n if lanes is None else lanes.size
        self.warps = self.n // WARP
        self.active = self.n if mask is None else int(np.count_nonzero(mask))
        everything = slice(None) if lanes is None else lanes
        self.lane = chunk.lane[everything]
        self.shared_base = chunk.shared_base[everything]
        self.local_base = chunk.local_base[everything]
        self.shared, self.local, self.global_ = chunk.shared, chunk.local, chunk.launch.global_
        self.param, self.const, self.generic = chunk.launch.param, chunk.launch.const, chunk.generic
        self.copies = chunk.copies
        self.counters, self.checker = chunk.launch.counters, chunk.launch.checker
        self.memo = {}  # what translated code works out once for this group

    @property
    def changes(self):
        """How often memory has changed: tells a hang from progress."""
        return self.chunk.changes

    @changes.setter
    def changes(self, count):
        self.chunk.changes = count

    def positions(self):
        """Positions of the active lanes in the chunk."""
        if self.lanes is None:
            return np.arange(self.n) if self.mask is None else np.flatnonzero(self.mask)
        return self.lanes if self.mask is None else self.lanes[self.mask]

    def of_active(self, value):
        """One element for each active lane."""
        spread = np.broadcast_to(value, self.n)
        return spread if self.mask is None else spread[self.mask]

    def alive(self):
        """Which lanes have not exited."""
        alive = self.chunk.pc != self.chunk.exit
        return alive if self.lanes is None else alive[self.lanes]

    def variable_address(self, name, offset):
        """Where a module-scope variable lies in host memory."""
        return np.array([self.chunk.launch.program.module.addresses[name] + offset], np.uint64)

    # -- errors --------------------------------------------------------------------------------------
    def fault(self, ins, sel, bad, address, space, size, why, write):
        """The exception for the first lane with a bad address. `sel`: lanes that the arrays stand for."""
        first = int(np.argmax(bad))
        at = int(address[first] if address.size > 1 else address[0])
        if bad.size > 1:
            lane = first if sel is None else int(sel[first])
        elif sel is not None:
            lane = int(sel[0])
        else:
            lane = 0 if self.mask is None else int(np.argmax(self.mask))
        what = f"{'write' if write else 'read'} of {size} bytes in {space} memory at 0x{at:x}: {why}"
        launch = self.chunk.launch
        if "mapped" in why:
            what += launch.near(at)
        elif why == "in a read-only array":
            what += f", {launch.place(at)}"
        elif space == "shared" and "outside" in why and launch.program.takes_shared_mem:
            what += f" (shared_mem={launch.shared_bytes - launch.program.shared_bytes})"
        thread = self.thread(lane)
        lanes = np.count_nonzero(bad) if bad.size > 1 else self.active if sel is None else sel.size
        kind = (
            "misaligned access" if why == "misaligned" else "out of bounds" if "outside" in why else "read-only memory"
        )
        error = MemoryFault(f"{what}; {self.describe(ins, lane)}")
        return error.located(kind, f"{thread}: {what}", ins, int(lanes))

    def error(self, ins, lane, what, kind=SimulationError.kind):
        """The exception for what one lane does wrong."""
        error = SimulationError(f"{what}; {self.describe(ins, lane)}")
        return error.located(kind, f"{self.thread(lane)}: {what}", ins)

    def beyond(self, lane):
        """In words, which lanes of a lane's warp are no threads, where the block ends in it; empty elsewhere."""
        threads, lane = self.chunk.launch.threads, self.position(lane)
        first = threads % WARP
        if not first or lane % self.chunk.pitch // WARP < threads // WARP:
            return ""
        absent = "lane 31 does" if first == WARP - 1 else f"lanes {first} to {WARP - 1} do"
        return f": the block has {threads} threads, {absent} not exist"

    def describe(self, ins, lane):
        return f"kernel {self.chunk.launch.program.name}, {self.thread(lane)}, {ins.path}"

    def thread(self, lane):
        """A lane of the group as a thread of a block, in words."""
        return self.chunk.describe(self.position(lane))

    def position(self, lane):
        """Of a lane of the group in the chunk."""
        return lane if self.lanes is None else int(self.lanes[lane])
