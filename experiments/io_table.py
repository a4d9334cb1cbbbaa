"""How do the bytes counted here compare with those that FlashAttention's paper prints?

Dao et al. (2022) give GFLOP and HBM reads and writes of forward + backward for GPT-2 medium (N = 1024, head_dim 64, 16
heads, batch 64, on an A100). Beside them stand the bytes by the formulas of the paper's algorithms, and those of this
library's kernels, counted in the simulator on one head of that size (float16, sm_80) and multiplied by the 1024 heads.

"Each launch once" counts a 32-byte sector once per launch, as with a cache that never drops one: the least. "Every
request" counts a sector for each request of a warp, as with no cache at all. The L2 cache of a GPU lies between the
two and is not modelled. Every request of the standard kernels says nothing about the method: one thread per number
reads its whole rows again.

The printed GFLOP do not follow from the sizes: one product of N x N x 64 over all heads is 137 GFLOP, and the standard
method has 6 of them (7 here, where the backward computes S again), FlashAttention 7, separate kernels for dq and for
dk, dv 9. Only their ratio means something.
"""

from __future__ import annotations

import math

import cupyflash
from cupyflash import naive
from cupyflash.demo.traffic import of_kernels
from experiments import record
from experiments.io_traffic import DIRECTIONS, ELEMENT_BYTES, formulas, profiled

SEQLEN, HEAD_DIM, NUM_HEADS = 1024, 64, 16 * 64
FLASH_BLOCK_N = 256  # key tile of the paper's algorithms: larger ones were not faster
COUNTED = f"counted on one head, times {NUM_HEADS}"


def row(method: str, source: str, forward: int, backward: int, products: int) -> dict[str, float | str]:
    """From bytes of one head: gigabytes of all, and GFLOP of as many products of N x N x head_dim."""
    return {
        "method": method,
        "source": source,
        "forward_gb": NUM_HEADS * forward / 1e9,
        "backward_gb": NUM_HEADS * backward / 1e9,
        "total_gb": NUM_HEADS * (forward + backward) / 1e9,
        "gflop": NUM_HEADS * products * 2 * SEQLEN**2 * HEAD_DIM / 1e9,
    }


def published(method: str, gigabytes: float, gflop: float) -> dict[str, float | str | None]:
    """As printed, where forward and backward are not told apart."""
    return {
        "method": method,
        "source": "published, A100",
        "forward_gb": None,
        "backward_gb": None,
        "total_gb": gigabytes,
        "gflop": gflop,
    }


def algorithms() -> tuple[dict, dict, dict]:
    """The paper's algorithms 0 and 3 (standard), and 1 and 4 (flash), by formula."""
    operand, square = SEQLEN * HEAD_DIM * ELEMENT_BYTES, SEQLEN**2 * ELEMENT_BYTES
    forward, backward = 4 * square + 4 * operand, 7 * square + 8 * operand
    key_tiles = math.ceil(SEQLEN / FLASH_BLOCK_N)
    return (
        row("standard", "algorithms 0 and 3, by formula", forward, backward, 6),
        # The forward reads and writes N x N numbers for each of the two, the backward for dropout only.
        row("standard", "the same with passes for mask and dropout", forward + 4 * square, backward + 2 * square, 6),
        # A key tile reads Q and O and writes O; in the backward it reads Q, O, dO and dQ and writes dQ.
        row(
            "flash", f"algorithms 1 and 4, by formula, {FLASH_BLOCK_N} keys a tile",
            (2 + 3 * key_tiles) * operand, (4 + 5 * key_tiles) * operand, 7,
        ),
    )  # fmt: skip


def counted(method: str, library, products: int) -> tuple[dict, dict]:
    """Kernels of this library: each launch once, and every request."""
    with record.timed(f"counting one head, {method}"):
        traffic = [of_kernels(profiled(library, direction, SEQLEN, HEAD_DIM)) for direction in DIRECTIONS]
    return (
        row(method, f"{COUNTED}, each launch once", *(x.least for x in traffic), products),
        row(method, f"{COUNTED}, every request", *(x.requested for x in traffic), products),
    )


def by_formula(method: str, name: str, source: str, products: int) -> dict:
    return row(method, source, *(formulas(direction, SEQLEN, HEAD_DIM)[name] for direction in DIRECTIONS), products)


def table() -> list[dict]:
    """Standard method first, then tiled ones."""
    standard, flash = published("standard", 40.3, 66.6), published("flash", 4.4, 75.2)
    standard_algorithm, with_passes, flash_algorithm = algorithms()
    return [
        standard,
        standard_algorithm,
        with_passes,
        by_formula("naive", "standard_formula", "by formula, each launch once", 7),
        *counted("naive", naive, 7),
        flash,
        flash_algorithm,
        by_formula("cupyflash", "ours_least_formula", "by formula, each launch once", 9),
        by_formula("cupyflash", "ours_requested_formula", "by formula, every request", 9),
        *counted("cupyflash", cupyflash, 9),
    ]


def draw(axes, rows: list[dict]) -> None:
    """A bar for each row but the formulas of what is counted as well, and what naive kernels request."""
    shown = [
        r
        for r in rows
        if not r["source"].startswith("by formula") and (r["method"], r["source"][-13:]) != ("naive", "every request")
    ][::-1]
    colours = {"standard": record.STANDARD, "naive": record.STANDARD, "flash": record.OURS, "cupyflash": record.OURS}
    for place, r in enumerate(shown):
        is_published = r["source"].startswith("published")
        axes.barh(place, r["total_gb"], color=colours[r["method"]], alpha=1 if is_published else 0.6)
        axes.annotate(f"{r['total_gb']:.1f}", (r["total_gb"], place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), [f"{r['method']}: {r['source']}" for r in shown], fontsize=9)
    axes.set_xlabel("GB, forward + backward, 1024 heads of 1024 x 64")
    axes.set_title("Device memory moved: FlashAttention's table and our counts", loc="left")
    axes.grid(axis="y", visible=False)


def main() -> None:
    args = record.arguments(__doc__)
    rows = table()
    for r in rows:
        print(f"{r['method']:>10} {r['total_gb']:10.2f} GB  {r['gflop']:7.1f} GFLOP  {r['source']}")
    record.write_csv(args.results / "io_table.csv", rows)
    with record.figure(args.results / "io_table.png", size=(10.0, 4.0)) as axes:
        draw(axes, rows)


if __name__ == "__main__":
    main()
