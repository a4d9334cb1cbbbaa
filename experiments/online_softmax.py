"""Is a softmax that sees its row tile by tile the same as one that knows the maximum beforehand?

A row of scores arrives in tiles of keys. What is kept is the largest score so far m, the sum l of exp(score - m) and
the output acc, the values summed with the same weights; where a tile moves m, all that was summed before is multiplied
by exp(m_old - m) (Milakov and Gimelshein 2018; FlashAttention). The two-pass softmax is the same loop that knows the
maximum beforehand, and so never rescales: here both sum in the same order, so that nothing but rescaling differs.

By hand, in NumPy: with rational numbers, with float32 and with float64. Three orders of scores: normal, any order
equally likely; rising with the key; one key far above the others. Of each there is a second set of inputs whose scores
are whole numbers in base 2, where every factor is a power of two and rescaling rounds nothing.

By the kernel (flash_fwd, in the simulator, sm_80): its lse and out as a fraction of their bounds (cupyflash.bounds),
with and without the threshold that leaves out small rescalings; the groups of 16 rows that it multiplies, counted on
that source line while it runs; and, for whole scores and tensor cores that sum as an A100's do, whether its bits depend
on the number of keys of a tile.

Expected: for exchangeable scores tile t holds the maximum of the first t tiles with probability 1 / t, so that a row is
rescaled H_T - 1 times over T tiles, and H_N - 1 times one key at a time; 1 <= l <= keys seen (Milakov and Gimelshein).
A rescaling errs by a few units in the last place (its argument's rounding, the exponential, the product).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from tqdm import tqdm

import kernels_cu
from cupyflash import Numerics, attention, bounds, ptxsim, reference
from cupyflash._config import flash_fwd_tile
from cupyflash.demo.online_softmax import scaled_scores
from experiments import record
from experiments.experiment import Experiment, Outcome, Row

ARCH, HEAD_DIM, NUM_QUERIES, GROUP = "sm_80", 64, 256, 16
DISTRIBUTIONS = ("normal", "rising", "peaked")
RISE = 20.0  # by how much the expected score rises from the first key to the last
PEAK, PEAK_PLACE = 30.0, 0.6  # score of the one dominating key, and where it is
WHOLE_DIMS, WHOLE_RISE, WHOLE_PEAK = 8, 6, 7  # 2 * 8 + 7 < 24: float16 holds every weight exactly
THRESHOLD = 8  # powers of 2
RESCALING = (
    "softmax.row_sum[m][half] *= alpha[m][half];"  # of flash_fwd.cu: for a group of 16 rows, two warp instructions
)
ULPS_SUM, ULPS_LSE, ULPS_MEDIAN = 16, 2, 2  # expected at most


def inputs(distribution: str, seqlen: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q (256, 64), k and v (seqlen, 64) float16, whose scaled scores are standard normal plus what the name says."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((NUM_QUERIES, HEAD_DIM))
    k, v = rng.standard_normal((2, seqlen, HEAD_DIM))
    # One dimension is set aside: there q is sqrt(head_dim), so that k is what it adds to the score.
    q[:, 0] = math.sqrt(HEAD_DIM)
    k[:, 0] = added(distribution, seqlen, RISE, PEAK)
    return tuple(x.astype(np.float16) for x in (q, k, v))


def whole_inputs(distribution: str, seqlen: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same with scores q . k that are whole numbers between -8 and 15."""
    rng = np.random.default_rng(2)
    q, k = np.zeros((NUM_QUERIES, HEAD_DIM)), np.zeros((seqlen, HEAD_DIM))
    q[:, :WHOLE_DIMS] = rng.integers(-1, 2, (NUM_QUERIES, WHOLE_DIMS))
    k[:, :WHOLE_DIMS] = rng.integers(-1, 2, (seqlen, WHOLE_DIMS))
    q[:, -1], k[:, -1] = 1, np.floor(added(distribution, seqlen, WHOLE_RISE, WHOLE_PEAK))
    return tuple(x.astype(np.float16) for x in (q, k, rng.standard_normal((seqlen, HEAD_DIM))))


