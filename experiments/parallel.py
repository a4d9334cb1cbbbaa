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
        from distributed.comm import get_address_host_port, parse_address
        from distributed.comm.registry import get_backend
    except ImportError as error:
        raise RuntimeError('no distributed: pip install "cupyflash[dask]"') from error
    try:  # before a client is made, which waits for whatever it is told
        scheme, _ = parse_address(address, strict=True)
        get_backend(scheme)
        if scheme != "inproc":
            get_address_host_port(address, strict=True)
    except ValueError as error:
        raise RuntimeError("not an address; expected one such as tcp://HOST:PORT") from error
    try:
        client = Client(address, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, TypeError, ValueError) as error:
        raise RuntimeError(f"no scheduler answers ({error})") from error
    with client, client.as_current():
        if not client.scheduler_info()["workers"]:
            raise RuntimeError("the scheduler has no workers")
        try:
            client.submit(imported, pure=False).result(SECONDS_TO_CONNECT)
        except Exception as error:  # of whatever kind the scheduler makes of it
            raise RuntimeError(
                "no worker is free, or it or the scheduler cannot import experiments; start both in this folder, by "
                "python -m dask"
            ) from error
        token = _cluster.set(client)
        try:
            yield
        finally:
            _cluster.reset(token)


def imported() -> bool:
    """Whether this module is known where the call is made."""
    return True


def everywhere(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function`` returns here and, on a cluster, in each worker."""
    here, client = function(*arguments), _cluster.get()
    return [here] if client is None else [here, *client.run(function, *arguments).values()]


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
