"""How often does the online softmax rescale, and what does it cost in accuracy?

A row's running maximum moves when a tile holds a new record. For exchangeable scores (any order equally likely) tile
t holds the maximum of the first t tiles with probability 1 / t, so that a row is rescaled H_T - 1 times over T tiles,
about ln T, where one key at a time would rescale it H_N - 1 times, about ln N. The kernel tests whole groups of 16
rows and skips the multiplications where no row of the group moved. Scores that rise with the key index are the worst
case; after one dominating key nothing moves. The error of the kernel's lse and out is measured against the exact
result for the same float16 inputs, as a fraction of the bound (cupyflash.bounds).
"""

from __future__ import annotations

import math

import numpy as np

from cupyflash import attention, bounds, ptxsim, reference
from cupyflash._config import flash_fwd_tile
from cupyflash.demo.online_softmax import scaled_scores, steps
from experiments import record

ARCH, HEAD_DIM, NUM_QUERIES, GROUP = "sm_80", 64, 256, 16
RISE = 20.0  # by how much the expected score rises from the first key to the last
PEAK = 30.0  # score of the one dominating key


def inputs(distribution: str, seqlen: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q (256, 64), k and v (seqlen, 64) float16, whose scaled scores are standard normal plus what the name says."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((NUM_QUERIES, HEAD_DIM))
    k, v = rng.standard_normal((2, seqlen, HEAD_DIM))
    # One dimension is set aside: there q is sqrt(head_dim), so that k is what it adds to the score.
    q[:, 0] = math.sqrt(HEAD_DIM)
    k[:, 0] = RISE * np.arange(seqlen) / seqlen if distribution == "rising" else 0
    if distribution == "peaked":
        k[int(0.6 * seqlen), 0] = PEAK
    return tuple(x.astype(np.float16) for x in (q, k, v))


def measure(distribution: str, seqlen: int) -> list[dict[str, float]]:
    """A row per tile: the state of one query, and how many rows and groups of 16 rows are rescaled."""
    q, k, v = inputs(distribution, seqlen)
    with ptxsim.settings(arch=ARCH):
        out, lse = attention(q, k, v, return_lse=True)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True)
    bound, lse_bound = bounds.attention(q, k, v, return_lse=True)

    block_n = flash_fwd_tile(HEAD_DIM, HEAD_DIM, ARCH).block_n
    scores = scaled_scores(q, k)
    history = steps(scores, block_n)
    moved = np.array([step.rescale < 1 for step in history])  # (tile, query)
    moved[0] = False  # nothing was summed before the first tile
    record_keys = np.diff(np.maximum.accumulate(scores, axis=-1), axis=-1) > 0
    numpy_lse = history[-1].lse
    summary = {
        "rescales_per_row": moved.sum(axis=0).mean(),
        "expected_per_row": sum(1 / (tile + 1) for tile in range(1, len(history)))
        if distribution == "normal"
        else None,
        "rescales_per_row_key_by_key": record_keys.sum(axis=-1).mean(),
        "ln_seqlen": math.log(seqlen),
        "kernel_lse_error": np.abs(lse - exact_lse).max(),
        "numpy_lse_error": np.abs(numpy_lse - exact_lse).max(),
        "kernel_lse_error_over_bound": (np.abs(lse - exact_lse) / lse_bound).max(),
        "kernel_out_error_over_bound": (np.abs(out - exact) / bound).max(),
        "kernel_lse": lse[0],
    }
    return [
        {
            "distribution": distribution,
            "keys_seen": min((tile + 1) * block_n, seqlen),
            "row_max": step.row_max[0],
            "rescale": step.rescale[0],
            "row_sum": step.row_sum[0],
            "lse_so_far": step.lse[0],
            "rows_rescaled": moved[tile].mean(),
            "groups_rescaled": moved[tile].reshape(-1, GROUP).any(axis=1).mean(),
            **summary,
        }
        for tile, step in enumerate(history)
    ]


def draw(axes, name: str, rows: list[dict[str, float]]) -> None:
    """Above one row's state, below how many rows are rescaled."""
    keys = [row["keys_seen"] for row in rows]
    state, share = axes
    state.plot(keys, [row["lse_so_far"] for row in rows], "o-", color=record.OURS, markersize=4, label="m + ln l")
    state.plot(keys, [row["row_max"] for row in rows], "s-", color=record.STANDARD, markersize=4, label="m")
    state.axhline(rows[0]["kernel_lse"], color="black", linewidth=0.8, linestyle="--", label="lse from the kernel")
    state.set_title(f"{name}\n{rows[0]['rescales_per_row']:.2f} rescales per row", loc="left", fontsize=11)
    width = 0.7 * keys[0]
    share.bar(keys, [row["groups_rescaled"] for row in rows], width, color="#d6d6d6", label="groups of 16")
    share.bar(keys, [row["rows_rescaled"] for row in rows], width, color=record.OURS, label="rows")
    if name == "normal":
        share.plot(keys[1:], [1 / (t + 1) for t in range(1, len(keys))], "k.--", linewidth=0.8)
        share.annotate("1 / t", (keys[1], 1 / 2), (6, 2), textcoords="offset points")
    share.set_ylim(0, 1.05)
    share.set_xlabel("keys seen")


def main() -> None:
    args = record.arguments(__doc__, seqlen=[2048])
    (seqlen,) = args.seqlen
    tables = {}
    for distribution in ("normal", "rising", "peaked"):
        with record.timed(f"{distribution} scores, {seqlen} keys"):
            tables[distribution] = measure(distribution, seqlen)
    record.write_csv(args.results / "online_softmax.csv", [row for rows in tables.values() for row in rows])
    with record.figure(args.results / "online_softmax.png", 2, len(tables), size=(10, 5.5)) as axes:
        for column, (name, rows) in enumerate(tables.items()):
            draw(axes[:, column], name, rows)
        axes[0, 0].set_ylabel("one row")
        axes[1, 0].set_ylabel("share rescaled")
        axes[0, 0].legend(fontsize=8)
        axes[1, -1].legend(fontsize=8, loc="center right", handlelength=1)


if __name__ == "__main__":
    main()
