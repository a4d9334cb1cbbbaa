"""How much of the backward's error comes from delta, which is computed from a rounded out?

The backward computes dS = P (dP - delta) with delta = rowsum(dO * out), and out is what the forward stored: its weights
were rounded to 16 bits, and so was it. Four deltas of the same inputs:

- rounded out: the library's call, by the kernels alone;
- before the last rounding: out of a tiled online softmax in NumPy (float32, weights rounded as the kernel rounds them);
- out of a wider call: that of the float32 kernel for the same numbers, for float32 inputs that of the float64 kernel;
- rowsum(P * dP): from lse and dP in float64 NumPy.

The last three reach the same kernels through ``dlse``, which is subtracted from delta: dlse = rowsum(dO * out) - delta
makes it the one that is wanted. dS is the gradient of a float32 bias of zeros, as it is before it is rounded for the
products; dq is that of a call without a bias. Exact gradients are those of :mod:`cupyflash.reference`.

Bounds name what each source adds. That of delta is taken twice: as what the given out really errs by, as
``bounds.attention_backward_terms`` has it, and as the most that it may err by, sum |dO| times ``bounds.attention``:
a bound that is known before out is. The rounding of dS to the inputs' dtype, u |dS|, is added to both.
head_dim 64, one head for each family of values.
"""

from __future__ import annotations

import math

import numpy as np
from tqdm import tqdm

from cupyflash import attention, attention_backward, bounds, reference
from cupyflash.bounds.arithmetic import Precision
from experiments import record
from experiments.emulation import as_kernel
from experiments.exp_models import DTYPES, KEY_TILE
from experiments.experiment import Experiment, Outcome, Row

HEAD_DIM = 64
RISE = 26.0
FAMILIES = ("normal", "peaked", "values of one sign", "keys with an offset", "rising")
WIDER = {"float16": np.float32, "bfloat16": np.float32, "float32": np.float64}
ROUNDED, UNROUNDED, WIDE, FROM_WEIGHTS = DELTAS = (
    "rounded out",
    "out before its last rounding",
    "out of a wider call",
    "rowsum(P * dP)",
)


def inputs(family: str, queries: int, keys: int) -> tuple[np.ndarray, ...]:
    """dout, q, k and v in float64."""
    rng = np.random.default_rng(FAMILIES.index(family))
    dout, q = rng.standard_normal((2, queries, HEAD_DIM))
    k, v = rng.standard_normal((2, keys, HEAD_DIM))
    if family == "peaked":
        q = 8 * q
    elif family == "values of one sign":
        v = np.abs(v) + 0.5
    elif family == "keys with an offset":
        k = k + 4 * rng.standard_normal(HEAD_DIM)
    elif family == "rising":
        q[:, 0], k[:, 0] = math.sqrt(HEAD_DIM), RISE * np.arange(keys) / keys
    return dout, q, k, v


def weights_of(q, k, lse) -> np.ndarray:
    """P = exp(S - lse), as the backward computes it, without its roundings."""
    q, k, lse = (x.astype(np.float64) for x in (q, k, lse))
    return np.exp(q @ k.mT / math.sqrt(HEAD_DIM) - lse[..., None])


def deltas(backend, dtype: str, dout, q, k, v, out, lse) -> dict[str, np.ndarray]:
    """The four, in float64."""
    wide_q, wide_k, wide_v = (x.astype(WIDER[dtype]) for x in (q, k, v))
    unrounded = [as_kernel(*x, tile=KEY_TILE[dtype]).out for x in zip(q, k, v, strict=True)]
    outs = {ROUNDED: out, UNROUNDED: np.stack(unrounded), WIDE: backend.call(attention, wide_q, wide_k, wide_v)}
    dout = dout.astype(np.float64)
    found = {name: (dout * x.astype(np.float64)).sum(axis=-1) for name, x in outs.items()}
    found[FROM_WEIGHTS] = (weights_of(q, k, lse) * (dout @ v.astype(np.float64).mT)).sum(axis=-1)
    return found


