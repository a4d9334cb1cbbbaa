"""Which part of its bound does the error of a result reach, where, and which term of the bound leads there?

For each dtype and family of values, out, lse and dq of 16 queries over N keys, dk and dv of 16 keys under N queries:
the largest and the median error / bound of the elements. Two sweeps, over N at head_dim 16 and over head_dim at one N.
A ratio near 1 says that the bound cannot be made smaller; a small one that roundings cancel each other, or that
nothing in the kernel errs as far as it might. Beyond 1 the kernel or the bound would be wrong.

In 16 bits the root mean square of out's errors is also compared with that of independent, uniformly distributed
roundings of P and out, sqrt(0.18 u^2 (sum_j P_j^2 V_jc^2 + O_c^2)) for each element: an estimate, not a bound. All
errors are those of the real kernels; what is called emulated is the outcome of a NumPy emulation of their roundings, on
other inputs, from before they were measured. How the bounds come about: experiments/error_bound.md.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from cupyflash import attention, attention_backward, bounds, ptxsim, reference
from cupyflash.testing import FAMILIES, AttentionProblem
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

ARCH = "sm_80"
FEW = 16
HEAD_DIM = 16  # of the sweep over N
NO_TERMS = {"leading_term": None, "its_share": None, "predicted_share": None}
DTYPES = ("float16", "bfloat16", "float32", "float64")
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # roundoff in 16 bits
QUERY_RESULTS, KEY_RESULTS = ("out", "lse", "dq"), ("dk", "dv")
RESULTS = {"keys": QUERY_RESULTS, "queries": KEY_RESULTS}  # that sum over them
# Terms whose share of a bound in 16 bits was emulated.
EMULATED_TERMS = {"out": ("rounding of P", "rounding of out"), "dq": ("delta",), "dk": ("delta",)}
EMULATED_SHARES = {"out": 0.8, "dq": 0.75, "dk": 0.75}
UNDERFLOWING = ("subnormal", "rising to tiny values", "underflowing weights")  # in float16
GIVEN_OUT = (
    "the emulation takes sum |dout| B for delta's error, B the bound of out; the bound here takes what the given out "
    "is really off by, |rowsum(dout (out - O))|, at N 256 0.2 to 5 % of it in the median row and at most 16 %"
)
EMULATIONS = (  # of the largest ratio: dtypes, result, families left out, from, to, why it differs
    (
        UNITS,
        "out",
        (),
        (0.1, 0.65),
        "reached where P or out underflows: there each weight or element loses all that the bound takes, half the "
        "spacing of subnormals or, if less, the whole weight",
    ),
    (UNITS, "out", UNDERFLOWING, (0.1, 0.65), ""),
    (("float32",), "out", (), (0.1, 0.65), ""),
    (UNITS, "dq", (), (0.1, 0.45), f"{GIVEN_OUT}: rows in which delta leads come near their bound"),
    (UNITS, "dk", (), (0.45, 1), ""),
    (UNITS, "dv", (), (0.45, 1), ""),
)
EMULATED_RMS = {"normal": (0.85, 1.15), "one sign": (0.85, 1.15), "peaked": (0.4, 0.75)}  # over the estimate


@dataclass(frozen=True)
class Case:
    """All families at one size."""

    dtype: str
    many: str  # "keys" or "queries"
    seqlen: int
    head_dim: int

    @property
    def seqlens(self) -> tuple[int, int]:
        """Of queries and keys."""
        return (FEW, self.seqlen) if self.many == "keys" else (self.seqlen, FEW)

    @property
    def work(self) -> int:
        """About proportional to the time it takes."""
        return self.seqlen * self.head_dim * (1, 1, 40, 160)[DTYPES.index(self.dtype)]

    def inputs(self) -> tuple[np.ndarray, ...]:
        """dout, q, k, v, with a leading dimension of families."""
        drawn = []
        for seed, values in enumerate(FAMILIES):
            q, k, v = AttentionProblem(
                dtype=self.dtype,
                seqlen_q=self.seqlens[0],
                seqlen_k=self.seqlens[1],
                head_dim=self.head_dim,
                head_dim_v=self.head_dim,
                values=values,
                seed=seed,
            ).inputs()
            dout = np.random.default_rng((seed, 1)).standard_normal(q.shape).astype(q.dtype)
            drawn.append((dout, q, k, v))
        return tuple(np.stack(arrays) for arrays in zip(*drawn, strict=True))


def measure(
    dtypes: list[str],
    seqlens: list[int],
    float32_seqlens: list[int],
    float64_seqlens: list[int],
    head_dims: list[int],
    seqlen: int,
) -> list[Row]:
    """Rows of both sweeps, for each dtype; ``seqlen`` is that of the sweep over head_dim."""
    lengths = {"float32": float32_seqlens, "float64": float64_seqlens}
    cases = [
        Case(dtype, many, *size)
        for dtype in dtypes
        for many in RESULTS
        for size in sizes(lengths.get(dtype, seqlens), head_dims, seqlen)
    ]
    return list(itertools.chain(*measure_all(audit, cases, work=lambda case: case.work)))


def sizes(seqlens: list[int], head_dims: list[int], seqlen: int) -> list[tuple[int, int]]:
    """(N, head_dim) of both sweeps."""
    return sorted({*((length, HEAD_DIM) for length in seqlens), *((seqlen, head_dim) for head_dim in head_dims)})


def audit(case: Case) -> list[Row]:
    """A row for each family and result."""
    dout, q, k, v = case.inputs()
    with ptxsim.settings(arch=ARCH):
        out, lse = attention(q, k, v, return_lse=True)
        arguments = dout, q, k, v, out, lse
        found = out, lse, *attention_backward(*arguments)
    exact = *reference.attention(q, k, v, return_lse=True), *reference.attention_backward(*arguments)
    bound = *bounds.attention(q, k, v, return_lse=True), *bounds.attention_backward(*arguments)
    judged = dict(zip(itertools.chain(*RESULTS.values()), zip(found, exact, bound, strict=True), strict=True))
    rms = {}
    for family in EMULATED_RMS if case.dtype in UNITS else ():
        index = FAMILIES.index(family)
        rms[family] = rms_over_estimate(UNITS[case.dtype], *(x[index] for x in (q, k, v, out, exact[0])))
    rows = []
    for index, family in enumerate(FAMILIES):
        summaries = {result: summary(*(x[index] for x in judged[result])) for result in RESULTS[case.many]}
        places = {result: (x["row"], x["column"]) for result, x in summaries.items() if x["row"] is not None}
        terms = leading_terms(places, *(x[index] for x in arguments))
        rows += [
            {
                "dtype": case.dtype,
                "result": result,
                "family": family,
                "seqlen_q": case.seqlens[0],
                "seqlen_k": case.seqlens[1],
                "head_dim": case.head_dim,
                **summaries[result],
                **terms.get(result, NO_TERMS),
                "rms_over_estimate": rms[family] if result == "out" and family in rms else None,
            }
            for result in summaries
        ]
    return rows


def summary(found: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> dict[str, float | None]:
    """Of the ratios of all elements that have a bound; the place of the largest, and the share that has none."""
    bounded = np.isfinite(bound)
    if not bounded.any():
        return {"largest": None, "median": None, "unbounded": 1.0, "row": None, "column": None}
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(found.astype(np.float64) - exact)
        ratio = np.where(bounded, np.where(error == 0, 0.0, error / bound), -1.0)
    place = np.unravel_index(ratio.argmax(), ratio.shape)
    return {
        "largest": ratio[place],
        "median": float(np.median(ratio[bounded])),
        "unbounded": 1 - float(bounded.mean()),
        "row": int(place[0]),
        "column": int(place[1]) if len(place) > 1 else None,
    }


def rms_over_estimate(unit: float, q, k, v, out, exact) -> float:
    """Root mean square of out's errors, over that of independent roundings of P and out."""
    q, k, v, out = (x.astype(np.float64) for x in (q, k, v, out))
    scores = q @ k.T * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    estimate = 0.18 * unit**2 * (weights**2 @ v**2 + exact**2)
    return float(np.sqrt(np.mean((out - exact) ** 2) / np.mean(estimate)))


