"""What does a tensor core's way of adding do to attention?

A tensor core does not round as IEEE arithmetic does. It aligns a few products and the sum so far at the largest
exponent among them, cuts off what lies below a fixed number of bits, and cuts the result off to float32. Cutting off
always goes toward zero, so sums of numbers of one sign come out too small, the more the longer they are.

The float16 kernel runs in the simulator on the models of V100, A100 and H100 (`ptxsim.settings(mma=...)`; Ada has
A100's, B200 has H100's), and on `exact`: one rounding to nearest per instruction. The model is chosen apart from the
architecture: the kernel is compiled for sm_80, and its m16n8k16 instructions are four sums on a V100's model, two on
an A100's, one on an H100's. A V100 has no such instruction; its numbers say what its arithmetic would do. No GPU
computes anything here: what is measured is the kernel on models, whose rules are those of the sources.

- Dot products. With one key, the row's maximum is q k^T as the tensor cores sum it. A bias of minus the correctly
  rounded product leaves the difference of the two, which float32 holds exactly. head_dim ends at 256: longer sums are
  the model alone (`tensor_models.multiply_add`), which is compared with the kernel, bit for bit, where both are there.
- Attention. Normal inputs: how many elements of out and lse have other bits than with `exact`, and the largest error
  in units of its bound.
- Drift. Queries of 0 weigh N keys alike, V ~ U(0.5, 1.5), so that the numerator is a plain sum of N values in the
  accumulator. A few keys at the end, whose values are -N in sum, take the mean away, since out is float16 and would
  hide what is lost; the error is relative to the sum without them, and the mean of 64 columns, whose standard error is
  below 1e-6. Tiles of 32 queries and 128 keys.
- FP8, which no kernel here has: NumPy. Products are cut off 13 bits below the largest, and so is their sum, over 32
  products at a time (H100's wgmma) or 16 (Ada).

Drift and the bias of positive dot products are compared with a formula of what is cut off on average
(`computed_loss`): it knows the published number of products of a step and of bits kept, but neither the kernel nor the
model's code. The figures that are called emulated come from another NumPy program of the same rules; agreeing with them
checks this program, not a GPU.

Sources: Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021); Xie et al., "MMA-Sim"
(2025); DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.2, for sums of FP8 in parts of 128.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from cupyflash import Numerics, attention, bounds, ptxsim, reference
from cupyflash.ptxsim.tensor_models import multiply_add
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

U32 = 2.0**-24  # half an ulp of float32 at 1, and of float16 below
U16 = 2.0**-11
GPUS = {"volta": "V100", "ampere": "A100", "hopper": "H100"}
ARCH = "sm_80"
MMA_K = 16  # of the instruction that the kernels use on sm_80
KERNEL_LENGTHS = (16, 64, 256)  # of dot products: head_dim
MODEL_LENGTH = 1024  # too long for a head_dim
QUERIES, BATCHES = 128, 4  # of dot products
DRIFT_TILE = (32, 128)
DRIFT_COLUMNS = 64
LARGEST_LAST = 32768  # of a value that takes the mean away
FP8_BITS = 13
FP8_WIDTH = {"hopper": 32, "ada": 16}
FP8_LENGTH, FP8_COUNT = 4096, 300
FP8_PARTS = (64, 128, FP8_LENGTH)  # products after which a part of the sum is added in float32

STEPS = {"volta": (4, 0), "ampere": (8, 1), "hopper": (16, 2)}  # products of a step, and bits kept below float32's
LSE_NOTE = (
    "scores that are cut off lower lse by 1e-7 on average, a sixth of the steps between its values at 7 to 8, 6.6e-7 "
    "(an ulp of its base-2 value, times ln 2): about one in six moves"
)
DEEPSEEK_NOTE = (
    "the report gives neither the distribution of its matrices nor what the error is relative to; of positive products "
    "the mean alone is 6.6 % off, so that 2 % lies between the two"
)


def row(part: str, model: str, sums: str, n: int, computed: str, quantity: str, value: float) -> Row:
    """One number. ``sums``: how the accumulator is used; ``computed``: by the kernel, or NumPy."""
    return {
        "part": part,
        "model": model,
        "sums": sums,
        "n": n,
        "computed": computed,
        "quantity": quantity,
        "value": float(value),
    }


# Dot products


def factors(data: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """QUERIES vectors and one to multiply them with, BATCHES times: float16."""
    rng = np.random.default_rng(n)
    draw = rng.standard_normal if data == "normal" else rng.random
    return draw((BATCHES, QUERIES, n)).astype(np.float16), draw((BATCHES, 1, n)).astype(np.float16)


def by_kernel(model: str, a: np.ndarray, b: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    """a b^T as the kernel's tensor cores sum it; ``nearest`` is the correctly rounded product."""
    with ptxsim.settings(mma=model, arch=ARCH):
        _, row_max = attention(a, b, b[..., :1], softmax_scale=1.0, bias=-nearest[..., None], return_max=True)
    return nearest + row_max


