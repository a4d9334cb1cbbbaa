"""How much of the work does a mask save?

A kernel visits the tiles of keys that a query of its tile sees, by the edges of a band (causal, a sliding window) or by
the bits of a block mask (documents in one sequence, a window with global keys). Counted while the kernels run in the
simulator: tensor-core FLOPs of the forward and of the backward, beside those without a mask. The formula counts, with
NumPy, the tiles that hold a pair that is left. One head, float16.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from cupyflash import _backward_config, _config, attention, attention_backward, block_mask, ptxsim
from cupyflash._problem import attention_problem
from experiments import record

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


def measure(mask: str, seqlen: int) -> dict[str, int | str]:
    """FLOPs counted, beside the formula."""
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
    print(f"counted {mask}, N = {seqlen}", flush=True)
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


def draw(axes, rows: list[dict[str, int | str]], direction: str) -> None:
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


def main() -> None:
    args = record.arguments(__doc__, seqlens=[512, 1024, 2048, 4096])
    print("Counting the work under each mask, a process per core; the longest ones first.")
    cases = sorted(((n, mask) for n in args.seqlens for mask in MASKS), reverse=True)
    lengths, masks = zip(*cases, strict=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(measure, masks, lengths))
    rows.sort(key=lambda row: (list(MASKS).index(row["mask"]), row["seqlen"]))
    record.write_csv(args.results / "sparse_work.csv", rows)
    with record.figure(args.results / "sparse_work.png", 1, 2, size=(11.0, 4.6)) as panels:
        for axes, direction in zip(panels, ("forward", "backward"), strict=True):
            draw(axes, rows, direction)
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


if __name__ == "__main__":
    main()
