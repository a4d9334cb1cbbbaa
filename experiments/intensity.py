"""Is attention limited by memory or by arithmetic, on which card and from which N?

Arithmetic intensity is FLOP over bytes of device memory. A card's ridge point is its peak over its bandwidth: below it
a kernel waits for memory at best, from it on for tensor cores (Williams et al. 2009). The standard method's forward has
4 N^2 d FLOP for 4 N^2 + 4 N d elements, so that its intensity stays below d / 2 however long N is; a tiled kernel reads
and writes 4 N d elements, so that its intensity is N / 2.

FLOP are those of matrix products: of tensor cores for the tiled kernels, of the scalar kernels that compute products
for the standard method (a multiplication by the scale included). Bytes are the distinct sectors of each launch, as with
a perfect cache, and for the tiled kernels also those of every request, as with no cache. Both are counted while the
kernels run in the simulator up to N = COUNTED_TO, the standard method's to N = STANDARD_TO; beyond stand the formulas,
which the counts equal. One head, float16, sm_80. Exponentials are not counted: a B200 needs as long for them as for the
products of a forward at head_dim 128.

Peaks and bandwidths are those of ``cupyflash.ptxsim.devices``, dense float16 products accumulated in float32; Hopper's
and Blackwell's data sheets have tensor cores at a lower clock than the highest (0.924 and 0.934 of it, the factors that
XLA takes).
"""

from __future__ import annotations

import cupyflash
from cupyflash import naive, ptxsim
from cupyflash.demo.traffic import of_kernels
from cupyflash.ptxsim.devices import DEVICES, Device
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.io_traffic import BACKWARD, DIRECTIONS, FORWARD, SLOWER, formulas, profiled, tiles
from experiments.parallel import measure_all

HEAD_DIMS = (64, 128)
STANDARD, TILED, NO_CACHE = METHODS = "standard method", "tiled", "tiled, no cache"
BYTES_FORMULA = {STANDARD: "standard_formula", TILED: "ours_least_formula", NO_CACHE: "ours_requested_formula"}
LIBRARIES = {STANDARD: naive, TILED: cupyflash}
# Of the standard method; its backward begins with S and P again.
PRODUCT_KERNELS = ("scores", "weighted_values", "dweights", "dquery", "dkey", "dvalue")
TENSOR_CLOCK = {"sm_90": 0.924, "sm_100": 0.934}
PUBLISHED_PEAKS = {"A100": 312, "H100": 989.4, "RTX 5090": 209.5, "RTX PRO 6000": 503.8}  # dense TFLOP/s, data sheets
STYLES = {
    STANDARD: (record.STANDARD, "s", "-"),
    TILED: (record.OURS, "o", "-"),
    NO_CACHE: (record.COLOURS[2], "^", "-."),
}
DRAWN_HEAD_DIM = HEAD_DIMS[0]
SHOWN_CARDS = ("RTX 5090", "A100", "H200", "H100", "L40S")
_DIRECTION_STYLES = {FORWARD: {"markersize": 4.5}, BACKWARD: {"markersize": 9, "markerfacecolor": "none"}}
LABEL_OFFSET = {STANDARD: (-10, 8), TILED: (-44, 4), NO_CACHE: (-10, -18)}  # points


def peak_flops(device: Device) -> float:
    """Dense float16 products a second, accumulated in float32."""
    return 2 * device.tensor_f16 * device.sms * device.clock * 1e9 * TENSOR_CLOCK.get(device.arch, 1)


def ridge_point(device: Device) -> float:
    """FLOP per byte from which on arithmetic is the limit."""
    return peak_flops(device) / (device.bandwidth * 1e9)


def product_flops(kernels: list[ptxsim.KernelProfile]) -> int:
    """FLOP of matrix products, by tensor cores or one by one."""
    scalar = sum(sum(kernel.flops.values()) for kernel in kernels if kernel.name in PRODUCT_KERNELS)
    return scalar + sum(kernel.mma_flops for kernel in kernels)


