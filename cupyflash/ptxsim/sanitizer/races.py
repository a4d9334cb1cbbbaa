"""Races: two accesses to one word of shared or global memory, one of them a write, that nothing orders.

Not a race: two atomics, or in global memory two strong accesses (atomic, volatile, relaxed and so on), which are
flags; plain stores of the same value and copies by cp.async from the same source, as far as nobody else reads it.
Volatile accesses of shared memory are flags only where a loop does nothing but wait for them. Bytes of one word are
different places, if the kernel has accesses as short. A cp.async writes its destination from the moment that it is
issued until its thread waits for it; copies that no thread ever waits for are no fault by themselves.
"""

import array

import numpy as np

from ..observer import Observer
from ..tensor_core import in_shared
from .copies import Copies
from .kinds import ATOMIC, COPY, PLAIN, VOLATILE, kinds, only_reads, shortest
from .order import Order
from .places import Place, lanes_of, positions
from .stamps import (
    BLOCKMATES,
    GRID,
    ONE,
    WARPMATES,
    Shadow,
    alone,
    event_of,
    extent,
    foreign,
    is_pending,
    lane_of,
    latest,
    many_of,
    saturated,
    stamp,
    together,
)

_RELEASE = {"release", "acq_rel", "sc"}

_NOW = {"ld": "reads", "ldu": "reads", "ldmatrix": "reads", "cp": "copies to", "atom": "updates", "red": "updates"}
_NOW |= {"mbarrier": "uses the mbarrier in"}
_BEFORE = {"ld": "read", "ldu": "read", "ldmatrix": "read", "cp": "copied to", "atom": "updated", "red": "updated"}
_BEFORE |= {"mbarrier": "used"}


