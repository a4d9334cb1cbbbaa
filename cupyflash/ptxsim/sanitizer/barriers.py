"""Barriers that threads of one warp or block do not meet as they should.

Lanes that have exited count for nothing (CUDA C++ Programming Guide, __syncthreads on compute capability 7 and up), so
a lane that returns early is no fault. A lane that was elsewhere when others of its warp came to the barrier, went
past it to code that they come to afterwards, and exited, has left out a barrier that it should have met.
"""

import numpy as np

from ..barrier import is_aligned
from ..group import WARP
from ..observer import Observer

_SIDE_EFFECTS = {"st", "atom", "red", "bar", "barrier", "mbarrier", "cp", "stmatrix", "vprintf", "trap"}


class BarrierUse(Observer):
    """Divergent and mismatched barriers, numbers and counts that no barrier has."""

    def __init__(self, checker):
        self.checker = checker

    def begin(self, chunk):
        self.chunk = chunk
        self.blocks = chunk.launch.program.blocks
        self.expected = {}  # (block, barrier) that is not complete -> threads expected, instruction
        self.elsewhere = {}  # lane -> the block it was at when others of its warp came to the barrier of another block

    def reached(self, x, block, number, count):
        ins = block.ending
        if (number > 15).any():
            self.report(x, number > 15, "barrier number", "comes to a barrier above 15", ins)
        if count is not None:
            bad = (count % WARP != 0) | (count == 0)
            if bad.any():
                self.report(x, bad, "barrier count", "gives a number of threads that is not a multiple of 32", ins)
            self.compare_counts(x, ins, number, count)
        if x.mask is not None and is_aligned(ins) and "arrive" not in ins.modifiers:
            self.look_around(x, block)

    def report(self, x, bad, kind, what, ins):
        bad = np.broadcast_to(bad, x.n)
        bad = bad if x.mask is None else bad & x.mask
        if bad.any():
            lane = int(np.argmax(bad))
            self.checker.found(kind, ins, f"{x.thread(lane)}: {what}", count=int(np.count_nonzero(bad)))

    def compare_counts(self, x, ins, number, count):
        lanes = x.positions()
        at = np.stack([lanes // self.chunk.pitch, x.of_active(number), x.of_active(count)], 1)
        for (block, barrier, threads), first in zip(*np.unique(at, axis=0, return_index=True), strict=True):
            known, other = self.expected.setdefault((int(block), int(barrier)), (threads, ins))
            if known != threads:
                who = self.chunk.describe(int(lanes[first]))
                what = f"{who}: {threads} threads are to meet at barrier {barrier}, for others it is {known}"
                self.found_two("barrier count", ins, other, what)

    def look_around(self, x, block):
        """Remember where the other lanes of these warps are."""
        lanes = np.arange(x.n) if x.lanes is None else x.lanes
        absent = lanes[~x.mask]
        absent = absent[(self.chunk.pc[absent] != self.chunk.exit) & (self.chunk.barriers.waiting[absent] < 0)]
        for lane in absent.tolist():
            self.elsewhere[lane] = int(self.chunk.pc[lane]), block.index

    def barrier(self, lanes, chunk, ins):
        if self.expected:
            for block in np.unique(lanes // chunk.pitch).tolist():
                number = int(chunk.barriers.waiting[lanes[0]])
                self.expected.pop((block, number), None)
        if chunk.barriers.waiting[lanes[0]] < 0:  # all together, without waiting
            return
        sites = chunk.pc[lanes] - 1
        if sites.min() != sites.max():
            self.compare_sites(lanes, sites)
        if self.elsewhere:
            self.missing(lanes, sites)

    def compare_sites(self, lanes, sites):
        """One barrier, completed by several instructions."""
        warps = lanes // WARP
        for warp in np.unique(warps).tolist():
            own = sites[warps == warp]
            first, last = (self.blocks[i].ending for i in (own.min(), own.max()))
            if first is not last and is_aligned(first):
                where = int(lanes[warps == warp][np.argmax(own)])
                what = f"{self.chunk.describe(where)}: waits at {last.where}, other lanes of its warp at {first.where}"
                self.found_two("divergent barrier", first, last, what)
                return
        first, last = (self.blocks[i].ending for i in (sites.min(), sites.max()))
        if first.where != last.where and is_aligned(first) and not self.chunk.barriers.count[lanes].any():
            who = self.chunk.describe(int(lanes[np.argmax(sites)]))
            what = f"{who}: waits at {last.where}, other warps of its block at {first.where}"
            self.found_two("mismatched barrier", first, last, what)

    def found_two(self, kind, first, last, what):
        """A finding about two instructions, the same one whichever comes first: at the upper line in the source."""
        upper, lower = sorted((first, last), key=lambda ins: (ins.source or ("", 0), ins.line))
        self.checker.found(kind, upper, what, lower)

    def missing(self, lanes, sites):
        """Lanes of these warps that have exited without coming to the barrier."""
        chunk = self.chunk
        for warp in np.unique(lanes // WARP).tolist():
            site = int(sites[lanes // WARP == warp][0])
            for lane in range(warp * WARP, warp * WARP + WARP):
                position, barrier = self.elsewhere.pop(lane, (None, None))
                if barrier == site and chunk.pc[lane] == chunk.exit and self.went_past(position, site):
                    ins = self.blocks[site].ending
                    what = f"{chunk.describe(lane)}: exits without this barrier, at which other lanes of its warp wait"
                    self.checker.found("divergent barrier", ins, what)

    def went_past(self, position, barrier):
        """Whether a way from a block around that of a barrier leads to where all come after the barrier."""
        ways = self.chunk.launch.program.ways()
        after = _post_dominators(ways, barrier) - _leaving(self.blocks, ways) - {barrier}
        return bool(after & _reachable(ways, position, barrier))


def _reachable(ways, start, without):
    found, waiting = set(), [start]
    while waiting:
        block = waiting.pop()
        if block != without and block < len(ways) and block not in found:
            found.add(block)
            waiting += ways[block]
    return found


def _post_dominators(ways, barrier):
    """Blocks that every way from a barrier to the exit leads through: without them the exit is out of reach."""
    exit_ = len(ways)

    def exits(without):
        found, waiting = set(), [*ways[barrier]]
        while waiting:
            block = waiting.pop()
            if block == exit_:
                return True
            if block != without and block not in found:
                found.add(block)
                waiting += ways[block]
        return False

    return {block for block in _reachable(ways, barrier, None) if not exits(block)}


def _leaving(blocks, ways):
    """Blocks from which nothing happens any more but the exit."""
    found = {
        b.index for b in blocks if _SIDE_EFFECTS.isdisjoint(i.opcode for i in [*b.code, b.ending] if i is not None)
    }
    shrunk = True
    while shrunk:
        keep = {i for i in found if all(t in found or t == len(blocks) for t in ways[i])}
        shrunk = keep != found
        found = keep
    return found
