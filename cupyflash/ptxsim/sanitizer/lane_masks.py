"""Member masks of warp instructions: who runs one must be a member."""

import numpy as np

from ..observer import Observer
from ..warp import is_member


class LaneMasks(Observer):
    """That a member is not here, or turned off by a predicate, is found by the instruction itself; what shfl reads of
    a lane that does not take part is an undefined value (undefined.py)."""

    def __init__(self, checker):
        self.checker = checker

    def exchange(self, x, m, members, ins):
        bad = np.broadcast_to(True if m is None else m, x.n) & ~is_member(members, x.lane)
        if bad.any():
            lane = int(np.argmax(bad))
            message = f"{x.thread(lane)}: is not in its own member mask"
            self.checker.found("member mask", ins, message, count=int(np.count_nonzero(bad)))
