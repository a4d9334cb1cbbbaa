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
from experiments.experiment import Experiment, Outcome, Row
from experiments.io_traffic import DIRECTIONS, ELEMENT_BYTES, formulas, profiled
from experiments.parallel import measure_all

SEQLEN, HEAD_DIM, NUM_HEADS = 1024, 64, 16 * 64  # of the published table
FLASH_BLOCK_N = 256  # key tile of the paper's algorithms: larger ones were not faster
ALGORITHMS = {
    "standard": "algorithms 0 and 3, by formula",
    "passes": "the same with passes for mask and dropout",
    "flash": f"algorithms 1 and 4, by formula, {FLASH_BLOCK_N} keys a tile",
}
_HOW = {"least": "each launch once", "requested": "every request"}
COUNTED = {how: f"counted on one head, times {NUM_HEADS}, {words}" for how, words in _HOW.items()}
BY_FORMULA = {how: f"by formula, {words}" for how, words in _HOW.items()}
FORMULAS = ("standard_formula", "ours_least_formula", "ours_requested_formula")
NO_MEASURE = ("naive", COUNTED["requested"])
METHODS = {"naive": naive, "cupyflash": cupyflash}
NAMES = {  # in the figure
    "standard": "standard method",
    "naive": "standard method, kernels here",
    "flash": "FlashAttention",
    "cupyflash": "tiled, kernels here",
}
PRODUCTS = {"standard": 6, "flash": 7, "naive": 7, "cupyflash": 9}  # of N x N x head_dim, forward and backward
PRINTED = {"standard": (40.3, 66.6), "flash": (4.4, 75.2)}  # GB and GFLOP


def row(method: str, source: str, seqlen: int, forward: int, backward: int) -> Row:
    """From bytes of one head: gigabytes of all, and GFLOP of the method's products."""
    return {
        "method": method,
        "source": source,
        "seqlen": seqlen,
        "forward_gb": NUM_HEADS * forward / 1e9,
        "backward_gb": NUM_HEADS * backward / 1e9,
        "total_gb": NUM_HEADS * (forward + backward) / 1e9,
        "gflop": NUM_HEADS * PRODUCTS[method] * 2 * seqlen**2 * HEAD_DIM / 1e9,
    }


def published(method: str) -> Row:
    """As printed, where forward and backward are not told apart."""
    gigabytes, gflop = PRINTED[method]
    return {
        "method": method,
        "source": "published, A100",
        "seqlen": SEQLEN,
        "forward_gb": None,
        "backward_gb": None,
        "total_gb": gigabytes,
        "gflop": gflop,
    }


def algorithms(seqlen: int) -> tuple[Row, Row, Row]:
    """The paper's algorithms 0 and 3 (standard), and 1 and 4 (flash), by formula."""
    operand, square = seqlen * HEAD_DIM * ELEMENT_BYTES, seqlen**2 * ELEMENT_BYTES
    forward, backward = 4 * square + 4 * operand, 7 * square + 8 * operand
    key_tiles = math.ceil(seqlen / FLASH_BLOCK_N)
    return (
        row("standard", ALGORITHMS["standard"], seqlen, forward, backward),
        # The forward reads and writes N x N numbers for each of the two, the backward for dropout only.
        row("standard", ALGORITHMS["passes"], seqlen, forward + 4 * square, backward + 2 * square),
        # A key tile reads Q and O and writes O; in the backward it reads Q, O, dO and dQ and writes dQ.
        row("flash", ALGORITHMS["flash"], seqlen, (2 + 3 * key_tiles) * operand, (4 + 5 * key_tiles) * operand),
    )


def count(case: tuple[str, str, int]):
    """Traffic of one head: a method in one direction."""
    method, direction, seqlen = case
    return of_kernels(profiled(METHODS[method], direction, seqlen, HEAD_DIM))


def measure(seqlen: int) -> list[Row]:
    """Standard method first, then tiled ones; what is printed at the length that it is printed for."""
    cases = [(method, direction, seqlen) for method in METHODS for direction in DIRECTIONS]
    traffic = measure_all(count, cases, work=lambda case: (case[0] == "naive", case[1] == "backward"))
    bytes_of = {  # forward, backward
        (method, how): [getattr(x, how) for case, x in zip(cases, traffic, strict=True) if case[0] == method]
        for method in METHODS
        for how in COUNTED
    }
    formula = {name: [formulas(way, seqlen, HEAD_DIM)[name] for way in DIRECTIONS] for name in FORMULAS}
    standard, with_passes, flash = algorithms(seqlen)
    rows = [
        published("standard"),
        standard,
        with_passes,
        row("naive", BY_FORMULA["least"], seqlen, *formula["standard_formula"]),
        *(row("naive", COUNTED[how], seqlen, *bytes_of["naive", how]) for how in COUNTED),
        published("flash"),
        flash,
        row("cupyflash", BY_FORMULA["least"], seqlen, *formula["ours_least_formula"]),
        row("cupyflash", BY_FORMULA["requested"], seqlen, *formula["ours_requested_formula"]),
        *(row("cupyflash", COUNTED[how], seqlen, *bytes_of["cupyflash", how]) for how in COUNTED),
    ]
    return [r for r in rows if r["seqlen"] == seqlen]