def flops_formula(method: str, direction: str, seqlen: int, head_dim: int) -> int:
    """The same by formula, for lengths that tiles divide."""
    product = 2 * seqlen**2 * head_dim
    if method != STANDARD:
        return (2 if direction == FORWARD else 7) * product  # dq and dkdv both compute S and dP again
    scores = product + seqlen**2
    return scores + product if direction == FORWARD else scores + 4 * product + 2 * seqlen * head_dim


def count(case: tuple[str, str, int, int, bool]) -> list[Row]:
    """FLOP and bytes of the standard method, or of the tiled kernels with and without a cache."""
    library, direction, seqlen, head_dim, counted = case
    kernels = profiled(LIBRARIES[library], direction, seqlen, head_dim) if counted else None
    traffic = kernels and of_kernels(kernels)
    rows = []
    for method in (STANDARD,) if library == STANDARD else (TILED, NO_CACHE):
        flops = flops_formula(method, direction, seqlen, head_dim)
        moved = formulas(direction, seqlen, head_dim)[BYTES_FORMULA[method]]
        intensity = flops / moved
        limited = [device.name for device in DEVICES.values() if intensity >= ridge_point(device)]
        rows.append(
            {
                "method": method,
                "direction": direction,
                "head_dim": head_dim,
                "seqlen": seqlen,
                "flops": kernels and product_flops(kernels),
                "bytes": traffic and (traffic.requested if method == NO_CACHE else traffic.least),
                "flops_formula": flops,
                "bytes_formula": moved,
                "intensity": intensity,
                "compute_bound_on": "; ".join(limited),
            }
        )
    return rows


def measure(seqlens: list[int], counted_to: int, standard_to: int) -> list[Row]:
    """Rows of each method, direction, head_dim and N."""
    cases = [
        (library, direction, seqlen, head_dim, seqlen <= limit)
        for library, limit in ((STANDARD, standard_to), (TILED, counted_to))
        for direction in DIRECTIONS
        for head_dim in HEAD_DIMS
        for seqlen in seqlens
    ]
    found = measure_all(count, cases, work=_work)
    return [row for method in METHODS for rows in found for row in rows if row["method"] == method]


def _work(case: tuple[str, str, int, int, bool]) -> float:
    """Time of a case, roughly."""
    library, direction, seqlen, head_dim, counted = case
    return counted * seqlen**2 * head_dim * (SLOWER if library == STANDARD else 1) * (1 if direction == FORWARD else 3)


def of(rows: list[Row], method: str, direction: str, head_dim: int) -> list[Row]:
    """Rows of one curve."""
    wanted = method, direction, head_dim
    return [row for row in rows if (row["method"], row["direction"], row["head_dim"]) == wanted]


def draw(figure, rows: list[Row]) -> None:
    """Intensity against N with the cards' ridge points; and the rooflines of two cards."""
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    draw_intensity(left, rows)
    draw_rooflines(right, rows)


