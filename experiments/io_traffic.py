"""How many bytes of device memory do the forward and the backward pass move, as N, head_dim and the block size grow?

Forward. The standard method writes S and P, N x N numbers each, and reads both back: 4 N^2 elements in three kernels
(Dao et al. 2022, algorithm 0), beside Q, K, V and O. A tiled kernel moves Q, K, V and O, 4 N d elements, where its
repeated reads of K and V hit a cache, and Q + O + ceil(N / BLOCK_M) (K + V) where nothing does. With M = BLOCK_M d, the
numbers of a tile of queries, these repeated reads are 2 N^2 d^2 / M elements: the theorem of the same paper (a method
with M numbers of memory on the chip moves of the order of N d + N^2 d^2 / M, the standard one N d + N^2), counted.

Backward. The standard method computes S and P again and then dP and dS, and moves 10 N^2 + 10 N d elements in seven
kernels (3 N^2 fewer if the forward's P were kept). The tiled kernels move 13 N d elements and 28 N bytes for lse and
delta where repeated reads hit a cache; where nothing does, dq reads K and V once for each tile of queries, and dkdv
reads Q and dO once for each tile of keys. Their tiles cannot be chosen; they differ with head_dim and architecture.

All is counted while the kernels run in the simulator: distinct 32-byte sectors of each launch ("least"), and sectors
of every request of a warp ("requested"). The standard kernels read their operands again for every number they compute,
without tiles: what they request says little about the method, and the comparison is with their least. They take long
in the simulator and run up to N = COUNTED_TO only; their formula goes on. One head, float16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import cupyflash
from cupyflash import Numerics, naive, ptxsim
from cupyflash._backward_config import flash_bwd_dkdv_tile, flash_bwd_dq_tile
from cupyflash._config import flash_fwd_tile
from cupyflash.demo.traffic import SECTOR_BYTES, inputs, of_kernels
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

ELEMENT_BYTES = 2
REPEATED_BYTES = 2 * ELEMENT_BYTES  # of two operands, for each N^2 d^2 / M
LENGTH_HEAD_DIM = 64  # while N grows
ARCH, OLDER_ARCH = "sm_80", "sm_75"  # the backward's tiles are smaller on the older one
FORWARD, BACKWARD = DIRECTIONS = "forward", "backward"
BY_LENGTH, BY_HEAD_DIM, BY_BLOCK = "length", "head_dim", "block"  # sweeps
BLOCK_KEYS = (
    32  # of a tile of the forward, for any number of queries: more do not fit beside 256 queries at head_dim 256
)
SLOWER = 20  # times that the standard kernels take in the simulator, roughly
PAIRS = {
    "standard_least": "standard_formula",
    "ours_least": "ours_least_formula",
    "ours_requested": "ours_requested_formula",
}
SERIES = (
    ("standard_least", "standard method", record.STANDARD, "-", "s"),
    ("ours_requested", "cupyflash,\nno cache", record.EXTRA, ":", "^"),
    ("ours_least", "cupyflash", record.OURS, "-", "o"),
)


def tiles(direction: str, head_dim: int, block_m: int | None = None, arch: str = ARCH) -> tuple[int, ...]:
    """Rows of the tile that a block of each launch keeps: of queries, and in dkdv of keys."""
    if direction == FORWARD:
        return (block_m or flash_fwd_tile(head_dim, head_dim, arch).block_m,)
    return flash_bwd_dq_tile(head_dim, head_dim, arch).block_m, flash_bwd_dkdv_tile(head_dim, head_dim, arch).block_n


def formulas(direction: str, seqlen: int, head_dim: int, block_m: int | None = None, arch: str = ARCH) -> Row:
    """Bytes by the formulas."""
    operand, square = seqlen * head_dim * ELEMENT_BYTES, seqlen * seqlen * ELEMENT_BYTES
    first, *others = (math.ceil(seqlen / rows) for rows in tiles(direction, head_dim, block_m, arch))
    repeated = first * 2 * operand + sum(others) * (2 * operand + 8 * seqlen)  # dkdv reads lse and delta as well
    return {
        "standard_formula": 4 * square + 4 * operand if direction == FORWARD else 10 * square + 10 * operand,
        "ours_least_formula": 4 * operand if direction == FORWARD else backward_least(seqlen, head_dim),
        "ours_requested_formula": once(direction, seqlen, head_dim) + repeated,
    }


def backward_least(seqlen: int, head_dim: int) -> int:
    """delta reads out and dout; dq and dkdv read Q, K, V and dO; three gradients are written."""
    statistics = 4 + 8 + 2 * 8  # of a query: lse is read; lse and delta are written, and read by dq and by dkdv
    return (2 + 2 * 4 + 3) * seqlen * head_dim * ELEMENT_BYTES + statistics * seqlen


def once(direction: str, seqlen: int, head_dim: int) -> int:
    """Bytes that the tiled kernels request once, whatever their tiles."""
    operand = seqlen * head_dim * ELEMENT_BYTES
    if direction == FORWARD:
        return 2 * operand
    delta = 2 * operand + 3 * seqlen * SECTOR_BYTES  # a warp for each query: a sector for each of its statistics
    return delta + (2 * 2 + 3) * operand + 8 * seqlen  # dq and dkdv read their own side; three gradients are written


def theorem(direction: str, seqlen: int, head_dim: int, block_m: int | None = None, arch: str = ARCH) -> int:
    """N^2 d^2 / M, with M the numbers of a kept tile, of all launches."""
    return round(sum(seqlen**2 * head_dim / rows for rows in tiles(direction, head_dim, block_m, arch)))


def profiled(
    library, direction: str, seqlen: int, head_dim: int, block_m: int | None = None, arch: str = ARCH
) -> list[ptxsim.KernelProfile]:
    """What the kernels of ``cupyflash`` or ``cupyflash.naive`` did for one head."""
    q, k, v = inputs(seqlen, head_dim)
    dout = np.random.default_rng((seqlen, 1)).standard_normal(q.shape).astype(q.dtype)
    out, dq, dk, dv = (np.empty_like(q) for _ in range(4))
    options = {} if block_m is None else {"numerics": Numerics(tile=(block_m, BLOCK_KEYS))}
    with ptxsim.settings(arch=arch):
        if direction == FORWARD:
            with ptxsim.profile() as profile:
                library.attention(q, k, v, out=out, **options)
        else:
            _, lse = cupyflash.attention(q, k, v, out=out, return_lse=True)
            with ptxsim.profile() as profile:
                library.attention_backward(dout, q, k, v, out, lse, grads_out=(dq, dk, dv))
    return profile.kernels


def count(case: Row) -> Row:
    """Bytes counted, beside the formulas; ``None`` for the standard method where it does not run."""
    sizes = {name: case[name] for name in ("direction", "seqlen", "head_dim", "block_m", "arch")}
    ours = of_kernels(profiled(cupyflash, **sizes))
    standard = case["standard"] and of_kernels(profiled(naive, case["direction"], case["seqlen"], case["head_dim"]))
    return {
        **sizes,
        "ours_least": ours.least,
        "ours_requested": ours.requested,
        "standard_least": standard.least if standard else None,
        **formulas(**sizes),
        "ours_repeated": ours.requested - once(case["direction"], case["seqlen"], case["head_dim"]),
        "theorem": theorem(**sizes),
    }


def measure(
    seqlens: list[int],
    head_dims: list[int],
    counted_to: int,
    sweep_seqlen: int,
    block_rows: list[int],
    archs: list[str],
) -> list[Row]:
    """Rows of three sweeps: N; head_dim at one N; the block size there, in the backward by the architecture."""

    def case(sweep, direction, seqlen, head_dim, block_m=None, arch=ARCH):
        return {
            "sweep": sweep,
            "direction": direction,
            "seqlen": seqlen,
            "head_dim": head_dim,
            "block_m": block_m,
            "arch": arch,
            "standard": sweep != BY_BLOCK and seqlen <= counted_to,
        }

    cases = [case(BY_LENGTH, way, n, LENGTH_HEAD_DIM) for way in DIRECTIONS for n in seqlens]
    cases += [case(BY_HEAD_DIM, way, sweep_seqlen, d) for way in DIRECTIONS for d in head_dims]
    cases += [case(BY_BLOCK, FORWARD, sweep_seqlen, d, rows) for d in head_dims for rows in block_rows]
    cases += [case(BY_BLOCK, BACKWARD, sweep_seqlen, d, arch=arch) for arch in archs for d in head_dims]
    different = dict.fromkeys(without_sweep(case) for case in cases)
    counts = measure_all(count, [dict(sizes) for sizes in different], work=_work)
    of_sizes = dict(zip(different, counts, strict=True))
    return [{"sweep": case["sweep"], **of_sizes[without_sweep(case)]} for case in cases]


def without_sweep(case: Row) -> tuple[tuple[str, Any], ...]:
    """Names and sizes: what two sweeps share is counted once."""
    return tuple((name, size) for name, size in case.items() if name != "sweep")


def _work(case: Row) -> float:
    """Time of a case, roughly."""
    pairs = case["seqlen"] ** 2 * case["head_dim"] * (1 if case["direction"] == FORWARD else 3)
    return pairs * (SLOWER if case["standard"] else 1)


def draw(figure, rows: list[Row]) -> None:
    """Above N, forward and backward; below head_dim and block size."""
    panels = figure.subplots(2, 2, height_ratios=(1.2, 1))
    panels[0, 1].sharey(panels[0, 0])
    for axes, direction in zip(panels[0], DIRECTIONS, strict=True):
        draw_lengths(axes, of(rows, BY_LENGTH, direction))
    draw_head_dims(panels[1, 0], of(rows, BY_HEAD_DIM, FORWARD))
    draw_blocks(panels[1, 1], [row for row in rows if row["sweep"] == BY_BLOCK])
    figure.suptitle("Device memory moved by one head: counted (markers) and by formula (lines)")


def of(rows: list[Row], sweep: str, direction: str) -> list[Row]:
    """Rows of a sweep in one direction."""
    return [row for row in rows if (row["sweep"], row["direction"]) == (sweep, direction)]


def draw_series(axes, rows: list[Row], variable: str, rises: tuple[int, ...] = (0, 0, 0)) -> None:
    """Bytes against a variable, both axes logarithmic; markers are counts, lines formulas. ``rises`` part labels."""
    values = [row[variable] for row in rows]
    for (counted, label, colour, line, marker), rise in zip(SERIES, rises, strict=True):
        axes.plot(values, [row[PAIRS[counted]] for row in rows], line, color=colour, linewidth=2)
        there = [row for row in rows if row[counted] is not None]
        axes.plot([row[variable] for row in there], [row[counted] for row in there], marker, color=colour)
        end = values[-1], rows[-1][PAIRS[counted]]
        axes.annotate(label, end, (8, rise), textcoords="offset points", va="center", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=4)
    axes.set_xticks(values, [str(value) for value in values])
    axes.yaxis.set_major_formatter(lambda t, _: f"{t / 1024:g} KiB" if t < 2**20 else f"{t / 2**20:g} MiB")
    axes.minorticks_off()


def draw_lengths(axes, rows: list[Row]) -> None:
    """Bytes against N, and the ratio at the longest."""
    draw_series(axes, rows, "seqlen")
    last = rows[-1]
    standard, ours = last["standard_formula"], last["ours_least"]
    middle = last["seqlen"], math.sqrt(ours * last["ours_requested"])
    axes.annotate(
        f"{standard / ours:.0f}x", middle, (-6, 0), textcoords="offset points", ha="right", va="center", fontsize=13
    )
    arrow = {"arrowstyle": "<->", "color": "black", "linewidth": 0.8}
    axes.annotate("", (last["seqlen"], standard / 1.2), (last["seqlen"], ours * 1.2), arrowprops=arrow)
    axes.set_xlabel("sequence length N")
    axes.set_title(f"{last['direction'].capitalize()}, head_dim {last['head_dim']}")


def draw_head_dims(axes, rows: list[Row]) -> None:
    """Bytes against head_dim."""
    draw_series(axes, rows, "head_dim", rises=(9, -12, 0))
    axes.set_xlabel("head_dim d")
    axes.set_title(f"Forward, N = {rows[0]['seqlen']}")


def draw_blocks(axes, rows: list[Row]) -> None:
    """Repeated reads against N^2 d^2 / M: the points of all head_dims and tiles lie on one line."""
    head_dims = sorted({row["head_dim"] for row in rows})
    for direction, face in (FORWARD, None), (BACKWARD, "white"):
        for head_dim, colour, marker in zip(head_dims, record.COLOURS, "osD^v", strict=False):
            those = [row for row in of(rows, BY_BLOCK, direction) if row["head_dim"] == head_dim]
            label = f"d = {head_dim}" if direction == FORWARD else None
            x, y = ([row[name] / 2**20 for row in those] for name in ("theorem", "ours_repeated"))
            axes.plot(x, y, marker, color=colour, label=label, markerfacecolor=face or colour, markersize=7)
    ends = [end(row["theorem"] for row in rows) / 2**20 for end in (min, max)]
    axes.plot(ends, [REPEATED_BYTES * x for x in ends], color="black", linewidth=1, zorder=0)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log", base=4)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel(r"$N^2 d^2 / M$, M = BLOCK_M d (backward: and BLOCK_N d), in $2^{20}$")
    axes.set_ylabel("MiB")
    axes.set_title(f"Without a cache: repeated reads, N = {rows[0]['seqlen']}")
    axes.annotate(
        rf"line: {REPEATED_BYTES} bytes $\cdot\;N^2 d^2 / M$" + "\nfilled: forward, open: backward",
        (0.97, 0.05), xycoords="axes fraction", ha="right", fontsize=10,
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=10)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Counts against formulas, growth with N and d, and the theorem."""
    pairs = [(row[a], row[b]) for row in rows for a, b in PAIRS.items() if row[a] is not None]
    equal = sum(counted == formula for counted, formula in pairs)
    found = [
        Outcome(
            "bytes counted and by formula",
            "equal in all (computed)",
            f"equal in {equal} of {len(pairs)}",
            equal == len(pairs),
        )
    ]
    for direction in DIRECTIONS:
        found += _growth(of(rows, BY_LENGTH, direction))
    # Lower powers of N count for more in the backward, which has more launches.
    advantages = (
        _advantage(of(rows, BY_HEAD_DIM, way), way, off) for way, off in ((FORWARD, 1 / 3), (BACKWARD, 1 / 2))
    )
    return [*found, *_theorem(rows), *advantages]


