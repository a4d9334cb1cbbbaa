"""``python -m cupyflash demo``: what the library does, on real inputs, in one screen.

The parts are usable on their own: real activations, counted traffic, the online softmax in NumPy, a planted fault.
"""

from __future__ import annotations

import time

from cupyflash.demo import accuracy, online_softmax, planted_fault, traffic


def run(device) -> None:
    """Print the four sections; ``device`` computes the first, the others are the simulator's."""
    start = time.perf_counter()
    for section in (accuracy.report(device), traffic.report(), online_softmax.report(), planted_fault.report()):
        for line in section:
            print(line, flush=True)
    print(f"\nAll of it took {time.perf_counter() - start:.0f} s.")
