"""How much of the work does a mask save?

A kernel visits the tiles of keys that a query of its tile sees, by the edges of a band (causal, a sliding window) or by
the bits of a block mask (documents in one sequence, a window with global keys). Counted while the kernels run in the
simulator: tensor-core FLOPs of the forward and of the backward, beside those without a mask. The formula counts, with
NumPy, the tiles that hold a pair that is left. One head, float16.
"""

from __future__ import annotations

import numpy as np

from cupyflash import _backward_config, _config, attention, attention_backward, block_mask, ptxsim
from cupyflash._problem import attention_problem
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

HEAD_DIM = 64
ARCH = "sm_80"
WINDOW = 256
DOCUMENT = 512
GLOBAL_KEYS = 64
BLOCK = 128  # of a block mask, queries and keys; tiles divide it
MASKS = {
    "all keys": "black",
    "causal": record.EXTRA,
    f"window of {WINDOW}": record.OURS,
    f"documents of {DOCUMENT}": record.STANDARD,
    f"window of {WINDOW}, {GLOBAL_KEYS} global keys": "#c79a2b",
}


def options(mask: str, seqlen: int):
    """Arguments of the call, and the pairs that they leave."""
    i, j = np.ogrid[:seqlen, :seqlen]
    in_window = (j <= i) & (i - j < WINDOW)
    if mask == "all keys":
        return {}, np.ones((seqlen, seqlen), bool)
    if mask == "causal":
        return {"causal": True}, j <= i
    if mask.startswith("documents"):
        expression = f"i / {DOCUMENT} == j / {DOCUMENT}"
        return {"mask_mod": block_mask(expression, seqlen, seqlen)}, i // DOCUMENT == j // DOCUMENT
    if mask.endswith("global keys"):
        expression = f"j <= i && (i - j < {WINDOW} || j < {GLOBAL_KEYS})"
        return {"mask_mod": block_mask(expression, seqlen, seqlen)}, in_window | ((j <= i) & (j < GLOBAL_KEYS))
    return {"window_size": (WINDOW - 1, 0)}, in_window


def flops_of_tiles(left: np.ndarray, config: _config.KernelConfig, products: int, block: int) -> int:
    """Of the tiles that hold a pair that is left, or lie in a block of the mask that does."""
    block_m, block_n = config.defines["BLOCK_M"], config.defines["BLOCK_N"]
    rows, columns = max(block_m, block), max(block_n, block)
    size = _config.round_up(len(left), BLOCK)
    padded = np.zeros((size, size), bool)
    padded[: len(left), : len(left)] = left
    blocks = padded.reshape(size // rows, rows, size // columns, columns).any(axis=(1, 3))
    tiles = blocks.repeat(rows // block_m, axis=0).repeat(columns // block_n, axis=1)
    exist = [_config.ceil_div(len(left), length) for length in (block_m, block_n)]
    return int(tiles[: exist[0], : exist[1]].sum()) * 2 * block_m * block_n * HEAD_DIM * products


def count(case: tuple[str, int]) -> Row:
    """FLOPs counted, beside the formula."""
    mask, seqlen = case
    rng = np.random.default_rng(seqlen)
    q, k, v, dout = rng.standard_normal((4, seqlen, HEAD_DIM)).astype(np.float16)
    with ptxsim.settings(arch=ARCH):
        arguments, left = options(mask, seqlen)
        with ptxsim.profile() as forward:
            out, lse = attention(q, k, v, return_lse=True, **arguments)
        with ptxsim.profile() as backward:
            attention_backward(dout, q, k, v, out, lse, **arguments)
    problem = attention_problem(q, k, v, **arguments)
    dkdv = _backward_config.dkdv(problem, ARCH, 1, with_dkey=True, with_dvalue=True)
    block = BLOCK if "mask_mod" in arguments else 0
    return {
        "mask": mask,
        "seqlen": seqlen,
        "forward_flops": sum(kernel.mma_flops for kernel in forward.kernels),
        "backward_flops": sum(kernel.mma_flops for kernel in backward.kernels),
        "forward_formula": flops_of_tiles(left, _config.forward(problem, ARCH), 2, block),
        "backward_formula": flops_of_tiles(left, _backward_config.dq(problem, ARCH, 1), 3, block)
        + flops_of_tiles(left, dkdv, 4, block),
        "pairs_left": int(left.sum()),
    }


def measure(seqlens: list[int]) -> list[Row]:
    """A row per mask and N."""
    return measure_all(count, [(mask, seqlen) for mask in MASKS for seqlen in seqlens], work=lambda case: case[1])


def draw_direction(axes, rows: list[Row], direction: str) -> None:
    """FLOPs against N; markers are counts, lines the formula."""
    for mask, colour in MASKS.items():
        of_mask = [row for row in rows if row["mask"] == mask]
        lengths = [row["seqlen"] for row in of_mask]
        axes.plot(lengths, [row[f"{direction}_formula"] for row in of_mask], color=colour, linewidth=2, label=mask)
        axes.plot(lengths, [row[f"{direction}_flops"] for row in of_mask], "o", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    ticks = [2.0**n for n in range(20, 44, 2)]
    low, high = axes.get_ylim()
    ticks = [tick for tick in ticks if low < tick < high]
    axes.set_yticks(ticks, [f"{tick / 2**20:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")
    axes.set_ylabel("tensor-core MFLOP (2^20)")
    axes.set_title(f"{direction.capitalize()}, head_dim {HEAD_DIM}", loc="left")


def draw(figure, rows: list[Row]) -> None:
    """A panel per direction."""
    panels = figure.subplots(1, 2)
    for axes, direction in zip(panels, ("forward", "backward"), strict=True):
        draw_direction(axes, rows, direction)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Counts against the formula, and what N does to them."""
    different = [r for r in rows for d in ("forward", "backward") if r[f"{d}_flops"] != r[f"{d}_formula"]]
    return [
        Outcome(
            "FLOPs counted and by formula, forward and backward",
            "equal in every row (computed)",
            f"equal in {2 * len(rows) - len(different)} of {2 * len(rows)}",
            not different,
        ),
        *_growth(rows),
    ]


def _growth(rows: list[Row]) -> list[Outcome]:
    """From half of the longest N to it, where both were counted, are whole tiles, and the window is no longer."""
    longest = max(row["seqlen"] for row in rows)
    flops = {(row["mask"], row["seqlen"]): row["forward_flops"] for row in rows}
    window, half = f"window of {WINDOW}", longest // 2
    if longest % (2 * BLOCK) or half < WINDOW or (window, half) not in flops:
        return []
    growth = {mask: flops[mask, longest] / flops[mask, half] for mask in MASKS}
    return [
        Outcome(
            f"forward, N {half} to {longest}: all keys",
            "4 times the work (computed)",
            f"{growth['all keys']:.2f} times",
            growth["all keys"] == 4,
        ),
        Outcome(
            f"forward, N {half} to {longest}: {window}",
            "2 to 2.5 times the work, 2 in the limit (predicted)",
            f"{growth[window]:.2f} times",
            2 <= growth[window] <= 2.5,
        ),
    ]


EXPERIMENT = Experiment(
    claim="A window, a causal mask or a block mask (documents, a window with global keys) does the work of the tiles "
    "that hold a pair that is left, forward and backward: with the length for a window, with its square for all keys",
    caption="Tensor-core work under each mask: a window's grows with N, that of all keys with its square.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seqlens": [512, 1024, 2048, 4096]},
    quick={"seqlens": [256, 512]},
    figure_size=(11.0, 4.6),
)
