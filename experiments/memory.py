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
import time
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np

from cupyflash import _launch, attention
from experiments import record

HEAD_DIM = 64
ELEMENT_BYTES = 2


def measure(seqlen: int) -> dict[str, float]:
    """Memory of one call in this process, which should have done nothing else; bytes and seconds."""
    q, k, v = np.random.default_rng(seqlen).standard_normal((3, 1, 1, seqlen, HEAD_DIM), np.float32).astype(np.float16)
    attention(*(x[..., :16, :] for x in (q, k, v)), return_lse=True)

    device = _CountingSimulator()
    resident = largest_resident_set()
    tracemalloc.start()
    start = time.perf_counter()
    with mock.patch.object(_launch, "device_of", lambda kind, array: device):
        attention(q, k, v, return_lse=True)
    seconds = time.perf_counter() - start
    _, traced_peak = tracemalloc.get_traced_memory()
    return {
        "seqlen": seqlen,
        "device_bytes": device.allocated,
        "traced_peak_bytes": traced_peak,
        "resident_growth_bytes": largest_resident_set() - resident,
        "seconds": seconds,
    }


class _CountingSimulator(_launch.Simulator):
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


def in_fresh_process(seqlen: int) -> dict[str, float]:
    """``measure`` where nothing has been allocated before."""
    code = f"import json; from experiments.memory import measure; print(json.dumps(measure({seqlen})))"
    root = Path(__file__).parent.parent
    with record.timed(f"N = {seqlen}"):
        done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def rows(seqlens: list[int]) -> list[dict[str, float]]:
    """A row per N: the measurements, their ratios to the row before per doubling, and what S would take."""
    found: list[dict[str, float]] = []
    for seqlen in sorted(seqlens):
        row = in_fresh_process(seqlen)
        for quantity in ("device_bytes", "traced_peak_bytes", "resident_growth_bytes"):
            row[quantity.replace("bytes", "per_doubling")] = (
                (row[quantity] / found[-1][quantity]) ** (1 / np.log2(seqlen / found[-1]["seqlen"]))
                if found
                else float("nan")
            )
        row["standard_scores_bytes"] = ELEMENT_BYTES * seqlen**2
        found.append(row)
    return found


def draw(axes, found: list[dict[str, float]]) -> None:
    """Memory against N."""
    lengths = [row["seqlen"] for row in found]
    for quantity, label, colour, line, rise in (
        ("standard_scores_bytes", "standard method: S", record.STANDARD, "--", 0),
        ("resident_growth_bytes", "growth of the process, with simulator", "black", "o-", 7),
        ("traced_peak_bytes", "traced allocations, with simulator", record.EXTRA, "o-", -7),
        ("device_bytes", "cupyflash: out and lse", record.OURS, "o-", 0),
    ):
        values = [row[quantity] / 2**20 for row in found]
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
    axes.set_title("Memory of one call, (1, 1, N, 64) float16", loc="left")


def main() -> None:
    args = record.arguments(__doc__, seqlens=[2048, 4096, 8192, 16384])
    print("One call in a fresh process for each N, in the simulator.")
    found = rows(args.seqlens)
    record.write_csv(args.results / "memory.csv", found)
    with record.figure(args.results / "memory.png", size=(8.0, 4.0)) as axes:
        draw(axes, found)


if __name__ == "__main__":
    main()
