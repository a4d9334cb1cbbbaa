"""Commands one after the other within a time, of which a later start does what is left; it knows nothing of GPUs.

Each step is a process of its own: one that hangs is ended, and what one has done to the GPU is gone with it. A table
says how each went, and is written after each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.experiment import Row

DONE, FAILED, OUT_OF_TIME, NOT_BEGUN = "done", "failed", "out of time", "not begun"
LEAST_SHARE = 1 / 3  # of its time, without which a step is not begun
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Step:
    """Arguments of a Python, and the seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Ended:
    """How a step went, and the last lines that it said."""

    outcome: str
    said: str = ""


def execute(step: Step, seconds: float) -> Ended:
    """Run a step, with all that it starts, for so long at most."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *step.arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # what it has started, too, and after Ctrl-C
            _end(process)
        output.seek(0)
        said = "\n".join(line for line in output.read().splitlines() if line.strip())[-2000:]
    if status is None:
        return Ended(OUT_OF_TIME, said)
    return Ended(FAILED if status else DONE, said)


def _end(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(
    steps: Sequence[Step],
    earlier: Sequence[Row],
    seconds: float,
    write: Callable[[list[Row]], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    execute: Callable[[Step, float], Ended] = execute,
) -> list[Row]:
    """Rows of all steps, in their order; ``earlier`` are those of an earlier start, whose finished steps stay.

    Steps that were never begun come first, then those that failed or ran out of time.
    """
    end = clock() + seconds
    rows = {step.name: _row(step, 0.0, Ended(NOT_BEGUN)) for step in steps}
    rows |= {row["step"]: row for row in earlier if row["step"] in rows}
    left = [step for step in steps if rows[step.name]["outcome"] != DONE]
    left.sort(key=lambda step: rows[step.name]["outcome"] != NOT_BEGUN)
    for number, step in enumerate(left, 1):
        begin = clock()
        limit = min(step.seconds, end - begin)
        if limit < LEAST_SHARE * step.seconds:
            print(f"[{number}/{len(left)}] {step.name}: not begun, {max(limit, 0):.0f} s are left", flush=True)
            continue
        print(f"[{number}/{len(left)}] {step.name}: {limit:.0f} s at most", flush=True)
        ended = execute(step, limit)
        rows[step.name] = _row(step, clock() - begin, ended)
        write(list(rows.values()))
        print("\n".join(f"    {line}" for line in _shown(ended)), flush=True)
        print(f"    {ended.outcome} after {clock() - begin:.0f} s", flush=True)
    write(list(rows.values()))
    return list(rows.values())


def _row(step: Step, seconds: float, ended: Ended) -> Row:
    said = ended.said.splitlines()[-1] if ended.said and ended.outcome == FAILED else ""
    return {"step": step.name, "outcome": ended.outcome, "seconds": round(seconds, 1), "said": said[:300]}


def _shown(ended: Ended) -> list[str]:
    """The end of what it said, without progress bars."""
    return [
        line.rpartition("\r")[2] for line in ended.said.splitlines() if "it/s]" not in line and "s/it]" not in line
    ][-12:]
