"""Times of calls on a GPU: by events, after a flush of the cache, turn by turn, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Call = Callable[[], Any]

WARM_UP, ROUNDS = 2, 10
MOST_MS = 300  # of all rounds of one call: a slow one has fewer
LEAST_FLUSH = 64 * 2**20
_HEAD_START = 3_000_000  # clock cycles, about 2 ms
_WAIT = """
extern "C" __global__ void wait(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


class Stopwatch:
    """Milliseconds between two events on CuPy's current stream.

    That is the null stream unless one is chosen, as PyTorch's is. Before the first event the GPU overwrites four times
    the size of its L2 cache and waits for about 2 ms: so long has the host for the launches of the call, which is not
    measured.
    """

    def __init__(self, cupy: Any):
        self._cupy = cupy
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self._overwritten = cupy.empty(max(4 * properties["l2CacheSize"], LEAST_FLUSH), np.uint8)
        self._wait = cupy.RawModule(code=_WAIT).get_function("wait")
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def __call__(self, call: Call) -> float:
        self._overwritten.fill(0)
        self._wait((1,), (1,), (np.int64(_HEAD_START),))
        self._start.record()
        call()
        self._stop.record()
        self._stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(self._start, self._stop)


@dataclass(frozen=True)
class Times:
    """Milliseconds of each round, or why there are none."""

    rounds: tuple[float, ...] = ()
    error: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def columns(self) -> dict[str, Any]:
        """Of a table."""
        return {
            "median_ms": self.median,
            "least_ms": min(self.rounds, default=None),
            "most_ms": max(self.rounds, default=None),
            "rounds": len(self.rounds),
            "error": self.error,
        }


def interleaved(milliseconds: Callable[[Call], float], calls: Mapping[str, Call]) -> dict[str, Times]:
    """Every call in each round, so that all see the same clocks and temperatures; one that fails is left out then.

    The first rounds compile and warm up and do not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    errors: dict[str, str] = {}
    for turn in range(WARM_UP + ROUNDS):
        for name, call in calls.items():
            if name in errors or turn >= WARM_UP + rounds_of(taken[name]):
                continue
            try:
                taken[name].append(milliseconds(call))
            except Exception as error:  # out of memory, no kernel for the shape: a result
                errors[name] = reason(error)
    return {
        name: Times(error=errors[name]) if name in errors else Times(tuple(times[WARM_UP:]))
        for name, times in taken.items()
    }


def rounds_of(taken: list[float]) -> int:
    """How many rounds count for a call that took so long until now."""
    if len(taken) < WARM_UP:
        return ROUNDS
    return max(1, min(ROUNDS, int(MOST_MS / max(taken[WARM_UP - 1], 1e-3))))


def reason(error: Exception) -> str:
    """Of a failure, for a cell of a table.

    >>> reason(MemoryError("CUDA out of memory. Tried to allocate 20 GiB")), reason(ValueError("no\\nway"))
    ('out of memory', 'ValueError: no')
    """
    said = f"{type(error).__name__}: {error}"
    if "outofmemory" in said.lower().replace(" ", ""):
        return "out of memory"
    return said.splitlines()[0][:200]