def leading_terms(places: dict[str, tuple[int, int | None]], dout, q, k, v, out, lse) -> dict[str, dict]:
    """For each result the term of its bound that is largest at the place given, its share of all of them, and that of
    the terms that led in the emulation."""
    if not places:
        return {}
    by_query = places.keys() <= {*QUERY_RESULTS}
    if by_query:  # a query's results and their bounds know no other query: these are enough
        queries = [row for row, _ in places.values()]
        dout, q, out, lse = (x[queries] for x in (dout, q, out, lse))
        places = {result: (at, column) for at, (result, (_, column)) in enumerate(places.items())}
    terms = {}
    if by_query:
        forward = bounds.attention_terms(q, k, v)
        terms |= {result: {name: x[i] for name, x in forward.items()} for i, result in enumerate(("out", "lse"))}
    backward = bounds.attention_backward_terms(dout, q, k, v, out, lse)
    terms |= {result: {name: x[i] for name, x in backward.items()} for i, result in enumerate(("dq", "dk", "dv"))}

    leading = {}
    for result, (row, column) in places.items():
        place = (row,) if column is None else (row, column)
        values = {name: float(term[place]) for name, term in terms[result].items()}
        name, total = max(values, key=values.get), sum(values.values())
        predicted = sum(values[term] for term in EMULATED_TERMS.get(result, ()))
        shares = values[name] / total if total else None, predicted / total if total and predicted else None
        leading[result] = dict(zip(NO_TERMS, (name, *shares), strict=True))
    return leading


