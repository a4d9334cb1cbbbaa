"""How far may weights range where they are rounded to 8 bits?

e4m3 holds magnitudes from 2^-9 to 448, about 2^8.8. A kernel that rounds weights to it multiplies them by 2^offset, so
that small ones are not lost. It may also follow a row's maximum only once that has grown by more than a threshold, in
powers of 2: then weights are up to 2^(offset + threshold). FlashAttention-4 had offset 8 and threshold 4: beyond 448
they saturated in the numerator and not in the row sum (issue 2577 and pull request 2716 of Dao-AILab/flash-attention,
with errors measured on a B300). The rule: offset + threshold <= log2 448. The other end: after a first key that takes
most of the weight, an attention sink, all others fall below 2^-10 and become 0, unless an offset lifts them or they
come first (arXiv:2606.06521).

Emulated in NumPy (emulation.py), for no kernel here has 8-bit weights: tiles of 128 keys, head_dim 128, float32 sums.

- Range: N = 8192; q, k, v in e4m3, q scaled to the standard deviation of the logits; one column of v is 1, and the
  exact result is 1 there. Keys as drawn; and each row's logits sorted, rising or falling, the worst and best order.
- Sinks: N = 4096, normal logits, 4 keys of which are raised by delta, first or last; v is normal.

By the kernel in the simulator: float16, whose weights have room to 65504, with both rescale thresholds that it offers.
The reference is the same formula in float64.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from cupyflash import Numerics, attention, ptxsim
from experiments import record
from experiments.emulation import FLOAT8_MAX, scaled_scores, tiled, to_float8
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

ARCH, HEAD_DIM, TILE = "sm_100", 128, 128
OFFSETS, THRESHOLDS = (0, 2, 4, 6, 8), (0.0, 0.75, 2.0, 4.0, 8.0)
ORDERS = {"as drawn": lambda logits: logits, "rising": np.sort, "falling": lambda logits: -np.sort(-logits)}
DEVIATIONS = (0.25, 0.5, 1.0, 1.5, 2.0)
# Relative error on a B300 (issue 2577): offset, threshold -> by standard deviation of the logits.
PUBLISHED = {
    (8, 4.0): dict(zip(DEVIATIONS, (0.027, 0.031, 0.136, 0.305, 0.361), strict=True)),
    (4, 4.0): dict(zip(DEVIATIONS, (0.027, 0.028, 0.027, 0.024, 0.022), strict=True)),
}
ROOM = math.log2(FLOAT8_MAX)
EMULATED, KERNEL = "NumPy emulation, e4m3", "kernel in the simulator, float16"
ZEROED_BELOW = 2.0**-10  # half the smallest subnormal of e4m3
SINKS, SINK_SEQLEN, DELTAS = 4, 4096, (0, 2, 4, 6, 8, 10, 12)
# Mean square errors of an independent emulation: delta -> first without offset, first with offset 8, last without.
SINK_EMULATED = {
    4: (2.6e-6, 6.0e-7, 6.1e-7),
    6: (3.3e-5, 5.2e-6, 6.0e-6),
}
SINK_CASES = {("first", 0): "sinks first", ("first", 8): "sinks first, offset 8", ("last", 0): "sinks last"}


class CountingFloat8:
    """Rounds to e4m3 and counts the weights, those that saturate and those that become 0."""

    def __init__(self):
        self.total = self.saturated = self.zeroed = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        rounded = to_float8(x)
        self.total += x.size
        self.saturated += int((x > FLOAT8_MAX).sum())
        self.zeroed += int((rounded == 0).sum())
        return rounded


def exact(logits: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax(logits) V in float64."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True).astype(np.float64))
    return weights / weights.sum(axis=-1, keepdims=True) @ v.astype(np.float64)


COLUMNS = (
    *("part", "by", "order", "logit_std", "sink_delta", "offset", "threshold", "relative_error", "mse"),
    *("ones_min", "ones_max", "saturated", "zeroed", "zeroed_predicted", "published"),
)


def row_of(**columns) -> Row:
    """Both parts have the same columns."""
    assert set(columns) <= set(COLUMNS)
    return {name: columns.get(name) for name in COLUMNS}


def range_inputs(deviation: float, seqlen: int, num_queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v, float32 numbers that e4m3 holds; the last column of v is 1."""
    rng = np.random.default_rng(int(100 * deviation))
    q = to_float8(rng.standard_normal((num_queries, HEAD_DIM), np.float32) * np.float32(deviation))
    k, v = (to_float8(rng.standard_normal((seqlen, HEAD_DIM), np.float32)) for _ in range(2))
    v[:, -1] = 1
    return q, k, v


