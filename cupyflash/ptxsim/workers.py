"""The chunks of a launch spread over processes, with the results of one.

Each process is forked from this one, runs consecutive chunks on its copy of memory, and leaves all writable memory in
pages that it shares with this one, which then takes what has changed, process by process in the order of the blocks.
So the outcome is that of one process unless a block reads what another writes in the same launch, or two blocks write
different values to one byte: what a GPU leaves undefined, too.
"""

import contextlib
import io
import itertools
import mmap
import os
import pickle
import signal
import sys
import warnings

import numpy as np

from .errors import SimulationError
from .flow import POLLING_MODIFIERS

AVAILABLE = sys.platform == "linux"  # elsewhere the libraries that NumPy calls do not survive a fork
_ORDERED_SCOPES = {"gl", "sys", "gpu", "cluster"}


def communicates(function):
    """Whether blocks of a kernel may work together: atomics, fences, or accesses meant for other blocks to see."""
    return any(_communicates(i) for i in function.code)


def _communicates(i):
    modifiers = set(i.modifiers)
    if i.opcode in ("fence", "membar"):
        return not _ORDERED_SCOPES.isdisjoint(modifiers)
    if i.opcode in ("atom", "red"):
        return "shared" not in modifiers and "shared::cta" not in modifiers
    if i.opcode in ("ld", "st"):
        return not (POLLING_MODIFIERS | {"release"}).isdisjoint(modifiers) and modifiers.isdisjoint(("shared", "local"))
    return i.opcode == "nanosleep"


def run_in_processes(launch, chunks, count):
    """Run all chunks, the first of them here."""
    edges = np.linspace(0, len(chunks), count + 1).astype(int).tolist()
    shares = [chunks[start:stop] for start, stop in itertools.pairwise(edges)]
    for block in launch.program.blocks:
        if block.run is None:
            launch.program.translate(block)
    segments = [s.views[1] for s in launch.global_.segments if s.writable]
    before = [data.copy() for data in segments]
    children = []
    try:
        for share in shares[1:]:
            children.append(_Child(launch, share, segments))
        launch.run_share(shares[0], launch.settings.progress)
        for child in children:
            child.finish(segments, before)
            if launch.settings.progress is not None:
                launch.settings.progress(sum(child.share[-1]), launch.blocks)
    finally:
        for child in children:
            child.end()


class _Child:
    """A process that runs a share of the chunks."""

    def __init__(self, launch, share, segments):
        self.share = share
        self.pages = mmap.mmap(-1, max(sum(data.size for data in segments), 1))
        read, write = os.pipe()
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: BLAS ends its own before a fork
            self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(read)
                self.work(launch, segments, write)
            finally:
                os._exit(0)
        os.close(write)
        self.pipe = os.fdopen(read, "rb")

    def work(self, launch, segments, write):
        printed, failure = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(printed):
                launch.run_share(self.share, None)
        except BaseException as error:
            failure = error
        for shared, data in zip(self.parts(segments), segments, strict=True):
            shared[:] = data
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps((printed.getvalue(), failure)))

    def parts(self, segments):
        """The shared pages, divided like the segments."""
        whole = np.frombuffer(self.pages, np.uint8)
        edges = np.cumsum([0, *(data.size for data in segments)]).tolist()
        return [whole[start:stop] for start, stop in itertools.pairwise(edges)]

    def finish(self, segments, before):
        """Wait, and do here what the process has done: its writes, its output, its exception."""
        told = self.pipe.read()
        if not told:
            raise SimulationError(f"a worker process ended before its blocks {self.share[0][0]} and up were done")
        printed, failure = pickle.loads(told)
        for shared, data, old in zip(self.parts(segments), segments, before, strict=True):
            changed = np.flatnonzero(shared != old)
            data[changed] = shared[changed]
        sys.stdout.write(printed)
        if failure is not None:
            raise failure

    def end(self):
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, nobody has to wait
            os.waitpid(self.pid, 0)
