"""How long does the host take for a call, launches on a GPU included? ``python -m experiments.gpu.launches``

The calls of ``host_time``, whose figures leave launches and allocations out, and of all that is installed the first two
shapes of them. Wall time from the first of many calls in a row to the return of the last, while the GPU is still busy
or not, and to the end of its work: where both are the same, the GPU has waited for the host. A round has fewer launches
than the GPU's queue holds; ``least_us`` is the least of several rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments import host_time
from experiments.experiment import Row
from experiments.gpu import tables
from experiments.gpu.contenders import OURS, contenders
from experiments.gpu.problems import BACKWARD, FORWARD, Problem, Shape
from experiments.gpu.speed import default_dtype
from experiments.gpu.stopwatch import reason

CALLS, ROUNDS = 100, 7  # at most five launches each: a queue holds about a thousand
SHAPES = {FORWARD: (2, 32, 8, 1, 4096, 128), BACKWARD: (2, 8, 8, 512, 512, 64)}


def measure(cupy: Any, dtype: str, times: int = CALLS, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """The rows of our calls, one by one, and those of each contender."""
    synchronize = cupy.cuda.Device().synchronize

    def array(*shape, dtype="float16"):
        return cupy.asarray(np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype))

    for (function, what), call in host_time.calls(array).items():
        direction = FORWARD if function == host_time.FORWARD else BACKWARD
        yield [_row(OURS, direction, what, "float16", lambda call=call: call, synchronize, times, rounds)]
    for direction, sizes in SHAPES.items():
        problem = Problem(Shape(*sizes, dtype=dtype), cupy)
        for name, contender in contenders().items():

            def prepare(contender=contender, problem=problem, direction=direction):
                problem.load(contender.package)
                return contender.prepare(problem, direction)

            yield [_row(name, direction, "beside others", dtype, prepare, synchronize, times, rounds)]


def _row(
    name: str,
    direction: str,
    what: str,
    dtype: str,
    prepare: Callable[[], Callable[[], Any]],
    synchronize: Callable[[], None],
    times: int,
    rounds: int,
) -> Row:
    try:
        (returned, done), error = host_microseconds(prepare(), synchronize, times, rounds), ""
    except Exception as failure:  # no kernel for the shape is a result
        returned, done, error = None, None, reason(failure)
    return {
        "what": name,
        "direction": direction,
        "call": what,
        "dtype": dtype,
        "least_us": returned,
        "until_done_us": done,
        "error": error,
    }


def host_microseconds(
    call: Callable[[], Any], synchronize: Callable[[], None], times: int, rounds: int
) -> tuple[float, float]:
    """Of one call: until calls in a row have returned, and until the GPU is done with them; each the least."""
    call()
    returned, done = [], []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        returned.append(time.perf_counter() - start)
        synchronize()
        done.append(time.perf_counter() - start)
    return 1e6 * min(returned) / times, 1e6 * min(done) / times


def summary(rows: Sequence[Row]) -> str:
    """A line for each call."""
    return "\n".join(
        f"{row['direction']}, {row['call']}, {row['what']}: "
        + (row["error"] or f"{row['least_us']:.0f} us on the host, {row['until_done_us']:.0f} us in all")
        for row in rows
    )


def main(arguments: list[str] | None = None) -> int:
    """Write a row for each call."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.launches", description=__doc__.splitlines()[0])
    return tables.main(
        parser, arguments, lambda args: "launches.csv", lambda cupy, args: measure(cupy, default_dtype()), summary
    )


if __name__ == "__main__":
    sys.exit(main())
