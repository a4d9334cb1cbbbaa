"""A progress bar for launches in the simulator that take more than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm

from cupyflash import ptxsim

_FIRST_SHOWN = 1.0  # seconds
_REFRESH = 0.5


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[None]:
    """Within the block, simulated launches report their blocks on stderr if it is a terminal; nothing is left there."""
    with tqdm(desc=description, unit="block", file=sys.stderr, leave=False, delay=_FIRST_SHOWN, disable=None) as bar:

        def update(done: int, total: int) -> None:
            if total != bar.total or done < bar.n:  # another launch
                bar.total, bar.n, bar.last_print_n = total, 0, 0
            bar.update(done - bar.n)

        with _clock(bar), ptxsim.settings(progress=update):
            yield


@contextlib.contextmanager
def _clock(bar: tqdm) -> Iterator[None]:
    """Keeps the elapsed time moving while many blocks are simulated together and none of them is done."""
    finished = threading.Event()

    def tick() -> None:
        if not finished.wait(_FIRST_SHOWN):
            while not finished.wait(_REFRESH):
                bar.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
