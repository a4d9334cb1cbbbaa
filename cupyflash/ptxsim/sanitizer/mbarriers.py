"""mbarrier objects that are not used as the ISA has it: as data, initialised twice, or with arrivals in excess.

That an operation finds no object, or a count out of its range, ends the launch: see `ptxsim.mbarrier`. Arrivals in
excess count for the next phase; what tells them from its own is that these come after somebody has waited for the
phase before.
"""

import numpy as np

from ..observer import Observer
from ..tensor_core import in_shared
from .places import Place, positions


class MbarrierUse(Observer):
    """Follows what threads do to the objects of a chunk, and to their bytes."""

    def __init__(self, checker):
        self.checker = checker

    def begin(self, chunk):
        self.chunk = chunk
        self.made = {}  # object -> its mbarrier.init
        self.is_made = np.zeros(chunk.shared.views[8].size, bool)
        self.shared = {id(view) for view in chunk.shared.views.values()}
        self.unseen = set()  # objects whose last phase nobody has waited for

    # -- as an mbarrier --------------------------------------------------------------------------------
    def mbarrier_made(self, lanes, at, ins):
        if at in self.made or lanes.size > 1:
            again = self.made.get(at, ins)
            self.report("mbarrier reuse", lanes[-1:], "initialises an mbarrier, which is one already", ins, again)
        self.made[at] = ins
        self.is_made[at] = True

    def mbarrier_ended(self, lanes, at, ins):
        del self.made[at]
        self.is_made[at] = False
        self.unseen.discard(at)

    def mbarrier_arrived(self, lanes, at, ins):
        if at in self.unseen:
            what = "arrives at an mbarrier, of which nobody has waited for the phase before"
            self.report("mbarrier arrival", lanes, what, ins, self.made[at])

    def mbarrier_completed(self, lanes, at, ins):
        self.unseen.add(at)

    def mbarrier_passed(self, lanes, at, ins):
        self.unseen.discard(at)

    # -- as data -----------------------------------------------------------------------------------------
    def load(self, x, m, space, address, size, ins):
        self.access(x, m, space, address, size, False, ins)

    def store(self, x, m, space, address, size, values, ins):
        self.access(x, m, space, address, size, True, ins)

    def atomic(self, x, m, space, address, size, ins):
        self.access(x, m, space, address, size, True, ins)

    def copy(self, x, m, address, size, shared, amount, ins):
        shared = in_shared(shared) if shared.dtype == np.uint64 else shared
        self.access(x, m, "shared", shared, size, True, ins)

    def bulk_copy(self, x, transfer):
        for rows, (to, index), _ in transfer.parts:
            lanes = transfer.lanes[rows]
            self.touch([Place(to, index, positions(x)[lanes], lanes, 16, 0)], transfer.ins)

    def matrix_load(self, x, address, count, ins):
        self.touch(self.checker.locate_rows(x, address, count, False, ins), ins)

    def matrix_store(self, x, address, count, ins):
        self.touch(self.checker.locate_rows(x, address, count, True, ins), ins)

    def access(self, x, m, space, address, size, write, ins):
        if self.made and space in ("shared", "generic"):
            self.touch(self.checker.locate(x, m, space, address, size, write, ins), ins)

    def touch(self, places, ins):
        for place in places:
            if id(place.view) in self.shared:
                objects = np.broadcast_to(place.index, place.lanes.shape) * place.size // 8
                if place.size == 16:  # of which the first half comes first
                    objects = np.where(self.is_made[objects], objects, objects + 1)
                hit = self.is_made[objects]
                if hit.any():
                    first = self.made[int(objects[np.argmax(hit)])]
                    self.report("mbarrier reuse", place.lanes[hit], "accesses the bytes of an mbarrier", ins, first)

    def report(self, kind, lanes, what, ins, made):
        message = f"{self.chunk.describe(int(lanes[0]))}: {what}"
        self.checker.found(kind, ins, message, made, lanes.size)
