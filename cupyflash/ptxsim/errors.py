"""What a launch can raise, apart from ValueError and TypeError for bad arguments."""


class SimulationError(RuntimeError):
    """A kernel did something undefined; the message names kernel, thread, block and source line."""


class MemoryFault(SimulationError):
    """An access outside its allocation, misaligned, or a write to read-only memory."""


class Deadlock(SimulationError):
    """No thread can go on: barriers that never fill, or loops that wait for what never comes."""


class CompileError(Exception):
    """NVRTC rejected the source; the text is its log."""

    def __init__(self, log, source, options):
        super().__init__(log)
        self.source = source
        self.options = options


class CompilerMissing(ImportError):
    """There is no NVRTC to compile with, or no CuPy to call it through."""