class Races(Observer):
    """Keeps the last write and the last reads of every word, and asks of each access whether they are ordered."""

    def __init__(self, checker):
        self.checker = checker
        program = checker.launch.program
        if "accesses" not in program.memo:
            words = {space: shortest(program, space) for space in ("shared", "global")}
            program.memo["accesses"] = kinds(program), words
        self.kind_of, self.words = program.memo["accesses"]
        self.sites, self.kinds, self.number = [None], [PLAIN], {}
        self.events = array.array("I", [0])  # event -> site
        self.global_ = None

    def begin(self, chunk):
        self.order = Order(chunk, self.now)
        self.first = chunk.first * chunk.pitch
        self.alone = chunk.launch.blocks == 1
        pitch, most = (None, BLOCKMATES) if self.alone else (chunk.pitch, GRID)
        if self.global_ is None:
            self.global_ = {}
            for segment in self.checker.launch.global_.segments:
                shadow = Shadow("global", segment.views[1].size, self.words["global"], pitch, most)
                self.global_ |= {id(view): shadow for view in segment.views.values()}
        views = chunk.shared.views
        self.shared = Shadow("shared", views[1].size, self.words["shared"], None, BLOCKMATES)
        self.shadows = self.global_ | {id(view): self.shared for view in views.values()}
        self.copies = Copies(chunk)

    # -- events --------------------------------------------------------------------------------------
    @property
    def now(self):
        return len(self.events) - 1

    def event(self, ins):
        """A new event at an instruction: its number."""
        site = self.number.get(ins)
        if site is None:
            site = self.number[ins] = len(self.sites)
            self.sites.append(ins)
            self.kinds.append(self.kind_of[ins])
        self.events.append(site)
        return len(self.events) - 1

    def site_of(self, stamps):
        return np.frombuffer(self.events, np.uint32)[event_of(stamps).astype(np.int64)]

    def barrier(self, lanes, chunk, ins):
        self.order.barrier(lanes, self.now)

    def arrive(self, lanes, numbers, chunk):
        self.order.arrive(lanes, numbers, self.now)

    def mbarrier(self, x, m, address, ins):
        """Operations on one object race with its init and its inval, not with each other."""
        for place in self.checker.locate(x, m, "shared", address, 8, True, ins):
            access = Access(self, x, self.shared, place, ins, PLAIN)
            if {"init", "inval"}.isdisjoint(ins.modifiers):
                self.read(access, ONE)
            else:
                self.write(access, ONE, None)

    def mbarrier_arrived(self, lanes, at, ins):
        if "relaxed" not in ins.modifiers:
            self.order.mbarrier_arrived(lanes, at, self.now)

    def mbarrier_completed(self, lanes, at, ins):
        self.order.mbarrier_completed(at)

    def mbarrier_passed(self, lanes, at, ins):
        if "relaxed" not in ins.modifiers:
            self.order.mbarrier_passed(lanes, at)

    def warp_barrier(self, x, m, members, ins):
        self.order.warp_barrier(lanes_of(x, m), self.now)

    def fence(self, x, m, ins):
        self.order.fence(lanes_of(x, m), self.now)

    def load(self, x, m, space, address, size, ins):
        if space == "local":
            return
        for place in self.checker.locate(x, m, space, address, size, False, ins):
            shadow = self.shadows.get(id(place.view))
            if shadow is not None:
                self.read(Access(self, x, shadow, place, ins), ONE)

    def matrix_load(self, x, address, count, ins):
        for place in self.checker.locate_rows(x, address, count, False, ins):
            self.read(Access(self, x, self.shared, place, ins), WARPMATES)

    def store(self, x, m, space, address, size, values, ins):
        if space == "local":
            return
        for place in self.checker.locate(x, m, space, address, size, True, ins):
            shadow = self.shadows.get(id(place.view))
            if shadow is not None:
                self.write(Access(self, x, shadow, place, ins), ONE, values)

    def matrix_store(self, x, address, count, ins):
        for place in self.checker.locate_rows(x, address, count, True, ins):
            self.write(Access(self, x, self.shared, place, ins), WARPMATES, None)

    def atomic(self, x, m, space, address, size, ins):
        for place in self.checker.locate(x, m, space, address, size, True, ins):
            shadow = self.shadows.get(id(place.view))
            if shadow is not None:
                access = Access(self, x, shadow, place, ins)
                if only_reads(ins):
                    self.read(access, ONE)
                else:
                    self.write(access, ONE, None)
                    self.order.acquire(shadow, access.rows, access.index, access.lanes)

    def copy(self, x, m, address, size, shared, amount, ins):
        reads = m if amount is None else amount > 0 if m is None else (amount > 0) & m
        sources = self.checker.locate(x, reads, "global", address, size, False, ins)
        for place in sources:
            self.read(Access(self, x, self.shadows[id(place.view)], place, ins, PLAIN), ONE)
        target = in_shared(shared) if shared.dtype == np.uint64 else shared
        for place in self.checker.locate(x, m, "shared", target, size, True, ins):
            access = Access(self, x, self.shared, place, ins)
            source = address if address.size == 1 or place.sel is None else address[place.sel]
            if amount is not None:
                count = amount if amount.size == 1 or place.sel is None else amount[place.sel]
                source = source ^ (count.astype(np.uint64) << np.uint64(59))
            if self.write(access, ONE, None, source):
                self.compare_lanes(access, access.words(_copied(x, sources, amount, size)))
            self.copies.issue(access.lanes, access.index, size, ins)

    def commit(self, x, m, ins):
        self.copies.commit(lanes_of(x, m))

    def wait(self, x, m, allowed, ins):
        """Copies are done: from now on they are writes of their threads like others."""
        for lanes, index, size, copy in self.copies.wait(lanes_of(x, m), allowed):
            self.arrived(lanes, index, size, copy)

    def bulk_copy(self, x, transfer):
        """Its rows are copies of the thread that has started it, which end together."""
        ins = transfer.ins
        for rows, (to, index), (view, at) in transfer.parts:
            lanes = transfer.lanes[rows]
            who = positions(x)[lanes], lanes, 16, 0
            self.read(Access(self, x, self.shadows[id(view)], Place(view, at, *who), ins, PLAIN), ONE)
            self.write(Access(self, x, self.shared, Place(to, index, *who), ins), ONE, None, transfer.source[rows])

    def bulk_copy_done(self, lanes, transfer):
        for rows, (_, index), _ in transfer.parts:
            self.arrived(lanes[rows], index, 16, transfer.ins)
        self.order.mbarrier_arrived(np.unique(lanes), transfer.at, self.now)

    def mbarrier_copies(self, lanes, batches):
        for copies in self.copies.wait_for_batches(lanes, batches):
            self.arrived(*copies)

    def arrived(self, lanes, index, size, copy):
        shadow, numbers = self.shared, (lanes + self.first).astype(np.uint64)
        stamps = stamp(self.event(copy), numbers)[:, None]
        shadow.last_written = max(shadow.last_written, stamps.max())
        if shadow.put(shadow.rows(shadow.written, size), index, stamps):
            words, numbers = several(shadow, index, size, numbers)
            shadow.remember(words, numbers, False, _NONE, _NO_STAMPS)

    # -- accesses ------------------------------------------------------------------------------------
    def read(self, access, many):
        shadow = access.shadow
        at, old = self.unordered(access, True)
        if old.size:
            self.report_races(access, *self.of_others(access, at, old))
        if access.kind in (ATOMIC, VOLATILE):
            self.order.acquire(shadow, access.rows, access.index, access.lanes)
        if access.kind == ATOMIC or (access.kind == VOLATILE and shadow is not self.shared):
            return
        if access.index.size < access.lanes.size:
            many = extent(access.lanes, shadow.pitch)
            access.lanes, access.numbers = access.lanes[:1], access.numbers[:1]
        rows = access.rows(shadow.read)
        stamps = access.stamps(many)
        old = access.earlier(False)
        if old is not None:
            full = saturated(old, shadow.most, access.limit)
            if full.all():
                return
            others = foreign(old, access.numbers[:, None], access.limit)
            if shadow.pitch is None and self.order.told_by_limit:
                stamps = np.where(others, together(old, stamps, None), stamps)
            else:
                stamps = np.where(full, old, stamps)
                at = np.nonzero(others > full)
                old = np.broadcast_to(old, stamps.shape)[at]
                open_ = ~self.order.ordered(access.lanes[at[0]], old, shadow.pitch is None)
                stamps = self.joined(access, stamps, tuple(w[open_] for w in at), old[open_])
        shadow.put(rows, access.index, stamps)
        shadow.last_read = latest(access.event)

    def write(self, access, many, values, source=None):
        """`values`: of the lanes of the access, where a store of equal ones is harmless; `source`: of a cp.async,
        likewise. Returns whether several lanes write one word."""
        shadow, ins = access.shadow, access.ins
        read, readers = self.unordered(access, False)
        at, old = self.unordered(access, True)
        stamps = access.stamps(many)
        before, earlier = _NONE, _NO_STAMPS
        if old.size and values is not None:
            words = access.words(values)
            compared = ~is_pending(old) & (self.kind_at(old) <= VOLATILE)
            equal = compared & (words[at] == access.present()[at])
            before, earlier = access.words_at(tuple(w[equal] for w in at)), old[equal]
            stamps = self.joined(access, stamps, tuple(w[equal] for w in at), earlier)
            changed = np.ones(words.shape, bool)  # whoever reads a value that another thread has put there, too
            changed[tuple(w[equal] for w in at)] = False
            read, readers = tuple(w[changed[read]] for w in read), readers[changed[read]]
            differ = compared & ~equal
            self.report("different values", access, *self.of_others(access, tuple(w[differ] for w in at), old[differ]))
            at, old = tuple(w[~compared] for w in at), old[~compared]
        at, old = self.of_others(access, at, old)
        if source is not None:
            same = self.same_source(access, source, at, old)
            if same.any():
                before, earlier = access.words_at(tuple(w[same] for w in at)), old[same]
                stamps = self.joined(access, stamps, tuple(w[same] for w in at), earlier)
                changed = np.ones(stamps.shape, bool)
                changed[tuple(w[same] for w in at)] = False
                read, readers = tuple(w[changed[read]] for w in read), readers[changed[read]]
                at, old = tuple(w[~same] for w in at), old[~same]
        self.report_races(access, read, readers)
        self.report_races(access, at, old)
        rows = access.rows(shadow.written)
        shadow.last_written = max(shadow.last_written, stamps.max())
        collided = False
        if access.kind == ATOMIC:
            rows[access.spread()] = stamps
        else:
            collided = shadow.put(rows, access.spread(), stamps)
            if collided or earlier.size or many != ONE:
                words, numbers = several(shadow, access.spread(), access.size, access.numbers)
                shadow.remember(words, numbers, many != ONE, before, earlier)
            if collided and values is not None and (access.kind == PLAIN or shadow is self.shared):
                self.compare_lanes(access, access.words(values))
        if access.kind in (ATOMIC, VOLATILE):
            if not _RELEASE.isdisjoint(ins.modifiers):
                self.order.fence(access.lanes, self.now)
            self.order.release(shadow, access.rows, access.index, access.lanes)
        return collided

    def unordered(self, access, written):
        """(lanes, words) of an access at which an earlier one is not ordered before it, and its stamps. A plain look
        at a flag that has done its work is ordered."""
        old = access.earlier(written)
        if old is None:
            return _NOTHING
        others = foreign(old, access.numbers[:, None], access.limit)
        if not others.any():
            return _NOTHING
        at = np.nonzero(others)
        count = old.shape[1]
        old = np.broadcast_to(old, (access.lanes.size, count))[at]
        open_ = ~self.order.ordered(access.lanes[at[0]], old, access.shadow.pitch is None)
        if written:
            open_ |= is_pending(old)
        if access.kind in (VOLATILE, ATOMIC):
            open_ &= ~self.flags(access, old)
        if written and access.shadow.released is not None:
            released = np.broadcast_to(access.rows(access.shadow.released)[access.index], (access.lanes.size, count))
            open_ &= (released[at] == 0) | ~self.strong(old)
        return tuple(w[open_] for w in at), old[open_]

    def of_others(self, access, at, old):
        """Where several threads have written the same value, each of them may rely on its own."""
        if not (many_of(old) != ONE).any():
            return at, old
        wrote = access.shadow.wrote(access.words_at(at), access.numbers[at[0]])
        kept = ~wrote | (many_of(old) == ONE) | is_pending(old)
        return tuple(w[kept] for w in at), old[kept]

    def same_source(self, access, source, at, old):
        """Which stamps are of copies from the same source as that of an access."""
        shadow = access.shadow
        if shadow.coming is None:
            shadow.coming = np.zeros(shadow.written.size, np.uint64)
        coming, index = access.rows(shadow.coming), access.spread()
        same = np.zeros(old.shape, bool)
        if old.size:
            same = self.kind_at(old) == COPY
            same &= coming[index[at[0]], at[1]] == np.broadcast_to(source, index.shape)[at[0]]
        coming[index] = source[:, None]
        return same

    def kind_at(self, stamps):
        return np.array(self.kinds)[self.site_of(stamps)]

    def flags(self, access, stamps):
        """Which of the stamps are of accesses that a strong access does not race with."""
        if access.kind == VOLATILE and access.shadow is self.shared:
            return self.kind_at(stamps) == ATOMIC
        return self.strong(stamps)

    def strong(self, stamps):
        kind = self.kind_at(stamps)
        return (kind == VOLATILE) | (kind == ATOMIC)

    def joined(self, access, stamps, at, old):
        """Stamps of an access that stand for those of earlier ones, too."""
        if not old.size:
            return stamps
        stamps = np.broadcast_to(stamps, (access.lanes.size, access.size // access.shadow.word)).copy()
        stamps[at] = together(old, stamps[at], access.shadow.pitch)
        return stamps

    # -- reports -------------------------------------------------------------------------------------
    def report_races(self, access, at, old):
        if old.size:
            early = is_pending(old)
            self.report("missing cp.async wait", access, tuple(w[early] for w in at), old[early])
            self.report(f"{access.shadow.name} race", access, tuple(w[~early] for w in at), old[~early])

    def report(self, kind, access, at, old):
        """One finding for each instruction that the access collides with."""
        sites = self.site_of(old)
        named = ~self.order.ordered(
            access.lanes[at[0]], alone(old), access.shadow.pitch is None
        )  # the thread that a stamp names is one of those
        for site in np.unique(sites):
            chosen = sites == site
            other = self.sites[site]
            first = int(np.argmax(chosen & named) if (chosen & named).any() else np.argmax(chosen))
            who, before = self.describe(access, at[0][first]), self.checker.describe(int(lane_of(old)[first]))
            if many_of(old)[first] != ONE:
                before = f"{before} and others" if named[first] else "other threads"
            now = _NOW.get(access.ins.opcode, "writes")
            then = _BEFORE.get(other.opcode, "wrote")
            place = access.address(at[0][first], at[1][first])
            why = {
                "different values": "with another value",
                "missing cp.async wait": "by cp.async, with no wait for it yet",
            }.get(kind, "with nothing that orders the two")
            text = f"{who} {now} {place}, which {before} {then} {why}"
            self.checker.found(kind, access.ins, text, other, np.unique(at[0][chosen]).size)

    def describe(self, access, i):
        return self.checker.describe(self.first + int(access.lanes[i]))

    def compare_lanes(self, access, words):
        """Several lanes store to one word at once: report those whose values differ."""
        count = words.shape[1]
        place = (access.spread()[:, None] * count + np.arange(count)).reshape(-1)
        by_place = np.argsort(place, kind="stable")
        place, values = place[by_place], words.reshape(-1)[by_place]
        differ = np.flatnonzero((place[1:] == place[:-1]) & (values[1:] != values[:-1]))
        if not differ.size:
            return
        (i, j), (k, _) = (divmod(int(by_place[differ[0] + n]), count) for n in (0, 1))
        who, other = self.describe(access, i), self.describe(access, k)
        text = f"{who} and {other} write different values to {access.address(i, j)} at once"
        self.checker.found("different values", access.ins, text, access.ins, differ.size)


_NONE, _NO_STAMPS = np.empty(0, np.intp), np.empty(0, np.uint64)
_NOTHING = (_NONE, _NONE), _NO_STAMPS


def several(shadow, index, size, numbers):
    """The words of elements that stamps of several threads are on now, and the number of the thread of each."""
    count = size // shadow.word
    words = index[:, None] * count + np.arange(count)
    at = np.nonzero(many_of(shadow.written[words]) != ONE)
    return words[at], numbers[at[0]]


def numbers_of(x, place, first):
    """The numbers that threads of a Place have among all of the launch."""
    numbers = x.memo.get("numbers")
    if numbers is None:
        numbers = x.memo["numbers"] = (positions(x) + first).astype(np.uint64)
    return numbers if place.sel is None else numbers[place.sel]


def _copied(x, sources, amount, size):
    """What lanes copy by cp.async from the Places of their sources: `size` bytes as a tuple of arrays."""
    values = np.zeros((x.n, size), np.uint8)
    for place in sources:
        lanes = slice(None) if place.sel is None else place.sel
        values[lanes] = place.view[place.index].view(np.uint8).reshape(-1, size)
    if amount is not None:
        values[np.arange(size) >= np.broadcast_to(amount, x.n)[:, None]] = 0
    return tuple(np.ascontiguousarray(values.view(np.uint32).T))


class Access:
    """One place of an access, and its event."""

    def __init__(self, races, x, shadow, place, ins, kind=None):
        self.shadow, self.place, self.ins = shadow, place, ins
        self.lanes, self.index, self.size = place.lanes, place.index, place.size
        self.launch, self.first, self.shared_base = x.chunk.launch, races.first, x.chunk.shared_base
        self.event = races.event(ins)
        self.kind = races.kind_of[ins] if kind is None else kind
        self.limit = races.order.limit_of(x) if shadow is races.shared or races.alone else np.uint64(0)
        self.numbers = numbers_of(x, place, races.first)

    def rows(self, table):
        return table.reshape(-1, self.size // self.shadow.word)

    def earlier(self, written):
        """Stamps of the last writes or reads (elements, words), None if all of these are done."""
        shadow = self.shadow
        table, last = (shadow.written, shadow.last_written) if written else (shadow.read, shadow.last_read)
        if last <= self.limit:
            return None
        stamps = self.rows(table).take(self.index, axis=0)
        return stamps if stamps.max() > self.limit else None

    def spread(self):
        """The element of each lane."""
        return np.broadcast_to(self.index, self.lanes.shape)

    def stamps(self, many):
        return stamp(self.event, self.numbers, many, self.kind == COPY)[:, None]

    def words_at(self, at):
        """Places (lanes, words) of the access as numbers of words."""
        return self.spread()[at[0]] * (self.size // self.shadow.word) + at[1]

    def words(self, values):
        """What lanes store, (lanes, words)."""
        place = self.place
        width = values[0].itemsize
        values = values[place.offset // width : (place.offset + place.size) // width]
        chosen = [v if v.size == 1 or place.sel is None else v[place.sel] for v in values]
        together = np.stack([np.broadcast_to(v, self.lanes.shape) for v in chosen], axis=1)
        return together.view(f"u{self.shadow.word}")

    def present(self):
        """What is there now, (lanes, words)."""
        return self.place.view[self.spread()].view(f"u{self.shadow.word}").reshape(self.lanes.size, -1)

    def address(self, i, j):
        """Words for the place of word j of lane i."""
        at = int(self.spread()[i]) * self.size + int(j) * self.shadow.word
        if self.shadow.name == "shared":
            return f"shared memory at 0x{at - int(self.shared_base[self.lanes[i]]):x}"
        return self.launch.place(self.place.view.ctypes.data + at)