def draw(figure, rows: list[Row]) -> None:
    """A bar for each row but the formulas of what is counted as well, and what naive kernels request."""
    axes = figure.subplots()
    hidden = BY_FORMULA.values()
    shown = [r for r in rows if r["source"] not in hidden and (r["method"], r["source"]) != NO_MEASURE][::-1]
    colours = {"standard": record.STANDARD, "naive": record.STANDARD, "flash": record.OURS, "cupyflash": record.OURS}
    for place, r in enumerate(shown):
        is_published = r["source"].startswith("published")
        axes.barh(place, r["total_gb"], color=colours[r["method"]], alpha=1 if is_published else 0.6)
        axes.annotate(f"{r['total_gb']:.1f}", (r["total_gb"], place), (4, 0), textcoords="offset points", va="center")
    sources = [r["source"].replace(f" on one head, times {NUM_HEADS}", "") for r in shown]
    names = [f"{NAMES[r['method']]}: {source}" for r, source in zip(shown, sources, strict=True)]
    axes.set_yticks(range(len(shown)), names)
    axes.margins(x=0.08)
    axes.set_xlabel(f"GB, forward + backward, {NUM_HEADS} heads of {rows[-1]['seqlen']} x {HEAD_DIM}")
    figure.suptitle("Device memory moved: FlashAttention's table (dark), formulas and counts (pale)")
    axes.grid(axis="y", visible=False)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Counts and formulas, and at the printed length what is printed."""
    total = {(r["method"], r["source"]): r["total_gb"] for r in rows}
    gflop = {r["method"]: r["gflop"] for r in rows if not r["source"].startswith("published")}
    naive_counted = total["naive", COUNTED["least"]]
    least, requested = (total["cupyflash", COUNTED[how]] for how in COUNTED)
    pairs = [
        (naive_counted, total["naive", BY_FORMULA["least"]]),
        (least, total["cupyflash", BY_FORMULA["least"]]),
        (requested, total["cupyflash", BY_FORMULA["requested"]]),
    ]
    equal = sum(counted == formula for counted, formula in pairs)
    ratio, printed_ratio = gflop["flash"] / gflop["standard"], PRINTED["flash"][1] / PRINTED["standard"][1]
    found = [
        Outcome(
            "GB counted and by formula", "equal (computed)", f"equal in {equal} of {len(pairs)}", equal == len(pairs)
        ),
        Outcome(
            "GFLOP, FlashAttention over the standard method",
            f"{printed_ratio:.2f} (published: Dao et al. 2022) within 5 %",
            f"{ratio:.2f}, from {PRODUCTS['flash']} products and {PRODUCTS['standard']}",
            abs(ratio / printed_ratio - 1) <= 0.05,
        ),
    ]
    if rows[0]["seqlen"] != SEQLEN:
        return found
    passes, printed = total["standard", ALGORITHMS["passes"]], PRINTED["standard"][0]
    flash, printed_flash = total["flash", ALGORITHMS["flash"]], PRINTED["flash"][0]
    return [
        *found,
        Outcome(
            "standard method, by formula, with passes for mask and dropout",
            f"{printed} GB (published: Dao et al. 2022) within 10 %",
            f"{passes:.1f} GB",
            abs(passes / printed - 1) <= 0.1,
        ),
        Outcome(
            "standard method, the kernels here, each launch once",
            f"{printed} GB (published: Dao et al. 2022) within 10 %",
            f"{naive_counted:.1f} GB",
            abs(naive_counted / printed - 1) <= 0.1,
            "mask and dropout have no passes of their own here, 6 of N x N numbers fewer than the published method; "
            "that P is computed again in the backward is 3 more",
        ),
        Outcome(
            f"FlashAttention's algorithms, {FLASH_BLOCK_N} keys a tile, by formula",
            f"{printed_flash} GB (published: Dao et al. 2022) within 20 %",
            f"{flash:.1f} GB",
            abs(flash / printed_flash - 1) <= 0.2,
        ),
        Outcome(
            "tiled kernels here, with a perfect cache and with none",
            f"on both sides of {printed_flash} GB (published: Dao et al. 2022)",
            f"{least:.1f} and {requested:.1f} GB",
            least < printed_flash < requested,
        ),
    ]


EXPERIMENT = Experiment(
    claim="For the sizes of FlashAttention's table (GPT-2 medium; Dao et al. 2022 print 40.3 GB against 4.4 GB) the "
    "standard method moves 31.9 GB, the tiled kernels 2.3 GB where a cache holds what a launch reads again and 8.1 GB "
    "without any",
    caption="FlashAttention's table of bytes, its algorithms by formula, and the kernels here, counted.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seqlen": SEQLEN},
    quick={"seqlen": 256},
    figure_size=(10.0, 4.0),
)
