"""Worker processes for mutants: a kernel that never ends, or ends its process, ends a worker only."""

import collections
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from tests.mutants.judge import CAUGHT, judge, original_sources

TIMEOUT = 60  # seconds for one case of the battery; a loop that does not end is a fault that shows


def run_all(mutants, jobs, log):
    """(mutant, outcome, why) for each, in order; every job has a worker process that is replaced when it hangs."""
    queue = collections.deque(enumerate(mutants))
    outcomes = [None] * len(mutants)
    lock = threading.Lock()
    start = time.monotonic()

    def job():
        worker = Worker()
        while True:
            with lock:
                if not queue:
                    break
                number, mutant = queue.popleft()
            outcome, why = worker.run(mutant)
            if not worker.alive:
                worker = Worker()
            with lock:
                outcomes[number] = (mutant, outcome, why)
                if log:
                    with log.open("a") as file:
                        file.write(f"{outcome} | {mutant.kind} | {mutant} | {why}\n")
                done = sum(o is not None for o in outcomes)
                if done % 20 == 0 or done == len(mutants):
                    print(f"\r{done} of {len(mutants)} in {time.monotonic() - start:.0f} s", end="", flush=True)
        worker.close()

    threads = [threading.Thread(target=job) for _ in range(max(1, min(jobs, len(mutants))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print()
    return outcomes


class Worker:
    """A process that judges one mutant after another."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.cache = tempfile.TemporaryDirectory(prefix="cupyflash-mutants-")
        self.process = context.Process(target=_serve, args=(theirs, self.cache.name), daemon=True)
        self.process.start()
        self.alive = True
        self._receive()

    def run(self, mutant):
        self.connection.send(mutant)
        try:
            while self.connection.poll(TIMEOUT):
                outcome, why = self._receive()
                if outcome != "alive":
                    return outcome, why
            why = CAUGHT, f"nothing after {TIMEOUT} s"
        except EOFError:
            why = CAUGHT, "the process died"
        self.close()
        return why

    def _receive(self):
        outcome, why = self.connection.recv()
        if outcome == "error":
            raise RuntimeError(why)
        return outcome, why

    def close(self):
        self.alive = False
        self.process.kill()
        self.process.join()
        self.cache.cleanup()


def _serve(connection, cache):
    os.environ["CUPYFLASH_CACHE_DIR"] = cache
    sys.stdout = sys.stderr = open(os.devnull, "w")  # compilers and NumPy warn about mutants
    try:
        original_sources()
        kept = set(Path(cache).iterdir())
        connection.send(("ready", ""))
        while True:
            connection.send(judge(connection.recv(), tick=lambda: connection.send(("alive", ""))))
            for entry in set(Path(cache).iterdir()) - kept:
                entry.unlink()
    except (EOFError, BrokenPipeError):  # nobody asks any more
        pass
    except Exception:
        connection.send(("error", traceback.format_exc()))