def rms(x: np.ndarray) -> np.ndarray:
    """Of each family, of which there is one for each index of the first axis."""
    return np.sqrt(np.square(x).mean(axis=tuple(range(1, x.ndim))))


def bound_shares(dtype: str, dout, q, k, v, out, lse, bias) -> dict[str, np.ndarray]:
    """Delta's part of the bounds on dS as it is rounded and on dq, by what out errs by and by what it may."""
    terms = bounds.attention_backward_terms(dout, q, k, v, out, lse, bias=bias)
    at_most = (np.abs(dout.astype(np.float64)) * bounds.attention(q, k, v)).sum(axis=-1, keepdims=True)
    weights = weights_of(q, k, lse)
    scale = HEAD_DIM**-0.5
    exact = reference.attention_backward(dout, q, k, v, out, lse, bias=bias)
    casting = Precision.of(DTYPES[dtype]).unit * np.abs(exact.dbias) if dtype != "float32" else 0.0
    bound_of = {"ds": weights * at_most, "dq": scale * at_most * (weights @ np.abs(k.astype(np.float64)))}
    shares = {}
    for gradient, attribute in ("ds", "dbias"), ("dq", "dq"):
        parts = {name: getattr(of_name, attribute) for name, of_name in terms.items()}
        rest = sum(part for name, part in parts.items() if name != "delta") + (casting if gradient == "ds" else 0.0)
        for name, delta in ("met", parts["delta"]), ("possible", bound_of[gradient]):
            mean_delta, mean_rest = (x.mean(axis=(1, 2)) for x in np.broadcast_arrays(delta, rest))
            shares[f"{gradient}_bound_from_{name}"] = mean_delta / (mean_delta + mean_rest)
    return shares


def predicted_share_of_cast(q, k, v, lse, exact_out) -> np.ndarray:
    """Of delta's mean squared error, the last rounding's: both roundings err by the same unit, of O and of each P V."""
    squares = np.square(weights_of(q, k, lse)) @ np.square(v.astype(np.float64))
    cast = np.square(exact_out)
    return cast.mean(axis=(1, 2)) / (cast + squares).mean(axis=(1, 2))


def all_gradients(*arrays, **options) -> tuple:
    """dq, dk and dv."""
    return tuple(attention_backward(*arrays, **options))


def only_ds(*arrays, **options):
    """The gradient of the bias."""
    return attention_backward(*arrays, **options).dbias


def measure_dtype(backend, dtype: str, queries: int, keys: int, bar) -> list[Row]:
    """A row for each family and delta."""
    drawn = [inputs(family, queries, keys) for family in FAMILIES]
    dout, q, k, v = (np.stack(x).astype(DTYPES[dtype]) for x in zip(*drawn, strict=True))
    bias = np.zeros((len(FAMILIES), queries, keys), np.float32)
    out, lse = backend.call(attention, q, k, v, return_lse=True)
    arguments = dout, q, k, v, out, lse
    exact, exact_out = reference.attention_backward(*arguments, bias=bias), reference.attention(q, k, v)
    exact_delta = (dout.astype(np.float64) * exact_out).sum(axis=-1)
    bound = bounds.attention_backward(*arguments)
    of_given_out = bound_shares(dtype, *arguments, bias) | {
        "predicted_share_of_cast": predicted_share_of_cast(q, k, v, lse, exact_out)
    }
    # Of all products whose sum the row sum of dS is.
    magnitudes = weights_of(q, k, lse) @ np.abs(v.astype(np.float64)) + np.abs(exact_out)
    size = (np.abs(dout.astype(np.float64)) * magnitudes).sum(axis=-1)
    found, rows = deltas(backend, dtype, *arguments), []
    for name, delta in found.items():
        dlse = (found[ROUNDED] - delta).astype(np.float32)
        dq, dk, _ = backend.call(all_gradients, *arguments, dlse=dlse)
        ds = backend.call(only_ds, *arguments, dlse=dlse, bias=bias)
        row_sum, delta_error = ds.astype(np.float64).sum(axis=-1), delta - exact_delta
        values = {
            "delta_error": rms(delta_error),
            "row_sum": rms(row_sum),
            "row_sum_and_delta_error": rms(row_sum + delta_error),
            "row_sum_in_units": np.abs(row_sum / size).max(axis=-1) / Precision.of(DTYPES[dtype]).unit,
            "ds_error": rms(ds - exact.dbias),
            "ds_rounded_error": rms(ds.astype(DTYPES[dtype]).astype(np.float64) - exact.dbias),
            "dq_error": rms(dq - exact.dq),
            "dk_error": rms(dk - exact.dk),
            "dq_of_bound": (np.abs(dq - exact.dq) / bound.dq).max(axis=(1, 2)),
            **(of_given_out if name == ROUNDED else dict.fromkeys(of_given_out, [None] * len(FAMILIES))),
        }
        rows += [
            {"dtype": dtype, "family": family, "delta": name, **{key: x[index] for key, x in values.items()}}
            for index, family in enumerate(FAMILIES)
        ]
        bar.update()
    return rows


