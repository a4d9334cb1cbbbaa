"""Counters of what kernels do: `with profile() as p:` around launches, then `p.kernels` and their `lines`.

How each counter counts. Everything is counted for the kernel and for the line of CUDA C++ that an instruction
comes from; with inlined functions that is the innermost line.

Instructions. A PTX instruction counts once for each warp in which a lane executes its basic block, also where a guard
(`@p`) switches it off: the warp issues it all the same. `lane_instructions` adds up those lanes, and
`predicated_off` how many of them a guard switched off. `instructions` counts by class, `opcodes` by opcode and type.

Branches. A conditional branch, exit or indexed branch counts once for each warp that comes to it, and is divergent
if the warp's active lanes go different ways.

FLOPs. `flops`: an addition, subtraction or multiplication is one operation of a lane, a fused multiply-add two, of a
packed pair twice as many; lanes that a guard switches off have none; divisions, roots and special functions are not
counted here. `mma_flops`: 2 m n k for each warp. (mma and ldmatrix count in full under a guard.)

Global memory. A request is one load or store of one warp in which a lane acts. It moves the `bytes` of its lanes and
touches `sectors`, distinct ones of 32 bytes; `ideal_sectors` would hold its distinct bytes if they lay together. The
`distinct` sectors of a launch are counted once however many warps ask for them: what a perfect cache would have to
read or write. A line's are those that it touches itself, so those of lines add up to more than those of the kernel.
Where malloc has put an array does not matter: memory counts as beginning at a multiple of 256 bytes, as on a GPU. An
array's memory is that of its last `.base` that is a NumPy array, its own without one; a view may begin further on.
`block_load_sectors` are the distinct sectors that each thread block loads, added up: what a perfect cache of each
block would have to read.

Shared memory. An access of 4 bytes or less a lane is one phase of 32 lanes, of 8 bytes two of 16, of 16 bytes four of
8; ldmatrix and stmatrix have one for each matrix. A phase takes as many wavefronts as one bank has distinct words of
4 bytes; one for each phase in which a lane acts is ideal.

cp.async is a global load and a shared store; zeros that it fills in are not loaded.

Local memory. Bytes of loads and stores to a thread's own arrays, not the parameters of calls; PTX knows no spills.

Atomics. `atomics` are warp instructions with an acting lane, `atomic_lanes` their lanes, and `atomic_passes` add up the
most lanes that have one address, which must take turns. They are neither loads nor stores; the sectors
that they touch are `global_atomic_sectors`.

Barriers. Once for each thread block that a barrier lets go on, on the line where its first thread waits.

Beside what it counts, a KernelProfile answers when asked: its `resources` and `occupancy` (NVRTC assembles the code for
that), the `lower_bound` of its cycles on a device (`cupyflash.ptxsim.cost_model`), and `to_html`, `to_png`, `figure`,
which show the source with what each line costs.

How blocks are grouped and scheduled does not change a count, unless the kernel itself does something else, as one that
polls memory.
"""

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
        One for each name, in order of the first launch.
    """

    def __init__(self):
        self._tallies = {}

    @property
    def kernels(self):
        return [tally.kernel for tally in self._tallies.values()]

    def __str__(self):
        return "\n\n".join(str(kernel) for kernel in self.kernels)

    def line_table(self, count=10, by="warp_instructions"):
        """Of each kernel, the `count` source lines that have most of a counter, as text."""
        return "\n\n".join(kernel.line_table(count, by) for kernel in self.kernels)

    def as_dict(self):
        """Counters of every kernel, by its name: numbers, strings, lists and dicts."""
        return {kernel.name: kernel.as_dict() for kernel in self.kernels}

    def to_json(self, indent=None):
        """`as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def add(self, launch):
        """Add one launch that has come to its end."""
        self._tallies.setdefault(launch.program.name, Tally(launch.program.name)).add(launch)


_current = contextvars.ContextVar("ptxsim_profile", default=None)


def current_profile():
    """The Profile that launches of this thread or task add to, or None."""
    return _current.get()


@contextlib.contextmanager
def profile():
    """Count what kernels do within the block.

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
