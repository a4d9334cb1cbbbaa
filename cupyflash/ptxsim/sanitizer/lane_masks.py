"""Member masks of warp instructions: who runs one must be a member, and what shfl reads as well."""

import numpy as np

from ..observer import Observer
from ..warp import shuffle_source


class LaneMasks(Observer):
    """That a member is not here, or turned off by a predicate, is found by the instruction itself."""

    def __init__(self, checker):
        self.checker = checker

    def exchange(self, x, m, members, source, ins):
        named = (np.broadcast_to(members, x.n) >> x.lane) & np.uint32(1) != 0
        active = np.broadcast_to(True if m is None else m, x.n)
        self.report(x, active & ~named, "is not in its own member mask", ins)
        if source is not None:
            lane, inside = shuffle_source(x, *source)
            outside = (np.broadcast_to(members, x.n) >> (lane % 32).astype(np.uint32)) & np.uint32(1) == 0
            self.report(x, active & named & inside & outside, "reads a lane that is not in its member mask", ins)

    def report(self, x, bad, what, ins):
        if bad.any():
            lane = int(np.argmax(bad))
            self.checker.found("member mask", ins, f"{x.thread(lane)}: {what}", count=int(np.count_nonzero(bad)))
