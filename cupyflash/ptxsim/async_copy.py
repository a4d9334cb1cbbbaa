"""cp.async: copies that happen at the matching wait, the latest moment that the ISA allows.

Under the random schedule a coin decides for each copy whether it happens at once, the earliest moment:
what is right under both needs its waits and its barriers.
"""

import dataclasses

import numpy as np

from .tensor_core import in_shared


@dataclasses.dataclass(slots=True)
class _Copy:
    """One cp.async instruction of some lanes, not yet performed."""

    lanes: np.ndarray | None  # positions in the chunk, None for all
    group: object  # each lane's number of the group it belongs to: an int or an array
    batch: object  # likewise, of those that one cp.async.mbarrier.arrive follows
    target: tuple  # (flat array, elements)
    source: tuple | None  # the same; None writes zeros
    ins: object


class _Count:
    """How often each of n lanes has done something: an int while all agree, else an array."""

    def __init__(self, n):
        self.n, self.value = n, 0

    def of(self, lanes):
        return self.value if lanes is None else _part(self.value, lanes)

    def step(self, x, m):
        """Lanes do it once more."""
        if _all_of(x, m):
            self.value = self.value + 1
            return
        self.value = np.full(self.n, self.value) if isinstance(self.value, int) else self.value.copy()
        self.value[_lanes(x, m)] += 1


class AsyncCopies:
    """What the lanes of a chunk have issued, and how many groups each has committed."""

    def __init__(self, n, random, observers):
        self.n = n
        self.observers = observers
        self.random = random  # None: always late
        self.pending = []
        self.committed, self.batches = _Count(n), _Count(n)

    def issue(self, x, m, shared, global_, size, source_size, ins):
        """`source_size`: bytes to read, an array (the rest is zero), or None for all."""
        if m is not None and m.size == 1:
            if not m[0]:
                return
            m = None
        if shared.dtype == np.uint64:
            shared = in_shared(shared)
        sel = None if m is None or m.all() else np.flatnonzero(m)
        if sel is not None and sel.size == 0:
            return
        target = x.shared.locate(x, sel, _pick(shared, sel), size, True, ins)
        lanes = sel if x.lanes is None else x.lanes if sel is None else x.lanes[sel]
        count = x.n if sel is None else sel.size
        ((view, index, _),) = target
        index = np.broadcast_to(index, count)
        reads = np.ones(count, bool)
        if source_size is not None:
            amount = np.broadcast_to(_pick(source_size, sel), count)
            whole, none = amount >= size, amount == 0
            if not (whole | none).all():
                self.issue_in_bytes(x, m, shared, global_, size, source_size, ins)
                return
            reads = whole
        everyone = reads.all()
        if not everyone:
            zero = np.flatnonzero(~reads)
            self.add(_of(lanes, zero), (view, index[zero]), None, ins)
        if reads.any():
            chosen = None if everyone else np.flatnonzero(reads)
            inner = sel if chosen is None else chosen if sel is None else sel[chosen]
            address = np.broadcast_to(_pick(global_, inner), count if chosen is None else chosen.size)
            for source, at, part in x.global_.locate(x, inner, address, size, False, ins):
                to = index if chosen is None else index[chosen]
                who = lanes if chosen is None else _of(lanes, chosen)
                if part is not None:
                    to, who = to[part], _of(who, part)
                self.add(who, (view, to), (source, at), ins)

    def issue_in_bytes(self, x, m, shared, global_, size, source_size, ins):
        for byte in range(size):
            read = np.where(source_size > byte, np.uint32(1), np.uint32(0))
            self.issue(x, m, shared + shared.dtype.type(byte), global_ + np.uint64(byte), 1, read, ins)

    def add(self, lanes, target, source, ins):
        copy = _Copy(lanes, self.committed.of(lanes), self.batches.of(lanes), target, source, ins)
        if self.random is not None and self.random.random() < 0.5:
            self.perform(copy, slice(None))
        else:
            self.pending.append(copy)

    def commit(self, x, m):
        self.committed.step(x, m)

    def wait(self, x, m, allowed):
        """Perform the copies of all but the `allowed` latest groups; None: of everything issued."""
        if not self.pending:
            return
        waits = None
        if not _all_of(x, m):
            waits = np.zeros(self.n, bool)
            waits[_lanes(x, m)] = True
        x.changes += 1

        def due(copy):
            last = None if allowed is None else self.committed.of(copy.lanes) - allowed
            found = np.True_ if last is None else np.less(copy.group, last)
            return found if waits is None else found & _of_lanes(waits, copy.lanes)

        self.settle(due)

    def finish(self, lanes, batches):
        """Perform the copies of lanes up to those of their batches."""
        last = np.full(self.n, -1)
        np.maximum.at(last, lanes, batches)
        self.settle(lambda copy: np.less_equal(copy.batch, _of_lanes(last, copy.lanes)))

    def settle(self, is_due):
        """Perform copies, or of each what some lanes do. `is_due`: which lanes of a copy, or whether all or none."""
        still = []
        for copy in self.pending:
            due = is_due(copy)
            if np.all(due):
                self.perform(copy, slice(None))
            elif np.any(due):
                lanes = np.arange(self.n) if copy.lanes is None else copy.lanes
                due = np.broadcast_to(due, lanes.shape)
                self.perform(copy, np.flatnonzero(due))
                rest = np.flatnonzero(~due)
                target = (copy.target[0], copy.target[1][rest])
                source = copy.source and (copy.source[0], copy.source[1][rest])
                numbers = _part(copy.group, rest), _part(copy.batch, rest)
                still.append(_Copy(lanes[rest], *numbers, target, source, copy.ins))
            else:
                still.append(copy)
        self.pending = still

    def perform(self, copy, which):
        view, to = copy.target
        source, at = copy.source or (None, None)
        to, at = to[which], None if source is None else np.broadcast_to(at, to.shape)[which]
        view[to] = 0 if source is None else source[at]
        for observer in self.observers:
            observer.copied(view, to, source, at, copy.ins)


def _pick(a, sel):
    return a if sel is None or a.size == 1 else a[sel]


def _part(number, which):
    return number if isinstance(number, int) else number[which]


def _of_lanes(table, lanes):
    return table if lanes is None else table[lanes]


def _of(lanes, which):
    return which if lanes is None else lanes[which]


def _all_of(x, m):
    return x.lanes is None and x.mask is None and (m is None or (m.size == 1 and bool(m[0])) or bool(m.all()))


def _lanes(x, m):
    lanes = np.arange(x.n) if x.lanes is None else x.lanes
    m = x.mask if m is None else m
    return lanes if m is None else lanes[np.broadcast_to(m, lanes.shape)]
