"""Cases of an experiment, a process per core or on a Dask cluster, with progress."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from distributed import Client

SECONDS_TO_CONNECT = 10
_cluster: ContextVar[Client | None] = ContextVar("cluster", default=None)


def measure_all(
    measure: Callable[[Any], Any], cases: Iterable[Any], *, work: Callable[[Any], float] = lambda case: 0, unit="case"
) -> list[Any]:
    """``measure(case)`` of each case, in the order of the cases; those with the most ``work`` are begun first."""
    cases = list(cases)
    order = sorted(range(len(cases)), key=lambda index: work(cases[index]), reverse=True)
    measured_by = _by_processes if _cluster.get() is None else _by_workers
    measured = measured_by(measure, [cases[index] for index in order], unit)
    return [result for _, result in sorted(zip(order, measured, strict=True), key=lambda pair: pair[0])]


@contextlib.contextmanager
def on_dask(address: str) -> Iterator[None]:
    """Have cases within measured by the workers of the Dask scheduler at this address; RuntimeError if it has none."""
    try:
        from distributed import Client
    except ImportError as error:
        raise RuntimeError('no distributed: pip install "cupyflash[dask]"') from error
    try:
        client = Client(address, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"no scheduler answers ({error})") from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise RuntimeError("the scheduler has no workers")
        token = _cluster.set(client)
        try:
            yield
        finally:
            _cluster.reset(token)


def everywhere(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function`` returns here and, on a cluster, in each worker; RuntimeError where one cannot call it."""
    here, client = function(*arguments), _cluster.get()
    if client is None:
        return [here]
    try:
        return [here, *client.run(function, *arguments).values()]
    except ImportError as error:
        raise RuntimeError(f"a worker cannot import what it is to run ({error}); start it in this folder") from error


def _by_processes(measure: Callable[[Any], Any], cases: Sequence[Any], unit: str) -> list[Any]:
    silent = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}  # Ctrl-C: no tracebacks
    with ProcessPoolExecutor(os.cpu_count(), **silent) as pool, tqdm(total=len(cases), unit=unit, smoothing=0) as bar:
        futures = [pool.submit(measure, case) for case in cases]
        for future in as_completed(futures):
            future.result()
            bar.update()
    return [future.result() for future in futures]


def _by_workers(measure: Callable[[Any], Any], cases: Sequence[Any], unit: str) -> list[Any]:
    from distributed import progress

    client = _cluster.get()
    futures = [client.submit(measure, case, pure=False, priority=-rank) for rank, case in enumerate(cases)]
    progress(futures, notebook=False)
    return client.gather(futures)
