"""Counters of what kernels do: `with profile() as p:` around launches, then `p.kernels` and their `lines`.

What is counted, and how, is written at `KernelProfile`.
"""

import collections
import contextlib
import contextvars
import json

from .counters import Counters
from .results import KernelProfile, LaunchShape, LineProfile
from .tally import Tally

__all__ = ["Counters", "KernelProfile", "LaunchShape", "LineProfile", "Profile", "current_profile", "profile"]


class Profile:
    """What kernels did within one `profile()` block.

    Attributes
    ----------
    kernels : list of KernelProfile
        One for each name, source and options, in order of the first launch.
    stopped : dict
        Kernel's name -> launches that a fault stopped, of which nothing is counted.
    """

    def __init__(self):
        self._tallies = {}
        self.stopped = {}

    @property
    def kernels(self):
        return [tally.kernel for tally in self._tallies.values()]

    def __repr__(self):
        return f"Profile({', '.join(map(repr, self.kernels)) or 'no launches'})"

    def __str__(self):
        stopped = [f"{name}: launches that a fault stopped, not counted: {n:,}" for name, n in self.stopped.items()]
        return "\n\n".join([*map(str, self.kernels), *stopped])

    def line_table(self, count=10, by="warp_instructions"):
        """Of each kernel, the `count` source lines that have most of a counter, as text."""
        return "\n\n".join(kernel.line_table(count, by) for kernel in self.kernels)

    def as_dict(self):
        """Counters of every kernel, by its name: numbers, strings, lists and dicts.

        The second kernel of a name, of another module, is under "name (2)".
        """
        found, seen = {}, collections.Counter()
        for kernel in self.kernels:
            seen[kernel.name] += 1
            number = seen[kernel.name]
            found[kernel.name if number == 1 else f"{kernel.name} ({number})"] = kernel.as_dict()
        return found

    def to_json(self, indent=None):
        """`as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def add(self, launch):
        """Add one launch that has come to its end."""
        name, module = launch.program.name, launch.program.module.raw
        key = (name, module.code, module.file_path, module.options)
        self._tallies.setdefault(key, Tally(name)).add(launch)

    def add_stopped(self, launch):
        """Say that a fault has stopped a launch."""
        name = launch.program.name
        self.stopped[name] = self.stopped.get(name, 0) + 1


_current = contextvars.ContextVar("ptxsim_profile", default=None)


def current_profile():
    """The Profile that launches of this thread or task add to, or None."""
    return _current.get()


@contextlib.contextmanager
def profile():
    """Count what kernels do within the block. How each counter counts: see `KernelProfile`.

    Yields
    ------
    Profile
        Its `kernels` hold a `KernelProfile` for each kernel that was launched, whose `lines` have the same counters
        for each source line; printing it shows them as tables. A launch counts once it has come to its end.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import ptxsim
    >>> source = 'extern "C" __global__ void copy(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    >>> x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    >>> with profile() as counters:
    ...     ptxsim.RawModule(code=source).get_function("copy")((1,), (64,), (x, y))
    >>> counters.kernels[0].global_load_bytes
    256
    """
    chosen = Profile()
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
