"""When do rounding errors of bfloat16 attention stop cancelling?

Qiu and Yao ("Why Low-Precision Transformer Training Fails", 2025) trace a loss that explodes to one rounding. Where two
scores tie for a row's maximum, both weights are exactly 1, and the sum of two values of bfloat16 lies halfway between
two others half of the time; the small weights of other keys then always push it to the same side. With values of one
sign the error of out has a sign, and so has that of delta = rowsum(dout * out), step after step.

They round P V to bfloat16 before it is divided by the row sum. That is emulated in NumPy, as are their cure (weights
are taken relative to beta times the row's maximum, beta = 2 or 7, so that none is 1) and stochastic rounding. The
kernel keeps P V in float32, divides, and rounds once. The small weights break its ties, too: (v1 + v2 + tail) / (2 +
their sum) lies nearer to 0 than the tie where the tail's values cancel, and to either side of it, by chance, where
they are like v1 and v2. The kernel runs in the simulator, and so does the backward, which is given either out. Keys
have a coordinate 1 that no query uses, so that dq has there the row sum of dS, which is minus the error of delta: a
meter of the bias that needs no reference.

A row: 2 or 4 keys of the largest score (or two whose weights are 1 and 0.64), and a tail, 8 keys of weight 1e-4; values
-U(2, 4), those of the tail of the same or of either sign; dout -U(0.5, 1.5). Eight rows share a tile of 128 keys, 16
each, by a mask. Means and standard errors are over rows, z is a mean over its standard error; a row's number is the
mean of its 64 columns, or a sum over them. With beta the weights are rounded, too, each row's by another amount: its
means have more noise. Expected means come from another NumPy emulation of the same roundings, the kernel's included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16
from tqdm import tqdm

from cupyflash import attention, attention_backward, reference
from experiments import record
from experiments.backends import Backend, Simulator
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

HEAD_DIM, COLUMNS = 16, 64
SUM_AT = 2  # the coordinate of keys that no query uses
ROWS, SLOTS = 8, 16  # queries of a tile, and keys for each
TAIL_KEYS, TAIL_WEIGHT = 8, float(bfloat16(1e-4))
# A weight below 1. Bfloat16 holds all weights: rounding the tail's by 0.2 % would send 1 in 200 ties the other way.
NEAR = 0.640625
ULP = 2.0**-6  # of out, which is in (-4, -2)
EXAMPLE = -4.703990459442139  # of Qiu and Yao: the sum that they follow bit by bit


@dataclass(frozen=True)
class Case:
    """Weights of the large keys; the tail's values: of the same sign, "mixed", or "none"."""

    name: str
    weights: tuple[float, ...]
    tail: str

    @property
    def scores(self) -> np.ndarray:
        """Of every key of a row, as two numbers of bfloat16 that are added: (keys, 2)."""
        scores = np.log([*self.weights, *([] if self.tail == "none" else [TAIL_WEIGHT] * TAIL_KEYS)])
        high = scores.astype(bfloat16)
        return np.stack([high, (scores - high.astype(float)).astype(bfloat16)], axis=1)

    def values(self, rng: np.random.Generator, batches: int) -> np.ndarray:
        """(batches, ROWS, keys, COLUMNS)."""
        values = -rng.uniform(2, 4, (batches, ROWS, len(self.scores), COLUMNS))
        if self.tail == "mixed":
            tail = values[:, :, len(self.weights) :]
            tail *= rng.choice([-1.0, 1.0], tail.shape)
        return values.astype(bfloat16)


CASES = (
    Case("2 tied, no tail", (1, 1), "none"),
    Case("2 tied, tail of one sign", (1, 1), "same"),
    Case("4 tied, tail of one sign", (1, 1, 1, 1), "same"),
    Case("2 tied, tail of either sign", (1, 1), "mixed"),
    Case("2 not tied, tail of one sign", (1, NEAR), "same"),
    Case("2 not tied, tail of either sign", (1, NEAR), "mixed"),
)
TIED = CASES[1]  # that the cures are tried on
CURES = ("beta = 2", "beta = 7", "stochastic rounding")
ROUNDED, KERNEL = "PV rounded first (NumPy)", "kernel"


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Through float32, as hardware that sums in float32 does."""
    return x.astype(np.float32).astype(bfloat16).astype(float)


def stochastically(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """To one of the two bfloat16 neighbours, the nearer one more often."""
    bits = x.astype(np.float32).view(np.uint32)
    added = rng.integers(0, 1 << 16, x.shape, np.uint32)
    return ((bits + added) & np.uint32(0xFFFF0000)).view(np.float32).astype(float)


def emulated(case: Case, values: np.ndarray, cure: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Error of P V where it is rounded, in units of the largest weight, and P V / row sum: (batches, ROWS, COLUMNS)."""
    scores = np.broadcast_to(case.scores.astype(float).sum(axis=1), values.shape[:3])
    offset = np.zeros((*values.shape[:2], 1))  # of the maximum that weights are relative to
    if cure.startswith("beta"):  # a largest score is drawn, and weights are relative to beta times it
        offset = (float(cure.split()[-1]) - 1) * rng.uniform(0.5, 2, offset.shape)
    weights = np.exp(scores - offset)
    exact = np.einsum("brk,brkc->brc", to_bfloat16(weights), values.astype(float))
    rounded = stochastically(rng, exact) if cure == "stochastic rounding" else to_bfloat16(exact)
    return (rounded - exact) * np.exp(offset), rounded / weights.sum(axis=-1, keepdims=True)


