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
    target: tuple  # (flat array, elements)
    source: tuple | None  # the same; None writes zeros
    ins: object


class AsyncCopies:
    """What the lanes of a chunk have issued, and how many groups each has committed."""

    def __init__(self, n, random, observers):
        self.n = n
        self.observers = observers
        self.random = random  # None: always late
        self.pending = []
        self.committed = 0  # an int while all lanes agree, else an array

    def committed_by(self, lanes):
        return (
            self.committed
            if isinstance(self.committed, int)
            else self.committed
            if lanes is None
            else self.committed[lanes]
        )

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
        copy = _Copy(lanes, self.committed_by(lanes), target, source, ins)
        if self.random is not None and self.random.random() < 0.5:
            self.perform(copy, slice(None))
        else:
            self.pending.append(copy)

    def commit(self, x, m):
        if _all_of(x, m):
            self.committed = self.committed + 1
            return
        self.spread()
        self.committed = self.committed.copy()
        self.committed[_lanes(x, m)] += 1

    def wait(self, x, m, allowed):
        """Perform the copies of all but the `allowed` latest groups; None: of everything issued."""
        if not self.pending:
            return
        waits = None
        if not _all_of(x, m):
            waits = np.zeros(self.n, bool)
            waits[_lanes(x, m)] = True
        x.changes += 1
        still = []
        for copy in self.pending:
            last = None if allowed is None else self.committed_by(copy.lanes) - allowed
            due = np.True_ if last is None else np.less(copy.group, last)
            if waits is not None:
                due = due & (waits if copy.lanes is None else waits[copy.lanes])
            if np.all(due):
                self.perform(copy, slice(None))
            elif np.any(due):
                lanes = np.arange(self.n) if copy.lanes is None else copy.lanes
                due = np.broadcast_to(due, lanes.shape)
                self.perform(copy, np.flatnonzero(due))
                rest = np.flatnonzero(~due)
                group = copy.group if isinstance(copy.group, int) else copy.group[rest]
                target = (copy.target[0], copy.target[1][rest])
                source = copy.source and (copy.source[0], copy.source[1][rest])
                still.append(_Copy(lanes[rest], group, target, source, copy.ins))
            else:
                still.append(copy)
        self.pending = still

    def spread(self):
        if isinstance(self.committed, int):
            self.committed = np.full(self.n, self.committed, np.int64)

    def perform(self, copy, which):
        view, to = copy.target
        source, at = copy.source or (None, None)
        to, at = to[which], None if source is None else np.broadcast_to(at, to.shape)[which]
        view[to] = 0 if source is None else source[at]
        for observer in self.observers:
            observer.copied(view, to, source, at, copy.ins)


def _pick(a, sel):
    return a if sel is None or a.size == 1 else a[sel]


def _of(lanes, which):
    return which if lanes is None else lanes[which]


def _all_of(x, m):
    return x.lanes is None and x.mask is None and (m is None or (m.size == 1 and bool(m[0])) or bool(m.all()))


def _lanes(x, m):
    lanes = np.arange(x.n) if x.lanes is None else x.lanes
    m = x.mask if m is None else m
    return lanes if m is None else lanes[np.broadcast_to(m, lanes.shape)]