def _growth(rows: list[Row]) -> list[Outcome]:
    """The power of N that bytes grow with between the two longest: the standard method's by its formula."""
    if len(rows) < 2:
        return []
    short, long = sorted(rows, key=lambda row: row["seqlen"])[-2:]
    outcomes = []
    for column, method, expected, tolerance, source in (
        ("standard_formula", "standard method, by formula", 2, 0.25, "published: Dao et al. 2022"),
        ("ours_least", "cupyflash", 1, 0, "computed"),
    ):
        power = math.log2(long[column] / short[column]) / math.log2(long["seqlen"] / short["seqlen"])
        outcomes.append(
            Outcome(
                f"{long['direction']}, {method}: power of N, N = {short['seqlen']} to {long['seqlen']}",
                f"{expected}{f' within {tolerance}' * bool(tolerance)} ({source})",
                f"{power:.2f}",
                abs(power - expected) <= tolerance + 1e-9,
                "beside the N x N numbers there are N d, which count for more where N is small",
            )
        )
    return outcomes


def _theorem(rows: list[Row]) -> list[Outcome]:
    """The constant of N^2 d^2 / M, over tiles and head_dims; and d^2 where M is the same."""
    outcomes = []
    for direction, tolerance, words in (FORWARD, 0, ""), (BACKWARD, 0.1, ", up to 10 % more for lse and delta"):
        constants = [row["ours_repeated"] / row["theorem"] for row in of(rows, BY_BLOCK, direction) if whole_tiles(row)]
        if not constants:
            continue
        low, high = min(constants), max(constants)
        outcomes.append(
            Outcome(
                f"{direction}, no cache: repeated reads over N^2 d^2 / M, all tiles and head_dims",
                f"{REPEATED_BYTES} bytes: two operands{words} (computed; the order of growth is published)",
                f"{low:.3g} to {high:.3g} bytes",
                REPEATED_BYTES <= low and high <= REPEATED_BYTES * (1 + tolerance),
            )
        )
    return [*outcomes, *_same_memory(of(rows, BY_BLOCK, FORWARD))]


