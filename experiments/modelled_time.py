"""How long does attention take at least on a card that is not there, and how much memory?

Lower bounds, by ``cupyflash.ptxsim.cost_model``, of the forward for one sequence of N tokens and 2048 hidden columns in
float16: the busiest unit of a multiprocessor, or device memory, cannot need less. They are no estimates. Latency,
waiting, clocks below the highest and the launches themselves come on top, and are different for each method; on an H100
and a B200 tensor cores are counted with the rate of instructions that none of these kernels uses.

* standard method, scalar kernels: ``cupyflash.naive``, which multiplies number by number,
* standard method, tensor cores: the same three steps at their best, the larger of FLOP over the card's peak and bytes
  over its bandwidth for each of them,
* cupyflash: the tiled kernel, where no maximum moves after the first tile.

The simulator runs one head at three short lengths. Work and blocks are polynomials of degree 2 in N where 128 divides
it, so that three counts say what every N has; where counts were made beyond these three, they must be what the
polynomials say, and bytes and memory what their formulas say. Every launch is taken to read its data from device memory
and to write them there: with the standard method's scores it does where they outgrow the second-level cache, on all
cards from N = 2048 on, where they have 134 MB or more. Memory is that of inputs, outputs and what a call allocates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np

import cupyflash
from cupyflash import _launch, naive, ptxsim
from cupyflash.demo.traffic import of_kernels
from cupyflash.ptxsim.devices import DEVICES
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.intensity import peak_flops
from experiments.io_traffic import ELEMENT_BYTES, FORWARD, formulas
from experiments.memory import CountingSimulator
from experiments.parallel import measure_all

HIDDEN = 2048  # columns of all heads together
SCALAR, TENSOR_CORES, TILED = METHODS = "standard method, scalar kernels", "standard method, tensor cores", "cupyflash"
CALLS = {SCALAR: naive.attention, TILED: cupyflash.attention}
BYTES_FORMULA = {SCALAR: "standard_formula", TENSOR_CORES: "standard_formula", TILED: "ours_least_formula"}
FITTED = (128, 256, 384)  # lengths that the polynomials go through: whole tiles, and whole turns of unrolled loops
DRAM = "DRAM"  # of the cost model's resources the one that is not an SM's
SCORES_OUTGROW_CACHES = 2048  # N; the largest second-level cache of the cards has 126 MB
WITHOUT_MMA_SYNC_RATE = ("sm_90", "sm_100")  # whose tensor cores have other instructions that are faster
_SOFTMAX_WAITS = f"softmax: {DRAM}"
CARDS = ("A100", "RTX 4090", "L40S", "H100", "H200", "B200", "RTX 5090")
DRAWN_CARD = "A100"
STYLES = {
    SCALAR: (record.COLOURS[2], "^", "--"),
    TENSOR_CORES: (record.STANDARD, "s", "-"),
    TILED: (record.OURS, "o", "-"),
}


class Work:
    """Of the launches of one kernel for one head: cycles of one SM by resource, those of device memory, and blocks."""

    def __init__(self, kernel: ptxsim.KernelProfile, card: str):
        bound = kernel.lower_bound(card).resources
        self.name = kernel.name
        self.blocks = kernel.executed.most_blocks
        used = min(DEVICES[card].sms, self.blocks)
        self.cycles = {name: cycles * used for name, cycles in bound.items()}
        moved = of_kernels([kernel]).least  # what is read, and what is written: the weights take the scores' place
        self.cycles[DRAM] = moved / DEVICES[card].dram_bytes


def least_cycles(blocks: float, cycles: dict[str, float], heads: int, card: str) -> tuple[float, str]:
    """Of all heads on a card, and the resource that gives it."""
    used = min(DEVICES[card].sms, heads * blocks)
    needed = {name: heads * work / (1 if name == DRAM else used) for name, work in cycles.items()}
    resource = max(needed, key=needed.get)
    return needed[resource], resource


def polynomial(lengths: Sequence[int], values: Sequence[float]) -> Callable[[int], float]:
    """Through these values, of the least degree (Lagrange)."""

    def at(n: int) -> float:
        total = 0.0
        for length, value in zip(lengths, values, strict=True):
            others = [other for other in lengths if other != length]
            total += value * np.prod([(n - other) / (length - other) for other in others])
        return total

    return at


@functools.cache
def profiled(method: str, head_dim: int, seqlen: int, arch: str) -> list[ptxsim.KernelProfile]:
    """Kernels of the forward of one head. All scores are 0, so that no maximum moves after the first tile."""
    q = np.zeros((seqlen, head_dim), np.float16)
    k, v = np.random.default_rng(0).standard_normal((2, seqlen, head_dim)).astype(np.float16)
    with ptxsim.settings(arch=arch), ptxsim.profile() as profile:
        CALLS[method](q, k.copy(), v.copy(), out=np.empty_like(q))
    return profile.kernels


def milliseconds(method: str, head_dim: int, seqlen: int, card: str) -> tuple[float, str]:
    """Of all heads by the polynomials; and what limits the launch that takes longest."""
    fitted = [[Work(kernel, card) for kernel in kernels] for kernels in _fitted(method, head_dim, DEVICES[card].arch)]
    launches = []
    for works in zip(*fitted, strict=True):  # one kernel at all lengths
        through = functools.partial(polynomial, FITTED)
        blocks = through([work.blocks for work in works])(seqlen)
        cycles = {name: through([work.cycles[name] for work in works])(seqlen) for name in works[0].cycles}
        launches.append((*least_cycles(blocks, cycles, HIDDEN // head_dim, card), works[0].name))
    return _added(launches, card)


def _fitted(method: str, head_dim: int, arch: str) -> list[list[ptxsim.KernelProfile]]:
    return [profiled(method, head_dim, seqlen, arch) for seqlen in FITTED]


def milliseconds_counted(method: str, head_dim: int, seqlen: int, card: str) -> float:
    """Of all heads, from a run at this length."""
    works = [Work(kernel, card) for kernel in profiled(method, head_dim, seqlen, DEVICES[card].arch)]
    launches = [(*least_cycles(work.blocks, work.cycles, HIDDEN // head_dim, card), work.name) for work in works]
    return _added(launches, card)[0]


def _added(launches: list[tuple[float, str, str]], card: str) -> tuple[float, str]:
    _, resource, kernel = max(launches)
    total = sum(cycles for cycles, _, _ in launches) / (DEVICES[card].clock * 1e6)
    return float(total), resource if len(launches) == 1 else f"{kernel}: {resource}"


def milliseconds_at_best(head_dim: int, seqlen: int, card: str) -> tuple[float, str]:
    """Three steps of the standard method, each as quick as products or transfers allow."""
    device, heads = DEVICES[card], HIDDEN // head_dim
    square, operand = heads * seqlen**2, heads * seqlen * head_dim
    product, steps = 2 * square * head_dim, []
    for name, flops, elements in (
        ("scores", product, square + 2 * operand),
        ("softmax", 0, 2 * square),
        ("weighted_values", product, square + 2 * operand),
    ):
        seconds = {"tensor": flops / peak_flops(device), DRAM: elements * ELEMENT_BYTES / (device.bandwidth * 1e9)}
        resource = max(seconds, key=seconds.get)
        steps.append((1e3 * seconds[resource], resource, name))
    _, resource, name = max(steps)
    return sum(step[0] for step in steps), f"{name}: {resource}"


def peak_bytes(method: str, head_dim: int, seqlen: int) -> int:
    """Inputs and outputs of all heads; of the standard method scores, whose place the weights take."""
    heads = HIDDEN // head_dim
    scores = 0 if method == TILED else heads * seqlen**2
    return ELEMENT_BYTES * (4 * heads * seqlen * head_dim + scores)


def peak_bytes_counted(method: str, head_dim: int, seqlen: int) -> int:
    """The same of one call, whose allocations are all alive at its end; heads have a memory of their own each."""
    device = CountingSimulator()
    q, k, v = np.zeros((3, seqlen, head_dim), np.float16)
    with mock.patch.object(_launch, "device_of", lambda kind, array: device):
        CALLS[method](q, k, v)
    return HIDDEN // head_dim * (q.nbytes + k.nbytes + v.nbytes + device.allocated)


def measure(
    seqlens: list[int], head_dims: list[int], cards: list[str], standard_counted_to: int, counted_to: int
) -> list[Row]:
    """Rows of each method, head_dim, card and N."""
    cases = [
        (method, head_dim, arch, tuple(cards_of_arch), tuple(seqlens), counted)
        for method, counted in ((SCALAR, standard_counted_to), (TENSOR_CORES, 0), (TILED, counted_to))
        for head_dim in head_dims
        for arch, cards_of_arch in by_arch(cards).items()
    ]
    return [row for rows in measure_all(rows_of, cases, work=lambda case: case[0] == SCALAR) for row in rows]


def by_arch(cards: list[str]) -> dict[str, list[str]]:
    """Cards that run the same code."""
    found: dict[str, list[str]] = {}
    for card in cards:
        found.setdefault(DEVICES[card].arch, []).append(card)
    return found


def rows_of(case: tuple[str, int, str, tuple[str, ...], tuple[int, ...], int]) -> list[Row]:
    """Of one method and head_dim on the cards of one architecture."""
    method, head_dim, arch, cards, seqlens, counted_to = case
    rows = []
    for card in cards:
        for seqlen in seqlens:
            counted = seqlen <= counted_to
            if method == TENSOR_CORES:
                time, limit = milliseconds_at_best(head_dim, seqlen, card)
            else:
                time, limit = milliseconds(method, head_dim, seqlen, card)
            heads = HIDDEN // head_dim
            rows.append(
                {
                    "method": method,
                    "head_dim": head_dim,
                    "heads": heads,
                    "card": card,
                    "arch": arch,
                    "seqlen": seqlen,
                    "milliseconds": time,
                    "milliseconds_counted": milliseconds_counted(method, head_dim, seqlen, card) if counted else None,
                    "limited_by": limit,
                    "bytes": heads * formulas(FORWARD, seqlen, head_dim, arch=arch)[BYTES_FORMULA[method]],
                    "bytes_counted": heads * of_kernels(profiled(method, head_dim, seqlen, arch)).least
                    if counted
                    else None,
                    "peak_bytes": peak_bytes(method, head_dim, seqlen),
                    "peak_bytes_counted": peak_bytes_counted(method, head_dim, seqlen) if counted else None,
                }
            )
    return rows


def of(rows: list[Row], **wanted) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def draw(figure, rows: list[Row]) -> None:
    """Time against N on one card, of the longest N on all cards, and memory against N."""
    head_dim = max(row["head_dim"] for row in rows)
    rows = of(rows, head_dim=head_dim)
    card = DRAWN_CARD if of(rows, card=DRAWN_CARD) else rows[0]["card"]
    time, cards, memory = figure.subplots(1, 3, width_ratios=(1, 1.1, 1))
    draw_lengths(time, of(rows, card=card), "milliseconds", "milliseconds_counted", 1)
    time.axvspan(min(row["seqlen"] for row in rows) / 1.2, SCORES_OUTGROW_CACHES, color="#f2f2f2", zorder=-1)
    time.annotate("grey: scores\nmay stay in\na cache", (0.04, 0.8), xycoords="axes fraction", fontsize=9)
    time.set_ylabel("milliseconds at least")
    time.set_title(f"{card}, head_dim {head_dim}", fontsize=11)
    draw_cards(cards, rows)
    draw_lengths(memory, of(rows, card=card), "peak_bytes", "peak_bytes_counted", 1e9)
    memory.set_ylabel("GB of device memory")
    memory.set_title("Inputs, outputs and what is allocated;\nboth standard methods need the same", fontsize=11)
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def draw_lengths(axes, rows: list[Row], column: str, counted: str, unit: float) -> None:
    """Lines are polynomials and formulas, markers counts."""
    for method, (colour, marker, line) in STYLES.items():
        curve = of(rows, method=method)
        x = [row["seqlen"] for row in curve]
        axes.plot(x, [row[column] / unit for row in curve], line, color=colour, linewidth=2, label=method)
        there = [row for row in curve if row[counted] is not None]
        axes.plot([row["seqlen"] for row in there], [row[counted] / unit for row in there], marker, color=colour)
    lengths = sorted({row["seqlen"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("sequence length N (markers: counted)")


def draw_cards(axes, rows: list[Row]) -> None:
    """Bars of the longest N."""
    seqlen = max(row["seqlen"] for row in rows)
    cards = list(dict.fromkeys(row["card"] for row in rows))
    for n, method in enumerate(METHODS):
        for place, card in enumerate(cards):
            (row,) = of(rows, method=method, card=card, seqlen=seqlen)
            y, x = place + 0.27 * (n - 1), row["milliseconds"]
            axes.barh(y, x, 0.25, color=STYLES[method][0])
            axes.annotate(f"{x:.3g}", (x, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xscale("log")
    values = [row["milliseconds"] for row in of(rows, seqlen=seqlen)]
    axes.set_xlim(min(values) / 2, 4 * max(values))
    axes.set_yticks(range(len(cards)), cards)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("milliseconds at least")
    axes.set_title(f"N = {seqlen // 1024}k, head_dim {rows[0]['head_dim']}, every card", fontsize=11)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Counts against formulas; then what the bounds say of the longest N."""
    names = ("milliseconds", "bytes", "peak_bytes")
    pairs = [(row[name], row[f"{name}_counted"]) for row in rows for name in names]
    pairs = [(formula, count) for formula, count in pairs if count is not None]
    equal = sum(abs(count / formula - 1) < 1e-5 for formula, count in pairs)
    of_counts = Outcome(
        "time, bytes and memory, counted and by polynomials and formulas",
        "equal, to the six digits of the table (computed)",
        f"equal in {equal} of {len(pairs)}",
        equal == len(pairs),
    )
    seqlen = max(row["seqlen"] for row in rows)
    return [*([of_counts] if pairs else []), *_limits(rows, seqlen), *_ratios(rows, seqlen), _memory(rows, seqlen)]


