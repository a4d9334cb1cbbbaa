"""How many bytes of device memory do the forward and the backward pass move, as N grows?

Forward. The standard method writes S and P, N x N numbers each, and reads both back: 4 N^2 elements in three kernels
(Dao et al. 2022, algorithm 0), beside Q, K, V and O. A tiled kernel moves Q, K, V and O, 4 N D elements, where its
repeated reads of K and V hit a cache, and Q + O + ceil(N / BLOCK_M) (K + V) where nothing does.

Backward. The standard method computes S and P again and then dP and dS, and moves 10 N^2 + 10 N D elements in seven
kernels (3 N^2 fewer if the forward's P were kept). The tiled kernels move 13 N D elements and 28 N bytes for lse and
delta where repeated reads hit a cache; where nothing does, dq reads K and V once for each tile of queries, and dkdv
reads Q and dO once for each tile of keys.

All is counted while the kernels run in the simulator: distinct 32-byte sectors of each launch ("least"), and sectors
of every request of a warp ("requested"). The standard kernels read their operands again for every number they compute,
without tiles: what they request says little about the method, and the comparison is with their least. One head,
float16.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import cupyflash
from cupyflash import naive, ptxsim
from cupyflash._backward_config import flash_bwd_dkdv_tile, flash_bwd_dq_tile
from cupyflash._config import flash_fwd_tile
from cupyflash.demo.traffic import SECTOR_BYTES, inputs, of_kernels
from experiments import record

ELEMENT_BYTES = 2
ARCH = "sm_80"
FORWARD, BACKWARD = DIRECTIONS = "forward", "backward"
STATISTICS_BYTES = 4 + 8 + 8 + 8  # of a query: lse is read; lse and delta are written, and read by two kernels


def formulas(direction: str, seqlen: int, head_dim: int) -> dict[str, int]:
    """Bytes by the formulas."""
    operand, square = seqlen * head_dim * ELEMENT_BYTES, seqlen * seqlen * ELEMENT_BYTES
    if direction == FORWARD:
        query_tiles = math.ceil(seqlen / flash_fwd_tile(head_dim, head_dim, ARCH).block_m)
        return {
            "standard_formula": 4 * square + 4 * operand,
            "ours_least_formula": 4 * operand,
            "ours_requested_formula": 2 * operand + query_tiles * 2 * operand,
        }
    query_tiles = math.ceil(seqlen / flash_bwd_dq_tile(head_dim, head_dim, ARCH).block_m)
    key_tiles = math.ceil(seqlen / flash_bwd_dkdv_tile(head_dim, head_dim, ARCH).block_n)
    delta = 2 * operand + 3 * seqlen * SECTOR_BYTES  # a warp for each query: a sector for each of its statistics
    dq = 3 * operand + 8 * seqlen + query_tiles * 2 * operand
    dkdv = 4 * operand + key_tiles * (2 * operand + 8 * seqlen)
    return {
        "standard_formula": 10 * square + 10 * operand,
        "ours_least_formula": 13 * operand + STATISTICS_BYTES * seqlen,
        "ours_requested_formula": delta + dq + dkdv,
    }


def profiled(library, direction: str, seqlen: int, head_dim: int) -> list[ptxsim.KernelProfile]:
    """What the kernels of ``cupyflash`` or ``cupyflash.naive`` did for one head."""
    q, k, v = inputs(seqlen, head_dim)
    dout = np.random.default_rng((seqlen, 1)).standard_normal(q.shape).astype(q.dtype)
    out, dq, dk, dv = (np.empty_like(q) for _ in range(4))
    with ptxsim.settings(arch=ARCH):
        if direction == FORWARD:
            with ptxsim.profile() as profile:
                library.attention(q, k, v, out=out)
        else:
            _, lse = cupyflash.attention(q, k, v, out=out, return_lse=True)
            with ptxsim.profile() as profile:
                library.attention_backward(dout, q, k, v, out, lse, grads_out=(dq, dk, dv))
    return profile.kernels


def measure(direction: str, seqlen: int, head_dim: int) -> dict[str, int | str]:
    """Bytes counted, beside the formulas."""
    start = time.perf_counter()
    standard, ours = (of_kernels(profiled(library, direction, seqlen, head_dim)) for library in (naive, cupyflash))
    seconds = time.perf_counter() - start
    print(f"counted the {direction} of N = {seqlen}, D = {head_dim} in {seconds:.1f} s", flush=True)
    return {
        "direction": direction,
        "seqlen": seqlen,
        "head_dim": head_dim,
        "standard_least": standard.least,
        "ours_least": ours.least,
        "ours_requested": ours.requested,
        **formulas(direction, seqlen, head_dim),
        "standard_requested": standard.requested,
    }


def draw(axes, rows: list[dict[str, int | str]]) -> None:
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
    ticks = [2.0**n for n in range(16, 32, 2) if last["ours_least"] / 64 < 2.0**n < 2 * last["standard_least"]]
    axes.set_yticks(ticks, [f"{t / 1024:g} KiB" if t < 2**20 else f"{t / 2**20:g} MiB" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")
    axes.set_title(f"{last['direction'].capitalize()}, head_dim {last['head_dim']}", loc="left")


def main() -> None:
    args = record.arguments(__doc__, seqlens=[128, 256, 512, 1024, 2048], head_dims=[64, 128])
    print("Counting the traffic of both methods, a process per core; the longest ones first.")
    sizes = sorted(((n, d, r) for n in args.seqlens for d in args.head_dims for r in DIRECTIONS), reverse=True)
    lengths, head_dims, directions = zip(*sizes, strict=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(measure, directions, lengths, head_dims))
    rows.sort(key=lambda row: (DIRECTIONS.index(row["direction"]), row["head_dim"], row["seqlen"]))
    record.write_csv(args.results / "io_traffic.csv", rows)
    # One head dimension: the picture is read at a glance, and the others differ by a factor only.
    with record.figure(args.results / "io_traffic.png", 1, 2, size=(11.0, 4.0), sharey=True) as panels:
        for axes, direction in zip(panels, DIRECTIONS, strict=True):
            draw(axes, [r for r in rows if r["direction"] == direction and r["head_dim"] == args.head_dims[0]])
        panels[0].figure.suptitle("Device memory moved")


if __name__ == "__main__":
    main()