def measure(backend, queries: int, keys: int, dtypes: list[str]) -> list[Row]:
    """Rows of each dtype."""
    with tqdm(total=len(dtypes) * len(DELTAS), unit="delta") as bar:
        return [row for dtype in dtypes for row in measure_dtype(backend, dtype, queries, keys, bar)]


def by_family(rows: list[Row], dtype: str, delta: str, column: str) -> np.ndarray:
    """One number for each family."""
    return np.array([row[column] for row in rows if (row["dtype"], row["delta"]) == (dtype, delta)])


def gone(rows: list[Row], dtype: str, column: str, delta: str = WIDE) -> np.ndarray:
    """What part of a mean squared error another delta takes away, for each family; below 0 where it adds to it."""
    return 1 - np.square(by_family(rows, dtype, delta, column) / by_family(rows, dtype, ROUNDED, column))


# No colour or marker of one legend is in the other: bounds and errors; deltas.
SHARE_STYLES = (
    {"marker": "s", "color": "black", "markerfacecolor": "white"},
    {"marker": "D", "color": "black", "markerfacecolor": "white"},
    {"marker": "<", "color": record.COLOURS[3]},
    {"marker": "^", "color": record.COLOURS[4]},
    {"marker": "v", "color": record.EXTRA},
)
DELTA_STYLES = (
    {"marker": "o", "color": record.OURS},
    {"marker": "P", "color": record.STANDARD, "markersize": 8},
    {"marker": "X", "color": record.COLOURS[2], "markersize": 8},
    {"marker": "*", "color": "#7db7cc", "markersize": 10},
)


