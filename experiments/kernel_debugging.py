"""What do a bank conflict and a missing barrier look like in the simulator, before and after they are fixed?

Two textbook kernels in `experiments/kernels`, each with a fault and a constant that fixes it; `experiments/ptxsim.md`
goes through both from the command line.

`transpose.cu` reads columns of a 32 x 32 tile in shared memory, whose words all lie in one bank: 32 wavefronts where
one unused column of PADDING leaves one. `product.cu` overwrites its tiles while other warps may still read them: a
race that the sanitizer reports, and that gives wrong elements as soon as the warps do not run in step; SECOND_BARRIER
orders them. All of it is counted or found by the simulator; which warp does what when is noted by the kernel itself, in
device memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tqdm import tqdm

from cupyflash import ptxsim
from experiments import record
from experiments.experiment import Experiment, Outcome, Row

SOURCES = Path(__file__).parent / "kernels"
TRANSPOSE, PRODUCT = "transpose.cu", "product.cu"
VARIANTS = {TRANSPOSE: ("PADDING=0", "PADDING=1"), PRODUCT: ("FIRST_BARRIER", "SECOND_BARRIER")}
TRANSPOSE_SIZE, PRODUCT_SIZE = 128, 64
LOCKSTEP, RANDOM = "lockstep", "random"  # orders of warps
ACCESSES = ("tile written at", "tile read at")  # the time counts accesses of a block's warps
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


def measure(seeds: list[int]) -> list[Row]:
    """Both kernels, each with its fault and without it; the first seed's order of warps is the one that is drawn."""
    return bank_conflict() + missing_barrier(seeds)


def measured(kernel: str, variant: str, what: str, value: int, **where) -> Row:
    """A row; ``where`` are those of line, other_line, order, warp and tile that apply."""
    places = dict.fromkeys(("line", "other_line", "order", "warp", "tile"))
    return {"kernel": kernel, "variant": variant, "what": what, **places, **where, "value": value}


def bank_conflict() -> list[Row]:
    """Wavefronts of each line of both transpositions."""
    return [
        measured(TRANSPOSE, define, what, value, line=line)
        for define in VARIANTS[TRANSPOSE]
        for line, both in wavefronts(define).items()
        for what, value in zip(("shared wavefronts", "ideal shared wavefronts"), both, strict=True)
    ]


def missing_barrier(seeds: list[int]) -> list[Row]:
    """What is found in both products in lockstep; their wrong elements in many orders of warps; one order in detail."""
    rows = []
    for define in VARIANTS[PRODUCT]:
        for line, other, count in races(define):
            rows.append(measured(PRODUCT, define, "shared race", count, line=line, other_line=other))
        orders = [(LOCKSTEP, 0), *((RANDOM, seed) for seed in seeds)]
        for schedule, seed in tqdm(orders, desc=define, unit="order"):
            order = order_name(schedule, seed)
            wrong = int(product(define, schedule, seed).sum())
            rows.append(measured(PRODUCT, define, "wrong elements", wrong, order=order))
        order = order_name(RANDOM, seeds[0])
        for (warp, tile, access), time in np.ndenumerate(timeline(define, seeds[0])):
            what = ACCESSES[access]
            rows.append(measured(PRODUCT, define, what, int(time), order=order, warp=warp, tile=tile))
    return rows


def order_name(schedule: str, seed: int) -> str:
    """As the CSV has it."""
    return f"{schedule}, seed {seed}" if schedule == RANDOM else schedule


def races(define: str) -> list[tuple[int, int, int]]:
    """Line, the line that it races with, and how often, as the sanitizer says of a product in lockstep."""
    with ptxsim.sanitize() as report:
        product(define)
    assert all(finding.kind == "shared race" for finding in report.findings)
    return [(line_of(finding.where), line_of(finding.other), finding.count) for finding in report.findings]


def line_of(place: str) -> int:
    """Of "file:line"."""
    return int(place.rpartition(":")[2])


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


def draw(figure, rows: list[Row]) -> None:
    """Above the bank conflict, below the missing barrier: the source at the left, what was counted at the right."""
    above, below = figure.subfigures(2, 1, height_ratios=(4.0, 5.6), hspace=0.06)
    draw_bank_conflict(above, [row for row in rows if row["kernel"] == TRANSPOSE])
    draw_missing_barrier(below, [row for row in rows if row["kernel"] == PRODUCT])


def draw_bank_conflict(figure, rows: list[Row]) -> None:
    """The source, and a panel of bars for each variant."""
    counted = wavefronts_by_line(rows)
    code, *panels = figure.subplots(1, 3, width_ratios=(2.6, 1, 1), sharey=True)
    draw_source(code, TRANSPOSE, marked={line: record.STANDARD for line in conflicting(counted)})
    most = max(count for lines in counted.values() for count, _ in lines.values())
    for axes, (define, lines) in zip(panels, counted.items(), strict=True):
        draw_wavefronts(axes, define, lines, most)


def wavefronts_by_line(rows: list[Row]) -> dict[str, dict[int, tuple[int, int]]]:
    """Variant -> line -> shared wavefronts and their ideal."""
    values = {(row["variant"], row["line"], row["what"]): row["value"] for row in rows}
    counted = {}
    for define, line, what in values:
        if what == "shared wavefronts":
            lines = counted.setdefault(define, {})
            lines[line] = values[define, line, what], values[define, line, "ideal shared wavefronts"]
    return counted


def conflicting(counted: dict[str, dict[int, tuple[int, int]]]) -> list[int]:
    """Lines that take more wavefronts than they need, in any variant."""
    return sorted({line for lines in counted.values() for line, (count, ideal) in lines.items() if count > ideal})