def added(distribution: str, seqlen: int, rise: float, peak: float) -> np.ndarray:
    """What the distribution adds to the score of each key."""
    score = rise * np.arange(seqlen) / seqlen if distribution == "rising" else np.zeros(seqlen)
    if distribution == "peaked":
        score[int(PEAK_PLACE * seqlen)] = peak
    return score


@dataclass(frozen=True)
class Step:
    """State of rows (...) after one tile."""

    row_max: np.ndarray  # m
    rescale: np.ndarray  # exp(m_old - m): the factor for all that was summed before this tile
    row_sum: np.ndarray  # l
    acc: np.ndarray  # (..., Dv)

    @property
    def out(self) -> np.ndarray:
        """The output, were this the last tile."""
        return self.acc / self.row_sum[..., None]

    @property
    def lse(self) -> np.ndarray:
        return self.row_max + np.log(self.row_sum)


def online(scores, values, block_n: int, exp: Callable = np.exp, known_max=-math.inf) -> list[Step]:
    """The states of rows of scores (..., S) with values (S, Dv); two passes where ``known_max`` is their maximum."""
    row_max = np.full(scores.shape[:-1], known_max, scores.dtype)
    row_sum = np.zeros(scores.shape[:-1], scores.dtype)
    acc = np.zeros((*scores.shape[:-1], values.shape[-1]), scores.dtype)
    history = []
    for first in range(0, scores.shape[-1], block_n):
        tile = scores[..., first : first + block_n]
        new_max = np.maximum(row_max, tile.max(axis=-1))
        rescale = exp(row_max - new_max)
        weights = exp(tile - new_max[..., None])
        row_sum = row_sum * rescale + weights.sum(axis=-1)
        acc = acc * rescale[..., None] + weights @ values[first : first + block_n]
        row_max = new_max
        history.append(Step(row_max, rescale, row_sum, acc))
    return history


def both(scores, values, block_n: int, exp: Callable = np.exp) -> tuple[Step, Step]:
    """The last states of the online and of the two-pass softmax."""
    return online(scores, values, block_n, exp)[-1], online(scores, values, block_n, exp, scores.max(axis=-1))[-1]


exact_exp2 = np.frompyfunc(lambda x: Fraction(0) if x == -math.inf else Fraction(2) ** int(x), 1, 1)


def equal_exactly(scores: np.ndarray, values: np.ndarray, block_n: int) -> bool:
    """Whether sums of whole scores in base 2 are the same rational numbers either way."""
    as_fractions = np.frompyfunc(Fraction, 1, 1)
    first, second = both(as_fractions(scores), as_fractions(values.astype(float)), block_n, exact_exp2)
    return bool(first.row_sum == second.row_sum and (first.acc == second.acc).all())


def equal_bits(scores: np.ndarray, values: np.ndarray, block_n: int) -> bool:
    """The same in float32, bit for bit."""
    first, second = both(scores, values, block_n, np.exp2)
    return bool((first.row_sum == second.row_sum).all() and (first.acc == second.acc).all())


def ulps(scores: np.ndarray, values: np.ndarray, block_n: int) -> dict[str, np.ndarray]:
    """By how many units in the last place both softmaxes differ; those of out are units of sum_j P_j |v_j|."""
    first, second = both(scores, values, block_n)
    magnitude = online(scores, np.abs(values), block_n)[-1].out
    return {
        "sum": np.abs(first.row_sum - second.row_sum) / np.spacing(second.row_sum),
        "lse": np.abs(first.lse - second.lse) / np.spacing(np.abs(second.lse)),
        "out": np.abs(first.out - second.out) / np.spacing(magnitude),
    }


def in_numpy(distribution: str, seqlen: int, block_n: int) -> Row:
    """How far rescaling moves the results, in every arithmetic."""
    q, k, v = inputs(distribution, seqlen)
    row: Row = {}
    for dtype in np.float32, np.float64:
        scores, values = scaled_scores(q, k).astype(dtype), v.astype(dtype)
        for what, differences in ulps(scores, values, block_n).items():
            row[f"{dtype.__name__}_{what}_ulps"] = differences.max()
            row[f"{dtype.__name__}_{what}_ulps_median"] = float(np.median(differences))
    scores, values = scaled_scores(q, k), v.astype(np.float32)
    exact = online(scores.astype(float), values.astype(float), seqlen)[-1].row_sum
    for method, step in zip(("online", "two_pass"), both(scores, values, block_n), strict=True):
        row[f"{method}_sum_rms_error"] = float(np.sqrt(np.mean((step.row_sum / exact - 1) ** 2)))

    q, k, v = whole_inputs(distribution, seqlen)
    scores, values = q.astype(np.float32) @ k.astype(np.float32).T, v.astype(np.float32)
    row["whole_rational_equal"] = equal_exactly(scores[:1], values[:, :2], block_n)
    row["whole_float32_equal"] = equal_bits(scores, values, block_n)
    return row