def _limits(rows: list[Row], seqlen: int) -> list[Outcome]:
    """What is busiest at the longest N."""
    standard, ours = (
        {f"{row['card']} {row['head_dim']}": row for row in of(rows, method=method, seqlen=seqlen)}
        for method in (TENSOR_CORES, TILED)
    )
    steps = [f"{where}: {row['limited_by']}" for where, row in standard.items() if row["limited_by"] != _SOFTMAX_WAITS]
    limits = {where: row["limited_by"] for where, row in ours.items()}
    others = [f"{where}: {limit}" for where, limit in limits.items() if limit != "tensor"]
    judged = [where for where, row in ours.items() if row["arch"] not in WITHOUT_MMA_SYNC_RATE]
    return [
        Outcome(
            f"{TENSOR_CORES}, N = {seqlen}: what gives the bound of the longest step",
            f"{_SOFTMAX_WAITS}, on every card: memory-bound (published: Dao et al. 2022)",
            "; ".join(steps) or f"{_SOFTMAX_WAITS}, in {len(standard)} of {len(standard)}",
            not steps,
            "there products take longer than the transfers of the softmax",
        ),
        Outcome(
            f"{TILED}, N = {seqlen}: what gives the bound",
            f"tensor cores where mma.sync has their rate, not on {' and '.join(WITHOUT_MMA_SYNC_RATE)} (predicted)",
            f"tensor in {len(limits) - len(others)} of {len(limits)}; {'; '.join(others)}".rstrip("; "),
            all(limits[where] == "tensor" for where in judged),
            "there another unit has more to do for a tile than the tensor cores; cost_table says how much",
        ),
    ]


