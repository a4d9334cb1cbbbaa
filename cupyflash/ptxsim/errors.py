"""What a launch can raise, apart from ValueError and TypeError for bad arguments."""


class SimulationError(RuntimeError):
    """A kernel did something undefined; the message names kernel, thread, block and source line.

    For a sanitizer's report, `kind` says what sort of fault it is, `what` what happened, with thread and block,
    `where` the source line, `calls` those that it is inlined at, `lanes` how many threads did it at once.
    """

    kind, what, where, calls, lanes = "undefined behaviour", None, "", (), 1

    def located(self, kind, what, instruction, lanes=1):
        """The same exception, with what a report says of it."""
        self.kind, self.what, self.lanes = kind, what, lanes
        self.where, self.calls = instruction.where, instruction.calls
        return self


class MemoryFault(SimulationError):
    """An access outside its allocation, misaligned, or a write to read-only memory."""


class Deadlock(SimulationError):
    """No thread can go on: barriers that never fill, or loops that wait for what never comes.

    `groups`: for each group of threads that wait together, the kind of wait, what they do, the source line, and
    their number.
    """

    def __init__(self, message, groups=()):
        super().__init__(message)
        self.groups = groups


class CompileError(Exception):
    """NVRTC rejected the source; the text is its log."""

    def __init__(self, log, source, options):
        super().__init__(log)
        self.source = source
        self.options = options

    def __reduce__(self):  # from the process that NVRTC may run in
        return type(self), (str(self), self.source, self.options)


class CompilerMissing(ImportError):
    """There is no NVRTC to compile with, or no CuPy to call it through."""