def groups_multiplied(profile) -> int:
    """Groups of 16 rows whose sums the kernel multiplied, over all tiles."""
    (line,) = (
        number for number, text in enumerate(kernels_cu.source("flash_fwd.cu").splitlines(), 1) if RESCALING in text
    )
    (kernel,) = profile.kernels
    (counted,) = (found for found in kernel.lines if found.file.endswith("flash_fwd.cu") and found.line == line)
    return counted.warp_instructions // 2


def by_kernel(distribution: str, seqlen: int, tiles: list[int]) -> Row:
    """Errors against bounds, groups that are rescaled, and whether the tile's size changes a bit."""
    q, k, v = inputs(distribution, seqlen)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True)
    row: Row = {}
    for name, numerics in ("kernel", None), (f"threshold_{THRESHOLD}", Numerics(rescale_threshold=THRESHOLD)):
        with ptxsim.settings(arch=ARCH), ptxsim.profile() as profile:
            out, lse = attention(q, k, v, return_lse=True, numerics=numerics)
        bound, lse_bound = bounds.attention(q, k, v, return_lse=True, numerics=numerics)
        row[f"{name}_out_error_over_bound"] = (np.abs(out - exact) / bound).max()
        row[f"{name}_lse_error_over_bound"] = (np.abs(lse - exact_lse) / lse_bound).max()
        row[f"{name}_groups"] = groups_multiplied(profile)
        row[f"{name}_lse"] = lse[0]

    row["kernel_tiles"] = " ".join(map(str, tiles))
    row["whole_kernel_equal"] = equal_for_tiles(whole_inputs(distribution, seqlen), math.log(2), tiles)
    row["kernel_equal"] = equal_for_tiles((q, k, v), None, tiles)
    return row


def equal_for_tiles(arrays, softmax_scale: float | None, tiles: list[int]) -> bool:
    """Whether out and lse of the kernel have the same bits for every number of keys of a tile."""
    options = {"softmax_scale": softmax_scale, "return_lse": True}
    with ptxsim.settings(arch=ARCH, mma="ampere"):
        results = [attention(*arrays, **options, numerics=Numerics(tile=(128, keys))) for keys in tiles]
    return len({(out.tobytes(), lse.tobytes()) for out, lse in results}) == 1


def moves(scores: np.ndarray, threshold: float) -> np.ndarray:
    """(column, row) bool: where a row is rescaled, since its maximum has grown by more than the threshold.

    The first column always counts: there is nothing before it.
    """
    relative_to, moved = np.full(len(scores), -np.inf, scores.dtype), []
    for column in scores.T:
        moved.append(column - relative_to > threshold)
        relative_to = np.where(moved[-1], column, relative_to)
    return np.array(moved)


