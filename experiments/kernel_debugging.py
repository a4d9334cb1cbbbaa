"""What do a bank conflict and a missing barrier look like in the simulator, before and after they are fixed?

Two textbook kernels in `experiments/kernels`, each with a fault and a constant that fixes it; `experiments/ptxsim.md`
goes through both from the command line.

`transpose.cu` reads columns of a 32 x 32 tile in shared memory, whose words all lie in one bank: 32 wavefronts where
one unused column of PADDING leaves one. `product.cu` overwrites its tiles while other warps may still read them: a
race that the sanitizer reports, and that gives wrong elements as soon as the warps do not run in step; SECOND_BARRIER
orders them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cupyflash import ptxsim
from experiments import record

SOURCES = Path(__file__).parent / "kernels"
TRANSPOSE, PRODUCT = "transpose.cu", "product.cu"
VARIANTS = {TRANSPOSE: ("PADDING=0", "PADDING=1"), PRODUCT: ("FIRST_BARRIER", "SECOND_BARRIER")}
TRANSPOSE_SIZE, PRODUCT_SIZE = 128, 64
LOCKSTEP, RANDOM = "lockstep", "random"
TOLERANCE = 1e-3  # far above the rounding of 64 products, far below one of them


def kernel(file: str, define: str):
    """The kernel of a file, named as the file is, with one constant defined."""
    source = (SOURCES / file).read_text(encoding="utf-8")
    module = ptxsim.RawModule(code=f'#line 1 "{file}"\n{source}', options=(f"-D{define}",))
    return module.get_function(file.removesuffix(".cu"))


def wavefronts(define: str) -> dict[int, tuple[int, int]]:
    """Source line -> shared wavefronts and their ideal, of one transposition."""
    n = TRANSPOSE_SIZE
    matrix, out = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32), np.empty((n, n), np.float32)
    transpose = kernel(TRANSPOSE, define)
    with ptxsim.profile() as profile:
        transpose((n // 32, n // 32), (32, 32), (matrix, out, np.int32(n)))
    assert (out == matrix.T).all()
    (counted,) = profile.kernels
    return {
        line.line: (line.shared_wavefronts, line.shared_ideal_wavefronts)
        for line in counted.lines
        if line.shared_wavefronts
    }


def product(define: str, schedule: str = LOCKSTEP, seed: int = 0) -> np.ndarray:
    """Which elements of a product come out wrong."""
    n = PRODUCT_SIZE
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    c = np.empty((n, n), np.float32)
    with ptxsim.settings(schedule=schedule, seed=seed):
        kernel(PRODUCT, define)((n // 16, n // 16), (16, 16), (a, b, c, np.int32(n)))
    return np.abs(c - a.astype(np.float64) @ b) > TOLERANCE


def findings(define: str) -> list[ptxsim.Finding]:
    """What the sanitizer says of a product in lockstep."""
    with ptxsim.sanitize() as report:
        product(define)
    return report.findings


def bank_conflict(folder: Path) -> list[dict[str, object]]:
    """Count both transpositions and draw them; rows for the CSV."""
    counted = {define: wavefronts(define) for define in VARIANTS[TRANSPOSE]}
    text = (SOURCES / TRANSPOSE).read_text(encoding="utf-8").splitlines()
    with record.figure(
        folder / "kernel_debugging_bank_conflict.png",
        *(1, 3),
        size=(12.0, 4.0),
        width_ratios=(2.6, 1, 1),
        sharey=True,
    ) as (code, *panels):
        draw_source(code, text, marked={line: record.STANDARD for line in conflicting(counted)})
        most = max(count for lines in counted.values() for count, _ in lines.values())
        for axes, (define, lines) in zip(panels, counted.items(), strict=True):
            draw_wavefronts(axes, define, lines, most)
    return [
        {"kernel": TRANSPOSE, "variant": define, "line": line, "what": what, "value": value}
        for define, lines in counted.items()
        for line, both in lines.items()
        for what, value in zip(("shared wavefronts", "ideal shared wavefronts"), both, strict=True)
    ]


def conflicting(counted: dict[str, dict[int, tuple[int, int]]]) -> list[int]:
    """Lines that take more wavefronts than they need, in any variant."""
    return sorted({line for lines in counted.values() for line, (count, ideal) in lines.items() if count > ideal})


def draw_source(axes, text: list[str], marked: dict[int, str]) -> None:
    """Source lines from above, each at its number; marked ones on a coloured ground."""
    axes.set(xlim=(0, 1), ylim=(len(text) + 0.6, 0.4))
    axes.axis("off")
    for number, line in enumerate(text, start=1):
        if number in marked:
            axes.axhspan(number - 0.5, number + 0.5, color=marked[number], alpha=0.18, linewidth=0)
        options = {"va": "center", "family": "monospace", "fontsize": 8}
        axes.text(0.03, number, number, ha="right", color="#9a9a9a", **options)
        axes.text(0.05, number, line, **options)


def draw_wavefronts(axes, define: str, lines: dict[int, tuple[int, int]], most: int) -> None:
    """A bar for each line that accesses shared memory."""
    for line, (count, ideal) in lines.items():
        colour = record.STANDARD if count > ideal else record.OURS
        axes.barh(line, count, height=0.8, color=colour)
        inside = count > most / 2
        axes.annotate(
            f"{count:,}: {count / ideal:g} per phase",
            (count, line),
            (-5 if inside else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            fontsize=9,
            color="white" if inside else colour,
        )
    axes.set_xlim(0, 1.05 * most)
    axes.grid(visible=False, axis="y")
    axes.tick_params(left=False, labelleft=False)
    axes.set_xlabel("shared-memory wavefronts")
    axes.set_title(define, loc="left", family="monospace")


def missing_barrier(folder: Path, seeds: list[int]) -> list[dict[str, object]]:
    """Check both products, run them in many orders and draw one; rows for the CSV."""
    rows, found, timelines = [], {}, {}
    for define in VARIANTS[PRODUCT]:
        found[define], timelines[define] = findings(define), timeline(define, seeds[0])
        measured = [(finding.where, f"{finding.kind} with {finding.other}", finding.count) for finding in found[define]]
        for schedule, seed in [(LOCKSTEP, 0), *((RANDOM, seed) for seed in seeds)]:
            order = schedule + f", seed {seed}" * (schedule == RANDOM)
            measured.append(("", f"wrong elements, {order}", int(product(define, schedule, seed).sum())))
        too_late = int(overwritten(timelines[define]).sum())
        measured.append(("", f"tiles read too late by a warp, {RANDOM}, seed {seeds[0]}", too_late))
        rows += [
            {"kernel": PRODUCT, "variant": define, "line": place.rpartition(":")[2], "what": what, "value": value}
            for place, what, value in measured
        ]
    with record.figure(
        folder / "kernel_debugging_missing_barrier.png", 2, 2, size=(13.0, 5.6), width_ratios=(1, 1.35), sharex="col"
    ) as axes:
        code = axes[0, 0].figure.add_subplot(axes[0, 0].get_gridspec()[:, 0])
        for unused in axes[:, 0]:
            unused.remove()
        draw_races(code, found[VARIANTS[PRODUCT][0]])
        for panel, define in zip(axes[:, 1], VARIANTS[PRODUCT], strict=True):
            late, wrong = overwritten(timelines[define]), product(define, RANDOM, seeds[0])
            draw_timeline(panel, timelines[define], late)
            barriers = "one barrier" if define == VARIANTS[PRODUCT][0] else "with SECOND_BARRIER"
            panel.set_title(
                f"{barriers}: {late.sum()} of {late.size} tiles read too late, {wrong.sum():,} elements of c wrong",
                loc="left",
                fontsize=11,
            )
        axes[1, 1].set_xlabel("time: warps write (squares) and read (discs) tiles 0 to 3")
    return rows


def timeline(define: str, seed: int) -> np.ndarray:
    """When each warp of one block writes and begins to read each tile: (warp, tile, write or read), counted from 0."""
    source = (SOURCES / PRODUCT).read_text(encoding="utf-8")
    for text, traced in (
        ("int n) {", "int n, int* now, int (*when)[2]) {"),
        ("        tile_a[y][x] =", "        NOTE(0);\n        tile_a[y][x] ="),
        ("        for (int i", "        NOTE(1);\n        for (int i"),
    ):
        assert source.count(text) == 1
        source = source.replace(text, traced)
    note = "if (x == 0 && y % 2 == 0) when[y / 2 * (n / 16) + first / 16][what] = atomicAdd(now, 1)"
    module = ptxsim.RawModule(code=f"#define NOTE(what) {note}\n{source}", options=(f"-D{define}",))
    n = PRODUCT_SIZE
    matrix, now, when = np.ones((n, n), np.float32), np.zeros(1, np.int32), np.zeros((8, n // 16, 2), np.int32)
    with ptxsim.settings(schedule=RANDOM, seed=seed):
        module.get_function("product")((1,), (16, 16), (matrix, matrix, matrix.copy(), np.int32(n), now, when))
    return when


def overwritten(when: np.ndarray) -> np.ndarray:
    """(warp, tile): whether another warp had begun to write the next tile when this one began to read."""
    next_written = np.append(when[:, 1:, 0].min(axis=0), when.max() + 1)
    return when[:, :, 1] > next_written


def draw_races(axes, found: list[ptxsim.Finding]) -> None:
    """The source, with the lines of each race joined."""
    pairs = [[int(place.rpartition(":")[2]) for place in (f.where, f.other)] for f in found]
    marked = {number: record.STANDARD for pair in pairs for number in pair}
    text = (SOURCES / PRODUCT).read_text(encoding="utf-8").splitlines()
    fixing = next(number for number, line in enumerate(text, start=1) if "every thread is done" in line)
    draw_source(axes, text, {**marked, fixing: record.OURS})
    for at, pair in enumerate(pairs):
        arrow = {"arrowstyle": "<->", "color": record.STANDARD, "linewidth": 1}
        axes.annotate("", (0.92 + 0.04 * at, pair[0]), (0.92 + 0.04 * at, pair[1]), arrowprops=arrow)
    axes.set_title(f"{len(found)} races found without line {fixing}", loc="left")


def draw_timeline(axes, when: np.ndarray, late: np.ndarray) -> None:
    """A square for each write of a tile, a disc for each read, red where the tile is no longer whole."""
    for (warp, tile, at), time in np.ndenumerate(when):
        colour = record.STANDARD if at == 1 and late[warp, tile] else record.OURS
        marker, face, ink = ("s", "white", colour) if at == 0 else ("o", colour, "white")
        axes.plot(time, warp, marker, markerfacecolor=face, markeredgecolor=colour, markersize=7.5)
        axes.text(time, warp, tile, ha="center", va="center_baseline", fontsize=6.5, color=ink)
    axes.invert_yaxis()
    axes.set_yticks(range(len(when)))
    axes.set_ylabel("warp of a block")
    axes.set_xticks([])
    axes.grid(visible=False)


def main() -> None:
    args = record.arguments(__doc__, seeds=list(range(8)))
    with record.timed("bank conflict"):
        rows = bank_conflict(args.results)
    with record.timed("missing barrier"):
        rows += missing_barrier(args.results, args.seeds)
    record.write_csv(args.results / "kernel_debugging.csv", rows)


if __name__ == "__main__":
    main()