def by_model(model: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same by the model alone."""
    c = np.zeros((*a.shape[:2], 1), np.float32)
    lengths = [MMA_K] * (a.shape[-1] // MMA_K)
    return multiply_add(model, "f16", a.astype(float), b.astype(float).swapaxes(1, 2), c, lengths)[..., 0]


def one_after_another(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """In float32, each sum rounded to nearest; products of float16 numbers are exact."""
    total = np.zeros(a.shape[:2], np.float32)
    for left, right in zip(np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0), strict=True):
        total = total + left.astype(np.float32) * right.astype(np.float32)
    return total


def dot_products(models: list[str], n: int) -> list[Row]:
    """How often sums of n products have other bits, and the mean relative error of positive ones."""
    rows = []
    for data in "normal", "positive":
        a, b = factors(data, n)
        exact = np.einsum("bin,bjn->bi", a.astype(float), b.astype(float))
        nearest, in_order = exact.astype(np.float32), one_after_another(a, b)
        for model in models:
            found, computed = by_model(model, a, b), "model"
            numbers = {}
            if n in KERNEL_LENGTHS:
                modelled, found, computed = found, by_kernel(model, a, b, nearest), "kernel"
                numbers["share equal to the model"] = np.mean(found == modelled)
            numbers["share unlike exact"] = np.mean(found != nearest)
            numbers["share unlike float32 in order"] = np.mean(found != in_order)
            if data == "positive":
                numbers["mean relative error / 2^-24"] = np.mean((found - exact) / exact) / U32
            rows += [row("dot products", model, data, n, computed, name, value) for name, value in numbers.items()]
    return rows


# Attention


def on_normal_inputs(models: list[str], n: int) -> list[Row]:
    """Elements of out and lse with other bits than on exact sums, and the largest error in units of its bound."""
    q, k, v = np.random.default_rng(n).standard_normal((3, 4, n, 64)).astype(np.float16)
    q = q[:, :QUERIES]
    exact, bound = reference.attention(q, k, v), bounds.attention(q, k, v)
    results = {}
    for model in models:
        with ptxsim.settings(mma=model, arch=ARCH):
            results[model] = attention(q, k, v, return_lse=True)
    rows = []
    for model, (out, lse) in results.items():
        numbers = {
            "share of out unlike exact": np.mean(out != results["exact"][0]),
            "share of lse unlike exact": np.mean(lse != results["exact"][1]),
            "largest error / bound": (abs(out - exact) / bound).max(),
        }
        rows += [row("attention", model, "one-level", n, "kernel", name, value) for name, value in numbers.items()]
    return rows


# Drift


def drift(model: str, accumulate: str, n: int) -> list[Row]:
    """Relative error of the sum of n values that attention with equal weights makes."""
    values = np.random.default_rng(n).uniform(0.5, 1.5, (n, DRIFT_COLUMNS)).astype(np.float16)
    last = np.full((max(1, n // LARGEST_LAST), DRIFT_COLUMNS), -min(n, LARGEST_LAST), np.float16)
    v = np.concatenate([values, last])
    with ptxsim.settings(mma=model, arch=ARCH):
        out = attention(
            np.zeros((1, 16), np.float16),
            np.zeros((len(v), 16), np.float16),
            v,
            numerics=Numerics(tile=DRIFT_TILE, accumulate=accumulate),
        )
    values = values.astype(float)
    total = values.sum(axis=0)
    error = (out[0].astype(float) * len(v) - (total + last.astype(float).sum(axis=0))) / total
    numbers = {"relative error": error.mean(), "standard error": error.std() / np.sqrt(error.size)}
    return [row("drift", model, accumulate, n, "kernel", name, value) for name, value in numbers.items()]


# FP8


def exponents(x: np.ndarray) -> np.ndarray:
    """Of the power of two of each number; of a zero, less than of any other."""
    return np.where(x == 0, -1000, np.frexp(x)[1] - 1)


def fp8_sums(a: np.ndarray, b: np.ndarray, width: int) -> np.ndarray:
    """Sums of products over the last axis, ``width`` at a time, with FP8_BITS bits."""
    products, exponent_sums = a * b, exponents(a) + exponents(b)
    total = np.zeros(a.shape[:-1])
    for start in range(0, a.shape[-1], width):
        at = slice(start, start + width)
        grid = np.ldexp(1.0, np.maximum(exponent_sums[..., at].max(axis=-1), exponents(total)) - FP8_BITS)
        total = (np.trunc(products[..., at] / grid[..., None]).sum(axis=-1) + np.trunc(total / grid)) * grid
        grid = np.ldexp(1.0, exponents(total) - FP8_BITS)
        total = np.trunc(total / grid) * grid
    return total


def in_parts(a: np.ndarray, b: np.ndarray, width: int, part: int) -> np.ndarray:
    """The same of ``part`` products at a time, which float32 adds one after another."""
    sums = fp8_sums(*(x.reshape(len(x), -1, part) for x in (a, b)), width).astype(np.float32)
    total = np.zeros(len(a), np.float32)
    for column in sums.T:
        total = total + column
    return total


def fp8(model: str, part: int) -> list[Row]:
    """Errors of FP8_COUNT sums of FP8_LENGTH products."""
    rows = []
    for data in "normal", "positive":
        rng = np.random.default_rng(FP8_LENGTH)
        draw = rng.standard_normal if data == "normal" else rng.random
        a, b = draw((2, FP8_COUNT, FP8_LENGTH)).astype(ml_dtypes.float8_e4m3fn).astype(float)
        exact = (a * b).sum(axis=1)  # exact: fewer than 53 bits
        error = in_parts(a, b, FP8_WIDTH[model], part) - exact
        if data == "normal":
            numbers = {
                "largest |error| / sum |ab|": np.max(abs(error) / abs(a * b).sum(axis=1)),
                "largest |error| / RMS result": np.max(abs(error)) / np.sqrt(np.mean(exact**2)),
            }
        else:
            numbers = {"mean relative error": np.mean(error / exact)}
        rows += [row(f"fp8, {data}", model, str(part), FP8_LENGTH, "NumPy", name, x) for name, x in numbers.items()]
    return rows


def measure_case(case: tuple[Callable, tuple]) -> list[Row]:
    """The rows of one function."""
    function, arguments = case
    return function(*arguments)


def measure(models: list[str], seqlens: list[int], attention_seqlen: int) -> list[Row]:
    """All parts: drift over ``seqlens``, dot products, attention, FP8."""
    accumulations = [(model, "one-level") for model in ("exact", *models)] + [(model, "two-level") for model in models]
    models = ["exact", *models]
    cases = [(drift, (*how, n)) for how in accumulations for n in seqlens]
    cases += [(dot_products, (models, n)) for n in (*KERNEL_LENGTHS, MODEL_LENGTH)]
    cases += [(on_normal_inputs, (models, attention_seqlen))]
    cases += [(fp8, (model, part)) for model in FP8_WIDTH for part in FP8_PARTS]
    rows = measure_all(measure_case, cases, work=lambda case: case[1][-1] if case[0] is drift else 0)
    return [row for of_case in rows for row in of_case]


def numbers(rows: list[Row], part: str, quantity: str, **choice) -> dict[tuple, float]:
    """(model, sums, n) -> value of one quantity."""
    chosen = {"part": part, "quantity": quantity, **choice}
    return {
        (r["model"], str(r["sums"]), r["n"]): r["value"]
        for r in rows
        if all(r[name] == chosen[name] for name in chosen)
    }


# Figure

STYLES = {  # model -> label, colour, marker
    "volta": ("V100 model", record.STANDARD, "s"),
    "ampere": ("A100 model", record.OURS, "o"),
    "hopper": ("H100 model", "#c79a2b", "^"),
    "exact": ("rounded to nearest", "black", "x"),
}


def draw_drift(axes, rows: list[Row]) -> None:
    """|relative error| against N."""
    found = numbers(rows, "drift", "relative error")
    lengths = sorted({n for _, _, n in found})
    ways = {sums: sorted({m for m, s, _ in found if s == sums}) for sums in ("one-level", "two-level")}
    for model in sorted(ways["one-level"], key=list(STYLES).index):
        label, colour, marker = STYLES[model]
        errors = [abs(found[model, "one-level", n]) for n in lengths]
        axes.plot(lengths, errors, marker=marker, color=colour, label=label)
    for model in ways["two-level"]:  # they coincide: one label
        errors = [abs(found[model, "two-level", n]) for n in lengths]
        label = "any model in two levels" if model == ways["two-level"][0] else None
        axes.plot(lengths, errors, "D:", color=record.EXTRA, markerfacecolor="white", label=label)
    axes.axhline(U16, color=record.EXTRA, linewidth=1)
    axes.annotate("half an ulp of float16", (lengths[0], U16), xytext=(0, 4), textcoords="offset points", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_ylim(-2e-9, 1e-2)
    axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("keys N")
    axes.set_ylabel("|relative error| of the sum of P V")
    axes.set_title("Kernel on models; equal weights, V ~ U(0.5, 1.5)", fontsize=11)


def draw_bias(axes, rows: list[Row]) -> None:
    """Mean error of positive dot products against their length."""
    found = numbers(rows, "dot products", "mean relative error / 2^-24")
    for model in dict.fromkeys(model for model, _, _ in found):
        _, colour, marker = STYLES[model]
        points = sorted((n, -value) for (of, _, n), value in found.items() if of == model)
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour)
    axes.axvline(max(KERNEL_LENGTHS) * 2, color=record.EXTRA, linewidth=1)
    axes.text(max(KERNEL_LENGTHS) * 1.9, axes.get_ylim()[1], "kernel\non models", ha="right", va="top", fontsize=9)
    axes.text(max(KERNEL_LENGTHS) * 2.1, axes.get_ylim()[1], "model\nalone", va="top", fontsize=9)
    axes.set_xscale("log", base=2)
    lengths = (*KERNEL_LENGTHS, MODEL_LENGTH)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("products in the sum")
    axes.set_ylabel("mean of (exact - sum) / exact, in 2$^{-24}$")
    axes.set_title("Positive data, Q K$^T$ in float16", fontsize=11)


def draw_fp8(axes, rows: list[Row]) -> None:
    """Mean error of positive FP8 sums, in parts of each size."""
    found = numbers(rows, "fp8, positive", "mean relative error")
    styles = {
        "hopper": ("H100 model, 32 at a time", "#c79a2b", ""),
        "ada": ("Ada model, 16 at a time", record.OURS, "//"),
    }
    for index, (model, (label, colour, hatch)) in enumerate(styles.items()):
        heights = [-found[model, str(part), FP8_LENGTH] for part in FP8_PARTS]
        positions = np.arange(len(FP8_PARTS)) + 0.4 * (index - 0.5)
        bars = axes.bar(positions, heights, 0.36, color=colour, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(bars, [f"{height:.1g}" for height in heights], padding=2, fontsize=9)
    axes.set_yscale("log")
    axes.set_ylim(1e-5, 1)
    axes.set_xticks(range(len(FP8_PARTS)), [*map(str, FP8_PARTS[:-1]), "all 4096"])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("products per sum that is added in float32")
    axes.set_ylabel("mean of (exact - sum) / exact")
    axes.set_title("FP8, positive data: 13 bits, in NumPy", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def draw(figure, rows: list[Row]) -> None:
    """Drift, bias, FP8."""
    panels = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    for axes, draw_panel in zip(panels, (draw_drift, draw_bias, draw_fp8), strict=True):
        draw_panel(axes, rows)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)


# Outcomes


def near(value: float, expected: float, tolerance: float) -> bool:
    """Within a share of what is expected."""
    return abs(value - expected) <= tolerance * abs(expected)


def shown(value: float) -> str:
    """With two digits."""
    return f"{value:.1e}" if value else "0"


def computed_loss(model: str, n: int, mean: float, spacings: tuple[float, ...]) -> float:
    """Mean relative error of a sum of n products of the given mean, which are multiples of each of the spacings
    equally often: half of what the grid of each step cannot hold is lost of each product, and of the step's sum."""
    width, extra_bits = STEPS[model]
    ends = mean * width * np.arange(1, n // width + 1)  # sums after each step
    ulp = np.ldexp(1.0, exponents(ends) - 23)
    grid = ulp * 2.0**-extra_bits
    of_products = width * np.mean([np.maximum(grid - spacing, 0) / 2 for spacing in spacings], axis=0)
    of_sum = np.maximum(ulp - np.maximum(grid, min(spacings)), 0) / 2
    return -float((of_products + of_sum).sum()) / (mean * n)


def drift_outcomes(rows: list[Row]) -> list[Outcome]:
    """Of each model's sums, and of what does not drift."""
    found = numbers(rows, "drift", "relative error")
    result = []
    for model, gpu in GPUS.items():
        values = {n: x for (of, sums, n), x in found.items() if (of, sums) == (model, "one-level")}
        if values:
            # float16's spacing is 2^-11 in (0.5, 1) and 2^-10 in (1, 1.5).
            expected = {n: computed_loss(model, n, 1.0, (2.0**-11, 2.0**-10)) for n in values}
            result.append(
                Outcome(
                    f"kernel on the {gpu} model: relative error of the sum, N = {', '.join(map(str, values))}",
                    f"{', '.join(map(shown, expected.values()))} (computed: what is cut off on average), within 10 % "
                    "or 1e-6",
                    ", ".join(map(shown, values.values())),
                    all(abs(x - expected[n]) <= max(0.1 * abs(expected[n]), 1e-6) for n, x in values.items()),
                )
            )
    for what, limit, chosen in (
        ("rounded to nearest by every instruction", 3e-6, [x for (m, _, _), x in found.items() if m == "exact"]),
        ("two-level, all models", 5e-7, [x for (_, sums, _), x in found.items() if sums == "two-level"]),
    ):
        largest = max(map(abs, chosen))
        result.append(
            Outcome(
                f"{what}, all N: largest |relative error|",
                f"no drift (predicted): below {limit:g}",
                shown(largest),
                largest < limit,
            )
        )
    return result


def dot_product_outcomes(rows: list[Row]) -> list[Outcome]:
    """How often bits differ, and the bias of positive sums."""
    equal = numbers(rows, "dot products", "share equal to the model")
    unlike = numbers(rows, "dot products", "share unlike float32 in order", sums="normal", n=MMA_K)
    shares = {model: share for (model, _, _), share in unlike.items() if model in GPUS}
    bias = numbers(rows, "dot products", "mean relative error / 2^-24", n=MODEL_LENGTH)
    biases = {model: value for (model, _, _), value in bias.items()}
    rounded = biases.pop("exact")
    expected = {model: computed_loss(model, MODEL_LENGTH, 0.25, (0.0,)) / U32 for model in biases}
    models = ", ".join(GPUS[model] for model in shares)
    return [
        Outcome(
            "dot products of the kernel that are those of the model alone, bit for bit",
            "all (a check of the simulator, not of a GPU)",
            f"{100 * min(equal.values()):g} %",
            min(equal.values()) == 1,
        ),
        Outcome(
            f"kernel, dot products of {MMA_K}, normal: unlike a float32 sum in order (models of {models})",
            "42 to 63 % (computed from results of GPUs that MATLAB-tensor-core publishes, on other inputs), "
            "5 percentage points more either way",
            ", ".join(f"{100 * share:.0f} %" for share in shares.values()),
            all(0.37 <= share <= 0.68 for share in shares.values()),
        ),
        Outcome(
            f"{MODEL_LENGTH} positive products, models of {models} alone: mean relative error in 2^-24",
            f"{', '.join(f'{x:.0f}' for x in expected.values())} (computed: what is cut off on average), within 15 %",
            ", ".join(f"{x:.0f}" for x in biases.values()),
            all(near(x, expected[model], 0.15) for model, x in biases.items()),
        ),
        Outcome(
            f"{MODEL_LENGTH} positive products, rounded to nearest: mean relative error in 2^-24",
            "no bias (predicted): less than 3 off 0",
            f"{rounded:.1f}",
            abs(rounded) < 3,
        ),
    ]


def attention_outcomes(rows: list[Row]) -> list[Outcome]:
    """What reaches the results on normal inputs."""
    ratios = numbers(rows, "attention", "largest error / bound")
    shares = {}
    for name in "out", "lse":
        found = numbers(rows, "attention", f"share of {name} unlike exact")
        shares[name] = {GPUS[model]: share for (model, _, _), share in found.items() if model in GPUS}
    of_gpus = {name: ", ".join(f"{100 * share:.1f} %" for share in of.values()) for name, of in shares.items()}
    models = ", ".join(shares["out"])
    return [
        Outcome(
            f"attention, normal inputs: elements of out unlike those of exact sums (models of {models})",
            "below 5 % (predicted: rounding to float16 hides most)",
            of_gpus["out"],
            max(shares["out"].values()) < 0.05,
        ),
        Outcome(
            f"attention, normal inputs: elements of lse, float32, unlike those of exact sums (models of {models})",
            "above 20 % (predicted)",
            of_gpus["lse"],
            min(shares["lse"].values()) > 0.2,
            LSE_NOTE,
        ),
        Outcome(
            "largest error in units of its bound, all models",
            "below 1 (computed)",
            f"{max(ratios.values()):.2f}",
            max(ratios.values()) < 1,
        ),
    ]


def fp8_outcomes(rows: list[Row]) -> list[Outcome]:
    """Of Hopper's sums, for which there are figures."""
    positive = numbers(rows, "fp8, positive", "mean relative error", model="hopper")
    normal = numbers(rows, "fp8, normal", "largest |error| / sum |ab|", model="hopper")
    typical = numbers(rows, "fp8, normal", "largest |error| / RMS result", model="hopper", sums=FP8_LENGTH)
    (typical,) = typical.values()
    result = [
        Outcome(
            f"FP8 in NumPy, {FP8_LENGTH} normal products, one sum: largest error in units of a typical result",
            "nearly 2 % (published: DeepSeek-V3, on an H800), within a factor 2",
            f"{100 * typical:.1f} %",
            0.01 <= typical <= 0.04,
            DEEPSEEK_NOTE,
        ),
        Outcome(
            "the same",
            "1 % (emulated), within a factor 2",
            f"{100 * typical:.1f} %",
            0.005 <= typical <= 0.02,
        ),
    ]
    for part, of_normal, of_positive in ((FP8_LENGTH, 2.7e-4, -6.6e-2), (128, 1.1e-5, -5.0e-4), (64, 6e-6, -1.4e-4)):
        key = "hopper", str(part), FP8_LENGTH
        result += [
            Outcome(
                f"FP8 in NumPy, parts of {part}, normal: largest |error| / sum |ab|",
                f"{shown(of_normal)} (emulated), within a factor 2",
                shown(normal[key]),
                0.5 <= normal[key] / of_normal <= 2,
            ),
            Outcome(
                f"FP8 in NumPy, parts of {part}, positive: mean relative error",
                f"{shown(of_positive)} (emulated), within 15 %",
                shown(positive[key]),
                near(positive[key], of_positive, 0.15),
            ),
        ]
    return result


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Each part against what is known of it."""
    return [*drift_outcomes(rows), *dot_product_outcomes(rows), *attention_outcomes(rows), *fp8_outcomes(rows)]


EXPERIMENT = Experiment(
    claim="Tensor cores cut sums off instead of rounding them (Fasi et al. 2021): on models of them long sums of one "
    "sign drift toward zero, at 131,072 keys past half an ulp of float16 on those of a V100 and an A100; sums in two "
    "levels do not",
    caption="Sums of one sign on models of V100, A100 and H100, no GPU: the kernel's drift with the number of keys, "
    "unless each tile has a sum of its own; with FP8's 13 bits, in NumPy, 4096 products lose 7 %.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={
        "models": ["volta", "ampere", "hopper"],
        "seqlens": [4096, 16384, 65536, 131072],
        "attention_seqlen": 1024,
    },
    quick={"models": ["ampere"], "seqlens": [16384], "attention_seqlen": 256},
    figure_size=(14.0, 4.8),
)
