"""Which tiles does a block visit, in which order, and how many bytes of shared memory does it hold at a time?

The standard method stores all N x N scores. A tiled kernel holds one tile of queries or keys for as long as a block
lives, and one of the others at a time; of the scores it has one tile, in registers or (without tensor cores) in shared
memory. Three kernels: the forward and the backward of dq own queries and visit key tiles, the backward of dk and dv
owns keys and visits query tiles.

By the kernels, in the simulator. Visits: float16, head_dim 128, as sm_80, all keys, causal and a sliding window. The
sources get one printf where a tile's visit begins; that the results do not change by a bit is checked, and the
tensor-core work counted while the untouched kernels run is that of the tiles reported. Bytes: what every launch asks
for, for dtypes, head_dims and architectures with 64, 163, 99 and 227 KiB for a block (48 without asking; CUDA C++
Programming Guide). In NumPy: the tiles that hold a visible pair, and the bytes of the tiles that the kernels' headers
say they keep.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Iterator
from unittest import mock

import numpy as np

from cupyflash import _backward_config, _config, _source, attention, attention_backward, ptxsim
from cupyflash._problem import Problem, attention_problem
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

ARCH, HEAD_DIM = "sm_80", 128  # of the visits
WINDOW = 150  # keys before its own that a query sees
MASKS = {"all keys": {}, "causal": {"causal": True}, "window": {"window_size": (WINDOW, 0)}}
FORWARD, DQ, DKDV = "forward", "backward, dq", "backward, dk and dv"
PRODUCTS = {FORWARD: 2, DQ: 3, DKDV: 4}  # of tiles, for each tile that is visited
FILES = {FORWARD: "flash_fwd", DQ: "flash_bwd_dq", DKDV: "flash_bwd_dkdv"}  # and with _fma, without tensor cores
UNASKED = 48  # KiB that a block may have without asking

VISIT = "auto visit = [&](int tile, auto boundary) {"
OWNED = {"flash_fwd": "first_query", "flash_bwd_dq": "first_query", "flash_bwd_dkdv": "first_key"}

PARTS = ("queries", "keys", "values", "dout", "in_turn", "row_values", "weights")  # columns of bytes


def inputs(seqlen: int, head_dim: int, dtype: str) -> np.ndarray:
    """q, k, v, dout."""
    return np.random.default_rng(0).standard_normal((4, seqlen, head_dim)).astype(dtype)


# -- visits


@contextlib.contextmanager
def reported_visits(text: io.StringIO) -> Iterator[None]:
    """Within the block each visit writes a line: block, its first row, tile, whether pairs may be masked there."""
    original = _source.render

    def render(kernel: str, *variant) -> str:
        arguments = f"blockIdx.x, {OWNED.get(kernel)}, tile, int(boundary.value)"
        return original(kernel, *variant).replace(
            VISIT, VISIT + f' if (threadIdx.x == 0) printf("{kernel} %d %d %d %d\\n", {arguments});'
        )

    with mock.patch.object(_source, "render", render), contextlib.redirect_stdout(text):
        yield


def visits_of(mask: str, seqlen: int) -> list[Row]:
    """A row per visit of each kernel, in the order of blocks and steps."""
    q, k, v, dout = inputs(seqlen, HEAD_DIM, "float16")
    text = io.StringIO()
    with ptxsim.settings(arch=ARCH):
        with ptxsim.profile() as profile:
            out, lse = attention(q, k, v, return_lse=True, **MASKS[mask])
            gradients = attention_backward(dout, q, k, v, out, lse, **MASKS[mask])
        with reported_visits(text):
            again = attention(q, k, v, return_lse=True, **MASKS[mask])
            gradients_again = attention_backward(dout, q, k, v, *again, **MASKS[mask])
    same_bits = all(
        a.tobytes() == b.tobytes() for a, b in zip((out, lse, *gradients), (*again, *gradients_again), strict=True)
    )
    counted = {kernel.name: kernel.mma_flops for kernel in profile.kernels}
    lines = [(name, *map(int, numbers)) for name, *numbers in map(str.split, text.getvalue().splitlines())]
    configs = configs_of(attention_problem(q, k, v, **MASKS[mask]), ARCH)
    return [
        row
        for kernel, name in FILES.items()
        for row in visit_rows(
            [line[1:] for line in lines if line[0] == name],
            {
                "mask": mask,
                "kernel": kernel,
                "seqlen": seqlen,
                "block_m": configs[kernel].defines["BLOCK_M"],
                "block_n": configs[kernel].defines["BLOCK_N"],
                "same_bits": same_bits,
                "counted_flops": counted[name],
            },
        )
    ]


def visit_rows(lines: list[tuple[int, ...]], common: Row) -> list[Row]:
    """Of one kernel; a block's lines are in its own order, blocks run together."""
    rows = []
    for block, of_block in itertools.groupby(sorted(lines, key=lambda line: line[0]), key=lambda line: line[0]):
        for step, (_, first_row, tile, boundary) in enumerate(of_block, 1):
            rows.append(
                {
                    **common,
                    "block": block,
                    "owned_from": first_row,
                    "step": step,
                    "tile": tile,
                    "masked": bool(boundary),
                }
            )
    return rows


