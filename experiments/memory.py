"""How much memory does a call take beyond its inputs, as N grows?

For (1, 1, N, 64) the tiled kernel needs its results only: device memory O(N). Measured in a fresh process for each N,
after a small call that loads and compiles everything: bytes that the library allocates as device memory (out and lse),
the peak of traced allocations during the call, and how far the call raises the process's largest resident set. The last
two include the simulator, which holds the threads of the blocks that it runs together. The standard method's S alone
takes 2 N^2 bytes; that is computed, not run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np

from cupyflash import _launch, attention
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

HEAD_DIM = 64
ELEMENT_BYTES, LSE_BYTES = 2, 4
QUANTITIES = ("device_bytes", "traced_peak_bytes", "resident_growth_bytes")
LARGEST_GROWTH = 2.2  # per doubling: linear, and what the first call in a process adds


def memory_of_call(seqlen: int) -> Row:
    """Bytes of one call in this process, which should have done nothing else."""
    q, k, v = np.random.default_rng(seqlen).standard_normal((3, 1, 1, seqlen, HEAD_DIM), np.float32).astype(np.float16)
    attention(*(x[..., :16, :] for x in (q, k, v)), return_lse=True)

    device = CountingSimulator()
    resident = largest_resident_set()
    tracemalloc.start()
    with mock.patch.object(_launch, "device_of", lambda kind, array: device):
        attention(q, k, v, return_lse=True)
    _, traced_peak = tracemalloc.get_traced_memory()
    return {
        "seqlen": seqlen,
        "device_bytes": device.allocated,
        "traced_peak_bytes": traced_peak,
        "resident_growth_bytes": largest_resident_set() - resident,
    }


class CountingSimulator(_launch.Simulator):
    """The simulator, adding up what is allocated as device memory."""

    def __init__(self):
        super().__init__()
        self.allocated = 0
        self.empty, self.zeros = self._counted(np.empty), self._counted(np.zeros)

    def _counted(self, allocate):
        def counted(shape, dtype):
            array = allocate(shape, dtype)
            self.allocated += array.nbytes
            return array

        return counted


def largest_resident_set() -> int:
    """Bytes; of this process alone, while ``getrusage`` on Linux starts from the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_fresh_process(seqlen: int) -> Row:
    """``memory_of_call`` where nothing has been allocated before."""
    code = f"import json; from experiments.memory import memory_of_call; print(json.dumps(memory_of_call({seqlen})))"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def measure(seqlens: list[int]) -> list[Row]:
    """A row per N: the measurements, their ratios to the row before per doubling, and what S would take."""
    rows = measure_all(in_fresh_process, sorted(seqlens), work=lambda seqlen: seqlen)
    for index, row in enumerate(rows):
        before = rows[index - 1] if index else None
        for quantity in QUANTITIES:
            row[per_doubling(quantity)] = before and (row[quantity] / before[quantity]) ** (
                1 / np.log2(row["seqlen"] / before["seqlen"])
            )
        row["standard_scores_bytes"] = ELEMENT_BYTES * row["seqlen"] ** 2
    return rows


def per_doubling(quantity: str) -> str:
    """Its column."""
    return quantity.replace("bytes", "per_doubling")


def draw(figure, rows: list[Row]) -> None:
    """Memory against N."""
    axes = figure.subplots()
    lengths = [row["seqlen"] for row in rows]
    for quantity, label, colour, line, rise in (
        ("standard_scores_bytes", "standard method: S alone,\nby formula, not run", record.STANDARD, "--", 0),
        ("resident_growth_bytes", "growth of the process,\nwith simulator", "black", "s-", 15),
        ("traced_peak_bytes", "traced allocations,\nwith simulator", record.EXTRA, "^-", -15),
        ("device_bytes", "cupyflash: out and lse", record.OURS, "o-", 0),
    ):
        values = [row[quantity] / 2**20 for row in rows]
        axes.plot(lengths, values, line, color=colour)
        end = lengths[-1], values[-1]
        axes.annotate(label, end, (8, rise), textcoords="offset points", va="center", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=4)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")
    axes.set_ylabel("MiB beyond the inputs")
    axes.set_title("Memory of one call, (1, 1, N, 64) float16: measured (markers), by formula (dashed)")


def outcomes(rows: list[Row]) -> list[Outcome]:
    """What is allocated, and how it grows where there are several lengths."""
    exact = sum(row["device_bytes"] == row["seqlen"] * (HEAD_DIM * ELEMENT_BYTES + LSE_BYTES) for row in rows)
    return [
        Outcome(
            "device memory that a call allocates",
            f"out and lse: {HEAD_DIM * ELEMENT_BYTES + LSE_BYTES} N bytes (computed)",
            f"equal in {exact} of {len(rows)}",
            exact == len(rows),
        ),
        *(_growth(rows) if len(rows) > 1 else []),
    ]


def _growth(rows: list[Row]) -> list[Outcome]:
    """From one length to the next, the largest."""
    found = []
    for quantity, what in (
        ("traced_peak_bytes", "the simulator's memory per doubling of N, traced"),
        ("resident_growth_bytes", "the process's memory per doubling of N"),
    ):
        growth = max(row[per_doubling(quantity)] for row in rows[1:])
        expected = f"at most {LARGEST_GROWTH} times; 4 for a method that stores S (predicted)"
        found.append(Outcome(what, expected, f"at most {growth:.2f} times", growth <= LARGEST_GROWTH))
    return found


EXPERIMENT = Experiment(
    claim="A call allocates out and lse and nothing that grows faster than N; the simulator around it grows at most "
    "2.2 times per doubling, then less",
    caption="Memory of one call beyond its inputs: linear in N, the simulator's own included; dashed, by "
    "formula: S of the standard method.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seqlens": [2048, 4096, 8192, 16384]},
    quick={"seqlens": [512, 2048]},
    figure_size=(9.0, 4.2),
)
