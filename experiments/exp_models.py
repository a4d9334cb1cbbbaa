"""How accurate must the exponential be?

Three parts. (1) 2^x of random x in [0, 1): ``ex2.approx`` correctly rounded, and off by up to the 2 ulp that the PTX
ISA allows (``ptxsim.settings(ulp_noise=2)``), and the polynomials of FlashAttention-4 (2026, section on the emulation
of exp2), before and after rounding to 16 bits. Degrees 3 and 5 are the kernels' own function, from ``numerics.cuh``;
degrees 2 and 4, which no kernel has, are the same steps in NumPy, and so are 3 and 5 once more, to compare the bits.
(2) Attention by the kernels, with each exponential: error / bound of out and lse, where the bound is the plain kernel's
for all of them, so that what another exponential does shows; and error / own bound, the one that
``Numerics(exp=...)`` gets. Degrees 2 and 4 are a tiled online softmax in NumPy (float32, weights rounded to the inputs'
dtype), which is also run with degree 3, to compare it with the kernel. Scores are standard normal, peaked (8 times as
large, as in the tests' family of that name), or rise by 26 from the first key to the last.
(3) ``rescale_threshold=8``: a row's sums are rescaled only once its maximum has grown by a factor of 2^8 (also
FlashAttention-4). Rescales follow from the scores, those of a row and those of 16 rows of a warp, which the kernel
rescales together; the latter are compared with what the profiler counts on the line that multiplies the row sums.

Tensor cores sum as ``mma="ampere"``. head_dim 64, a head for each kind of scores; the kernels' own tiles, but smaller
ones where keys are fewer than 16 of them. The first rescale of each row, of nothing, is not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

import kernels_cu
from cupyflash import Numerics, attention, bounds, ptxsim, reference
from experiments import record
from experiments.emulation import Tiled, as_kernel, fused
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

ARCH, MMA = "sm_80", "ampere"
HEAD_DIM = 64
# What the kernels take for this head_dim.
QUERY_TILE = {"float16": 128, "bfloat16": 128, "float32": 64}
KEY_TILE = {"float16": 128, "bfloat16": 128, "float32": 64}
GROUP = 16  # rows that a warp rescales together
RISE = 26.0  # natural units: 37.5 powers of 2
SCORES = ("normal", "peaked", "rising")
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
POLYNOMIALS = {  # coefficients from x^1 on; that of x^0 is 1
    2: (0.6657850742340087890625, 0.330107033252716064453125),
    3: (0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625),
    4: (0.693042695522308349609375, 0.2412912547588348388671875, 5.2225358784198760986328125e-2,
        1.3434938155114650726318359375e-2),
    5: (0.693151414394378662109375, 0.24016360938549041748046875, 5.5802188813686370849609375e-2,
        9.01452265679836273193359375e-3, 1.86810153536498546600341796875e-3),
}  # fmt: skip
# In the order of the figures; the kernels have all but degrees 2 and 4.
ROUNDED, NOISY = "ex2, correctly rounded", "ex2, off by up to 2 ulp"
MODELS = (ROUNDED, NOISY, "accurate", "degree 5", "degree 4", "degree 3", "degree 2")
KERNELS = {
    ROUNDED: ("ex2.approx", 0),
    NOISY: ("ex2.approx", 2),
    "accurate": ("accurate", 0),
    "degree 5": ("poly5", 0),
    "degree 3": ("poly3", 0),
}
COLUMNS = (
    "part", "model", "computed_by", "dtype", "scores", "threshold",
    "error", "error_bfloat16", "error_float16", "mean_error", "differ_bfloat16", "differ_float16", "same_bits",
    "out_of_plain_bound", "lse_of_plain_bound", "out_of_own_bound", "lse_of_own_bound", "rmse",
    "rescales_per_row", "groups_rescaled", "groups_counted", "largest_sum",
)  # fmt: skip


def polynomial(x: np.ndarray, degree: int) -> np.ndarray:
    """2^x in float32, as ``exp2_polynomial`` of the kernels; below 2^-126 it is 0."""
    whole = np.floor(x)
    fraction = x - whole
    *rest, power = POLYNOMIALS[degree]
    power = np.full_like(x, power)
    for coefficient in (*reversed(rest), 1.0):
        power = fused(power, fraction, coefficient)
    return np.where(x < -126, np.float32(0), np.ldexp(power, np.maximum(whole, -126).astype(np.int32)))


def in_kernel(x: np.ndarray, exp: str, ulp_noise: int) -> np.ndarray:
    """The kernels' function for powers of 2, of ``exp`` as Numerics has it."""
    choice = {"accurate": "EXP_ACCURATE 1", "ex2.approx": "EXP_DEGREE 0"}.get(exp, f"EXP_DEGREE {exp[-1]}")
    headers = (kernels_cu.source(f"{name}.cuh") for name in ("common", "ptx", "element", "numerics"))
    lines = [line for header in headers for line in header.splitlines() if not line.startswith("#include")]
    source = "\n".join([
        f"#define ELEMENT float\n#define {choice}", *lines,
        'extern "C" __global__ void powers_of_2(const float* x, float* y, int n) {',
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;",
        "    if (i < n) y[i] = exponential(x[i]);",
        "}",
    ])  # fmt: skip
    y = ptxsim.empty(x.shape, x.dtype)
    with ptxsim.settings(arch=ARCH, ulp_noise=ulp_noise, chunk_lanes=1 << 16):
        kernel = ptxsim.RawModule(code=source).get_function("powers_of_2")
        kernel((-(-x.size // 256),), (256,), (x, y, np.int32(x.size)))
    return y


def evaluate(model: str, x: np.ndarray, kernels: Iterable[str] = tuple(KERNELS)) -> tuple[np.ndarray, str]:
    """2^x by the model, and what computed it: its kernel where there is one."""
    if model in kernels:
        return in_kernel(x, *KERNELS[model]), "kernel"
    return polynomial(x, int(model[-1])), "NumPy"


def power_row(case: tuple[str, int, list[str]]) -> Row:
    """Part 1: errors of 2^x."""
    model, samples, kernels = case
    x = np.random.default_rng(0).random(samples, np.float32)
    y, computed_by = evaluate(model, x, kernels)
    exact = np.exp2(x.astype(np.float64))

    def largest(found):
        return float(np.abs(found.astype(np.float64) / exact - 1).max())

    row = {"part": "2^x", "model": model, "computed_by": computed_by, "error": largest(y)}
    row["mean_error"] = float((y / exact - 1).mean())
    for name in "bfloat16", "float16":
        rounded, best = y.astype(DTYPES[name]), exact.astype(np.float32).astype(DTYPES[name])
        row |= {f"error_{name}": largest(rounded), f"differ_{name}": float((rounded != best).mean())}
    if model.startswith("degree") and computed_by == "kernel":
        row["same_bits"] = float((polynomial(x, int(model[-1])) == y).mean())
    return row


def inputs(scores: str, queries: int, keys: int, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """q, k and v; scaled scores are standard normal, but for what the name says."""
    rng = np.random.default_rng(SCORES.index(scores))
    q, (k, v) = rng.standard_normal((queries, HEAD_DIM)), rng.standard_normal((2, keys, HEAD_DIM))
    if scores == "peaked":
        q = 8 * q
    elif scores == "rising":  # one dimension is set aside: q is sqrt(head_dim) there, so that k is what it adds
        q[:, 0], k[:, 0] = math.sqrt(HEAD_DIM), RISE * np.arange(keys) / keys
    return tuple(x.astype(dtype) for x in (q, k, v))


@dataclass(frozen=True)
class Case:
    """Attention to all families of scores."""

    model: str
    computed_by: str
    dtype: str
    threshold: int
    queries: int
    keys: int

    @property
    def numerics(self) -> Numerics:
        """Of a kernel."""
        return Numerics(exp=KERNELS[self.model][0], rescale_threshold=self.threshold)

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys: the kernel's own, but less for few of them, to save time and to have 16 tiles of keys."""
        queries = QUERY_TILE[self.dtype]
        return queries if self.queries >= queries else 32, min(KEY_TILE[self.dtype], self.keys // 16)

    @property
    def counts_rescales(self) -> bool:
        """bfloat16 stands for both: float32's kernel does not ask whether there is anything to rescale."""
        return (self.model, self.computed_by, self.dtype) == (ROUNDED, "kernel", "bfloat16")

    @property
    def work(self) -> int:
        return (self.computed_by == "kernel") * (8 if self.dtype == "float32" else 1)


def rescaled_groups(profile, block_m: int, queries: int) -> float:
    """Rescales of 16 rows of a warp, for each 16 queries, but the first: twice a lane multiplies row sums on a line."""
    (kernel,) = profile.kernels
    lines = (line for line in kernel.lines if "row_sum[m][half] *= alpha" in line.text)
    # Whole query tiles: rows beyond the last query have scores of 0, which are rescaled to once.
    first = len(SCORES) * -(-queries // block_m) * block_m // GROUP
    return (sum(line.opcodes["mul.f32"] for line in lines) / 2 - first) / (len(SCORES) * queries / GROUP)


def by_kernel(case: Case, q, k, v) -> tuple[np.ndarray, np.ndarray, Row]:
    """out, lse and what is counted."""
    numerics = replace(case.numerics, tile=case.tile)
    with ptxsim.settings(arch=ARCH, mma=MMA, ulp_noise=KERNELS[case.model][1]):
        if not case.counts_rescales:
            return *attention(q, k, v, numerics=numerics, return_lse=True), {}
        with ptxsim.profile() as profile:
            out, lse = attention(q, k, v, numerics=numerics, return_lse=True)
    return out, lse, {"groups_counted": rescaled_groups(profile, case.tile[0], case.queries)}


def by_numpy(case: Case, per_family: list) -> tuple[np.ndarray, np.ndarray]:
    """out, rounded, and lse."""
    exp2 = functools.partial(polynomial, degree=int(case.model[-1]))
    found = [as_kernel(*arrays, tile=case.tile[1], exp2=exp2) for arrays in per_family]
    return np.stack([x.out for x in found]).astype(DTYPES[case.dtype]), np.stack([x.lse for x in found])


def attention_rows(case: Case) -> list[Row]:
    """Parts 2 and 3: errors of out and lse, and rescales."""
    per_family = [inputs(scores, case.queries, case.keys, DTYPES[case.dtype]) for scores in SCORES]
    q, k, v = (np.stack(arrays) for arrays in zip(*per_family, strict=True))
    bound, counted = {"plain": bounds.attention(q, k, v, return_lse=True)}, {}
    if case.computed_by == "kernel":
        out, lse, counted = by_kernel(case, q, k, v)
        bound["own"] = bounds.attention(q, k, v, return_lse=True, numerics=case.numerics)
    else:
        out, lse = by_numpy(case, per_family)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True)
    errors = {"out": np.abs(out - exact), "lse": np.abs(lse - exact_lse)}

    rows = []
    for index, scores in enumerate(SCORES):
        row = {name: getattr(case, name) for name in ("model", "computed_by", "dtype", "threshold")}
        row |= {"part": "attention", "scores": scores, "rmse": float(np.sqrt(np.square(errors["out"][index]).mean()))}
        for whose, both in bound.items():
            for result, of_result in zip(errors, both, strict=True):
                row[f"{result}_of_{whose}_bound"] = float((errors[result][index] / of_result[index]).max())
        if case.counts_rescales:
            found = as_kernel(*per_family[index], tile=case.tile[1], threshold=case.threshold)
            row |= counted | rescales(found)
        rows.append(row)
    return rows


def rescales(of: Tiled) -> Row:
    """Of a row, and of the warp's groups of 16 rows, each of which is rescaled where one of its rows is."""
    groups = of.rescaled.reshape(len(of.rescaled), -1, GROUP).any(axis=-1)
    return {
        "rescales_per_row": float(of.rescaled.sum(axis=0).mean()),
        "groups_rescaled": float(groups.sum(axis=0).mean()),
        "largest_sum": float(of.row_sum.max()),
    }


def measure(samples: int, queries: int, keys: int, kernels: list[str], dtypes: list[str]) -> list[Row]:
    """A row for each model of 2^x, then for each model, dtype and family of scores of attention.

    Of kernels ex2, correctly rounded, and degree 3 are always there, of dtypes bfloat16: others are compared with them.
    """
    kernels = [model for model in KERNELS if model in {ROUNDED, "degree 3", *kernels}]
    dtypes = [dtype for dtype in DTYPES if dtype in {"bfloat16", *dtypes}]
    cases = [
        Case(model, computed_by, dtype, threshold, queries, keys)
        for dtype in dtypes
        for model, computed_by, threshold in (
            *((model, "kernel", 0) for model in kernels),
            *((f"degree {degree}", "NumPy", 0) for degree in (4, 3, 2)),
            (ROUNDED, "kernel", 8),
        )
    ]
    of_powers = [model for model in MODELS if model in kernels or model.startswith("degree")]
    rows = measure_all(power_row, [(model, samples, kernels) for model in of_powers], unit="model")
    for of_case in measure_all(attention_rows, cases, work=lambda case: case.work):
        rows += of_case
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def powers(rows: list[Row]) -> dict[str, Row]:
    """Part 1 by model."""
    return {row["model"]: row for row in rows if row["part"] == "2^x"}


def runs(rows: list[Row], model: str, *, computed_by: str | None = None, threshold: int = 0) -> dict[tuple, Row]:
    """Attention with one exponential, by dtype and scores; computed by what computes it, or by that which is said."""
    by = computed_by or ("kernel" if model in KERNELS else "NumPy")
    chosen = ("attention", model, by, threshold)
    keys = ("part", "model", "computed_by", "threshold")
    return {(row["dtype"], row["scores"]): row for row in rows if tuple(row[key] for key in keys) == chosen}


LABELS = [model.replace("accurate", "$2^x$ by double precision") for model in MODELS]  # of the axes


def dtypes_of(attention: dict[tuple, Row]) -> list[str]:
    """Of such rows, in the order of the figures."""
    return [dtype for dtype in DTYPES if (dtype, SCORES[0]) in attention]


MARKERS = dict(zip(DTYPES, ("s", "o", "^"), strict=True))
DTYPE_COLOURS = dict(zip(DTYPES, record.COLOURS, strict=False))
RESCALE_COLOURS = record.COLOURS[3], record.EXTRA


def draw_powers(axes, rows: dict[str, Row]) -> None:
    """Largest error of 2^x, a line for each model."""
    models = [model for model in MODELS if model in rows]
    for column, dtype, label in (
        ("error", "float32", "float32"),
        ("error_float16", "float16", "rounded to float16"),
        ("error_bfloat16", "bfloat16", "rounded to bfloat16"),
    ):
        values = [rows[model][column] for model in models]
        axes.plot(
            values, [MODELS.index(model) for model in models], MARKERS[dtype], color=DTYPE_COLOURS[dtype], label=label
        )
    axes.set_xscale("log")
    axes.set_xlabel("largest relative error of $2^x$, x in [0, 1)")
    axes.set_title("The exponential")


def draw_differing(axes, rows: dict[str, Row]) -> None:
    """Share of 16-bit results that another rounding has made."""
    places = [at for at, model in enumerate(MODELS) if model in rows]
    for dtype, shift in ("float16", -0.19), ("bfloat16", 0.19):
        values = [100 * rows[MODELS[at]][f"differ_{dtype}"] for at in places]
        axes.barh([at + shift for at in places], values, 0.36, color=DTYPE_COLOURS[dtype], label=dtype)
        for at, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.2g}" if value else "0", (max(value, 1e-4), at + shift), (3, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(1e-4, 1e3)
    axes.set_xlabel("16-bit results that differ (%)")
    axes.set_title("$2^x$ against its correct rounding")


def draw_attention(axes, rows: list[Row], result: str) -> None:
    """Largest error of attention, of all families of scores, over the plain kernel's bound."""
    models = [model for model in MODELS if runs(rows, model)]
    for dtype in dtypes_of(runs(rows, ROUNDED)):
        values = [
            max(row[f"{result}_of_plain_bound"] for (of, _), row in runs(rows, model).items() if of == dtype)
            for model in models
        ]
        axes.plot(
            values, [MODELS.index(model) for model in models], MARKERS[dtype], color=DTYPE_COLOURS[dtype], label=dtype
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel(f"error of {result} / bound of the plain kernel")
    axes.set_title(f"Attention: {result}")


def draw_rescales(axes, rows: list[Row]) -> None:
    """Rescales with either threshold, bfloat16."""
    bars = [
        ("rescales_per_row", 0, "a row", RESCALE_COLOURS[0], ""),
        ("rescales_per_row", 8, "a row, threshold 8", RESCALE_COLOURS[0], "///"),
        ("groups_rescaled", 0, "16 rows of a warp", RESCALE_COLOURS[1], ""),
        ("groups_rescaled", 8, "16 rows, threshold 8", RESCALE_COLOURS[1], "///"),
    ]
    for number, (column, threshold, label, colour, hatch) in enumerate(bars):
        of = runs(rows, ROUNDED, threshold=threshold)
        values = [of["bfloat16", scores][column] for scores in SCORES]
        places = [at + 0.2 * (number - 1.5) for at in range(len(SCORES))]
        axes.bar(places, values, 0.19, color="white" if hatch else colour, edgecolor=colour, hatch=hatch, label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(place, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(SCORES)), SCORES)
    axes.set_ylabel("rescales")
    axes.set_ylim(0, 23)
    axes.legend(fontsize=8, ncols=2, loc="upper left", frameon=False)
    axes.set_title("Rescales, bfloat16")


def rmse_changes(rows: list[Row]) -> dict[tuple[str, str], float]:
    """RMSE of out with threshold 8 over that with 0, less 1, by dtype and scores."""
    before, after = runs(rows, ROUNDED), runs(rows, ROUNDED, threshold=8)
    return {key: after[key]["rmse"] / row["rmse"] - 1 for key, row in before.items()}


def draw_rmse(axes, rows: list[Row]) -> None:
    """What the threshold costs."""
    changes = rmse_changes(rows)
    dtypes = dtypes_of(changes)
    for number, dtype in enumerate(dtypes):
        values = [100 * changes[dtype, scores] for scores in SCORES]
        places = [at + 0.27 * (number - (len(dtypes) - 1) / 2) for at in range(len(SCORES))]
        axes.bar(places, values, 0.25, color=DTYPE_COLOURS[dtype], label=dtype)
        for place, value in zip(places, values, strict=True):
            axes.text(place, max(value, 0), f"{round(value, 1) + 0.0:.1f}", ha="center", va="bottom", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(SCORES)), SCORES)
    axes.set_ylabel("change of the RMSE of out (%)")
    axes.set_title("What a threshold of 8 costs")


def draw(figure, rows: list[Row]) -> None:
    """Above the exponential and rescales, below attention."""
    panels = figure.subplots(2, 3)
    draw_powers(panels[0, 0], powers(rows))
    draw_differing(panels[0, 1], powers(rows))
    draw_rescales(panels[0, 2], rows)
    draw_attention(panels[1, 0], rows, "out")
    draw_attention(panels[1, 1], rows, "lse")
    draw_rmse(panels[1, 2], rows)
    for axes in panels[:, :2].flat:
        axes.set_ylim(len(MODELS) - 0.4, -0.6)
        axes.set_yticks(range(len(MODELS)), LABELS)
        axes.tick_params(axis="y", labelleft=axes in panels[:, 0])
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, title="all panels but Rescales")


# Largest errors by FlashAttention-4, Table 2: of float32, and rounded to bfloat16.
PUBLISHED = {"degree 3": (8.77e-5, 3.90e-3), "degree 5": (1.44e-7, 3.89e-3)}
# In percent of 4 million numbers: shares that another rounding has made, bfloat16 and float16; emulated.
DIFFERING = {"degree 2": (23.9, 89), "degree 3": (0.99, 7.96), "degree 4": (0.03, 0.27), "degree 5": (0.001, 0.01)}


def power_outcomes(of: dict[str, Row]) -> list[Outcome]:
    """Part 1."""
    found = []
    for model, expected in PUBLISHED.items():
        errors = of[model]["error"], of[model]["error_bfloat16"]
        found.append(
            Outcome(
                f"largest error of 2^x, {model}: float32, after rounding to bfloat16",
                "{:.3g}, {:.3g} (published: FlashAttention-4, Table 2)".format(*expected),
                "{:.3g}, {:.3g}".format(*errors),
                all(abs(x / y - 1) < 0.02 for x, y in zip(errors, expected, strict=True)),
            )
        )
    if NOISY in of:
        rounded, noisy = of[ROUNDED]["error"], of[NOISY]["error"]
        found.append(
            Outcome(
                "largest error of ex2: correctly rounded, and off by up to 2 ulp",
                "at most 6.0e-8 and 3.0e-7 (computed); a GPU's 1.41e-7 (published: FlashAttention-4) lies between",
                f"{rounded:.3g}, {noisy:.3g}",
                rounded <= 6.0e-8 and 1.41e-7 < noisy <= 3.0e-7,
            )
        )
    shares = {m: tuple(100 * of[m][f"differ_{dtype}"] for dtype in ("bfloat16", "float16")) for m in DIFFERING}
    # The rarest are few in a million: a factor of 2 there, 10 % of the others.
    near = [
        abs(math.log(max(x, 1e-9) / y)) < math.log(2 if y < 0.1 else 1.1)
        for model in DIFFERING
        for x, y in zip(shares[model], DIFFERING[model], strict=True)
    ]
    same = {model: row["same_bits"] for model, row in of.items() if row["same_bits"] is not None}
    by_kernels = " and ".join(sorted(model.removeprefix("degree ") for model in same))
    return [
        *found,
        Outcome(
            "16-bit results that differ from the correct rounding, bfloat16 / float16, degrees 2, 3, 4, 5",
            ", ".join(f"{x:g} / {y:g} %" for x, y in DIFFERING.values()) + " (emulated)",
            ", ".join(f"{x:.2g} / {y:.2g} %" for x, y in shares.values()),
            all(near),
            "the rarest are a few in a million, of which too few are met among fewer numbers",
        ),
        Outcome(
            "mean error of degree 3",
            "+8e-6 (emulated)",
            f"{of['degree 3']['mean_error']:+.2g}",
            abs(of["degree 3"]["mean_error"] / 8e-6 - 1) < 0.1,
        ),
        Outcome(
            f"degree {by_kernels} by the kernels' function and in NumPy",
            "the same bits (predicted)",
            "the same bits" if min(same.values()) == 1 else f"the same in {min(same.values()):.4%} of the numbers",
            min(same.values()) == 1,
        ),
    ]


def grown(rows: list[Row], result: str, dtype: str) -> dict[str, float]:
    """By how much degree 3 makes error / plain bound larger, by scores."""
    column = f"{result}_of_plain_bound"
    plain, other = runs(rows, ROUNDED), runs(rows, "degree 3")
    return {scores: other[dtype, scores][column] / plain[dtype, scores][column] for scores in SCORES}


def attention_outcomes(rows: list[Row]) -> list[Outcome]:
    """Part 2."""
    dtypes = dtypes_of(runs(rows, ROUNDED))
    of_out, of_lse = ({dtype: grown(rows, result, dtype) for dtype in dtypes} for result in ("out", "lse"))
    seen = [*of_out.get("float32", {}).values(), *(x for of_dtype in of_lse.values() for x in of_dtype.values())]
    second = [row["out_of_plain_bound"] for key, row in runs(rows, "degree 2").items() if key == ("float16", "peaked")]
    within = [row[f"{result}_of_own_bound"] for row in rows if row["part"] == "attention" and row["computed_by"] ==
              "kernel" for result in ("out", "lse")]  # fmt: skip
    emulated, real = runs(rows, "degree 3", computed_by="NumPy"), runs(rows, "degree 3")
    apart = max(abs(math.log(emulated[key]["rmse"] / real[key]["rmse"])) for key in real)
    return [
        *(
            Outcome(
                f"degree 3, {dtype}: error / bound of out against the plain kernel's, " + ", ".join(SCORES),
                f"the same within 10 % ({source})",
                ", ".join(f"{x - 1:+.1%}" for x in of_out[dtype].values()),
                all(abs(x - 1) <= 0.1 for x in of_out[dtype].values()),
                note,
            )
            for dtype, source, note in (
                ("bfloat16", "published: FlashAttention-4, bfloat16's rounding hides it", ""),
                (
                    "float16",
                    "emulated: normal 0.22 and peaked 0.52 of the bound, where the plain one has 0.22 and 0.50",
                    "its error, 8.8e-5, is 18 % of the rounding to float16, 4.9e-4: the largest error of a row moves "
                    "by up to that, while the RMSE grows by 1 to 4 %",
                ),
            )
            if dtype in dtypes
        ),
        Outcome(
            "degree 3: error of lse in every dtype" + ", and of out in float32" * ("float32" in dtypes),
            "at least 3 times the plain kernel's (predicted)",
            f"{min(seen):.2g} to {max(seen):.2g} times",
            min(seen) >= 3,
        ),
        *(
            Outcome(
                "degree 2 (NumPy), float16, peaked scores: error / bound of out",
                "beyond 1 (emulated, of 512 keys and with a tighter bound: 2.6)",
                f"{of_bound:.2f}",
                of_bound > 1,
            )
            for of_bound in second
        ),
        Outcome(
            "error / own bound, all kernels, out and lse",
            "at most 1 (computed: the bound)",
            f"at most {max(within):.2f}",
            max(within) <= 1,
        ),
        Outcome(
            "degree 3 by the kernels and in NumPy: RMSE of out",
            "the same within 5 % (predicted)",
            f"within {100 * (math.exp(apart) - 1):.2g} %",
            apart < math.log(1.05),
        ),
    ]


def rescaling_outcomes(rows: list[Row]) -> list[Outcome]:
    """Part 3."""
    before, after = runs(rows, ROUNDED)["bfloat16", "rising"], runs(rows, ROUNDED, threshold=8)["bfloat16", "rising"]
    changes = [x for (dtype, _), x in rmse_changes(rows).items() if dtype != "float32"]
    warps = before["groups_rescaled"], after["groups_rescaled"]
    counted = [row["groups_counted"] for row in (before, after)]
    by_scores = [
        np.mean([row["groups_rescaled"] for (dtype, _), row in of.items() if dtype == "bfloat16"])
        for of in (runs(rows, ROUNDED), runs(rows, ROUNDED, threshold=8))
    ]
    return [
        Outcome(
            "rescales of a row whose scores rise, threshold 0 and 8",
            "15 and 4 within 1 (emulated)",
            f"{before['rescales_per_row']:.1f} and {after['rescales_per_row']:.1f}",
            abs(before["rescales_per_row"] - 15) <= 1 and abs(after["rescales_per_row"] - 4) <= 1,
        ),
        Outcome(
            "rescales of 16 rows in a warp, threshold 0 and 8, same scores",
            "15 and 4 within 1, as of a row (predicted)",
            f"{warps[0]:.1f} and {warps[1]:.1f}",
            abs(warps[0] - 15) <= 1 and abs(warps[1] - 4) <= 1,
            "the rows of a warp pass the threshold at different tiles, and one of them is enough: about a third of the "
            "multiplications is saved, not three quarters",
        ),
        Outcome(
            "the same by the scores and by the profiler, mean of all three",
            "equal (computed)",
            ", ".join(f"{x:.4g} and {y:.4g}" for x, y in zip(by_scores, counted, strict=True)),
            all(abs(x - y) < 0.01 for x, y in zip(by_scores, counted, strict=True)),
        ),
        Outcome(
            "RMSE of out with threshold 8, 16-bit",
            "4 to 21 % more (emulated), within 5 percentage points",
            f"{100 * min(changes):.1f} to {100 * max(changes):.1f} % more",
            -0.01 <= min(changes) and max(changes) <= 0.26,
            "the RMSE is of few rows, and of peaked scores a few weights make it",
        ),
    ]


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Part by part."""
    return [*power_outcomes(powers(rows)), *attention_outcomes(rows), *rescaling_outcomes(rows)]


EXPERIMENT = Experiment(
    claim="A polynomial of degree 3 for 2^x is hidden by the rounding to bfloat16, one of degree 5 is as good as the "
    "instruction, and rescaling only after a growth by 2^8 costs little accuracy (FlashAttention-4)",
    caption="Exponentials of different accuracy by themselves and in attention, and rescaling with a threshold.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"samples": 2**22, "queries": 128, "keys": 2048, "kernels": list(KERNELS), "dtypes": list(DTYPES)},
    quick={"samples": 2**18, "queries": 32, "keys": 1024, "kernels": [ROUNDED, "degree 3"], "dtypes": ["bfloat16"]},
    figure_size=(15.0, 8.2),
)
