"""The observer that tells each check of what a launch does."""

from ..observer import Observer
from .report import Finding

# The checks of a launch: subclasses of Observer, made with the Checker. Each hears of the events that it overrides.
CHECKS = []

_EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Checker(Observer):
    """The checks of one launch."""

    def __init__(self, report, launch):
        self.report, self.launch = report, launch
        self.checks = [check(self) for check in CHECKS]
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
        self.report.add(Finding(kind, name, ins.where, message, other and other.where, count))


def _in_turn(listeners):
    def tell(*event):
        for listener in listeners:
            listener(*event)

    return tell
