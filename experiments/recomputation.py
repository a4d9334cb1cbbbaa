"""What does the backward pay, and save, by computing the weights P again instead of keeping them?

Keeping P costs N x N numbers between the passes and their transfers; computing it again costs products. Three ways, for
the forward and the backward of one head in float16, counted while the kernels run in the simulator (sm_80):

* P kept: the standard method, whose backward reads the P that the forward wrote. ``cupyflash.naive`` keeps nothing, its
  backward begins with the two kernels that compute P and store it again, so that the counts of these two launches are
  left out here; the five others read P from device memory in either case,
* P stored again: the standard method as it is in ``cupyflash.naive``,
* rebuilt in tiles: the kernels of ``cupyflash``, which compute P from lse where they need it, and dP too, as dq and
  dk, dv come from two kernels. FlashAttention's one kernel (Dao et al. 2022, algorithm 4) computes both once.

FLOP are those of matrix products, bytes the distinct sectors of each launch (see ``intensity``). Kept bytes are what
the forward leaves for the backward beside inputs and output: P, or lse. The time is a bound and no measurement: the
larger of FLOP over the peak of an A100 and bytes over its bandwidth; of the standard method it supposes products by
tensor cores. Beyond N = COUNTED_TO stand the formulas, which the counts equal.
"""

from __future__ import annotations

from cupyflash.demo.traffic import of_kernels
from cupyflash.ptxsim.devices import DEVICES
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.intensity import LIBRARIES, STANDARD, TILED, flops_formula, peak_flops, product_flops
from experiments.io_traffic import BACKWARD, DIRECTIONS, ELEMENT_BYTES, FORWARD, SLOWER, formulas, profiled
from experiments.parallel import measure_all

HEAD_DIM = 64
KEPT, STORED_AGAIN, REBUILT = WAYS = "P kept", "P stored again", "rebuilt in tiles"
REBUILDING_KERNELS = ("scores", "softmax")  # the standard backward's first two
CARD = "A100"  # of the published table
LSE_BYTES = 4
TABLE_SEQLEN = 1024
PRINTED_FLOP_RATIO, PRINTED_BYTES_RATIO = 75.2 / 66.6, 40.3 / 4.4  # of FlashAttention's table, GPT-2 medium
STYLES = {KEPT: (record.STANDARD, "s", "-"), STORED_AGAIN: ("#c79a2b", "^", "--"), REBUILT: (record.OURS, "o", "-")}


def formula(way: str, seqlen: int) -> tuple[int, int]:
    """FLOP and bytes of forward and backward."""
    method, column = (TILED, "ours_least_formula") if way == REBUILT else (STANDARD, "standard_formula")
    flops = sum(flops_formula(method, direction, seqlen, HEAD_DIM) for direction in DIRECTIONS)
    moved = sum(formulas(direction, seqlen, HEAD_DIM)[column] for direction in DIRECTIONS)
    if way != KEPT:
        return flops, moved
    square, operand = seqlen**2, seqlen * HEAD_DIM
    # S from Q and K, written; then S read and P written.
    return flops - 2 * square * HEAD_DIM - square, moved - ELEMENT_BYTES * (3 * square + 2 * operand)


def count(case: tuple[str, int]) -> list[tuple[int, int]]:
    """FLOP and bytes of forward and backward, of each way that the library shows."""
    library, seqlen = case
    forward, backward = (profiled(LIBRARIES[library], direction, seqlen, HEAD_DIM) for direction in (FORWARD, BACKWARD))
    ways = [forward + backward]
    if library == STANDARD:
        ways.insert(0, forward + [kernel for kernel in backward if kernel.name not in REBUILDING_KERNELS])
    return [(product_flops(kernels), of_kernels(kernels).least) for kernels in ways]