def configs_of(problem: Problem, arch: str) -> dict[str, _config.KernelConfig]:
    """What the kernels are launched with; of two launches for dk and for dv the one for dk, which takes more."""
    both = _backward_config.one_pass_for_keys_and_values(problem)
    return {
        FORWARD: _config.forward(problem, arch),
        DQ: _backward_config.dq(problem, arch, 1),
        DKDV: _backward_config.dkdv(problem, arch, 1, with_dkey=True, with_dvalue=both),
    }


def visible(mask: str, queries: int, keys: int) -> np.ndarray:
    """(query, key) bool."""
    i, j = np.ogrid[:queries, :keys]
    return {"all keys": (i >= 0) & (j >= 0), "causal": j <= i, "window": (j <= i) & (i - j <= WINDOW)}[mask]


def expected_visits(row: Row) -> dict[int, list[tuple[int, bool]]]:
    """First row that a block owns -> the tiles that hold a visible pair, and whether they hold a masked one too.

    In the two kernels that own queries, keys behind the last count as masked. In the other one queries behind the last
    count as if they were there.
    """
    seqlen, block_m, block_n = (row[name] for name in ("seqlen", "block_m", "block_n"))
    seen = visible(row["mask"], _config.round_up(seqlen, block_m), seqlen)
    found: dict[int, list[tuple[int, bool]]] = {}
    for first_query, first_key in itertools.product(range(0, seqlen, block_m), range(0, seqlen, block_n)):
        tile = seen[first_query : first_query + block_m, first_key : first_key + block_n]
        there = tile[: seqlen - first_query]
        if not there.any():
            continue
        if row["kernel"] == DKDV:
            found.setdefault(first_key, []).append((first_query // block_m, not tile.all()))
        else:
            missing = tile.shape[1] < block_n
            found.setdefault(first_query, []).append((first_key // block_n, missing or not there.all()))
    return found


# -- bytes


def launched_bytes(arch: str, dtype: str, head_dim: int) -> list[Row]:
    """A row per kernel: what its launch asks for, beside the tiles that it keeps."""
    q, k, v, dout = inputs(16, head_dim, dtype)
    with ptxsim.settings(arch=arch), ptxsim.profile() as profile:
        out, lse = attention(q, k, v, return_lse=True)
        attention_backward(dout, q, k, v, out, lse)
    rows = []
    for kernel, config in configs_of(attention_problem(q, k, v), arch).items():
        shapes = [shape for found in profile.kernels if found.name == config.name for shape in found.shapes]
        parts = parts_of(kernel, np.dtype(dtype).itemsize, head_dim, config.defines)
        rows.append(
            {
                "arch": arch,
                "dtype": dtype,
                "head_dim": head_dim,
                "kernel": kernel,
                "block_m": config.defines["BLOCK_M"],
                "block_n": config.defines["BLOCK_N"],
                **{f"{part}_bytes": parts.get(part, 0) for part in PARTS},
                "launched_bytes": max(shape.dynamic_shared_bytes + shape.static_shared_bytes for shape in shapes),
                "limit_bytes": _config.shared_memory_per_block(arch),
            }
        )
    return rows


def parts_of(kernel: str, itemsize: int, head_dim: int, defines) -> dict[str, int]:
    """Bytes of each tile that a block keeps; rows of the head_dims here are whole 128-byte lines.

    With tensor cores the scores are in registers, and what is visited may have two buffers, one being filled while the
    other is read. In the kernel of dk and dv the second one takes the place of the keys and values, once they are in
    registers, and P goes from one warp to another in float32. Without tensor cores, a tile of weights (or of dS) is in
    shared memory, and the two operands that are visited take turns in one place.
    """
    block_m, block_n, stages = defines["BLOCK_M"], defines["BLOCK_N"], defines.get("NUM_STAGES", 1)
    of_queries, of_keys = block_m * head_dim * itemsize, block_n * head_dim * itemsize
    if itemsize == 2:
        return {
            FORWARD: {"queries": of_queries, "keys": of_keys, "values": of_keys},
            DQ: {"queries": of_queries, "dout": of_queries, "keys": stages * of_keys, "values": stages * of_keys},
            DKDV: {
                "keys": of_keys,
                "values": of_keys,
                "queries": of_queries,
                "dout": of_queries,
                "row_values": 2 * 4 * block_m,
                "weights": 4 * block_m * block_n,
            },
        }[kernel]

    def lines(columns: int) -> int:
        return math.ceil(columns * itemsize / 128) * 128

    return {
        FORWARD: {"queries": of_queries, "in_turn": of_keys, "weights": block_m * lines(block_n)},
        DQ: {
            "queries": of_queries,
            "dout": of_queries,
            "in_turn": of_keys,
            "weights": block_m * lines(block_n),
        },
        DKDV: {"keys": of_keys, "values": of_keys, "in_turn": of_queries, "weights": block_n * lines(block_m)},
    }[kernel]


def against_scores(seqlen: int) -> list[Row]:
    """The forward's launch for this many keys, beside the scores of as many queries in float32."""
    q, k, v, _ = inputs(seqlen, HEAD_DIM, "float16")
    with ptxsim.settings(arch=ARCH), ptxsim.profile() as profile:
        attention(q[:64], k, v)  # a block's shared memory does not depend on the number of blocks
    (shape,) = profile.kernels[0].shapes
    return [{"seqlen": seqlen, "launched_bytes": shape.dynamic_shared_bytes, "scores_bytes": 4 * seqlen**2}]


# -- all of it

_MEASURES = {"visit": visits_of, "tile set": launched_bytes, "scores": against_scores}


def measure_case(case) -> list[Row]:
    """Rows of one case (kind, arguments)."""
    kind, arguments = case
    return [{"kind": kind, **row} for row in _MEASURES[kind](*arguments)]


def measure(
    seqlen: int, masks: list[str], archs: list[str], dtypes: list[str], head_dims: list[int], lengths: list[int]
) -> list[Row]:
    """Rows of three kinds in one table: visits, tile sets, scores."""
    cases = [
        *(("visit", (mask, seqlen)) for mask in masks),
        *(("tile set", case) for case in itertools.product(archs, dtypes, head_dims)),
        *(("scores", (length,)) for length in lengths),
    ]
    work = {"visit": 3, "scores": 2, "tile set": 1}
    rows = list(itertools.chain(*measure_all(measure_case, cases, work=lambda case: work[case[0]])))
    columns = dict.fromkeys(itertools.chain(*rows))  # of all kinds, None where a row has no such column
    return [{**columns, **row} for row in rows]


# -- figure

_TILE_COLOURS = ("#dceaf0", "#1f6f8b")  # first step, last step
_PART_COLOURS = {
    "queries": record.OURS,
    "keys": record.STANDARD,
    "values": "#c79a2b",
    "dout": "#5b4a8a",
    "in_turn": "#d58a7b",
    "weights": "#bdbdbd",
}
_PART_NAMES = {
    "queries": "Q (out, at the end)",
    "keys": "K",
    "values": "V",
    "dout": "dO",
    "in_turn": "K and V, or Q and dO, in turn",
    "weights": "P or dS",
}
_UNDRAWN = "row_values"  # lse and delta: too thin to see
_HATCHES = {"in_turn": "//", "weights": "..", "values": "\\\\"}


def draw_scores(axes, seqlen: int) -> None:
    """Every eighth score of every eighth query: what the standard method stores."""
    q, k, *_ = inputs(seqlen, HEAD_DIM, "float16")
    scores = q[::8].astype(np.float32) @ k[::8].astype(np.float32).T
    axes.imshow(scores, cmap="Greys", extent=(0, seqlen, seqlen, 0), interpolation="nearest")
    axes.set_title(
        f"standard: {seqlen} x {seqlen} scores,\n{4 * seqlen**2 / 2**20:.2f} MiB in float32", fontsize=12, pad=18
    )


def draw_visits(axes, rows: list[Row]) -> None:
    """Tiles with the step at which their block visits them; those that may hold masked pairs are framed."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    shade = LinearSegmentedColormap.from_list("steps", _TILE_COLOURS)
    first = rows[0]
    seqlen, sizes, steps = first["seqlen"], (first["block_m"], first["block_n"]), max(row["step"] for row in rows)
    for row in rows:
        own, visited = row["owned_from"], row["tile"]
        y, x = (visited * sizes[0], own) if row["kernel"] == DKDV else (own, visited * sizes[1])
        height, width = min(sizes[0], seqlen - y), min(sizes[1], seqlen - x)
        frame = {"edgecolor": record.STANDARD, "linewidth": 1.4} if row["masked"] else {"edgecolor": "white"}
        colour = shade((row["step"] - 1) / max(steps - 1, 1))
        axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, zorder=2 + row["masked"], **frame))
        text_colour = "white" if row["step"] > 0.55 * steps else "black"
        size = 11 if min(height, width) >= 40 else 8 if min(height, width) >= 30 else 6
        axes.text(
            x + width / 2, y + height / 2, row["step"], ha="center", va="center_baseline", fontsize=size,
            color=text_colour, zorder=4,
        )  # fmt: skip
    owned = sizes[1] if first["kernel"] == DKDV else sizes[0]
    for block, own in sorted({(row["block"], row["owned_from"]) for row in rows}):
        middle, options = (own + min(own + owned, seqlen)) / 2, {"fontsize": 9.5, "color": "#555555"}
        if first["kernel"] == DKDV:
            axes.text(middle, -0.01 * seqlen, block, ha="center", va="bottom", **options)
        else:
            axes.text(1.03 * seqlen, middle, block, va="center", **options)
    axes.set(xlim=(0, seqlen), ylim=(seqlen, 0), aspect="equal")
    axes.set_title(f"{first['kernel']}: {first['mask']},\ntiles of {sizes[0]} x {sizes[1]}", fontsize=12, pad=18)


def draw_bytes(axes, rows: list[Row]) -> None:
    """A bar per kernel, head_dim and dtype on one architecture; marks are other architectures' launches."""
    archs = {row["arch"] for row in rows}
    base = ARCH if ARCH in archs else min(archs)
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    drawn = [dtype for dtype in dtypes if dtype != "float64"] or list(dtypes)
    own = [row for row in rows if row["arch"] == base and row["dtype"] in drawn]
    others = sorted(archs - {base}, key=lambda arch: int(arch[3:]))
    marks = dict(zip(others, ("v", "^", "D", "s"), strict=False))
    names = []
    for place, row in enumerate(own):
        left = 0.0
        for part in _PART_COLOURS:
            width = row[f"{part}_bytes"] / 1024
            if width:
                style = {"color": _PART_COLOURS[part], "hatch": _HATCHES.get(part), "edgecolor": "white"}
                axes.barh(place, width, 0.72, left=left, label=_PART_NAMES[part], linewidth=0.5, **style)
            left += width
        for arch, mark in marks.items():
            (same,) = (
                other
                for other in rows
                if other["arch"] == arch and all(other[name] == row[name] for name in ("dtype", "head_dim", "kernel"))
            )
            options = {"color": "black", "markersize": 4, "markerfacecolor": "white", "label": f"as {arch}"}
            axes.plot(same["launched_bytes"] / 1024, place, mark, linestyle="none", **options)
        names.append(f"{row['dtype']}, head_dim {row['head_dim']}: {row['kernel'].removeprefix('backward, ')}")
    limits = sorted({row["limit_bytes"] // 1024 for row in rows} | {UNASKED})
    for limit in limits:
        axes.axvline(limit, color="black", linewidth=0.9, linestyle="--")
        axes.annotate(str(limit), (limit, -0.9), ha="center", va="bottom", fontsize=10, annotation_clip=False)
    axes.set_yticks(range(len(own)), names, fontsize=10)
    axes.set_ylim(len(own) - 0.4, -0.8)
    axes.set_xlim(0, max(limits) * 1.03)
    axes.grid(visible=False, axis="y")
    thinnest = max(row[f"{_UNDRAWN}_bytes"] for row in own) / 1024
    left_out = [f"lse and delta, at most {thinnest:g} KiB"] * bool(thinnest) + [x for x in dtypes if x not in drawn]
    axes.set_xlabel(
        f"KiB of shared memory of a block; bars: {base}; dashed: limits of a block\n"
        f"not drawn: {'; '.join(left_out) or 'nothing'}"
    )


def draw_growth(axes, rows: list[Row], limits: list[int]) -> None:
    """Bytes against N."""
    lengths = [row["seqlen"] for row in rows]
    axes.plot(lengths, [row["scores_bytes"] / 1024 for row in rows], "s-", color=record.STANDARD)
    axes.plot(lengths, [row["launched_bytes"] / 1024 for row in rows], "o-", color=record.OURS)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_yticks([2.0**n for n in range(4, 18, 2)], [f"{2**n:,}" for n in range(4, 18, 2)])
    axes.minorticks_off()
    axes.axhspan(min(limits), max(limits), color="#e9e9e9", zorder=0)
    note = {"textcoords": "offset points", "fontsize": 9}
    middle = rows[len(rows) // 2]
    place = middle["seqlen"], middle["scores_bytes"] / 1024
    axes.annotate("N x N scores, float32", place, (-8, 4), ha="right", **note)
    own = rows[-1]["launched_bytes"] / 1024
    axes.annotate(f"forward, head_dim {HEAD_DIM}: {own:g} KiB", (lengths[-1], own), (0, -14), ha="right", **note)
    axes.annotate(
        f"limits of a block, {min(limits)} to {max(limits)} KiB",
        (lengths[-1], max(limits)),
        (0, -12),
        ha="right",
        **note,
    )
    axes.set_xlabel("sequence length N")
    axes.set_ylabel("KiB, one head")


def draw(figure, rows: list[Row]) -> None:
    """Above the scores and the visits, below the bytes."""
    visits, sets, scores = (kind_of(rows, kind) for kind in _MEASURES)
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    masks = list(dict.fromkeys(row["mask"] for row in visits))
    (first, *panels), (*more, growth) = above.subplots(2, 3)
    panels += more
    draw_scores(first, visits[0]["seqlen"])
    shown = [*((FORWARD, mask) for mask in masks), (DKDV, "causal" if "causal" in masks else masks[0])]
    for axes in panels[len(shown) :]:
        axes.remove()
    panels = panels[: len(shown)]
    leftmost = first, *more[:1]
    for axes in leftmost:
        axes.set_ylabel("query")
    for axes, (kernel, mask) in zip(panels, shown, strict=True):
        draw_visits(axes, [row for row in visits if (row["kernel"], row["mask"]) == (kernel, mask)])
    ticks = range(0, visits[0]["seqlen"] + 1, 200)
    for axes in (first, *panels):
        axes.set_xticks(ticks)
        axes.set_yticks(ticks, [str(tick) for tick in ticks] if axes in leftmost else [])
        axes.tick_params(labelsize=10)
        axes.set_xlabel("key")
        axes.grid(visible=False)
    above.supxlabel(
        f"float16, head_dim {HEAD_DIM}, {ARCH}; in a tile: the step at which its block visits it;\nred frame: may hold "
        "masked pairs; grey numbers: the block",
        fontsize=11,
    )
    bars = below.subplots()
    draw_bytes(bars, sets)
    draw_growth(growth, scores, [UNASKED, *(row["limit_bytes"] // 1024 for row in sets)])
    handles, labels = bars.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    order = sorted(unique, key=lambda label: label.startswith("as "))
    below.legend([unique[label] for label in order], order, loc="outside lower center", ncols=4, frameon=False)


# -- outcomes


def kind_of(rows: list[Row], kind: str) -> list[Row]:
    """Rows of one kind."""
    return [row for row in rows if row["kind"] == kind]


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Visits, tile sets, scores."""
    visits, sets, scores = (kind_of(rows, kind) for kind in _MEASURES)
    runs = [list(run) for _, run in itertools.groupby(visits, key=lambda row: (row["mask"], row["kernel"]))]
    return [*_visits(runs), *_bytes(sets), *_scores(scores, sets)]


def blocks_of(run: list[Row]) -> dict[int, list[Row]]:
    """Rows of each block, in order."""
    return {block: list(of_block) for block, of_block in itertools.groupby(run, key=lambda row: row["block"])}


def _visits(runs: list[list[Row]]) -> list[Outcome]:
    as_expected = [run for run in runs if visited(run) == expected_visits(run[0])]
    with_work = [run for run in runs if all(row["counted_flops"] == flops_of(run) for row in run)]
    same_bits = [run for run in runs if all(row["same_bits"] for row in run)]
    causal = [run for run in runs if run[0]["mask"] == "causal"]
    longest_first = [run for run in causal if is_descending([len(rows) for rows in blocks_of(run).values()])]
    found = [
        Outcome(
            "tiles visited by each block, in order, and which of them mask pairs; each kernel and mask",
            "those with a visible pair, ascending; masked where a pair is masked (predicted)",
            f"so in {len(as_expected)} of {len(runs)} runs",
            len(as_expected) == len(runs),
        ),
        Outcome(
            "tensor-core FLOPs of the untouched kernels against those of the tiles reported",
            "equal (computed)",
            f"equal in {len(with_work)} of {len(runs)} runs",
            len(with_work) == len(runs),
        ),
        Outcome(
            "results with and without the printf",
            "the same bits (predicted)",
            f"the same in {len(same_bits)} of {len(runs)} runs",
            len(same_bits) == len(runs),
        ),
    ]
    if not causal:
        return found
    return [
        *found,
        Outcome(
            "order of blocks under a causal mask",
            "the longest first (predicted)",
            f"so in {len(longest_first)} of {len(causal)} kernels",
            len(longest_first) == len(causal),
        ),
    ]


def visited(run: list[Row]) -> dict[int, list[tuple[int, bool]]]:
    """As `expected_visits`, of what the kernel reports."""
    found: dict[int, list[tuple[int, bool]]] = {}
    for row in sorted(run, key=lambda row: (row["owned_from"], row["step"])):
        found.setdefault(row["owned_from"], []).append((row["tile"], row["masked"]))
    return found


def flops_of(run: list[Row]) -> int:
    """Of the tiles visited, whole ones."""
    first = run[0]
    return len(run) * PRODUCTS[first["kernel"]] * 2 * first["block_m"] * first["block_n"] * HEAD_DIM


def is_descending(numbers: list[int]) -> bool:
    return all(a >= b for a, b in itertools.pairwise(numbers))


def _bytes(sets: list[Row]) -> list[Outcome]:
    equal = [row for row in sets if row["launched_bytes"] == sum(row[f"{part}_bytes"] for part in PARTS)]
    within = [row for row in sets if row["launched_bytes"] <= row["limit_bytes"]]
    limits = {row["arch"]: f"{row['limit_bytes'] // 1024} KiB" for row in sets}
    fullest = max(sets, key=lambda row: row["launched_bytes"] / row["limit_bytes"])
    unasked = sum(row["launched_bytes"] <= UNASKED * 1024 for row in sets)
    return [
        Outcome(
            "bytes that a launch asks for against the tiles that the kernel keeps",
            "equal (computed)",
            f"equal in {len(equal)} of {len(sets)}",
            len(equal) == len(sets),
        ),
        Outcome(
            "bytes that a launch asks for against the limit of its architecture",
            f"never more than {', '.join(f'{limit} ({arch})' for arch, limit in limits.items())} (published: CUDA C++ "
            "Programming Guide)",
            f"within it in {len(within)} of {len(sets)}, {unasked} of them in {UNASKED} KiB; fullest: "
            f"{fullest['kernel']}, {fullest['dtype']}, head_dim {fullest['head_dim']}, {fullest['arch']}, "
            f"{fullest['launched_bytes'] / 1024:g} of {fullest['limit_bytes'] // 1024} KiB",
            len(within) == len(sets),
        ),
    ]


def _scores(scores: list[Row], sets: list[Row]) -> list[Outcome]:
    launched = {row["launched_bytes"] for row in scores}
    largest = max(row["limit_bytes"] for row in sets)
    longest = math.isqrt(largest // 4)
    fitting = [row["seqlen"] for row in scores if row["scores_bytes"] <= largest]
    found = []
    if len(scores) > 1:
        found.append(
            Outcome(
                f"bytes of the forward's launch, head_dim {HEAD_DIM}, "
                f"N {scores[0]['seqlen']} to {scores[-1]['seqlen']}",
                "the same for every N (predicted)",
                " and ".join(f"{size / 1024:g} KiB" for size in sorted(launched)),
                len(launched) == 1,
            )
        )
    return [
        *found,
        Outcome(
            f"lengths whose N x N scores, one head in float32, fit in {largest // 1024} KiB",
            f"those up to N = {longest} (computed)",
            f"{len(fitting)} of {len(scores)} lengths: N = {', '.join(map(str, fitting)) or 'none'}; "
            f"N = {scores[-1]['seqlen']} takes {scores[-1]['scores_bytes'] / largest:.3g} times as much as there is",
            fitting == [row["seqlen"] for row in scores if row["seqlen"] <= longest],
        ),
    ]


EXPERIMENT = Experiment(
    claim="A block holds one set of tiles, 24 to 128 KiB whatever the length, where N x N scores outgrow 227 KiB at "
    "N = 242; it visits the tiles that hold a visible pair, in order, and masks only where a pair is masked",
    caption="The scores that the standard method stores; the tiles that blocks visit, with their order; the bytes of "
    "each kernel's tiles beside the shared memory that a block may have; and N x N scores beside both.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={
        "seqlen": 600,
        "masks": list(MASKS),
        "archs": ["sm_75", ARCH, "sm_86", "sm_90"],
        "dtypes": ["float16", "float32", "float64"],  # bfloat16 has the bytes of float16
        "head_dims": [64, 128, 256],
        "lengths": [64, 128, 256, 512, 1024, 2048, 4096],
    },
    quick={
        "seqlen": 300,
        "masks": ["causal"],
        "archs": [ARCH],
        "dtypes": ["float16"],
        "head_dims": [64],
        "lengths": [64, 256, 1024],
    },
    figure_size=(11.0, 14.0),
)