def dtypes_of(rows: list[Row]) -> list[str]:
    """In their order."""
    return list(dict.fromkeys(row["dtype"] for row in rows))


def seqlen_of(row: Row) -> int:
    return max(row["seqlen_q"], row["seqlen_k"])


def draw(figure, rows: list[Row]) -> None:
    """A column of three panels for each dtype."""
    dtypes = dtypes_of(rows)
    seqlen = next((seqlen_of(row) for row in rows if row["head_dim"] != HEAD_DIM), seqlen_of(rows[0]))
    panels = figure.subplots(3, len(dtypes), height_ratios=(1, 1, 1.4), squeeze=False)
    for column, dtype in zip(panels.T, dtypes, strict=True):
        own = [row for row in rows if row["dtype"] == dtype]
        draw_sweep(column[0], [row for row in own if row["head_dim"] == HEAD_DIM], seqlen_of)
        draw_sweep(column[1], [row for row in own if seqlen_of(row) == seqlen], lambda row: row["head_dim"])
        draw_families(column[2], own)
        column[0].set_title(dtype)
        column[0].set_xlabel(f"N, at head_dim {HEAD_DIM}")
        column[1].set_xlabel(f"head_dim, at N = {seqlen}")
        column[2].tick_params(labelleft=dtype == dtypes[0], length=0)
    for axes in panels[:2].flat:
        axes.set_ylim(1e-4, 2)
    for axes in panels[:2, 0]:
        axes.set_ylabel("error / bound")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    title = (
        "Above, of all families: solid, the largest; dotted, the median of the medians. Below: the largest, by family"
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, title=title)


def draw_sweep(axes, rows: list[Row], size) -> None:
    """For each result the largest ratio of all families, and the median of their medians, against ``size(row)``."""
    results = itertools.chain(*RESULTS.values())
    for result, colour, marker in zip(results, record.COLOURS, "os^Dv", strict=False):
        points = {}
        for row in rows:
            if row["result"] == result and row["largest"] is not None:
                points.setdefault(size(row), []).append((row["largest"], row["median"]))
        at = sorted(points)
        axes.plot(
            at, [max(x for x, _ in points[n]) for n in at], f"{marker}-", color=colour, markersize=4, label=result
        )
        axes.plot(at, [np.median([x for _, x in points[n]]) for n in at], ":", color=colour)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({size(row) for row in rows}), sorted({size(row) for row in rows}))
    axes.minorticks_off()


def draw_families(axes, rows: list[Row]) -> None:
    """A map of the largest ratio of all sizes: families down, results across."""
    results = list(itertools.chain(*RESULTS.values()))
    largest = np.full((len(FAMILIES), len(results)), np.nan)
    for row in rows:
        if row["largest"] is not None:
            place = FAMILIES.index(row["family"]), results.index(row["result"])
            largest[place] = np.nanmax([largest[place], row["largest"]])
    axes.imshow(np.log10(np.maximum(largest, 1e-4)), vmin=-4, vmax=0, cmap="Blues", aspect="auto")
    for (i, j), value in np.ndenumerate(largest):
        text, size = shown(value), 7 if math.isnan(value) else 9
        axes.text(j, i, text, ha="center", va="center", fontsize=size, color="white" if value > 0.1 else "black")
    axes.set_xticks(range(len(results)), results)
    axes.set_yticks(range(len(FAMILIES)), FAMILIES, fontsize=9)
    axes.grid(visible=False)


