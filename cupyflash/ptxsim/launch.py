"""One launch: its memory and parameters, and the grid in chunks of blocks."""

import numpy as np

from .cooperative import workspace
from .errors import SimulationError
from .group import WARP
from .machine import Chunk
from .memory import Buffer, GlobalMemory
from .profile import Counters
from .program import lane_values
from .sanitizer import Checker
from .settings import current
from .workers import run_in_processes

_UNDEFINED = {"?": False, "u1": 0xFF, "u2": 0xFFFF, "u4": 0xFFFFFFFF, "u8": 2**64 - 1, "f4": np.nan, "f8": np.nan}
_NEAR = 1 << 20  # bytes

_CHUNK_LANES = 4096
_RESIDENT_LANES = 1 << 18  # about the threads that a GPU holds at once
_LOCAL_BYTES = 1 << 30  # of all lanes together, that stacks may take


class Launch:
    """A kernel with everything it was called with. `arrays`: what it may touch, by name."""

    def __init__(self, program, grid, block, parameters, arrays, shared_bytes, profile, report):
        self.program, self.grid, self.block = program, grid, block
        self.settings = current()
        self.shared_bytes, self.shared_pitch = shared_bytes, program.shared_pitch(shared_bytes)
        self.profile, self.report = profile, report
        self.counters = None if profile is None else Counters(self)
        self.threads = block[0] * block[1] * block[2]
        self.blocks = grid[0] * grid[1] * grid[2]
        self.param = _filled("param", parameters)
        self.const = _filled("const", program.module.constant_memory)
        self.arrays = arrays | program.module.reachable
        if program.module.constants:
            self.arrays["__constant__ variables"] = constants = program.module.constant_memory.view()
            constants.flags.writeable = False
        self.workspace = None
        if program.module.raw.enable_cooperative_groups:
            self.arrays["the grid's workspace"] = self.workspace = workspace()
        self.global_ = GlobalMemory([_extent(a) for a in self.arrays.values() if a.size])
        self.checker = None if report is None else Checker(report, self)
        self.observers = [observer for observer in (self.counters, self.checker) if observer is not None]

    def run(self):
        """Simulate all blocks. A fault ends the launch; for a checker, as one more finding."""
        try:
            self.run_chunks()
        except SimulationError as error:
            if self.profile is not None:
                self.profile.add_stopped(self)
            if self.checker is None:
                raise
            self.checker.stopped(error)

    def run_chunks(self):
        """Chunk by chunk, in processes if there may be several."""
        most = _LOCAL_BYTES // max(self.program.local_bytes, 1)
        lanes = self.settings.chunk_lanes or min(most, _RESIDENT_LANES if self.program.awaits_blocks else _CHUNK_LANES)
        per_chunk = max(1, lanes // (-(-self.threads // WARP) * WARP)) if self.workspace is None else self.blocks
        chunks = [(first, min(per_chunk, self.blocks - first)) for first in range(0, self.blocks, per_chunk)]
        processes = 1 if self.observers or self.program.communicates else min(self.settings.workers, len(chunks))
        if processes > 1:
            run_in_processes(self, chunks, processes)
        else:
            self.run_share(chunks, self.settings.progress)
        if self.profile is not None:
            self.profile.add(self)

    def run_share(self, chunks, progress):
        """Some chunks, one after another."""
        for first, count in chunks:
            Chunk(self, first, count).run()
            if progress is not None:
                progress(first + count, self.blocks)

    def initial_registers(self, chunk):
        """Undefined contents are all ones; special registers follow the ordinary ones."""
        from .translate import KEPT

        undefined = {kind: np.array([value], kind) for kind, value in _UNDEFINED.items()}
        registers = [undefined[KEPT[r.type]] for r in self.program.function.registers]
        registers += [lane_values(name, chunk) for name in self.program.specials]
        return registers

    def thread_of(self, thread):
        x, y, _ = self.block
        return thread % x, thread // x % y, thread // (x * y)

    def describe(self, lane):
        """A thread and its block in words, by its number among all lanes of the launch."""
        block, thread = divmod(lane, -(-self.threads // WARP) * WARP)
        return f"thread {self.thread_of(thread)} of block {self.block_of(block)}"

    def place(self, address):
        """A place in global memory in words."""
        for name, array in self.arrays.items():
            low, high, _ = _extent(array)
            if low <= address < high:
                if not array.flags.c_contiguous or array.ndim == 0:
                    return f"{name} at byte {address - low}"
                element = np.unravel_index((address - low) // array.itemsize, array.shape)
                return f"{name}[{', '.join(map(str, element))}]"
        return f"global memory at 0x{address:x}"

    def near(self, address):
        """Which array an address outside all of them just misses, in words; empty if none."""
        misses = []
        for name, array in self.arrays.items():
            low, high, _ = _extent(array)
            size = f"{name} ({high - low:,} bytes)"
            misses.append((max(low - address, address - high), address >= low, size))
        distance, behind, name = min(misses, default=(_NEAR, False, ""))
        if distance >= _NEAR:
            return ""
        if distance < 0:
            return f", across the end of {name}"
        if distance == 0:
            return f", just past the end of {name}"
        return f", {distance:,} bytes {'past the end' if behind else 'before the start'} of {name}"

    def block_of(self, block):
        x, y, _ = self.grid
        return block % x, block // x % y, block // (x * y)


def _filled(name, data):
    space = Buffer(name, len(data), 1, fill=0, writable=False)
    space.views[1][: len(data)] = np.frombuffer(data, np.uint8)
    return space


def _extent(array):
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high, array.flags.writeable
