"""Which part of its bound does the error of a result reach, where, and which term of the bound leads there?

For each dtype and family of values, out, lse and dq of 16 queries over N keys, dk and dv of 16 keys under N queries:
the largest and the median error / bound of the elements. Two sweeps, over N at head_dim 16 and over head_dim at N =
256. A ratio near 1 says that the bound cannot be made smaller; a small one that roundings cancel each other, or that
nothing in the kernel errs as far as it might. Beyond 1 the kernel or the bound would be wrong.
"""

from __future__ import annotations

import itertools
import math
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from cupyflash import attention, attention_backward, bounds, ptxsim, reference
from cupyflash.testing import FAMILIES, AttentionProblem
from experiments import record

ARCH = "sm_80"
FEW = 16
HEAD_DIM, SEQLEN = 16, 256  # of the sweep over the other
DTYPES = ("float16", "bfloat16", "float32", "float64")
RESULTS = {"keys": ("out", "lse", "dq"), "queries": ("dk", "dv")}  # that sum over them


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


def measure(case: Case) -> list[dict[str, float | str | None]]:
    """A row for each family and result."""
    dout, q, k, v = case.inputs()
    with ptxsim.settings(arch=ARCH):
        out, lse = attention(q, k, v, return_lse=True)
        arguments = dout, q, k, v, out, lse
        found = out, lse, *attention_backward(*arguments)
    exact = *reference.attention(q, k, v, return_lse=True), *reference.attention_backward(*arguments)
    bound = *bounds.attention(q, k, v, return_lse=True), *bounds.attention_backward(*arguments)
    judged = dict(zip(itertools.chain(*RESULTS.values()), zip(found, exact, bound, strict=True), strict=True))
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
                **terms.get(result, {"leading_term": None, "its_share": None}),
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


def leading_terms(places: dict[str, tuple[int, int | None]], dout, q, k, v, out, lse) -> dict[str, dict]:
    """For each result the term of its bound that is largest at the place given, and its share of all of them."""
    if not places:
        return {}
    by_query = places.keys() <= {*RESULTS["keys"]}
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
        leading[result] = {"leading_term": name, "its_share": values[name] / total if total else None}
    return leading


def sizes(seqlens: list[int], head_dims: list[int]) -> list[tuple[int, int]]:
    """(N, head_dim) of both sweeps."""
    return sorted({*((seqlen, HEAD_DIM) for seqlen in seqlens), *((SEQLEN, head_dim) for head_dim in head_dims)})


def audit(cases: list[Case]) -> list[dict]:
    """All rows in the order of the cases; the longest ones are computed first, a process per core."""
    order = sorted(cases, key=lambda case: case.work, reverse=True)
    done = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool, tqdm(total=len(cases), unit="case", smoothing=0) as bar:
        waiting = {pool.submit(measure, case): case for case in order}
        for future in as_completed(waiting):
            case = waiting[future]
            done[case] = future.result()
            bar.set_postfix_str(f"{case.dtype}, {case.seqlen} {case.many}, head_dim {case.head_dim}", refresh=False)
            bar.update()
    return [row for case in cases for row in done[case]]


def seqlen_of(row: dict) -> int:
    return max(row["seqlen_q"], row["seqlen_k"])


def draw_sweep(axes, rows: list[dict], size) -> None:
    """For each result the largest ratio of all families, and the median of their medians, against ``size(row)``."""
    for colour, result in enumerate(itertools.chain(*RESULTS.values())):
        points = {}
        for row in rows:
            if row["result"] == result and row["largest"] is not None:
                points.setdefault(size(row), []).append((row["largest"], row["median"]))
        at = sorted(points)
        axes.plot(at, [max(x for x, _ in points[n]) for n in at], "o-", color=f"C{colour}", markersize=4, label=result)
        axes.plot(at, [np.median([x for _, x in points[n]]) for n in at], ":", color=f"C{colour}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({size(row) for row in rows}), sorted({size(row) for row in rows}))
    axes.minorticks_off()


def draw_families(axes, rows: list[dict]) -> None:
    """A map of the largest ratio of all sizes: families down, results across."""
    results = list(itertools.chain(*RESULTS.values()))
    largest = np.full((len(FAMILIES), len(results)), np.nan)
    for row in rows:
        if row["largest"] is not None:
            place = FAMILIES.index(row["family"]), results.index(row["result"])
            largest[place] = np.nanmax([largest[place], row["largest"]])
    axes.imshow(np.log10(np.maximum(largest, 1e-4)), vmin=-4, vmax=0, cmap="Blues", aspect="auto")
    for (i, j), value in np.ndenumerate(largest):
        text = "no bound" if math.isnan(value) else f"{value:.2g}" if value < 0.095 else f"{value:.2f}"
        axes.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if value > 0.1 else "black")
    axes.set_xticks(range(len(results)), results)
    axes.set_yticks(range(len(FAMILIES)), FAMILIES, fontsize=8)
    axes.grid(visible=False)


def draw(panels, rows: list[dict]) -> None:
    """A column of three panels for each dtype."""
    for column, dtype in zip(panels.T, DTYPES, strict=True):
        own = [row for row in rows if row["dtype"] == dtype]
        draw_sweep(column[0], [row for row in own if row["head_dim"] == HEAD_DIM], seqlen_of)
        draw_sweep(column[1], [row for row in own if seqlen_of(row) == SEQLEN], lambda row: row["head_dim"])
        draw_families(column[2], own)
        column[0].set_title(dtype, loc="left")
        column[0].set_xlabel(f"N, at head_dim {HEAD_DIM}")
        column[1].set_xlabel(f"head_dim, at N = {SEQLEN}")
        column[2].tick_params(labelleft=dtype == DTYPES[0], length=0)
    for axes in panels[:2].flat:
        axes.set_ylim(1e-6, 2)
    for axes in panels[:2, 0]:
        axes.set_ylabel("error / bound")
    panels[0, 0].legend(fontsize=8, title="largest; dotted: median", title_fontsize=8, loc="lower left")


def main() -> None:
    args = record.arguments(
        __doc__,
        quick={"seqlens": [64, 256], "head_dims": [32]},
        seqlens=[64, 256, 1024, 4096, 16384],
        head_dims=[32, 64, 128, 256],
    )
    cases = [
        Case(dtype, many, seqlen, head_dim)
        for dtype in DTYPES
        for many in RESULTS
        for seqlen, head_dim in sizes(args.seqlens, args.head_dims)
    ]
    rows = audit(cases)
    for dtype in DTYPES:
        for result in itertools.chain(*RESULTS.values()):
            own = [r for r in rows if (r["dtype"], r["result"]) == (dtype, result) and r["largest"] is not None]
            worst = max(own, key=lambda row: row["largest"])
            print(
                f"{dtype:>8} {result:>3}: at most {worst['largest']:.3f} of the bound (N = {seqlen_of(worst)}, "
                f"head_dim {worst['head_dim']}, {worst['family']}; mostly {worst['leading_term']})"
            )
    record.write_csv(args.results / "bound_audit.csv", rows)
    with record.figure(
        args.results / "bound_audit.png", 3, len(DTYPES), size=(14.0, 11.0), height_ratios=(1, 1, 1.4)
    ) as panels:
        draw(panels, rows)


if __name__ == "__main__":
    main()