def whole_tiles(row: Row) -> bool:
    """Whether no tile that a block keeps has rows beyond N."""
    kept = tiles(row["direction"], row["head_dim"], row["block_m"], row["arch"])
    return all(row["seqlen"] % rows == 0 for rows in kept)


def _same_memory(rows: list[Row]) -> list[Outcome]:
    """Where M is the same, repeated reads grow with d^2."""
    on_chip = min(row["head_dim"] for row in rows) * max(row["block_m"] for row in rows)
    same = sorted(
        (row["head_dim"], row["ours_repeated"]) for row in rows if row["block_m"] * row["head_dim"] == on_chip
    )
    (narrow, few), (wide, many) = same[0], same[-1]
    if narrow == wide:
        return []
    expected, found = (wide / narrow) ** 2, many / few
    what = f"the forward's, M = {on_chip}, head_dim {narrow} to {wide}"
    return [
        Outcome(
            what, f"{expected:g} times, d squared (published: Dao et al. 2022)", f"{found:g} times", found == expected
        )
    ]


def _advantage(rows: list[Row], direction: str, tolerance: float) -> Outcome:
    """The standard method over the tiled kernels without a cache, which shrinks as d^2 comes near M."""
    squares = {FORWARD: 4, BACKWARD: 10}[direction]  # N x N numbers of the standard method
    expected = [squares * ELEMENT_BYTES * row["seqlen"] ** 2 / (REPEATED_BYTES * row["theorem"]) for row in rows]
    ratios = [row["standard_formula"] / row["ours_requested"] for row in rows]
    head_dims = ", ".join(str(row["head_dim"]) for row in rows)
    return Outcome(
        f"{direction}, no cache for the tiled kernels: standard over tiled, head_dim {head_dims}",
        f"by the terms in N^2 alone {_joined(expected)}, within {tolerance:.0%} (computed)",
        _joined(ratios),
        all(abs(ratio / near - 1) < tolerance for ratio, near in zip(ratios, expected, strict=True)),
        "the terms in N d count for more where N is small",
    )


def _joined(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


EXPERIMENT = Experiment(
    claim="The standard method moves 4 N^2 + 4 N d elements of device memory per head in the forward and "
    "10 N^2 + 10 N d in the backward, the tiled kernels 4 N d and 13 N d; without any "
    "cache the forward reads 2 N^2 d^2 / M for a tile of M numbers, as FlashAttention's theorem has it (Dao et al. "
    "2022)",
    caption="Device memory that one head moves: the standard method writes and reads N x N numbers, the tiled kernels "
    "never do, with a perfect cache or with none; below, head_dim, and repeated reads against N^2 d^2 / M for a tile "
    "of M numbers.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={
        "seqlens": [128, 256, 512, 1024, 2048, 4096],
        "head_dims": [32, 64, 128, 256],
        "counted_to": 1024,
        "sweep_seqlen": 512,
        "block_rows": [32, 64, 128, 256],
        "archs": [OLDER_ARCH, ARCH],
    },
    quick={
        "seqlens": [64, 256, 512],
        "head_dims": [64],
        "counted_to": 64,
        "sweep_seqlen": 256,
        "block_rows": [64],
        "archs": [ARCH],
    },
    figure_size=(11.0, 8.0),
)