def result_columns(out: np.ndarray, expected: np.ndarray) -> Row:
    """Error of the random columns, relative to their norm, and the column that should be 1."""
    error, columns = (out - expected)[:, :-1], expected[:, :-1]
    return {
        "relative_error": float(np.linalg.norm(error) / np.linalg.norm(columns)),
        "mse": float(np.mean(error**2)),
        "ones_min": float(out[:, -1].min()),
        "ones_max": float(out[:, -1].max()),
    }


def range_of_weights(deviation: float, order: str, seqlen: int, num_queries: int) -> list[Row]:
    """Every offset and threshold on the same logits."""
    q, k, v = range_inputs(deviation, seqlen, num_queries)
    logits = ORDERS[order](scaled_scores(q, k))
    expected = exact(logits, v)
    rows = []
    for offset in OFFSETS:
        for threshold in THRESHOLDS:
            rounding = CountingFloat8()
            out = tiled(logits, v, tile=TILE, weights_to=rounding, offset=offset, threshold=threshold).out
            rows.append(
                row_of(
                    part="range",
                    by=EMULATED,
                    order=order,
                    logit_std=deviation,
                    offset=offset,
                    threshold=threshold,
                    saturated=rounding.saturated / rounding.total,
                    zeroed=rounding.zeroed / rounding.total,
                    published=PUBLISHED.get((offset, threshold), {}).get(deviation) if order == "as drawn" else None,
                    **result_columns(out, expected),
                )
            )
    return rows


def kernel_range(deviation: float, seqlen: int, num_queries: int) -> list[Row]:
    """The float16 kernel on the same inputs."""
    q, k, v = range_inputs(deviation, seqlen, num_queries)
    expected = exact(scaled_scores(q, k), v)
    rows = []
    for threshold in (0.0, 8.0):
        with ptxsim.settings(arch=ARCH):
            out = attention(
                *(x.astype(np.float16) for x in (q, k, v)), numerics=Numerics(rescale_threshold=threshold)
            ).astype(np.float64)
        columns = result_columns(out, expected)
        rows.append(
            row_of(
                part="range",
                by=KERNEL,
                order="as drawn",
                logit_std=deviation,
                offset=0,
                threshold=threshold,
                **columns,
            )
        )
    return rows


def sinks(delta: float, order: str, num_queries: int) -> list[Row]:
    """Weights after or before the keys that take most of the weight, with and without an offset."""
    rng = np.random.default_rng(int(delta))
    logits = rng.standard_normal((num_queries, SINK_SEQLEN)).astype(np.float32)
    v = rng.standard_normal((SINK_SEQLEN, HEAD_DIM)).astype(np.float32)
    logits[:, :SINKS] += delta
    largest = logits[:, :SINKS].max(axis=-1)
    if order == "last":
        logits, v = logits[:, ::-1], v[::-1]
    expected = exact(logits, v)
    rows = []
    for offset in 0, 8:
        rounding = CountingFloat8()
        out = tiled(logits, v, tile=TILE, weights_to=rounding, offset=offset).out
        # A normal logit s gets exp(s - largest) 2^offset.
        limits = largest + math.log(ZEROED_BELOW) - offset * math.log(2)
        rows.append(
            row_of(
                part="sinks",
                by=EMULATED,
                order=order,
                sink_delta=delta,
                offset=offset,
                threshold=0.0,
                mse=float(np.mean((out - expected) ** 2)),
                saturated=rounding.saturated / rounding.total,
                zeroed=rounding.zeroed / (num_queries * (SINK_SEQLEN - SINKS)),
                zeroed_predicted=float(np.mean([normal_below(x) for x in limits])) if order == "first" else None,
            )
        )
    return rows


