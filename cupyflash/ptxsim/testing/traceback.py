"""Where in a project a launch has failed, without the way that it took in the simulator."""

import types

_SIMULATOR = __name__.removesuffix(".testing.traceback")


def without_the_simulator(traceback):
    """The frames of all other modules; code that a kernel has been translated to is of no module."""
    entries = []
    while traceback is not None:
        if not traceback.tb_frame.f_globals.get("__name__", _SIMULATOR).startswith(_SIMULATOR):
            entries.append(traceback)
        traceback = traceback.tb_next
    kept = None
    for entry in reversed(entries):
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