def measure_one(distribution: str, seqlen: int, tiles: list[int]) -> list[Row]:
    """A row per tile: the state of query 0, and how many rows and groups of 16 rows are rescaled."""
    q, k, v = inputs(distribution, seqlen)
    block_n = flash_fwd_tile(HEAD_DIM, HEAD_DIM, ARCH).block_n
    scores = scaled_scores(q, k)
    history = online(scores, v.astype(np.float32), block_n)
    of_tiles = np.stack([scores[:, n : n + block_n].max(axis=1) for n in range(0, seqlen, block_n)], axis=1)
    moved, with_threshold = (moves(of_tiles, threshold) for threshold in (0, THRESHOLD * math.log(2)))
    groups, groups_with_threshold = (of.reshape(len(history), -1, GROUP).any(axis=-1) for of in (moved, with_threshold))
    summary = {
        "rescales_per_row": moved[1:].sum(axis=0).mean(),
        "rescales_per_row_key_by_key": moves(scores, 0)[1:].sum(axis=0).mean(),
        f"rescales_per_row_threshold_{THRESHOLD}": with_threshold[1:].sum(axis=0).mean(),
        "kernel_groups_in_numpy": groups.sum(),
        f"threshold_{THRESHOLD}_groups_in_numpy": groups_with_threshold.sum(),
        **in_numpy(distribution, seqlen, block_n),
        **by_kernel(distribution, seqlen, tiles),
    }
    return [
        {
            "distribution": distribution,
            "keys_seen": min((tile + 1) * block_n, seqlen),
            "row_max": step.row_max[0],
            "rescale": step.rescale[0],
            "row_sum": step.row_sum[0],
            "acc": step.acc[0, 0],
            "out_so_far": step.out[0, 0],
            "lse_so_far": step.lse[0],
            "least_row_sum": step.row_sum.min(),
            "largest_row_sum": step.row_sum.max(),
            "rows_rescaled": moved[tile].mean() if tile else 0.0,
            "groups_rescaled": groups[tile].mean() if tile else 0.0,
            **summary,
        }
        for tile, step in enumerate(history)
    ]


def table(rows: list[Row]) -> list[str]:
    """One row's softmax, step by step."""
    lines = [
        f"query 0, {rows[0]['distribution']} scores; acc and acc / l: the first of {HEAD_DIM} columns",
        "    keys seen         m   exp(m_old - m)            l         acc     acc / l     m + ln l",
    ]
    for row in rows:
        lines.append(
            f"    {row['keys_seen']:9,} {row['row_max']:9.4f} {row['rescale']:16.6f} {row['row_sum']:12.5f} "
            f"{row['acc']:11.5f} {row['out_so_far']:11.6f} {row['lse_so_far']:12.6f}"
        )
    return [*lines, f"    lse from the kernel{rows[0]['kernel_lse']:70.6f}"]


def measure(seqlen: int, tiles: list[int]) -> list[Row]:
    """A row per distribution and tile."""
    rows = [measure_one(name, seqlen, tiles) for name in tqdm(DISTRIBUTIONS, unit="distribution", smoothing=0)]
    for of_one in rows:
        print("\n".join(table(of_one)))
    return list(itertools.chain(*rows))