def draw_intensity(axes, rows: list[Row]) -> None:
    """Markers were counted, of the forward dots and of the backward rings around them; lines are formulas."""
    for method, (colour, marker, line) in STYLES.items():
        for direction, style in _DIRECTION_STYLES.items():
            curve = of(rows, method, direction, DRAWN_HEAD_DIM)
            lengths = [row["seqlen"] for row in curve]
            axes.plot(lengths, [row["intensity"] for row in curve], line, color=colour, linewidth=1.6)
            counted = [row for row in curve if row["flops"] is not None]
            x, y = [row["seqlen"] for row in counted], [row["flops"] / row["bytes"] for row in counted]
            axes.plot(x, y, marker, color=colour, **style)
        place = of(rows, method, FORWARD, DRAWN_HEAD_DIM)[len(lengths) * 5 // 8]
        end = place["seqlen"], place["intensity"]
        axes.annotate(method, end, LABEL_OFFSET[method], textcoords="offset points", color=colour)
    lengths = sorted({row["seqlen"] for row in rows})
    for name in SHOWN_CARDS:
        ridge = ridge_point(DEVICES[name])
        axes.axhline(ridge, color="black", linewidth=0.7, linestyle=(0, (6, 4)), zorder=0)
        axes.annotate(f"{name} {ridge:.0f}", (1.01, ridge), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("sequence length N")
    axes.set_ylabel("FLOP per byte of device memory")
    axes.set_title(f"Intensity, head_dim {DRAWN_HEAD_DIM}; dashed: ridge points")
    axes.annotate("filled: forward\nring: backward", (0.03, 0.88), xycoords="axes fraction", fontsize=10)


def draw_rooflines(axes, rows: list[Row]) -> None:
    """What a card can reach at an intensity, and where the forward of both methods is."""
    for name, line in ("A100", "-"), ("H100", "--"):
        device = DEVICES[name]
        peak, ridge = peak_flops(device) / 1e12, ridge_point(device)
        axes.plot((8, ridge, 4096), (8 * peak / ridge, peak, peak), line, color="black", linewidth=1.2)
        axes.annotate(f"{name} {peak:.0f}", (4096, peak), (0, 4), textcoords="offset points", ha="right")
        for method in STANDARD, TILED:
            colour, marker, _ = STYLES[method]
            points = [row for row in of(rows, method, FORWARD, DRAWN_HEAD_DIM) if row["seqlen"] <= 4096]
            x, y = [row["intensity"] for row in points], [_reached(row, device) for row in points]
            axes.plot(x, y, marker, color=colour, markerfacecolor=colour if line == "-" else "white")
            if name == "A100":
                for row, height in zip(points, y, strict=True):
                    _label_point(axes, method, row, height, colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("FLOP per byte of device memory")
    axes.set_ylabel("TFLOP/s at most")
    axes.set_title(f"Roofline, forward only, head_dim {DRAWN_HEAD_DIM}")
    axes.annotate("filled: A100\nopen: H100", (0.03, 0.88), xycoords="axes fraction", fontsize=10)


def _label_point(axes, method: str, row: Row, height: float, colour: str) -> None:
    """Some of the tiled method's lengths; the standard method's points lie close together."""
    if method == TILED and row["seqlen"] in (128, 512, 2048):
        text = f"N = {row['seqlen']}" if row["seqlen"] > 128 else "tiled, N = 128"
    elif method == STANDARD and row["seqlen"] == 512:
        text = "standard method, any N"
    else:
        return
    place = row["intensity"], height
    axes.annotate(text, place, (9, -12), textcoords="offset points", color=colour, fontsize=10)


def _reached(row: Row, device: Device) -> float:
    return min(peak_flops(device), row["intensity"] * device.bandwidth * 1e9) / 1e12


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Counts against formulas, cards against data sheets, and which side of the ridge points the methods are on."""
    counted = [(row, name) for row in rows for name in ("flops", "bytes") if row[name] is not None]
    equal = sum(row[name] == row[f"{name}_formula"] for row, name in counted)
    peaks = {name: peak_flops(DEVICES[name]) / 1e12 for name in PUBLISHED_PEAKS}
    of_counts = Outcome(
        "FLOP and bytes counted and by formula",
        "equal (computed)",
        f"equal in {equal} of {len(counted)}",
        equal == len(counted),
    )
    return [
        *([of_counts] if counted else []),
        Outcome(
            f"peak TFLOP/s of {', '.join(PUBLISHED_PEAKS)}",
            f"{_joined(PUBLISHED_PEAKS.values())} (published: data sheets) within 2 %",
            _joined(peaks.values()),
            all(abs(peaks[name] / sheet - 1) <= 0.02 for name, sheet in PUBLISHED_PEAKS.items()),
        ),
        *(_standard(rows, head_dim) for head_dim in HEAD_DIMS),
        _tiled(rows),
        _no_cache(rows),
    ]


def _joined(values) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _standard(rows: list[Row], head_dim: int) -> Outcome:
    highest = max(row["intensity"] for row in of(rows, STANDARD, FORWARD, head_dim))
    cards = {row["compute_bound_on"] for way in DIRECTIONS for row in of(rows, STANDARD, way, head_dim)} - {None}
    return Outcome(
        f"standard method, head_dim {head_dim}: forward's intensity, and cards where either direction is compute-bound",
        f"at most d / 2 = {head_dim // 2}, and 1/8 for the scale; none "
        "(computed; published: memory-bound, Dao et al. 2022)",
        f"at most {highest:.1f}; {'; '.join(sorted(cards)) or 'none'}",
        highest <= head_dim / 2 * (1 + 1 / (4 * head_dim)) and not cards,  # multiplications by the scale included
    )


def _tiled(rows: list[Row]) -> Outcome:
    """The first N of the table at which the forward is compute-bound."""
    curve = of(rows, TILED, FORWARD, DRAWN_HEAD_DIM)
    found, expected = {}, {}
    for device in DEVICES.values():
        bound = [row["seqlen"] for row in curve if device.name in (row["compute_bound_on"] or "").split("; ")]
        found[device.name] = min(bound, default=None)
        expected[device.name] = min(
            (row["seqlen"] for row in curve if row["seqlen"] >= 2 * ridge_point(device)), default=None
        )
    return Outcome(
        "tiled, perfect cache, forward: first N of the table that is compute-bound",
        f"N = twice the ridge point: {_cards(expected)} (computed)",
        _cards(found),
        found == expected,
    )


def _cards(lengths: dict[str, int | None]) -> str:
    grouped: dict[int | None, list[str]] = {}
    for name, length in lengths.items():
        grouped.setdefault(length, []).append(name)
    ordered = sorted(grouped.items(), key=lambda item: item[0] or 2**62)
    return "; ".join(f"{length or 'beyond'}: {', '.join(names)}" for length, names in ordered)


def _no_cache(rows: list[Row]) -> Outcome:
    """Its intensity ends at the rows of a tile, however long N is."""
    block_m = tiles(FORWARD, DRAWN_HEAD_DIM)[0]
    curve = of(rows, NO_CACHE, FORWARD, DRAWN_HEAD_DIM)
    seqlen = curve[-1]["seqlen"]
    limit = seqlen / (1 + seqlen / block_m)
    expected = [device.name for device in DEVICES.values() if ridge_point(device) < limit]
    found = (curve[-1]["compute_bound_on"] or "").split("; ")
    return Outcome(
        f"tiled, no cache, forward, N = {seqlen}: intensity, and cards that it is compute-bound on",
        f"N / (1 + N / BLOCK_M) = {limit:.1f} within 1 %, below BLOCK_M; {', '.join(expected) or 'none'} (computed)",
        f"{curve[-1]['intensity']:.1f}; {', '.join(found) or 'none'}",
        abs(curve[-1]["intensity"] / limit - 1) < 0.01 and [name for name in found if name] == expected,
    )


EXPERIMENT = Experiment(
    claim="The standard method has fewer than d / 2 FLOP per byte: at head_dim 64 and 128 it is limited by memory on "
    "every card, however long N is (Dao et al. 2022: attention is memory-bound); a tiled forward has N / 2 and is "
    "limited by tensor cores from N of a few hundred on",
    caption="FLOP per byte of both methods against N, and the ridge points from which on a card is limited by "
    "arithmetic; right, what two cards can reach at most with the forward.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"seqlens": [2**n for n in range(7, 15)], "counted_to": 2048, "standard_to": 512},
    quick={"seqlens": [128, 512, 2048, 8192], "counted_to": 128, "standard_to": 128},
    figure_size=(12.0, 4.8),
)