def measure(seqlens: list[int], counted_to: int) -> list[Row]:
    """A row of each way and N."""
    cases = [(library, seqlen) for library in (STANDARD, TILED) for seqlen in seqlens if seqlen <= counted_to]
    counts = dict(zip(cases, measure_all(count, cases, work=_work), strict=True))
    rows = []
    for way in WAYS:
        for seqlen in seqlens:
            library, place = (TILED, 0) if way == REBUILT else (STANDARD, WAYS.index(way))
            flops, moved = counts[library, seqlen][place] if (library, seqlen) in counts else (None, None)
            flops_by_formula, bytes_by_formula = formula(way, seqlen)
            rows.append(
                {
                    "way": way,
                    "seqlen": seqlen,
                    "flops": flops,
                    "bytes": moved,
                    "flops_formula": flops_by_formula,
                    "bytes_formula": bytes_by_formula,
                    "kept_bytes": kept(way, seqlen),
                    "least_microseconds": 1e6 * least_seconds(flops_by_formula, bytes_by_formula),
                }
            )
    return rows


def kept(way: str, seqlen: int) -> int:
    """Bytes that the forward leaves for the backward."""
    return {KEPT: ELEMENT_BYTES * seqlen**2, STORED_AGAIN: 0, REBUILT: LSE_BYTES * seqlen}[way]


def _work(case: tuple[str, int]) -> float:
    """Time of a case, roughly."""
    library, seqlen = case
    return seqlen**2 * (SLOWER if library == STANDARD else 1)


def least_seconds(flops: int, moved: int) -> float:
    """Of one head, the others of a batch taking their turns: the slower of arithmetic and memory."""
    device = DEVICES[CARD]
    return max(flops / peak_flops(device), moved / (device.bandwidth * 1e9))


def draw(figure, rows: list[Row]) -> None:
    """What is computed, what is moved, and the time that both take at least."""
    products, moved, time = figure.subplots(1, 3, width_ratios=(0.8, 1, 1))
    draw_products(products, rows)
    draw_curves(moved, rows, "bytes_formula", "bytes", 2**20)
    moved.set_ylabel("MiB of device memory")
    moved.set_title("Moved, one head")
    draw_curves(time, rows, "least_microseconds", None, 1)
    time.set_ylabel("microseconds")
    time.set_title(f"Least time, {CARD} model, one head")
    handles, labels = moved.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def draw_products(axes, rows: list[Row]) -> None:
    """FLOP in products of N x N x d."""
    longest = max(row["seqlen"] for row in rows)
    for place, way in enumerate(WAYS):
        (row,) = (row for row in rows if (row["way"], row["seqlen"]) == (way, longest))
        products = row["flops_formula"] / (2 * longest**2 * HEAD_DIM)
        axes.bar(place, products, 0.6, color=STYLES[way][0])
        axes.annotate(f"{products:.1f}", (place, products), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(WAYS)), ["\n".join(way.rsplit(" ", 1)) for way in WAYS])
    axes.set_ylabel(r"products of $2N^2d$ FLOP")
    axes.set_title("Computed, forward and backward")
    axes.grid(axis="x", visible=False)