def normal_below(x: float) -> float:
    """Probability that a standard normal number is below x."""
    return math.erfc(-x / math.sqrt(2)) / 2


def called(case: functools.partial) -> list[Row]:
    """The rows of one set of logits."""
    return case()


def measure(seqlen: int, queries: int, sink_queries: int, deviations: list[float]) -> list[Row]:
    """Range of the weights, then sinks."""
    cases = [
        functools.partial(range_of_weights, deviation, order, seqlen, queries)
        for deviation in deviations
        for order in ORDERS
    ]
    cases += [functools.partial(kernel_range, deviation, seqlen, queries) for deviation in deviations]
    cases += [functools.partial(sinks, delta, order, sink_queries) for delta in DELTAS for order in ("first", "last")]
    return [row for rows in measure_all(called, cases) for row in rows]


def selected(rows: list[Row], **columns) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in columns.items())]


def emulated(rows: list[Row], order: str, offset: int, threshold: float) -> list[Row]:
    """By standard deviation of the logits."""
    return selected(rows, part="range", by=EMULATED, order=order, offset=offset, threshold=threshold)


def keeps_rule(row: Row) -> bool:
    """Whether no weight can saturate."""
    return row["offset"] + row["threshold"] <= ROOM


def draw(figure, rows: list[Row]) -> None:
    """Error by logits; every offset and threshold; sinks."""
    by_deviation, grid, by_delta = figure.subplots(1, 3, width_ratios=(1, 1.15, 1))
    _draw_deviations(by_deviation, rows)
    _draw_grid(grid, rows)
    _draw_sinks(by_delta, rows)


def _draw_deviations(axes, rows: list[Row]) -> None:
    styles = {
        (8, 4.0): (record.STANDARD, "D", "offset 8, threshold 4"),
        (0, 0.0): ("#c79a2b", "s", "offset 0, threshold 0"),
        (4, 4.0): (record.OURS, "o", "offset 4, threshold 4"),
    }
    for (offset, threshold), (colour, marker, label) in styles.items():
        line = emulated(rows, "as drawn", offset, threshold)
        deviations = [row["logit_std"] for row in line]
        axes.plot(deviations, [row["relative_error"] for row in line], color=colour, marker=marker, label=label)
        published = [row for row in line if row["published"]]
        axes.plot(
            [row["logit_std"] for row in published], [row["published"] for row in published], marker,
            color=colour, fillstyle="none", markersize=11,
        )  # fmt: skip
    axes.plot([], [], "o", color="black", fillstyle="none", markersize=11, label="open: published, B300")
    axes.set_yscale("log")
    axes.minorticks_off()
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    axes.set_ylim(0.009, 2)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("standard deviation of the logits")
    axes.set_ylabel("relative error of out")
    axes.set_title("emulated, keys as drawn", fontsize=11)
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def _draw_grid(axes, rows: list[Row]) -> None:
    widest = max(row["logit_std"] for row in rows if row["part"] == "range")
    ones = np.array(
        [
            [selected(emulated(rows, "rising", offset, t), logit_std=widest)[0]["ones_min"] for offset in OFFSETS]
            for t in THRESHOLDS
        ]
    )
    image = axes.imshow(ones, cmap="cividis", vmin=0, vmax=1, origin="lower", aspect="auto")
    for y, threshold in enumerate(THRESHOLDS):
        for x, offset in enumerate(OFFSETS):
            too_far = not keeps_rule({"offset": offset, "threshold": threshold})
            axes.text(
                x, y, f"{ones[y, x]:.2f}", ha="center", va="center",
                color="white" if ones[y, x] < 0.5 else "black",
            )  # fmt: skip
            if too_far and x and keeps_rule({"offset": OFFSETS[x - 1], "threshold": threshold}):
                axes.plot([x - 0.5, x - 0.5], [y - 0.5, y + 0.5], color=record.STANDARD, linewidth=4)
            if too_far and y and keeps_rule({"offset": offset, "threshold": THRESHOLDS[y - 1]}):
                axes.plot([x - 0.5, x + 0.5], [y - 0.5, y - 0.5], color=record.STANDARD, linewidth=4)
    axes.set_xticks(range(len(OFFSETS)), [str(offset) for offset in OFFSETS])
    axes.set_yticks(range(len(THRESHOLDS)), [f"{threshold:g}" for threshold in THRESHOLDS])
    axes.grid(visible=False)
    axes.set_xlabel("offset")
    axes.set_ylabel("rescale threshold")
    axes.set_title(f"emulated, rising logits, std {widest:g}\nred: offset + threshold = log2 448", fontsize=11)
    axes.figure.colorbar(image, ax=axes, label="least out where V = 1 (right: 1)")


