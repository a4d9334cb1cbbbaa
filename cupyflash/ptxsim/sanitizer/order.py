"""What is ordered: which earlier accesses a thread can rely on to be done.

Barriers order the threads that they hold; bar.warp.sync those of a warp; an mbarrier those that arrive before those
that find the phase complete. Flags order, too: a fence followed by an atomic or a strong store (release), and an
atomic or strong load of the same word later (acquire). What is modelled of flags errs towards "ordered": a release
covers all accesses before the last fence of the block, whoever made them, and an acquire serves the whole warp at
once, its block at the next barrier. A bar.warp.sync of some lanes counts as one of the whole warp, a named barrier of
some lanes of a warp too, and so does a wait at an mbarrier, though not an arrival there; that of cp.async covers all
that its thread has done when it comes.
"""

import numpy as np

from ..group import WARP
from .stamps import BLOCKMATES, ONE, WARPMATES, event_of, lane_of, latest, many_of


class Order:
    """Of the lanes of a chunk. Times are numbers of events; `now` is the latest."""

    def __init__(self, chunk, now):
        self.chunk, self.pitch = chunk, chunk.pitch
        self.first = chunk.first * chunk.pitch
        self.block_done = np.full(chunk.count, now, np.int64)  # by all threads of the block
        self.warp_done = np.full(chunk.n, now, np.int64)  # by the own warp
        self.acquired = np.zeros(chunk.n // WARP, np.int64)  # by anybody
        self.fenced = np.zeros(chunk.count, np.int64)  # the last fence of a block
        self.published = np.zeros(chunk.n // WARP, np.int64)  # by a warp, before a fence of its own or of who knows it
        self.known = None  # [block, warp, lane of the block]: by that lane, from barriers of a part of the block
        self.arrivals = {}  # (block, barrier) -> what each warp at bar.arrive knows and has acquired
        self.gathered = {}  # mbarrier -> the same of all that have arrived in this phase, together
        self.complete = {}  # mbarrier -> the same of the phase before
        self.limit = latest(now)
        self.even = True  # whether all blocks are at the same barrier
        self.synced = self.looked = False  # whether there has been a barrier of a warp, a flag that was seen

    # -- events --------------------------------------------------------------------------------------
    def barrier(self, lanes, now):
        chunk = self.chunk
        if lanes.size == chunk.n:
            self.whole(np.arange(chunk.count), now)
            return
        alive = (chunk.pc != chunk.exit).reshape(chunk.count, self.pitch).sum(1)
        here = np.bincount(lanes // self.pitch, minlength=chunk.count)
        counted = np.zeros(chunk.n, bool)  # where threads that have exited are no part of it
        counted[lanes] = (chunk.barriers.waiting[lanes] >= 0) & (chunk.barriers.count[lanes] % self.pitch > 0)
        everybody = (here == alive) & ~counted.reshape(chunk.count, self.pitch).any(1)
        self.whole(np.flatnonzero((here > 0) & everybody), now)
        for block in np.flatnonzero((here > 0) & ~everybody):
            self.part(int(block), lanes[lanes // self.pitch == block], now)

    def whole(self, blocks, now):
        self.block_done[blocks] = now
        running = (self.chunk.pc != self.chunk.exit).reshape(self.chunk.count, self.pitch).any(1)
        oldest = int(self.block_done[running].min(initial=now))
        self.limit = latest(oldest)
        self.even = oldest == self.block_done[running].max(initial=oldest)
        if self.looked:
            by_block = self.acquired.reshape(self.chunk.count, -1)
            by_block[blocks] = by_block[blocks].max(1, keepdims=True)

    def part(self, block, lanes, now):
        """A barrier of some warps of a block."""
        self.warp_done[lanes], self.synced = now, True
        warps = np.unique(lanes // WARP)
        inner = warps - block * (self.pitch // WARP)
        number = int(self.chunk.barriers.waiting[lanes[0]])
        before = self.knowledge(block, inner, now)
        acquired = self.acquired[warps].max()
        for other, theirs in self.arrivals.pop((block, number), []):
            np.maximum(before, other, out=before)
            acquired = max(acquired, theirs)
        self.known[block, inner] = before
        self.acquired[warps] = acquired

    def knowledge(self, block, inner, now):
        """What some warps of a block know together, themselves included."""
        before = self.known_before(block, inner)
        before.reshape(-1, WARP)[inner] = now
        return before

    def known_before(self, block, inner):
        """What some warps of a block know together, their own accesses aside."""
        if self.known is None:
            self.known = np.zeros((self.chunk.count, self.pitch // WARP, self.pitch), np.int64)
        return np.maximum(self.known[block, inner].max(0), self.block_done[block])

    def arrive(self, lanes, numbers, now):
        for warp in np.unique(lanes // WARP):
            at = int(np.argmax(lanes // WARP == warp))
            block, inner = divmod(int(warp), self.pitch // WARP)
            before = self.knowledge(block, np.array([inner]), now)
            self.arrivals.setdefault((block, int(numbers[at])), []).append((before, self.acquired[warp]))

    def mbarrier_arrived(self, lanes, at, now):
        block, warps = int(lanes[0]) // self.pitch, np.unique(lanes // WARP)
        inner = warps - block * (self.pitch // WARP)
        before = self.known_before(block, inner)
        own = before.reshape(-1, WARP)
        own[inner] = np.maximum(own[inner], self.warp_done.reshape(-1, WARP)[warps])
        before[lanes - block * self.pitch] = now
        others, acquired = self.gathered.get(at, (before, 0))
        self.gathered[at] = np.maximum(before, others), max(acquired, self.acquired[warps].max())

    def mbarrier_completed(self, at):
        self.complete[at] = self.gathered.pop(at, None)

    def mbarrier_passed(self, lanes, at):
        told = self.complete.get(at)
        if told is not None:
            block, warps = int(lanes[0]) // self.pitch, np.unique(lanes // WARP)
            inner = warps - block * (self.pitch // WARP)
            self.known[block, inner] = np.maximum(self.known[block, inner], told[0])
            self.acquired[warps] = np.maximum(self.acquired[warps], told[1])

    def warp_barrier(self, lanes, now):
        self.warp_done[lanes], self.synced = now, True

    def fence(self, lanes, now):
        blocks = np.unique(lanes // self.pitch)
        self.fenced[blocks] = now
        by_block = self.published.reshape(self.chunk.count, -1)
        known = self.block_done[blocks, None]
        if self.known is not None:
            known = np.maximum(known, self.known[blocks].max(1).reshape(blocks.size, -1, WARP).max(2))
        by_block[blocks] = np.maximum(by_block[blocks], known)
        self.published[lanes // WARP] = now

    def release(self, shadow, rows_of, index, lanes):
        """Lanes write a flag: whoever sees it sees what they have fenced."""
        covered = int(self.fenced[lanes // self.pitch].max())
        if not covered:
            return
        if shadow.released is None:
            shadow.released = np.zeros(shadow.written.size, np.int64)
        rows = rows_of(shadow.released)
        rows[index] = np.maximum(rows[index], covered)

    def acquire(self, shadow, rows_of, index, lanes):
        """Lanes look at a flag."""
        if shadow.released is not None:
            seen = np.broadcast_to(rows_of(shadow.released)[index].max(1), lanes.shape)
            np.maximum.at(self.acquired, lanes // WARP, seen)
            self.looked = True

    @property
    def told_by_limit(self):
        """Whether nothing but the limit orders accesses of several threads of one block."""
        return self.even and not self.synced and not self.looked and self.known is None

    def limit_of(self, x):
        """The stamp up to which all accesses are done for all lanes of a group, as far as block barriers tell."""
        if x.lanes is not None:
            first, last = int(x.lanes[0]) // self.pitch, int(x.lanes[-1]) // self.pitch
            if first == last:
                return latest(int(self.block_done[first]))
        return self.limit

    # -- the question --------------------------------------------------------------------------------
    def ordered(self, lanes, old, inside):
        """Whether the access that a stamp tells of is done before the lanes go on; `inside`: it can only have been in
        their own block."""
        event = event_of(old).astype(np.int64)
        other = lane_of(old) - self.first
        alone = many_of(old) == ONE
        done = alone & (other == lanes)
        same_block = True if inside else (many_of(old) <= BLOCKMATES) & (other // self.pitch == lanes // self.pitch)
        done |= same_block & (event <= self.block_done[lanes // self.pitch])
        if self.synced:
            same_warp = (many_of(old) <= WARPMATES) & (other // WARP == lanes // WARP)
            done |= same_warp & (event <= self.warp_done[lanes])
        if self.looked:
            done |= (event <= self.acquired[lanes // WARP]) & self.is_published(event, other, many_of(old))
        if self.known is not None:
            done |= same_block & (event <= self.known_of(lanes // self.pitch, lanes, other, many_of(old)))
        return done

    def is_published(self, event, other, many):
        """Whether a fence counts for accesses that are done; for those of several warps or of other chunks one may."""
        of_one_warp = (many <= WARPMATES) & (other >= 0) & (other < self.chunk.n)
        return ~of_one_warp | (event <= self.published[np.where(of_one_warp, other, 0) // WARP])

    def known_of(self, block, lanes, other, many):
        """Up to when a lane knows the accesses of another; of several: of the best known, that is not of its warp if
        they are of several warps."""
        own, place = lanes % self.pitch // WARP, other % self.pitch
        exact = self.known[block, own, place]
        if (many == ONE).all():
            return exact
        rows, row = np.unique(block * (self.pitch // WARP) + own, return_inverse=True)
        of_warps = self.known.reshape(-1, self.pitch // WARP, WARP)[rows].max(2)
        of_warp = of_warps[row, place // WARP]
        of_warps[np.arange(rows.size), rows % (self.pitch // WARP)] = 0
        return np.where(many == ONE, exact, np.where(many == WARPMATES, of_warp, of_warps.max(1)[row]))
