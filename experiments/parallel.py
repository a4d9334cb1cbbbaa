"""Cases of an experiment, a process per core, with progress."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm


def measure_all(
    measure: Callable[[Any], Any], cases: Iterable[Any], *, work: Callable[[Any], float] = lambda case: 0, unit="case"
) -> list[Any]:
    """``measure(case)`` of each case, in the order of the cases; those with the most ``work`` are begun first."""
    cases = list(cases)
    order = sorted(range(len(cases)), key=lambda index: work(cases[index]), reverse=True)
    done: dict[int, Any] = {}
    silent = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}  # Ctrl-C: no tracebacks
    with ProcessPoolExecutor(os.cpu_count(), **silent) as pool, tqdm(total=len(cases), unit=unit, smoothing=0) as bar:
        waiting = {pool.submit(measure, cases[index]): index for index in order}
        for future in as_completed(waiting):
            done[waiting[future]] = future.result()
            bar.update()
    return [done[index] for index in range(len(cases))]