def _draw_sinks(axes, rows: list[Row]) -> None:
    styles = {
        ("first", 0): (record.STANDARD, "D", "-"),
        ("first", 8): ("#c79a2b", "s", "--"),
        ("last", 0): (record.OURS, "o", ":"),
    }
    for (order, offset), (colour, marker, style) in styles.items():
        line = selected(rows, part="sinks", order=order, offset=offset)
        axes.plot(
            [row["sink_delta"] for row in line], [row["mse"] for row in line], style,
            color=colour, marker=marker, linewidth=2, label=SINK_CASES[order, offset],
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("delta of the sinks' logits")
    axes.set_ylabel("mean square error of out")
    axes.set_title("emulated, 4 sinks", fontsize=11)
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """The published table, the rule, and sinks."""
    return [*_table_outcomes(rows), *_rule_outcomes(rows), *_sink_outcomes(rows)]


def _table_outcomes(rows: list[Row]) -> list[Outcome]:
    outcomes = []
    for (offset, threshold), tolerance in zip(PUBLISHED, (1.5, 1.3), strict=True):
        line = [row for row in emulated(rows, "as drawn", offset, threshold) if row["published"]]
        if not line:
            continue
        ratios = [row["relative_error"] / row["published"] for row in line]
        outcomes.append(
            Outcome(
                f"offset {offset}, threshold {threshold:g} (emulated), relative error at logit std "
                + ", ".join(f"{row['logit_std']:g}" for row in line),
                ", ".join(f"{row['published']:.3f}" for row in line)
                + f" (published: B300, issue 2577) within a factor {tolerance:g}",
                ", ".join(f"{row['relative_error']:.3f}" for row in line),
                all(1 / tolerance <= ratio <= tolerance for ratio in ratios),
                f"factors {', '.join(f'{ratio:.2f}' for ratio in ratios)}; how many rows saturate is chance",
            )
        )
    widest = selected(emulated(rows, "as drawn", 8, 4.0), logit_std=2.0)  # that of the expected figure
    outcomes += [
        Outcome(
            "offset 8, threshold 4 (emulated), logit std 2: least out where V = 1",
            "0.82 (emulated independently) within 0.1",
            f"{row['ones_min']:.2f}",
            abs(row["ones_min"] - 0.82) <= 0.1,
            "it is the worst of the queries",
        )
        for row in widest
    ]
    kernel = selected(rows, by=KERNEL)
    off = max(max(abs(row["ones_min"] - 1), abs(row["ones_max"] - 1)) for row in kernel)
    return [
        *outcomes,
        Outcome(
            "float16 kernel, thresholds 0 and 8: out where V = 1",
            "1 (predicted) to float16 rounding, 2^-11",
            f"off by {off:.1e} at most" if off else "exactly 1",
            off <= 2**-11,
            "weights that float16 holds cannot do that",
        ),
    ]


def _rule_outcomes(rows: list[Row]) -> list[Outcome]:
    inside = [row for row in selected(rows, part="range", by=EMULATED) if keeps_rule(row)]
    widest = max(row["logit_std"] for row in inside)
    beyond = [
        row
        for row in selected(rows, part="range", by=EMULATED, order="rising", logit_std=widest)
        if not keeps_rule(row)
    ]
    falling = selected(rows, part="range", by=EMULATED, order="falling")
    saturated, saturated_falling = ([row for row in part if row["saturated"]] for part in (inside, falling))
    unsaturated = [row for row in beyond if not row["saturated"]]
    return [
        Outcome(
            "offset + threshold up to log2 448, every order and std: cases with a weight beyond 448",
            "none (published rule: pull request 2716)",
            f"{len(saturated)} of {len(inside)}",
            not saturated,
            _cases(saturated),
        ),
        Outcome(
            f"offset + threshold beyond it, rising logits of std {widest:g}: cases with a weight beyond 448",
            "all (predicted)",
            f"{len(beyond) - len(unsaturated)} of {len(beyond)}",
            not unsaturated,
            f"not with {_cases(unsaturated)}",
        ),
        Outcome(
            "falling logits, whose maximum never grows: cases with a weight beyond 448",
            "none, whatever the threshold (predicted)",
            f"{len(saturated_falling)} of {len(falling)}",
            not saturated_falling,
            _cases(saturated_falling),
        ),
    ]


def _cases(rows: list[Row]) -> str:
    return "; ".join(
        f"offset {row['offset']}, threshold {row['threshold']:g}, {row['order']}, std {row['logit_std']:g}"
        for row in rows
    )


def _sink_outcomes(rows: list[Row]) -> list[Outcome]:
    found = {
        (delta, order, offset): selected(rows, part="sinks", sink_delta=delta, order=order, offset=offset)[0]
        for delta in DELTAS
        for order, offset in SINK_CASES
    }
    outcomes = []
    for delta, expected in SINK_EMULATED.items():
        errors = [found[delta, order, offset]["mse"] for order, offset in SINK_CASES]
        outcomes.append(
            Outcome(
                f"sinks, delta {delta} (emulated), mean square error: first; first with offset 8; last",
                f"{', '.join(f'{x:.1e}' for x in expected)} (emulated independently) within a factor 1.5",
                ", ".join(f"{x:.1e}" for x in errors),
                all(2 / 3 <= x / y <= 1.5 for x, y in zip(errors, expected, strict=True)),
                "most of the error is in queries whose largest sink is high",
            )
        )
    gains = {delta: found[delta, "first", 0]["mse"] / found[delta, "first", 8]["mse"] for delta in DELTAS}
    formula = [row for row in found.values() if row["zeroed_predicted"] is not None]
    off = max(abs(row["zeroed"] - row["zeroed_predicted"]) for row in formula)
    return [
        *outcomes,
        Outcome(
            "sinks first, delta 4 and 6 (emulated): error without an offset over that with offset 8",
            "3 to 10 times (published: arXiv:2606.06521)",
            f"{gains[4]:.1f} and {gains[6]:.1f} times",
            all(3 <= gains[delta] <= 10 for delta in (4, 6)),
            "most of the error is in queries whose largest sink is high",
        ),
        Outcome(
            "sinks first, delta 10 and 12 (emulated): the same",
            "no gain (predicted), below 1.2 times: what is left is the rounding of the sinks' own weights",
            f"{gains[10]:.2f} and {gains[12]:.2f} times",
            max(gains[10], gains[12]) < 1.2,
            "the weights that an offset keeps count there",
        ),
        Outcome(
            "sinks first: share of weights that become 0, against Phi(largest sink - 6.93 - ln 2^offset)",
            "the formula (published: arXiv:2606.06521), within 0.01",
            f"{off:.4f} apart at most",
            off <= 0.01,
            "a normal logit above every sink makes another maximum",
        ),
    ]


EXPERIMENT = Experiment(
    claim="8-bit weights need offset + rescale threshold <= log2 448, or they saturate in the numerator alone: a bug "
    "of FlashAttention-4 (published: issue 2577, on a B300; emulated here), seen at once where V = 1; an offset, "
    "or another order of keys, keeps those behind a sink",
    caption="8-bit weights, emulated in NumPy: saturation where offset and threshold leave no room (in the middle the "
    "least out of values that are all 1), and weights lost behind a sink.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seqlen": 8192, "queries": 256, "sink_queries": 1024, "deviations": list(DEVIATIONS)},
    quick={"seqlen": 4096, "queries": 32, "sink_queries": 128, "deviations": [2.0]},
    figure_size=(13.5, 4.6),
)
