"""How many bytes of device memory does the forward pass move, as N grows?

The standard method writes S and P, N x N numbers each, and reads both back: 4 N^2 elements in three kernels (Dao et
al. 2022, algorithm 0), beside Q, K, V and O. A tiled kernel moves Q, K, V and O, 4 N D elements, where its repeated
reads of K and V hit a cache, and Q + O + ceil(N / BLOCK_M) (K + V) where nothing does. Both are counted while the
kernels run in the simulator: distinct 32-byte sectors of each launch ("least"), and sectors of every request
("requested"). One head, float16.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ProcessPoolExecutor

from cupyflash import attention, naive, ptxsim
from cupyflash._config import flash_fwd_tile
from cupyflash.demo.traffic import count, inputs
from experiments import record

ELEMENT_BYTES = 2
ARCH = "sm_80"


def formulas(seqlen: int, head_dim: int) -> dict[str, int]:
    """Bytes by the formulas."""
    operand, square = seqlen * head_dim * ELEMENT_BYTES, seqlen * seqlen * ELEMENT_BYTES
    query_tiles = math.ceil(seqlen / flash_fwd_tile(head_dim, head_dim, ARCH).block_m)
    return {
        "standard_formula": 4 * square + 4 * operand,
        "ours_least_formula": 4 * operand,
        "ours_requested_formula": 2 * operand + query_tiles * 2 * operand,
    }


def measure(seqlen: int, head_dim: int) -> dict[str, int]:
    """Bytes counted, beside the formulas."""
    start = time.perf_counter()
    operands = inputs(seqlen, head_dim)
    with ptxsim.settings(arch=ARCH):
        standard, ours = count(naive.attention, *operands), count(attention, *operands)
    print(f"counted N = {seqlen}, D = {head_dim} in {time.perf_counter() - start:.1f} s", flush=True)
    return {
        "seqlen": seqlen,
        "head_dim": head_dim,
        "standard_least": standard.least,
        "ours_least": ours.least,
        "ours_requested": ours.requested,
        **formulas(seqlen, head_dim),
    }


def draw(axes, rows: list[dict[str, int]]) -> None:
    """Bytes against N; markers are counts, lines are formulas."""
    series = (
        ("standard_least", "standard_formula", "standard method", record.STANDARD, "-"),
        ("ours_requested", "ours_requested_formula", "cupyflash, no cache at all", record.EXTRA, ":"),
        ("ours_least", "ours_least_formula", "cupyflash", record.OURS, "-"),
    )
    lengths = [row["seqlen"] for row in rows]
    for counted, formula, label, colour, line in series:
        axes.plot(lengths, [row[formula] for row in rows], line, color=colour, linewidth=2)
        axes.plot(lengths, [row[counted] for row in rows], "o", color=colour)
        axes.annotate(
            label, (lengths[-1], rows[-1][counted]), (8, 0), textcoords="offset points", va="center", color=colour
        )
    last = rows[-1]
    axes.annotate(
        f"{last['standard_least'] / last['ours_least']:.0f}x",
        (last["seqlen"], math.sqrt(last["ours_least"] * last["ours_requested"])),
        (-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
    )
    axes.annotate(
        "",
        (last["seqlen"], last["standard_least"] / 1.2),
        (last["seqlen"], last["ours_least"] * 1.2),
        arrowprops={"arrowstyle": "<->", "color": "black", "linewidth": 0.8},
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    ticks = [2.0**n for n in range(16, 32, 2) if last["ours_least"] / 32 < 2.0**n < 2 * last["standard_least"]]
    axes.set_yticks(ticks, [f"{t / 1024:g} KiB" if t < 2**20 else f"{t / 2**20:g} MiB" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")
    axes.set_title(f"Device memory moved, head_dim {last['head_dim']}", loc="left")


def main() -> None:
    args = record.arguments(__doc__, seqlens=[128, 256, 512, 1024, 2048], head_dims=[64, 128])
    print("Counting the traffic of both methods, a process per core; the longest ones first.")
    sizes = sorted(((n, d) for n in args.seqlens for d in args.head_dims), reverse=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = sorted(pool.map(measure, *zip(*sizes, strict=True)), key=lambda row: (row["head_dim"], row["seqlen"]))
    record.write_csv(args.results / "io_traffic.csv", rows)
    # One panel: the picture is read at a glance, and the other head dimensions differ by a factor only.
    with record.figure(args.results / "io_traffic.png", size=(7.0, 4.0)) as axes:
        draw(axes, [row for row in rows if row["head_dim"] == args.head_dims[0]])


if __name__ == "__main__":
    main()