def draw_shares(axes, rows: list[Row], dtype: str) -> None:
    """Delta's part of the bounds, and of the errors."""
    shown = [
        ("bound on dS, before out is known", by_family(rows, dtype, ROUNDED, "ds_bound_from_possible")),
        ("bound on dS, by the given out's error", by_family(rows, dtype, ROUNDED, "ds_bound_from_met")),
        ("squared error of dS in float32", gone(rows, dtype, "ds_error")),
        (f"squared error of dS in {dtype}", gone(rows, dtype, "ds_rounded_error")),
        ("squared error of dq", gone(rows, dtype, "dq_error")),
    ]
    for number, ((label, shares), style) in enumerate(zip(shown, SHARE_STYLES, strict=True)):
        if dtype == "float32" and number == 3:  # what dS is in already
            continue
        places = [at + 0.14 * (number - 2) for at in range(len(FAMILIES))]
        axes.plot(100 * np.maximum(shares, -0.6), places, linestyle="none", label=label, **style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlim(-65, 105)
    axes.set_xlabel("delta's part (%)\nbelow 0 an exact delta adds error (cut at -60)")
    axes.set_title(f"{dtype}: of bounds and errors")


def draw_deltas(axes, rows: list[Row], dtype: str, column: str) -> None:
    """Something of each delta, on a logarithmic axis."""
    for number, (delta, style) in enumerate(zip(DELTAS, DELTA_STYLES, strict=True)):
        places = [at + 0.16 * (number - 1.5) for at in range(len(FAMILIES))]
        values = by_family(rows, dtype, delta, column)
        if column == "dq_error":
            values = values / by_family(rows, dtype, ROUNDED, column)
        axes.plot(values, places, linestyle="none", label=delta, **style)
    axes.set_xscale("log")


def draw(figure, rows: list[Row]) -> None:
    """A row of panels for bfloat16, or for float16 without it, and one for float32 where it was measured."""
    measured = {row["dtype"] for row in rows}
    half = "bfloat16" if "bfloat16" in measured else "float16"
    dtypes = [dtype for dtype in (half, "float32") if dtype in measured]
    panels = figure.subplots(len(dtypes), 3, squeeze=False)
    for (shares, row_sums, errors), dtype in zip(panels, dtypes, strict=True):
        draw_shares(shares, rows, dtype)
        draw_deltas(row_sums, rows, dtype, "row_sum")
        row_sums.set_xlabel("RMS of the row sums of dS\n(in exact arithmetic each is 0)")
        row_sums.set_title(f"{dtype}: row sums")
        draw_deltas(errors, rows, dtype, "dq_error")
        errors.axvline(1, color="black", linewidth=0.8)
        ticks = [0.5, 1, 2, 4] if dtype == "float32" else [0.4, 0.6, 0.8, 1]
        errors.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        errors.minorticks_off()
        errors.set_xlabel("RMSE of dq / that with the rounded out")
        errors.set_title(f"{dtype}: dq")
        for axes in (shares, row_sums, errors):
            axes.set_ylim(len(FAMILIES) - 0.5, -0.5)
            axes.set_yticks(range(len(FAMILIES)), FAMILIES if axes is shares else [])
    for at, axes in ("lower left", panels[0, 0]), ("lower right", panels[0, 1]):
        handles, labels = axes.get_legend_handles_labels()
        title = "left: delta's part of" if axes is panels[0, 0] else "middle and right: delta from"
        figure.legend(handles, labels, loc=f"outside {at}", ncols=2, frameon=False, fontsize=9, title=title)


def percents(values: np.ndarray) -> str:
    return ", ".join(f"{100 * x:.0f}" for x in values) + " %"


def outcomes_of(rows: list[Row], dtype: str) -> list[Outcome]:
    """Of a 16-bit dtype; families in their order."""
    possible, met = (by_family(rows, dtype, ROUNDED, f"ds_bound_from_{which}") for which in ("possible", "met"))
    row_sum, left = (by_family(rows, dtype, ROUNDED, c) for c in ("row_sum", "row_sum_and_delta_error"))
    units = by_family(rows, dtype, ROUNDED, "row_sum_in_units")
    smaller = row_sum / by_family(rows, dtype, WIDE, "row_sum")
    rounded_gone, dq_gone = gone(rows, dtype, "ds_rounded_error"), gone(rows, dtype, "dq_error")
    cast, predicted = gone(rows, dtype, "delta_error", UNROUNDED), by_family(rows, dtype, ROUNDED,
                                                                             "predicted_share_of_cast")  # fmt: skip
    even = [index for index, family in enumerate(FAMILIES) if family != "peaked"]
    families = ", ".join(FAMILIES)
    return [
        Outcome(
            f"{dtype}: delta's part of the bound on the rounded dS, before out is known ({families})",
            "75 to 98 % (emulated, with a bound of the same terms)",
            percents(possible),
            bool((possible >= 0.75).all() and (possible <= 0.98).all()),
        ),
        Outcome(
            f"{dtype}: the same by what the given out errs by",
            "less: roundings of out cancel in rowsum(dO * out) (predicted)",
            percents(met),
            bool((met < possible).all()),
        ),
        Outcome(
            f"{dtype}: row sums of dS against -(error of delta)",
            "the same within 1 % (predicted: an identity)",
            f"apart by at most {100 * (left / row_sum).max():.2g} %",
            bool((left / row_sum <= 0.01).all()),
        ),
        Outcome(
            f"{dtype}: largest row sum of dS / sum of |dO| (P |V| + |out|), in unit roundoffs",
            "at most 4 (predicted; emulated: 0.16)",
            ", ".join(f"{x:.2g}" for x in units),
            bool((units <= 4).all()),
        ),
        Outcome(
            f"{dtype}: row sums of dS with out of a wider call",
            "at least 100 times smaller (predicted: float32 against 16 bits)",
            ", ".join(f"{x:.3g}" for x in smaller) + " times",
            bool((smaller >= 100).all()),
            "with scores of about 30 float32 itself moves a weight by 2^-19 of it, which is 2^8 below the unit "
            "roundoff of float16, not 2^13",
        ),
        Outcome(
            f"{dtype}: squared error that out of a wider call takes away: rounded dS; dq",
            "at least 75 % of both, as of the bound (predicted)",
            f"{percents(rounded_gone)}; {percents(dq_gone)}",
            bool((np.concatenate([rounded_gone, dq_gone]) >= 0.75).all()),
            "the bound lets every element of out err by its most and in dO's direction; really sqrt(head_dim) random "
            "roundings are left, and where a row's weights are spread the rounding of dS to 16 bits is larger. Delta "
            "leads where out is large against dP - delta (one sign) or one weight leads (peaked), and in dq where keys "
            "share a direction in which the error of a row's delta adds up (offset, rising)",
        ),
        Outcome(
            f"{dtype}: part of delta's squared error that is out's last rounding, all but peaked",
            f"{percents(predicted[even])} within 25 percentage points (computed: both roundings as independent)",
            percents(cast[even]),
            bool((np.abs(cast - predicted)[even] <= 0.25).all()),
            "the error of the weights' rounding is not that of independent ones in these rows",
        ),
    ]


def float32_outcomes(rows: list[Row]) -> list[Outcome]:
    """What an exact delta does where nothing is rounded to 16 bits."""
    possible = by_family(rows, "float32", ROUNDED, "ds_bound_from_possible")
    ratios, sums = (
        by_family(rows, "float32", WIDE, column) / by_family(rows, "float32", ROUNDED, column)
        for column in ("dq_error", "row_sum")
    )
    return [
        Outcome(
            "float32: delta's part of the bound on dS, before out is known",
            "75 to 98 % (emulated, as for bfloat16)",
            percents(possible),
            bool((possible >= 0.75).all() and (possible <= 0.98).all()),
        ),
        Outcome(
            "float32: RMSE of dq with out of a float64 call / with the call's own",
            "at most 1.05: a better delta makes no gradient worse (predicted)",
            ", ".join(f"{x:.2f}" for x in ratios),
            bool((ratios <= 1.05).all()),
            "forward and backward compute the same scores with the same errors, so that out and the weights of the "
            "backward err together and dP - delta cancels that; an exact delta is not that of these weights. The row "
            "sums of dS show it: with the exact delta they are "
            + ", ".join(f"{x:.2g}" for x in sums)
            + " times those with the call's own",
        ),
    ]


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Of the dtypes that were measured."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    found = [outcome for dtype in dtypes if dtype != "float32" for outcome in outcomes_of(rows, dtype)]
    return found + (float32_outcomes(rows) if "float32" in dtypes else [])


EXPERIMENT = Experiment(
    claim="The rounded out in delta = rowsum(dO * out) is what the backward's bound is mostly made of, and row sums "
    "of dS are its error; an unrounded out or rowsum(P * dP) takes it away (Qiu and Yao 2025)",
    caption="Delta's part of bounds and of errors, the row sums of dS, and the error of dq with four deltas; float16 "
    "is in the table and not drawn.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"queries": 128, "keys": 512, "dtypes": ["bfloat16", "float16", "float32"]},
    quick={"queries": 32, "keys": 128, "dtypes": ["bfloat16"]},
    figure_size=(14.0, 9.0),
    on_gpu=True,
)