def draw_source(axes, file: str, marked: dict[int, str]) -> None:
    """Source lines from above, each at its number; marked ones on a coloured ground."""
    text = (SOURCES / file).read_text(encoding="utf-8").splitlines()
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
            f"{count:,}: {count / ideal:g} per warp",
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


def draw_missing_barrier(figure, rows: list[Row]) -> None:
    """The source with its races, and a panel for each variant: one order of the warps."""
    code, orders = figure.subfigures(1, 2, width_ratios=(1, 1.35), wspace=0.02)
    one, two = VARIANTS[PRODUCT]
    draw_races(code.subplots(), [(r["line"], r["other_line"]) for r in rows if r["what"] == "shared race"])
    panels = orders.subplots(2, 1, sharex=True)
    for axes, define, barriers in zip(panels, (one, two), ("one barrier", f"with {two}"), strict=True):
        own = [row for row in rows if row["variant"] == define]
        when, order = timeline_of(own)
        late = overwritten(when)
        (wrong,) = (row["value"] for row in own if row["what"] == "wrong elements" and row["order"] == order)
        draw_timeline(axes, when, late)
        axes.set_title(f"{barriers}: {late.sum()} of {late.size} tiles read too late, {wrong:,} elements of c wrong")
        axes.title.set_fontsize(11)
    panels[1].set_xlabel("time: warps write (squares) and read (discs) tiles 0 to 3")


def timeline_of(rows: list[Row]) -> tuple[np.ndarray, str]:
    """What ``timeline`` gave for one variant, and for which order of warps."""
    accesses = [row for row in rows if row["what"] in ACCESSES]
    when = np.empty((8, PRODUCT_SIZE // 16, 2), int)
    for row in accesses:
        when[row["warp"], row["tile"], ACCESSES.index(row["what"])] = row["value"]
    return when, accesses[0]["order"]


def draw_races(axes, pairs: list[tuple[int, int]]) -> None:
    """The source, with the lines of each race joined."""
    marked = {number: record.STANDARD for pair in pairs for number in pair}
    fixing = line_with(PRODUCT, "every thread is done")
    draw_source(axes, PRODUCT, {**marked, fixing: record.OURS})
    for at, pair in enumerate(pairs):
        arrow = {"arrowstyle": "<->", "color": record.STANDARD, "linewidth": 1}
        axes.annotate("", (0.92 + 0.04 * at, pair[0]), (0.92 + 0.04 * at, pair[1]), arrowprops=arrow)
    axes.set_title(f"{len(pairs)} races found without line {fixing}")


def line_with(file: str, text: str) -> int:
    """Number of the one line of a kernel's file that holds the text."""
    lines = (SOURCES / file).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if text in line)
    return number


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


def outcomes(rows: list[Row]) -> list[Outcome]:
    """What the rules of shared memory and of barriers say, beside what the simulator counted and found."""
    counted = wavefronts_by_line([row for row in rows if row["kernel"] == TRANSPOSE])
    column = line_with(TRANSPOSE, "= tile[x][y]")
    turns = {define: lines[column][0] / lines[column][1] for define, lines in counted.items()}
    read = line_with(PRODUCT, "sum += ")
    racing = {(line_with(PRODUCT, f"tile_{name}[y][x] ="), read) for name in "ab"}
    one, two = VARIANTS[PRODUCT]
    judged = [
        Outcome(
            f"wavefronts of a warp that reads a column, {define}",
            f"{expected} (computed: {why})",
            f"{turns[define]:g}",
            turns[define] == expected,
        )
        for define, expected, why in (
            ("PADDING=0", 32, "all words in one bank"),
            ("PADDING=1", 1, "each in another bank"),
        )
    ]
    for define, expected, said in (
        (one, racing, "both lines that write a tile with the one that reads it (predicted)"),
        (two, set(), "none (predicted)"),
    ):
        found = {
            (row["line"], row["other_line"]) for row in rows if (row["variant"], row["what"]) == (define, "shared race")
        }
        lines = ", ".join(f"lines {line} and {other}" for line, other in sorted(found))
        judged.append(Outcome(f"races found in lockstep, {define}", said, lines or "none", found == expected))
    wrong = {
        (define, random): [
            row["value"]
            for row in rows
            if (row["variant"], row["what"]) == (define, "wrong elements") and (row["order"] != LOCKSTEP) == random
        ]
        for define in (one, two)
        for random in (False, True)
    }
    least, most = min(wrong[one, True]), max(wrong[one, True])
    judged.append(
        Outcome(
            f"wrong elements, {one}",
            "none in lockstep; some in every random order (predicted)",
            f"{wrong[one, False][0]} in lockstep; {least:,} to {most:,} of {PRODUCT_SIZE**2:,} in "
            f"{len(wrong[one, True])} random orders",
            wrong[one, False] == [0] and least > 0,
        )
    )
    all_of_two = wrong[two, False] + wrong[two, True]
    judged.append(
        Outcome(
            f"wrong elements, {two}",
            "none in any order (predicted)",
            f"up to {max(all_of_two):,}" if any(all_of_two) else f"none in {len(all_of_two)} orders",
            not any(all_of_two),
        )
    )
    return judged


EXPERIMENT = Experiment(
    claim="A column of a 32 x 32 tile in shared memory takes 32 wavefronts, with one unused column 1; a tile that is "
    "overwritten without a barrier is a race between two lines, and gives wrong elements when warps do not run in step "
    "([worked through](ptxsim.md))",
    caption="Two faults in the simulator, and both fixed: above a bank conflict, as wavefronts of each source line; "
    "below a missing barrier, as lines that race and as tiles that a warp reads when others have overwritten them.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seeds": list(range(8))},
    quick={"seeds": [0]},
    figure_size=(13.0, 9.6),
)