def arguments(case: Case, values: np.ndarray) -> tuple[tuple[np.ndarray, ...], dict]:
    """q, k, v and options of the calls."""
    batches, _, keys, _ = values.shape
    q, k = np.zeros((ROWS, HEAD_DIM), bfloat16), np.zeros((ROWS, SLOTS, HEAD_DIM), bfloat16)
    q[:, :2] = 1
    k[:, :keys, :2] = case.scores
    k[..., SUM_AT] = 1  # dq has the row sums of dS there
    v = np.zeros((batches, ROWS, SLOTS, COLUMNS), bfloat16)
    v[:, :, :keys] = values
    column = np.arange(ROWS * SLOTS)
    mask = (column // SLOTS == np.arange(ROWS)[:, None]) & (column % SLOTS < keys)
    q, k = (np.broadcast_to(x.reshape(-1, HEAD_DIM), (batches, x.size // HEAD_DIM, HEAD_DIM)) for x in (q, k))
    return (q, k, v.reshape(batches, -1, COLUMNS)), {"softmax_scale": 1.0, "mask": mask}


def row(case: str, method: str, quantity: str, numbers: np.ndarray) -> Row:
    """Of one number for each row."""
    mean, sd = numbers.mean(), numbers.std()
    z = mean / (sd / np.sqrt(numbers.size)) if sd else 0.0
    return {"case": case, "method": method, "quantity": quantity, "rows": numbers.size, "mean": mean, "sd": sd, "z": z}


def measure_case(work: tuple[Backend, Case, int]) -> list[Row]:
    """Errors of P V, out and delta, and the row sums of dS, where P V is rounded first and from the kernel."""
    backend, case, batches = work
    rng = np.random.default_rng(CASES.index(case))
    values = case.values(rng, batches)
    inputs, options = arguments(case, values)
    exact = reference.attention(*inputs, **options)
    dout = (-rng.uniform(0.5, 1.5, exact.shape)).astype(bfloat16)
    out, lse = backend.call(attention, *inputs, return_lse=True, **options)
    of_sum, divided = emulated(case, values, "", rng)

    rows = [
        row(case.name, ROUNDED, "PV", of_sum.mean(axis=-1)),
        row(case.name, ROUNDED, "delta of out in float32", (dout.astype(float) * (divided - exact)).sum(axis=-1)),
    ]
    for method, result in (ROUNDED, to_bfloat16(divided)), (KERNEL, out.astype(float)):
        error = result - exact
        of_delta = (dout.astype(float) * error).sum(axis=-1)
        call = (dout, *inputs, result.astype(bfloat16), lse)
        row_sum = backend.call(gradient_of_q, *call, **options)[..., SUM_AT].astype(float)
        rows += [
            row(case.name, method, "out", error.mean(axis=-1)),
            row(case.name, method, "delta", of_delta),
            row(case.name, method, "dS row sum", row_sum),
            row(case.name, method, "dS row sum + error of delta", row_sum + of_delta),
        ]
    return rows + (cured(values, exact, dout, rng) if case == TIED else [])


def gradient_of_q(*call, **options) -> np.ndarray:
    """dq of the backward."""
    return attention_backward(*call, **options).dq


def cured(values: np.ndarray, exact: np.ndarray, dout: np.ndarray, rng: np.random.Generator) -> list[Row]:
    """The same errors, emulated, with each cure."""
    rows = []
    for cure in CURES:
        of_sum, divided = emulated(TIED, values, cure, rng)
        error = to_bfloat16(divided) - exact
        name = f"{TIED.name}: {cure}"
        rows += [
            row(name, ROUNDED, "PV", of_sum.mean(axis=-1)),
            row(name, ROUNDED, "out", error.mean(axis=-1)),
            row(name, ROUNDED, "delta", (dout.astype(float) * error).sum(axis=-1)),
        ]
    return rows


def measure(backend: Backend, batches: int) -> list[Row]:
    """All cases, ``batches`` times ROWS rows each, and the sum of the paper."""
    cases = [(backend, case, batches) for case in CASES]
    if isinstance(backend, Simulator):
        rows = measure_all(measure_case, cases)
    else:  # a GPU's context stays in the process that opened it
        rows = [measure_case(case) for case in tqdm(cases, unit="case")]
    example = row("the paper's sum", ROUNDED, "PV", to_bfloat16(np.array([EXAMPLE])) - EXAMPLE)
    return [*(row for of_case in rows for row in of_case), example]


def chosen(rows: list[Row], case: str, method: str, quantity: str) -> Row:
    """The one row of these."""
    wanted = {"case": case, "method": method, "quantity": quantity}
    (found,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return found


# Figure


def draw_quantity(axes, rows: list[Row], names: list[str], quantity: str, unit: float) -> None:
    """Means of one quantity, a line per case, with three standard errors each way."""
    for method, colour, marker, offset in (ROUNDED, record.STANDARD, "s", -0.17), (KERNEL, record.OURS, "o", 0.17):
        of_method = [r for r in rows if r["method"] == method and r["quantity"] == quantity and r["case"] in names]
        axes.errorbar(
            [r["mean"] / unit for r in of_method],
            [names.index(r["case"]) + offset for r in of_method],
            xerr=[3 * r["sd"] / np.sqrt(r["rows"]) / unit for r in of_method],
            fmt=marker,
            color=colour,
            capsize=2,
            label=method,
        )
        if quantity == "out":
            for r in of_method:
                if abs(r["z"]) > 20:
                    at = r["mean"] / unit, names.index(r["case"]) + offset
                    axes.annotate(
                        f"z {r['z']:.0f}",
                        at,
                        xytext=(8 if r["mean"] < 0 else -8, 0),
                        textcoords="offset points",
                        ha="left" if r["mean"] < 0 else "right",
                        va="center",
                        fontsize=9,
                    )
    axes.axvline(0, color="black", linewidth=1)


def label_of(name: str) -> str:
    """In the figure; short for cures."""
    return name.replace(f"{TIED.name}: ", "2 tied, one sign; ").replace("; beta", "; max times beta")


def draw(figure, rows: list[Row]) -> None:
    """Errors of out and of delta by case; the row sums of dS beside the latter."""
    names = [case.name for case in CASES] + [f"{TIED.name}: {cure}" for cure in CURES]
    left, right = figure.subplots(1, 2, sharey=True)
    draw_quantity(left, rows, names, "out", ULP)
    draw_quantity(right, rows, names, "delta", 1)
    sums = [r for r in rows if r["quantity"] == "dS row sum"]
    offsets = [0.17 if r["method"] == KERNEL else -0.17 for r in sums]
    right.scatter(
        [-r["mean"] for r in sums],
        [names.index(r["case"]) + offset for r, offset in zip(sums, offsets, strict=True)],
        s=110,
        facecolors="none",
        edgecolors="black",
        label="minus the row sum of dS, by the backward kernels",
    )
    left.set_yticks(range(len(names)), [label_of(name) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    left.axhline(len(CASES) - 0.5, color=record.EXTRA, linewidth=1)
    right.axhline(len(CASES) - 0.5, color=record.EXTRA, linewidth=1)
    left.set_xlabel("mean error of out, in ulp of bfloat16 ($2^{-6}$)\n(z: mean / its standard error)")
    right.set_xlabel("mean error of delta = rowsum(dout * out)")
    handles, labels = right.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: labels[index].startswith("minus"))  # methods first
    figure.legend(
        [handles[n] for n in order], [labels[n] for n in order], loc="outside lower center", ncols=3, frameon=False
    )


# Outcomes

BIASES = {  # mean errors of another emulation, but for one that follows from another; 0: no bias
    (CASES[0].name, ROUNDED, "PV"): 0.0,
    (CASES[1].name, ROUNDED, "PV"): -5.4e-3,
    (CASES[2].name, ROUNDED, "PV"): -5.4e-3,
    (CASES[3].name, ROUNDED, "PV"): 0.0,
    (CASES[1].name, ROUNDED, "out"): -3.9e-3,
    (CASES[2].name, ROUNDED, "out"): -2.0e-3,
    (CASES[3].name, ROUNDED, "out"): -1.2e-3,
    (CASES[0].name, KERNEL, "out"): 0.0,
    (CASES[1].name, KERNEL, "out"): 0.0,
    (CASES[2].name, KERNEL, "out"): 0.0,
    (CASES[3].name, KERNEL, "out"): 2.7e-3,
    (CASES[1].name, ROUNDED, "delta"): COLUMNS * 3.9e-3,  # of out, times the mean of |dout|, 1
    (CASES[1].name, ROUNDED, "delta of out in float32"): 0.189,
    (CASES[1].name, KERNEL, "delta"): 0.0,
    (CASES[3].name, KERNEL, "delta"): -0.169,
}
TOLERANCE = {"delta of out in float32": 0.25}  # for an unknown dout; of the others:
MEANS_WITHIN = 0.15
STOCHASTIC_NOTE = (
    "P V has no bias left, but out is rounded to nearest again, and P V / 2 is a number of bfloat16: that undoes the "
    "division by a little more than 2, as it does with a tail of either sign"
)


def bias_outcomes(rows: list[Row]) -> list[Outcome]:
    """Each mean against the figure for it."""
    result = []
    for (case, method, quantity), expected in BIASES.items():
        found = chosen(rows, case, method, quantity)
        mean, z = found["mean"], found["z"]
        tolerance = TOLERANCE.get(quantity, MEANS_WITHIN)
        holds = abs(mean - expected) <= tolerance * abs(expected) and abs(z) > 20 if expected else abs(z) < 4
        result.append(
            Outcome(
                f"{case}: mean error of {quantity}, {method}",
                f"{expected:.2g} (emulated) within {100 * tolerance:.0f} %, over 20 standard errors"
                if expected
                else "0 (emulated) within 4 standard errors",
                f"{mean:.2g}, {z:.0f} standard errors",
                bool(holds),
            )
        )
    return result


def cure_outcomes(rows: list[Row]) -> list[Outcome]:
    """What is left of the bias of P V and of out."""
    result = []
    for quantity in "PV", "out":
        bias = chosen(rows, TIED.name, ROUNDED, quantity)["mean"]
        for cure in CURES:
            found = chosen(rows, f"{TIED.name}: {cure}", ROUNDED, quantity)
            source = "predicted" if cure == "stochastic rounding" else "published: Qiu and Yao's cure"
            left, noise = found["mean"] / bias, abs(3 * found["sd"] / np.sqrt(found["rows"]) / bias)
            result.append(
                Outcome(
                    f"{TIED.name}, {cure}: mean error of {quantity} in units of that without",
                    f"0 ({source}) within 0.05 and three standard errors",
                    f"{left:.3f} +- {noise:.3f}",
                    bool(abs(left) <= 0.05 + noise),
                    STOCHASTIC_NOTE if (quantity, cure) == ("out", "stochastic rounding") else "",
                )
            )
    return result


def outcomes(rows: list[Row]) -> list[Outcome]:
    """The paper's sum, every bias, its meter and its cures."""
    example = chosen(rows, "the paper's sum", ROUNDED, "PV")["mean"]
    bias = chosen(rows, TIED.name, ROUNDED, "PV")["mean"]
    controls = [chosen(rows, case.name, ROUNDED, "PV")["mean"] / bias for case in CASES[4:]]
    largest = max(abs(r["mean"]) for r in rows if r["quantity"] == "delta")
    off = max(abs(r["mean"]) for r in rows if r["quantity"] == "dS row sum + error of delta")
    return [
        Outcome(
            f"{EXAMPLE} in bfloat16: its error",
            "-0.0147595 (published, Qiu and Yao: it becomes -4.71875)",
            f"{example:.6g}",
            f"{example:.6g}" == "-0.0147595",
        ),
        *bias_outcomes(rows),
        Outcome(
            "2 not tied: mean errors of PV in units of the tied bias",
            "within 0.05 of 0 (predicted)",
            ", ".join(f"{x:.3f}" for x in controls),
            all(abs(x) <= 0.05 for x in controls),
        ),
        *cure_outcomes(rows),
        Outcome(
            "mean row sum of dS, all cases, both outs: off minus the mean error of delta by",
            f"0 (predicted) within 2 % of the largest bias, {0.02 * largest:.2g}",
            f"{off:.1e} at most",
            off <= 0.02 * largest,
        ),
    ]


EXPERIMENT = Experiment(
    claim="Two keys that tie for the maximum bias bfloat16 attention where P V is rounded before it is divided (Qiu "
    "and Yao 2025); one rounding of out at the end has no bias where all values have one sign, but the opposite one "
    "where those of the tail have either; row sums of dS show both",
    caption="Mean errors where scores tie: rounding P V before dividing (red) pushes out one way; one rounding at the "
    "end (the kernel, blue) pushes the other way, and only where the tail, values of small weight, has either sign. "
    "Below the line: cures, emulated; with beta, weights are relative to beta times the maximum.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"batches": 400},
    quick={"batches": 30},
    figure_size=(12.0, 5.2),
    on_gpu=True,
)
