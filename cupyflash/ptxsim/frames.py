"""What each call of a function has anew: its registers, and in local memory its parameters and variables.

The frame of a function that needs a stack begins where its caller's ends, with the parameters: the caller stores there
what it passes, and loads what is returned. A register of each function holds where its frame begins.
"""

import dataclasses

from .syntax import Function, Register, Variable

STACK_BYTES = 16384  # of the frames of one lane, where functions call themselves; a GPU's first limit is 1024
_SLOT = 16


@dataclasses.dataclass(slots=True, eq=False)
class Frame:
    """The frame of a function or, without `register`, of the kernel.

    `registers`, `variables`: what stands here for those of the functions whose code is part of this one's; the kernel's
    variables are its own. `passed`: what each of its calls passes; `callees`: what they call; `position`, `entry`: the
    instruction and the block where its code begins.
    """

    function: Function
    register: Register | None
    recursive: bool
    registers: dict = dataclasses.field(default_factory=dict)  # name of a function -> number of its first register
    variables: dict = dataclasses.field(default_factory=dict)
    passed: list = dataclasses.field(default_factory=list)
    callees: set = dataclasses.field(default_factory=set)
    position: int = 0
    entry: int = 0
    end: Variable = None  # of no bytes, behind all others
    start: int = 0  # where the variables begin, behind the parameters
    reach: int = 0  # bytes up to the end of what it passes

    def __post_init__(self):
        self.end = Variable("the next frame", "local", 0, _SLOT, frame=self.register)

    @property
    def parameters(self):
        """The function's parameters, as they are in this frame."""
        return [self.variables[p] for p in self.function.parameters] if self.register else []


def lay_out(frames, variables, places) -> int:
    """Give the variables of frames their places, counted from the begin of each frame; returns the bytes of a lane.
    `variables`: those of the kernel itself.

    Raises NotImplementedError for a variable that two calls pass at different places.
    """
    for frame in frames:
        passed = {variable for call in frame.passed for variable in call}
        end = frame.start = _place_parameters(frame.parameters, 0, places)
        for variable in frame.variables.values() if frame.register else variables:
            if variable not in passed and variable not in places:
                places[variable] = -(-end // variable.align) * variable.align
                end = places[variable] + variable.size
        places[frame.end] = frame.reach = -(-end // _SLOT) * _SLOT
        for call in frame.passed:
            frame.reach = max(frame.reach, _place_parameters(call, places[frame.end], places))
    if any(frame.recursive for frame in frames):
        return places[frames[0].end] + STACK_BYTES
    by_name = {frame.function.name: frame for frame in frames}
    return _deepest(frames[0], by_name, places)


def _place_parameters(variables, start, places):
    """Place parameters by their sizes alone: a caller knows no more of them. Returns where they end."""
    for variable in variables:
        step = min(1 << max(variable.size - 1, 0).bit_length(), _SLOT)
        place = -(-start // step) * step
        if places.setdefault(variable, place) != place:
            raise NotImplementedError(f"{variable.name} is passed by two calls that differ in their parameters")
        start = place + variable.size
    return start


def _deepest(frame, by_name, places):
    below = (places[frame.end] + _deepest(by_name[name], by_name, places) for name in frame.callees)
    return max([frame.reach, *below])
