"""Findings, and the block of launches that they are collected from."""

import contextlib
import contextvars
import dataclasses
import re

from ..errors import SimulationError

KINDS = (
    "shared race",
    "global race",
    "different values",
    "missing cp.async wait",
    "uninitialised register",
    "uninitialised shared memory",
    "uninitialised local memory",
    "uninitialised global memory",
    "uninitialised value",
    "divergent barrier",
    "mismatched barrier",
    "barrier number",
    "barrier count",
    "member mask",
    "inactive lane",
    "mbarrier arrival",
    "mbarrier reuse",
    "no mbarrier",
    "mbarrier count",
    "out of bounds",
    "misaligned access",
    "read-only memory",
    "deadlock",
    "livelock",
    "trap",
    "undefined behaviour",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One kind of fault at one place of a kernel; further occurrences are counted, not listed.

    Kinds: ``"shared race"``, ``"global race"``, ``"different values"`` (stored to one word), ``"missing cp.async
    wait"``; ``"uninitialised register"``, ``"uninitialised shared memory"``, ``"uninitialised local memory"``,
    ``"uninitialised global memory"``, ``"uninitialised value"`` (of many); ``"divergent barrier"``, ``"mismatched
    barrier"``, ``"barrier number"``, ``"barrier count"``, ``"member mask"``, ``"inactive lane"``, ``"mbarrier
    arrival"`` (in excess), ``"mbarrier reuse"`` (its bytes as data, or initialised again); and what ends a launch:
    ``"no mbarrier"``, ``"mbarrier count"``, ``"out of bounds"``, ``"misaligned access"``, ``"read-only memory"``,
    ``"deadlock"``, ``"livelock"``, ``"trap"``, ``"undefined behaviour"`` (anything else, such as a failed assertion).
    """

    kind: str
    kernel: str
    where: str  # file:line of the CUDA source
    message: str  # what happened there first, with thread and block
    other: str | None = None  # file:line of the access it collides with; of several readers, of the first one
    count: int = 1
    calls: tuple = ()  # file:line of the calls that the code at `where` is inlined at, innermost first
    other_calls: tuple = ()

    @property
    def thread(self):
        """(x, y, z) of the thread that the message begins with, None where it names none."""
        return self._indices("thread")

    @property
    def block(self):
        """(x, y, z) of its block."""
        return self._indices("block")

    def _indices(self, name):
        found = re.search(rf"{name} \((\d+), (\d+), (\d+)\)", self.message)
        return found and tuple(map(int, found.groups()))

    def as_dict(self):
        """All of it by name."""
        return {**dataclasses.asdict(self), "thread": self.thread, "block": self.block}

    def __str__(self):
        again = f" ({self.count} times)" if self.count > 1 else ""
        here, there = _place(self.where, self.calls), self.other and _place(self.other, self.other_calls)
        other = f" and {there}" if there and there != here else ""
        return f"{self.kind}: {self.message}; kernel {self.kernel}, {here}{other}{again}"


def _place(where, calls):
    return " called at ".join((where, *calls))


class Halted(SimulationError):
    """The first finding, where the report is to halt at it."""


class Report:
    """Findings of the launches within one `sanitize()` block, in the order of their first occurrence.

    `bool(report)` says whether there are any, `str(report)` has them one a line, and `report.findings` is their list.
    """

    def __init__(self, halt=False):
        self.halt = halt
        self.ended = []  # names of kernels of which a fault has ended a launch
        self._found = {}

    @property
    def findings(self):
        return list(self._found.values())

    def __bool__(self):
        return bool(self._found)

    def __repr__(self):
        kinds = [finding.kind for finding in self.findings]
        counted = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
        return f"<Report: {', '.join(counted) or 'no findings'}>"

    def __str__(self):
        return "\n".join(map(str, self.findings)) or "no findings"

    def add(self, finding, error=None):
        """Count a finding; raise it, if the report is to halt at the first: as `error` if given."""
        key = dataclasses.replace(finding, message="", count=1)
        known = self._found.get(key)
        self._found[key] = finding if known is None else dataclasses.replace(known, count=known.count + finding.count)
        if self.halt:
            raise error or Halted(str(finding))


_current = contextvars.ContextVar("ptxsim_report", default=None)


def current_report():
    """The Report that launches of this thread or task add to, or None."""
    return _current.get()


@contextlib.contextmanager
def sanitize(*, halt=False):
    """Check launches within the block for undefined behaviour.

    A fault, such as an access out of bounds or a deadlock, ends its launch as it does on a GPU; the call returns
    and the fault is one of the findings. A launch orders everything before it with everything in it.

    Races are looked for between the accesses that were made, whatever the schedule: one run finds those that
    its control flow and its addresses can have. A race needs two threads, one word, at least one write, and no
    barrier, `__syncwarp` or flag (a fence and an atomic, volatile, release or acquire access) between the two.
    Shuffles, votes and `volatile` order no memory: in shared memory a `volatile` variable is a flag only where a loop
    does nothing but wait for it. Stores of equal values are no race between themselves, but with a thread that reads
    the value without having stored it; copies by cp.async from one source to one place are none between themselves,
    but with every reader until all of them are done. Flags are modelled generously: after one,
    all that its writer's block has done before its last fence counts as seen.

    An uninitialised value is followed until something depends on it: an address, a predicate, an operand of an
    atomic, a store to global memory. It may be copied, shuffled, computed with and selected away before that, as tails
    and padding are; of an mma, the rows and columns that it meets are undefined. The finding names the memory that it
    came from and the line that first read it there, through whatever shared or local memory it has gone since. Shared
    and local memory begin undefined, and so do arrays of `ptxsim.empty`. What is used counts as undefined if all of
    its bytes are, for structures have padding; of an operand of an mma, each 16-bit half counts.
    Where the compiler has chosen a value for an undefined variable, as NVRTC often does, nothing is left to be seen.
    What a shuffle reads of a lane that has left, or is not in the member mask, is undefined as well ("inactive lane").

    Structures have padding and words have fields, so copies and bits count generously. A vector, or what one line
    stores side by side, that is copied to global memory as it was loaded is used only where all of it is undefined;
    else its undefined bytes stay so, in arrays of `ptxsim.empty`, until the end of the launch. Bits put into an
    undefined word (`and` then `or`, shifts, `bfi`, `prmt`, `lop3`) make all of it defined; `x & y` is defined where the
    one that is defined is 0. So a member or a component that is missing from such a copy, and a bit-field missing from
    a word with others, are not found. One report may be wrong: padding that a loop which is not unrolled copies to
    global memory word by word looks like data; copy whole structures instead.

    A divergent barrier is one that lanes of a warp meet at different instructions, or that some of them go past to
    code that the others come to after it; lanes that have returned count for nothing. Warps that meet at different
    lines of `__syncthreads` are a mismatched barrier, a warning. A livelock is a loop that has come back to the same
    registers and the same memory; threads that change memory for ever, or count for ever, are not told from work, nor
    is a whole warp that leaves out a barrier and returns from one that does early.

    What cannot be seen: an access that leaves its own variable for another one of the same shared or local
    memory, or its own array for another one that the kernel was given; only the end of the block's shared
    memory, of the thread's local memory and of each stretch of arrays is checked. Nor are atomics that only read
    (`atomicAdd(p, 0)`) held against later stores, nor stores to what a cp.async still reads from. Only launches of
    the thread (or task) that entered the block are checked, not those of threads started in it; the findings of an
    inner `sanitize()` are not among those of the outer one.

    Parameters
    ----------
    halt : bool
        Raise the first finding, a SimulationError, instead of collecting all of them.

    Yields
    ------
    Report
        Its `findings` name kind, kernel, source line, thread and block.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import ptxsim
    >>> source = '''
    ... extern "C" __global__ void turn(const int* x, int* y) {
    ...   __shared__ int s[64];
    ...   s[threadIdx.x] = x[threadIdx.x];
    ...   y[threadIdx.x] = s[63 - threadIdx.x];
    ... }'''
    >>> x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    >>> with ptxsim.sanitize() as report:
    ...     ptxsim.RawModule(code=source).get_function("turn")((1,), (64,), (x, y))
    >>> [(finding.kind, finding.where, finding.other) for finding in report.findings]
    [('shared race', 'kernel.cu:5', 'kernel.cu:4')]
    """
    report = Report(halt)
    token = _current.set(report)
    try:
        yield report
    finally:
        _current.reset(token)