def _ratios(rows: list[Row], seqlen: int) -> list[Outcome]:
    """Bounds of the standard method over ours."""
    found = []
    for head_dim in sorted({row["head_dim"] for row in rows}):
        ours = {row["card"]: row["milliseconds"] for row in of(rows, method=TILED, head_dim=head_dim, seqlen=seqlen)}
        best = of(rows, method=TENSOR_CORES, head_dim=head_dim, seqlen=seqlen)
        ratios = {row["card"]: row["milliseconds"] / ours[row["card"]] for row in best}
        found.append(
            Outcome(
                f"head_dim {head_dim}, N = {seqlen}: least time of the standard method with tensor cores over ours",
                "above 1 on every card (predicted)",
                ", ".join(f"{card} {ratio:.1f}" for card, ratio in ratios.items()),
                min(ratios.values()) > 1,
                "a bound of ours that high says that the tiled kernel could be slower there",
            )
        )
    return found


def _memory(rows: list[Row], seqlen: int) -> Outcome:
    """How it grows."""
    head_dim = max(row["head_dim"] for row in rows)
    standard, ours = (
        of(rows, method=method, head_dim=head_dim, seqlen=seqlen)[0]["peak_bytes"] for method in (SCALAR, TILED)
    )
    expected = 1 + seqlen / (4 * head_dim)
    return Outcome(
        f"memory of the standard method over ours, N = {seqlen}, head_dim {head_dim}",
        f"1 + N / (4 d) = {expected:g} (computed)",
        f"{standard / ours:.6g}: {standard / 1e9:.1f} GB for {ours / 1e9:.2f} GB",
        abs(standard / ours / expected - 1) < 1e-5,
    )


EXPERIMENT = Experiment(
    claim="By a model that gives lower bounds, the tiled forward can be limited by tensor cores where the standard "
    "method waits for memory, whatever computes its products, and it needs less memory by a factor of 1 + N / (4 d)",
    caption="Lower bounds for one forward of N tokens, 2048 hidden columns, float16, by the cost model: how long each "
    "method takes at least, not how long it takes (latency, waiting and launches are not in it, nor is it measured); "
    "right, memory.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={
        "seqlens": [2**n for n in range(9, 16)],
        "head_dims": [64, 128],
        "cards": [*CARDS],
        "standard_counted_to": 512,
        "counted_to": 1024,
    },
    quick={
        "seqlens": [256, 4096],
        "head_dims": [64],
        "cards": ["A100"],
        "standard_counted_to": 256,
        "counted_to": 256,
    },
    figure_size=(13.0, 4.8),
)