def of_distributions(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each."""
    return {name: [row for row in rows if row["distribution"] == name] for name in DISTRIBUTIONS}


def draw_one(panels, rows: list[Row]) -> None:
    """From above: m and m + ln l; l; the output; the factor of this row, and how many rows have one."""
    first, keys = rows[0], [row["keys_seen"] for row in rows]
    maximum, row_sum, output, factor = panels

    def line(axes, column: str, style: str, colour: str, label: str) -> None:
        axes.plot(keys, [row[column] for row in rows], style, color=colour, markersize=4, label=label)

    line(maximum, "lse_so_far", "o-", record.OURS, "m + ln l")
    line(maximum, "row_max", "s-", record.STANDARD, "m")
    maximum.axhline(first["kernel_lse"], color="black", linewidth=0.9, linestyle="--", label="lse of the kernel")
    line(row_sum, "row_sum", "o-", record.OURS, "l")
    row_sum.set_ylim(bottom=0)
    row_sum.lines[0].set_clip_on(False)  # values close to 0
    line(output, "out_so_far", "o-", record.OURS, "acc / l")
    output.axhline(rows[-1]["out_so_far"], color="black", linewidth=0.9, linestyle="--", label="at the end")
    width = 0.7 * keys[0]
    factor.bar(keys, [row["groups_rescaled"] for row in rows], width, color="#d6d6d6", label="groups of 16 rescaled")
    factor.bar(keys, [row["rows_rescaled"] for row in rows], 0.5 * width, color=record.OURS, label="rows rescaled")
    style = {"color": record.STANDARD, "markersize": 4.5, "clip_on": False, "zorder": 3}
    factor.plot(keys, [row["rescale"] for row in rows], "D", label="factor of query 0", **style)
    if first["distribution"] == "normal":
        factor.plot(keys[1:], [1 / (t + 1) for t in range(1, len(keys))], "k:", linewidth=1.2, label="1 / t")
    factor.set_ylim(0, 1.06)
    factor.set_xlabel("keys seen")
    maximum.set_title(f"{first['distribution']}: {first['rescales_per_row']:.2f} rescalings per row", fontsize=11)


def draw(figure, rows: list[Row]) -> None:
    """A column per distribution."""
    panels = figure.subplots(4, len(DISTRIBUTIONS), sharex=True)
    for column, of_one in zip(panels.T, of_distributions(rows).values(), strict=True):
        draw_one(column, of_one)
    names = ("score (query 0)", "sum l", "output, column 0", "factor, or share")
    for row, name in zip(panels, names, strict=True):
        row[0].set_ylabel(name)
        handles, labels = row[0].get_legend_handles_labels()  # the first column has all of them
        row[-1].legend(handles, labels, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Both softmaxes, then how often is rescaled, then the kernel."""
    tables = of_distributions(rows)
    firsts = {name: of_one[0] for name, of_one in tables.items()}
    if len(rows) == len(tables):  # one tile rescales nothing, and is two passes
        return _kernel(firsts, rows)
    return [*_same(firsts), *_rescalings(tables), *_kernel(firsts, rows)]


def _same(firsts: dict[str, Row]) -> list[Outcome]:
    def everywhere(column: str) -> bool:
        return all(row[column] for row in firsts.values())

    def largest(column: str) -> float:
        return max(row[column] for row in firsts.values())

    def equal(column: str) -> str:
        return f"equal for {sum(row[column] for row in firsts.values())} of {len(firsts)} kinds of scores"

    found = [
        Outcome(
            "online against two-pass, rational numbers, whole scores in base 2",
            "equal (predicted)",
            equal("whole_rational_equal"),
            everywhere("whole_rational_equal"),
        ),
        Outcome(
            "the same in float32",
            "0 ulp: factors are powers of two (predicted)",
            equal("whole_float32_equal"),
            everywhere("whole_float32_equal"),
        ),
    ]
    for dtype in "float32", "float64":
        sums, lse, out = (largest(f"{dtype}_{what}_ulps") for what in ("sum", "lse", "out"))
        median = max(largest(f"{dtype}_{what}_ulps_median") for what in ("sum", "lse", "out"))
        found.append(
            Outcome(
                f"online against two-pass, {dtype}, any scores",
                f"l and out within {ULPS_SUM} ulp, lse within {ULPS_LSE}, medians within {ULPS_MEDIAN} (predicted)",
                f"l {sums:.0f}, out {out:.1f}, lse {lse:.0f}, largest median {median:.2f}",
                max(sums, out) <= ULPS_SUM and lse <= ULPS_LSE and median <= ULPS_MEDIAN,
            )
        )
    ratios = [row["online_sum_rms_error"] / row["two_pass_sum_rms_error"] for row in firsts.values()]
    found.append(
        Outcome(
            "error of l against float64, online over two-pass, root mean square, float32",
            "0.5 to 2: rescaling costs no accuracy (predicted)",
            " ".join(f"{name} {ratio:.2f}" for name, ratio in zip(firsts, ratios, strict=True)),
            all(0.5 <= ratio <= 2 for ratio in ratios),
        )
    )
    return found


def _rescalings(tables: dict[str, list[Row]]) -> list[Outcome]:
    normal, rising, peaked = (tables[name] for name in DISTRIBUTIONS)
    num_tiles, seqlen = len(normal), normal[-1]["keys_seen"]
    found = []
    for what, column, length in (
        (f"{num_tiles} tiles", "rescales_per_row", num_tiles),
        ("one key at a time", "rescales_per_row_key_by_key", seqlen),
    ):
        chances = 1 / np.arange(2, length + 1)
        expected, tolerance = chances.sum(), 4 * math.sqrt((chances * (1 - chances)).sum() / NUM_QUERIES)
        rate = normal[0][column]
        found.append(
            Outcome(
                f"rescalings per row, normal scores, {what}",
                f"H_n - 1 = {expected:.2f}, within {tolerance:.2f}, 4 standard deviations (computed)",
                f"{rate:.2f}",
                abs(rate - expected) <= tolerance,
            )
        )
    rate, with_threshold = rising[0]["rescales_per_row"], rising[0][f"rescales_per_row_threshold_{THRESHOLD}"]
    threshold = THRESHOLD * math.log(2)
    least, most = RISE / (threshold + RISE / num_tiles) - 1, RISE / threshold  # the last tile may overshoot by its rise
    place = int(PEAK_PLACE * seqlen)
    after = [row["rows_rescaled"] for before, row in itertools.pairwise(peaked) if before["keys_seen"] > place]
    if after:
        what = f"rows rescaled in the {len(after)} tiles after the one dominating key"
        found.append(Outcome(what, "none (predicted)", f"{sum(after):g}", not any(after)))
    return [
        *found,
        Outcome(
            "rescalings per row, rising scores",
            f"at least 0.8 of the {num_tiles - 1} possible (predicted)",
            f"{rate:.2f}",
            rate >= 0.8 * (num_tiles - 1),
        ),
        Outcome(
            f"the same where the maximum must grow by 2^{THRESHOLD} first, as FlashAttention-4 has it",
            f"{least:.1f} to {most:.1f}: the rise over the threshold (computed)",
            f"{with_threshold:.2f}",
            least <= with_threshold <= most,
        ),
        Outcome(
            "l after every tile, all rows",
            "at least 1, at most the keys seen (published: Milakov and Gimelshein 2018)",
            f"at least {min(row['least_row_sum'] for of_one in tables.values() for row in of_one):.4f}, at most "
            f"{max(row['largest_row_sum'] / row['keys_seen'] for of_one in tables.values() for row in of_one):.2f} "
            "times the keys seen",
            all(
                1 <= row["least_row_sum"] and row["largest_row_sum"] <= row["keys_seen"]
                for row in itertools.chain(*tables.values())
            ),
        ),
    ]


def _kernel(firsts: dict[str, Row], rows: list[Row]) -> list[Outcome]:
    variants = "kernel", f"threshold_{THRESHOLD}"
    same_bits = sum(row["whole_kernel_equal"] for row in firsts.values())
    others = [name for name in ("normal", "rising") if firsts[name]["kernel_equal"]]
    counted = [
        (row[f"{variant}_groups"], row[f"{variant}_groups_in_numpy"]) for variant in variants for row in firsts.values()
    ]
    errors = {
        what: max(row[f"{variant}_{what}_error_over_bound"] for row in firsts.values() for variant in variants)
        for what in ("out", "lse")
    }
    of_tiles = [
        Outcome(
            f"the kernel with key tiles of {rows[0]['kernel_tiles']}, whole scores",
            "the same bits of out and lse (predicted)",
            f"the same for {same_bits} of {len(firsts)} kinds of scores",
            same_bits == len(firsts),
        ),
        Outcome(
            "the same, normal and rising scores",
            "bits that differ: roundings are elsewhere (predicted)",
            f"the same for {' and '.join(others)}" if others else "bits that differ",
            not others,
        ),
    ]
    return [
        Outcome(
            "groups of 16 rows that the kernel multiplies, counted, without and with the threshold",
            f"as many as NumPy finds: {' '.join(str(numpy) for _, numpy in counted)} (computed)",
            " ".join(str(kernel) for kernel, _ in counted),
            all(kernel == numpy for kernel, numpy in counted),
        ),
        *(of_tiles if " " in str(rows[0]["kernel_tiles"]) else []),  # one size of tile is no comparison
        Outcome(
            "error of the kernel over its bound, with and without the threshold",
            "below 1 (computed: the bound)",
            f"out {errors['out']:.2f}, lse {errors['lse']:.2f}",
            max(errors.values()) < 1,
        ),
    ]


EXPERIMENT = Experiment(
    claim="A softmax over tiles, by a running maximum and sum (Milakov and Gimelshein 2018), is the two-pass softmax: "
    "exactly in exact arithmetic, to units in the last place in floating point; scores in random order rescale a row "
    "H_T - 1 times over T tiles",
    caption="One row's softmax tile by tile: running maximum, sum and output for scores in random order, rising ones, "
    "and one key above all; below, its rescaling factors and how many of 256 rows have one.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seqlen": 2048, "tiles": [16, 32, 64, 128]},
    quick={"seqlen": 384, "tiles": [32, 128]},
    figure_size=(11.5, 9.0),
)