def shown(ratio: float) -> str:
    """With two digits, down to a thousandth."""
    if math.isnan(ratio):
        return "no bound"
    if ratio < 1e-3:
        return "<0.001" if ratio else "0"
    return f"{ratio:.2g}" if ratio < 0.095 else f"{ratio:.2f}"


def worst(rows: list[Row]) -> Row:
    """The row of the largest ratio."""
    return max((row for row in rows if row["largest"] is not None), key=lambda row: row["largest"])


def told(row: Row) -> str:
    """Ratio, and where it is."""
    where = f"N {seqlen_of(row)}, head_dim {row['head_dim']}, {row['family']}"
    return f"{row['largest']:.3f} ({row['dtype']}, {row['result']}, {where}; mostly {row['leading_term']})"


def outcomes(rows: list[Row]) -> list[Outcome]:
    """That no error is above its bound; and what was emulated of ratios and shares."""
    judged = []
    for dtype in dtypes_of(rows):
        row = worst([row for row in rows if row["dtype"] == dtype])
        holds = row["largest"] <= 1
        judged.append(Outcome(f"{dtype}: largest error / bound", "at most 1 (computed)", told(row), holds))
    half = [dtype for dtype in dtypes_of(rows) if dtype in UNITS]
    for expected_of, result, left_out, (least, most), note in EMULATIONS:
        dtypes = [dtype for dtype in dtypes_of(rows) if dtype in expected_of]
        own = [row for row in rows if row["dtype"] in dtypes and row["result"] == result]
        if not own:
            continue
        row = worst([row for row in own if row["family"] not in left_out])
        judged.append(
            Outcome(
                f"{' and '.join(dtypes)}, {result}: largest error / bound"
                + f", without {', '.join(left_out)}" * bool(left_out),
                f"{least:g} to {most:g} (emulated)",
                told(row),
                least <= row["largest"] <= most,
                note,
            )
        )
    for result, terms in EMULATED_TERMS.items() if half else ():
        own = [row for row in rows if row["dtype"] in UNITS and row["result"] == result and row["predicted_share"]]
        share = float(np.median([row["predicted_share"] for row in own]))
        least = EMULATED_SHARES[result]
        judged.append(
            Outcome(
                f"{' and '.join(half)}: share of {' and '.join(terms)} in the bound of {result} where the ratio is "
                "largest, median",
                f"above {least:.0%} (emulated)",
                f"{share:.0%}; {sum(row['predicted_share'] > least for row in own)} of {len(own)} above",
                share > least,
                f"{GIVEN_OUT}; the rounding of dS leads in most families" * (result != "out"),
            )
        )
    for family, (least, most) in EMULATED_RMS.items() if half else ():
        ratios = [row["rms_over_estimate"] for row in rows if row["family"] == family and row["rms_over_estimate"]]
        ratio = float(np.median(ratios))
        judged.append(
            Outcome(
                f"{' and '.join(half)}, {family}: root mean square of out's errors, over the estimate, median",
                f"{least:g} to {most:g} (emulated)",
                f"{ratio:.2f}; {min(ratios):.2f} to {max(ratios):.2f}",
                least <= ratio <= most,
            )
        )
    return judged


EXPERIMENT = Experiment(
    claim="No error exceeds its bound, for four dtypes, N to 16384 (float32: 4096, float64: 1024), head_dim 16 to 256 "
    "and families of values that each stress one term ([the bound](error_bound.md))",
    caption="Largest and median error / bound of every result, over N, head_dim and families of values: none above 1.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={
        "dtypes": list(DTYPES),
        "seqlens": [64, 256, 1024, 4096, 16384],
        "float32_seqlens": [64, 256, 1024, 4096],
        "float64_seqlens": [64, 256, 1024],
        "head_dims": [16, 32, 64, 128, 256],
        "seqlen": 256,
    },
    quick={
        "dtypes": ["float16", "float32"],
        "seqlens": [32],
        "float32_seqlens": [32],
        "float64_seqlens": [32],
        "head_dims": [16],
        "seqlen": 32,
    },
    figure_size=(14.0, 11.5),
)