def draw_curves(axes, rows: list[Row], column: str, counted: str | None, unit: float) -> None:
    """A column against N; markers where it was counted."""
    for way, (colour, marker, line) in STYLES.items():
        curve = [row for row in rows if row["way"] == way]
        lengths = [row["seqlen"] for row in curve]
        axes.plot(lengths, [row[column] / unit for row in curve], line, color=colour, linewidth=2, label=way)
        there = [row for row in curve if counted and row[counted] is not None]
        axes.plot([row["seqlen"] for row in there], [row[counted] / unit for row in there], marker, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=4)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Counts against formulas; near the published table's N its ratios; and what the time says."""
    counted = [(row, name) for row in rows for name in ("flops", "bytes") if row[name] is not None]
    equal = sum(row[name] == row[f"{name}_formula"] for row, name in counted)
    seqlen = min((row["seqlen"] for row in rows), key=lambda n: abs(n - TABLE_SEQLEN))
    kept, again, rebuilt = (next(r for r in rows if (r["way"], r["seqlen"]) == (way, seqlen)) for way in WAYS)
    flops = rebuilt["flops_formula"] / kept["flops_formula"]
    fewer_bytes = kept["bytes_formula"] / rebuilt["bytes_formula"]
    stored_again = [again[name] / kept[name] for name in ("flops_formula", "bytes_formula")]
    curves = ([row["least_microseconds"] for row in rows if row["way"] == way] for way in (KEPT, REBUILT))
    quicker = [a / b for a, b in zip(*curves, strict=True)]
    of_counts = Outcome(
        "FLOP and bytes, counted and by formula",
        "equal (computed)",
        f"equal in {equal} of {len(counted)}",
        equal == len(counted),
    )
    bytes_again = 14 * (seqlen + HEAD_DIM) / (11 * seqlen + 12 * HEAD_DIM)
    return [
        *([of_counts] if counted else []),
        Outcome(
            f"FLOP, rebuilt in tiles over P kept, N = {seqlen}",
            "1.50: 9 products for 6 (computed)",
            f"{flops:.2f}",
            abs(flops - 9 / 6) < 0.01,
        ),
        *(_published(flops, fewer_bytes) if seqlen == TABLE_SEQLEN else []),
        Outcome(
            f"P stored again over P kept, N = {seqlen}: FLOP; bytes",
            f"7/6 = 1.17; 14 (N + d) / (11 N + 12 d) = {bytes_again:.2f}: both worse (computed)",
            "; ".join(f"{ratio:.2f}" for ratio in stored_again),
            abs(stored_again[0] - 7 / 6) < 0.01 and abs(stored_again[1] - bytes_again) < 0.01,
        ),
        Outcome(
            f"bytes left for the backward, N = {seqlen}: P over lse",
            f"N / 2 = {seqlen // 2} times (computed)",
            f"{kept['kept_bytes'] / rebuilt['kept_bytes']:g} times",
            2 * kept["kept_bytes"] == seqlen * rebuilt["kept_bytes"],
        ),
        Outcome(
            f"least time by the model of an {CARD}, P kept over rebuilt in tiles, every N",
            "above 1: more FLOP in less time (computed)",
            f"{min(quicker):.1f} to {max(quicker):.1f}",
            min(quicker) > 1,
        ),
    ]


def _published(flops: float, fewer_bytes: float) -> list[Outcome]:
    """Ratios at the N of FlashAttention's table."""
    return [
        Outcome(
            f"the same, beside FlashAttention's table, N = {TABLE_SEQLEN}",
            f"{PRINTED_FLOP_RATIO:.2f} (published: Dao et al. 2022) within 10 %",
            f"{flops:.2f}",
            abs(flops / PRINTED_FLOP_RATIO - 1) <= 0.1,
            "FlashAttention's backward is one kernel of 5 products, 7 for 6 with the forward, which is 1.17; here dq "
            "and dk, dv come from two kernels that both compute S and dP, for gradients without atomics",
        ),
        Outcome(
            f"bytes, P kept over rebuilt in tiles, N = {TABLE_SEQLEN}",
            f"{PRINTED_BYTES_RATIO:.1f} (published: Dao et al. 2022, with mask and dropout) within 25 %",
            f"{fewer_bytes:.1f}",
            abs(fewer_bytes / PRINTED_BYTES_RATIO - 1) <= 0.25,
        ),
    ]


EXPERIMENT = Experiment(
    claim="Computing P again in tiles costs FLOP and saves bytes, and by a model it is quicker where memory is the "
    "limit (Dao et al. 2022 print 1.13 times the FLOP and 9.2 times fewer bytes); storing it again costs both",
    caption="Forward and backward with P kept, stored again, or rebuilt in tiles: more FLOP, fewer bytes, less time "
    "(a model's, not measured).",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seqlens": [2**n for n in range(7, 14)], "counted_to": 1024},
    quick={"seqlens": [128, 256, 1024], "counted_to": 128},
    figure_size=(12.0, 4.4),
)
