"""The observer that tells each check of what a launch does."""

from ..errors import Deadlock
from ..observer import Observer
from .barriers import BarrierUse
from .lane_masks import LaneMasks
from .mbarriers import MbarrierUse
from .places import matrix_rows, places
from .races import Races
from .report import Finding, Halted
from .undefined import Undefined

# The checks of a launch: subclasses of Observer, made with the Checker. Each hears of the events that it overrides.
CHECKS = [Races, Undefined, BarrierUse, LaneMasks]

_EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Checker(Observer):
    """The checks of one launch."""

    def __init__(self, report, launch):
        self.report, self.launch = report, launch
        has_mbarriers = any(i.opcode == "mbarrier" for i in launch.program.function.code)
        self.checks = [check(self) for check in (*CHECKS, *[MbarrierUse] * has_mbarriers)]
        self.last, self.places = (None,) * 4, []
        for event in _EVENTS:
            listeners = [
                getattr(c, event) for c in self.checks if getattr(type(c), event) is not getattr(Observer, event)
            ]
            if len(listeners) == 1:
                setattr(self, event, listeners[0])
            elif listeners:
                setattr(self, event, _in_turn(listeners))

    def found(self, kind, ins, message, other=None, count=1):
        """Report a finding at an instruction; `other`: the instruction that it collides with."""
        name = self.launch.program.name
        there, other_calls = (other.where, other.calls) if other else (None, ())
        self.report.add(Finding(kind, name, ins.where, message, there, count, ins.calls, other_calls))

    def stopped(self, error):
        """A fault has ended the launch: report it; raise it, if the report is to halt."""
        if isinstance(error, Halted):
            raise error
        name = self.launch.program.name
        self.report.ended.append(name)
        itself = (error.kind, error.what, error.where, error.lanes)
        for kind, what, where, threads in error.groups if isinstance(error, Deadlock) else (itself,):
            self.report.add(Finding(kind, name, where, what or str(error), None, threads, error.calls), error)

    def describe(self, lane):
        """A thread and its block, by its number among all lanes of the launch."""
        return self.launch.describe(lane)

    def locate(self, x, m, space, address, size, write, ins):
        """The Places of an access, worked out once for all checks. Raises MemoryFault as the access itself would."""
        group, mask, at, instruction = self.last
        if at is not address or instruction is not ins or group is not x or mask is not m:
            self.places = list(places(x, m, space, address, size, write, ins))
            self.last = x, m, address, ins
        return self.places

    def locate_rows(self, x, address, count, write, ins):
        """The same of ldmatrix and stmatrix: rows of 16 bytes, whose addresses the first 8 * count lanes give."""
        return self.locate(x, matrix_rows(x, count), "shared", address, 16, write, ins)


def _in_turn(listeners):
    def tell(*event):
        for listener in listeners:
            listener(*event)

    return tell
