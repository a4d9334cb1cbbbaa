"""Which changes of a call leave every bit of the result, and which only its bound?

Floating-point sums depend on their order, so that a result keeps its bits only where a change leaves the order of every
sum. The kernels are called twice for each configuration, on the same numbers; the share of equal elements is counted,
and the largest difference measured: in units in the last place of the row's largest element, and against the sum of
both bounds (cupyflash.bounds). Standard normal q, k and v, 2 batches of 2 heads, tiles of 128 keys for 16
bits and of 64 for float32; tensor cores sum as ``mma="ampere"``. All of it is the kernels' own.

Decoding: the last query by itself with the keys that it sees, half of them, and as a row of a call with all queries and
all keys, whose causal band leaves it the same ones. A split size that does not depend on the call ("fixed") is compared
with one that makes two parts of the keys that are there ("two parts").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from cupyflash import Numerics, attention, attention_varlen, bounds, merge, ptxsim
from experiments import record
from experiments.experiment import Experiment, Outcome, Row

ARCH, MMA = "sm_80", "ampere"
BATCHES, HEADS = 2, 2
TILES = {2: (128, 128), 4: (64, 64)}  # queries and keys, by bytes of an element: what the kernels take here
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
SAME, OTHER = "the same sums", "other sums"
WITHIN_TILE = "keys in another order within their tile"


def unchanged(x: np.ndarray) -> np.ndarray:
    return x


@dataclass(frozen=True)
class Side:
    """One of the two calls, and what brings its results to the places and the scale of the other's."""

    arrays: tuple[np.ndarray, ...]
    options: dict[str, Any] = field(default_factory=dict)
    out: Callable[[np.ndarray], np.ndarray] = unchanged
    lse: Callable[[np.ndarray], np.ndarray] | None = unchanged  # None: it is another one
    function: Callable = attention
    bound: Callable | None = bounds.attention

    def results(self, backend) -> tuple[np.ndarray, np.ndarray | None]:
        """out and lse."""
        out, lse = backend.call(self.function, *self.arrays, return_lse=True, **self.options)
        return self.out(out), self.lse(lse) if self.lse else None

    def bound_of_out(self) -> np.ndarray:
        return np.abs(self.out(self.bound(*self.arrays, **self.options)))


@dataclass(frozen=True)
class Configuration:
    """What is changed, whether every bit should stay, and both calls."""

    name: str
    same: bool
    sides: tuple[Side, Side]


def by_heads(q, k, v, *, return_lse):
    """The call on views of arrays (batch, length, heads, head_dim), k and v with the lengths in reverse in memory."""
    q, k, v = (x.swapaxes(1, 2).copy() for x in (q, k, v))
    k, v = (x[:, ::-1].copy()[:, ::-1] for x in (k, v))
    return attention(*(x.swapaxes(1, 2) for x in (q, k, v)), return_lse=return_lse)


def values_of(q, k, v, *, return_lse):
    """What attention is where all values are the first one; what stands for lse is not compared."""
    return np.repeat(v[..., :1, :], q.shape[-2], axis=-2), q[..., 0]


def in_two_calls(q, k, v, *, return_lse):
    """Attention to both halves of the keys, merged."""
    half = k.shape[-2] // 2
    parts = [attention(q, k[..., p, :], v[..., p, :], return_lse=return_lse) for p in (slice(half), slice(half, None))]
    return merge(*zip(*parts, strict=True))


def packed(arrays: tuple[np.ndarray, ...], lengths: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """The beginnings of the batches' sequences, one after the other."""
    rows = [[x[batch, :, :length].swapaxes(0, 1) for batch, length in enumerate(lengths)] for x in arrays]
    return tuple(np.concatenate(x) for x in rows)


@dataclass(frozen=True)
class Rows:
    """Some of the queries' results, in an order."""

    which: Any

    def out(self, x: np.ndarray) -> np.ndarray:
        return x[..., self.which, :]

    def lse(self, x: np.ndarray) -> np.ndarray:
        return x[..., self.which]

    def of(self, *arguments) -> Side:
        """A call whose results are these."""
        return Side(*arguments, out=self.out, lse=self.lse)


def by_place(plain: Side) -> Iterator[Configuration]:
    """What is the same elsewhere: in a batch, in memory, in another order of what is not summed over."""
    q, k, v = plain.arrays
    queries, keys, rng = q.shape[-2], k.shape[-2], np.random.default_rng(1)
    yield Configuration("the call again", True, (plain, Side((q, k, v))))
    alone = Side(tuple(x[1, 1] for x in (q, k, v)))
    yield Configuration("a (batch, head) alone", True, (alone, Side((q, k, v), out=one_head, lse=one_head)))
    yield Configuration("other strides", True, (plain, Side((q, k, v), function=by_heads)))
    order, columns = rng.permutation(queries), rng.permutation(v.shape[-1])
    yield Configuration("queries in another order", True, (Side((q[..., order, :], k, v)), Rows(order).of((q, k, v))))
    fifth = slice(5, 6)
    yield Configuration("one query alone", True, (Side((q[..., fifth, :], k, v)), Rows(fifth).of((q, k, v))))
    reordered = Side((q, k, v), out=lambda x: x[..., columns])
    yield Configuration("columns of v in another order", True, (Side((q, k, v[..., columns])), reordered))
    shared, repeated = ((q, *(np.repeat(x[:, :1], count, axis=1) for x in (k, v))) for count in (1, HEADS))
    yield Configuration("a key head shared, or repeated", True, (Side(shared), Side(repeated)))
    lengths = queries, queries - 7
    offsets = np.cumsum([0, *lengths])
    second = Side(
        (*packed((q, k, v), lengths), offsets, offsets),
        out=lambda x: x[queries:].swapaxes(0, 1),
        lse=lambda x: x[:, queries:],
        function=attention_varlen,
        bound=bounds.attention_varlen,
    )
    unpacked = Side(tuple(x[1, :, : lengths[1]] for x in (q, k, v)))
    yield Configuration("packed, or a call for each sequence", True, (second, unpacked))
    first, first_keys = slice(queries - 9), slice(keys // 2 - 9)
    prefix = Side((q[..., first, :], *(x[..., first_keys, :] for x in (k, v))), band(q, k))
    yield Configuration("causal: a prefix alone", True, (prefix, Rows(first).of((q, k, v), band(q, k))))


def one_head(x: np.ndarray) -> np.ndarray:
    return x[1, 1]


def band(q, k) -> dict[str, Any]:
    """Options of a causal call whose last query sees half of the keys."""
    return {"window_size": (None, k.shape[-2] // 2 - q.shape[-2]), "align": "top-left"}


def by_values(plain: Side) -> Iterator[Configuration]:
    """Signs and powers of 2, which roundings do not see, and results that are known."""
    q, k, v = plain.arrays
    four = q.dtype.type(4)
    yield Configuration("-v", True, (plain, Side((q, k, -v), out=np.negative)))
    yield Configuration("-q and -k", True, (plain, Side((-q, -k, v))))
    yield Configuration("4 v", True, (plain, Side((q, k, four * v), out=lambda x: x / four)))
    yield Configuration("4 q and k / 4", True, (plain, Side((four * q, k / four, v))))
    known = {"lse": None, "function": values_of, "bound": None}
    one_key = q, k[..., :1, :], v[..., :1, :]
    yield Configuration("one key: out is v", True, (Side(one_key, lse=None), Side(one_key, **known)))
    constant = q, k, np.ones_like(v) * q.dtype.type(1.7)
    half = v.dtype.itemsize == 2  # in float32 the sums of P and of P v are rounded differently
    yield Configuration("constant v: out is v", half, (Side(constant, lse=None), Side(constant, **known)))


def by_options(plain: Side) -> Iterator[Configuration]:
    """Options that change nothing."""
    q, k, v = plain.arrays
    keys, tile = k.shape[-2], TILES[q.dtype.itemsize]

    def with_option(name, arrays=plain.arrays, **options):
        return Configuration(name, True, (plain, Side(arrays, options)))

    longer = (np.concatenate([x, np.full_like(x, np.nan)], axis=-2) for x in (k, v))
    yield with_option("as many keys again, NaN, behind a length", (q, *longer), seqlens_k=np.full(BATCHES, keys))
    yield with_option("a window wider than the keys", window_size=(keys, keys), align="top-left")
    yield with_option("a sink of -inf", attn_sink=np.full(HEADS, -np.inf, np.float32))
    yield with_option("a bias of 0", bias=np.zeros((1, 1), np.float32))
    yield with_option("half as many queries in a tile", numerics=Numerics(tile=(tile[0] // 2, tile[1])))


def by_fixed_splits(plain: Side) -> Iterator[Configuration]:
    """Keys in parts whose size does not depend on the call."""
    q, k, v = plain.arrays
    split = {"split_size": 128}
    alone = Side(tuple(x[1, 1] for x in (q, k, v)), split)
    in_batch = Side((q, k, v), split, out=one_head, lse=one_head)
    yield Configuration("fixed split size: a (batch, head) alone", True, (alone, in_batch))
    yield Configuration("fixed split size: decoding", True, decoded(q, k, v, 128, 128))


def decoded(q, k, v, size_alone: int, size_in_all: int) -> tuple[Side, Side]:
    """The last query with its keys, and as a row of the whole call, with these sizes of parts."""
    last, half = slice(-1, None), slice(k.shape[-2] // 2)
    alone = Side((q[..., last, :], k[..., half, :], v[..., half, :]), {"split_size": size_alone})
    return alone, Rows(last).of((q, k, v), {**band(q, k), "split_size": size_in_all})


def by_order(plain: Side) -> Iterator[Configuration]:
    """Other sums."""
    q, k, v = plain.arrays
    keys, tile, rng = k.shape[-2], TILES[q.dtype.itemsize], np.random.default_rng(2)

    def keys_at(places):
        return Side((q, k[..., places, :], v[..., places, :]))

    parts = Side((q, k, v), {"split_size": 128})
    yield Configuration("two parts: decoding", False, decoded(q, k, v, keys // 4, keys // 2))
    yield Configuration("parts of 128 keys, or all", False, (parts, plain))
    yield Configuration("parts of 128 keys, or of 256", False, (parts, Side((q, k, v), {"split_size": 256})))
    merged = Side((q, k, v), function=in_two_calls, bound=None)
    yield Configuration("two calls merged, or one", False, (merged, plain))
    half_tile = Side((q, k, v), {"numerics": Numerics(tile=(tile[0], tile[1] // 2))})
    yield Configuration("half as many keys in a tile", False, (half_tile, plain))
    yield Configuration("keys in another order", False, (keys_at(rng.permutation(keys)), plain))
    within = [first + rng.permutation(min(tile[1], keys - first)) for first in range(0, keys, tile[1])]
    yield Configuration(WITHIN_TILE, False, (keys_at(np.concatenate(within)), plain))
    kept = np.arange(keys) % 3 != 0
    masked = Side((q, k, v), {"mask": kept[None]})
    yield Configuration("a third of the keys masked, or left out", False, (masked, keys_at(kept)))
    coarse = (np.round(k.astype(np.float64) * 16) / 16).astype(k.dtype)  # so that 1 more is exact
    shifted, unshifted = (Side((q, coarse + k.dtype.type(shift), v), lse=None) for shift in (1, 0))
    yield Configuration("k + 1: scores shifted", False, (shifted, unshifted))
    columns = rng.permutation(q.shape[-1])
    reordered = Side((q[..., columns], k[..., columns], v))
    yield Configuration("columns of q and k in another order", False, (reordered, plain))


CHANGES = {  # in the figure's order
    "place": by_place,
    "values": by_values,
    "options": by_options,
    "splits": by_fixed_splits,
    "order": by_order,
}


def configurations(plain: Side, changes: Iterable[str] = tuple(CHANGES)) -> Iterator[Configuration]:
    """Changes of the plain call, of these kinds."""
    return itertools.chain.from_iterable(of_kind(plain) for kind, of_kind in CHANGES.items() if kind in changes)


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Share of equal elements, and the largest difference in units in the last place of the row's largest."""
    wide = np.stack([one, other]).astype(np.float64)
    largest = np.abs(wide).max(axis=(0, -1))[..., None]
    unit = float(ml_dtypes.finfo(one.dtype).eps) * np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1))))
    return float((one == other).mean()), float((np.abs(wide[0] - wide[1]) / unit).max())


def measure_dtype(
    backend, dtype: str, queries: int, keys: int, head_dim: int, changes: list[str], bar
) -> Iterator[Row]:
    """A row for each configuration."""
    rng = np.random.default_rng(0)
    shapes = [(BATCHES, HEADS, length, head_dim) for length in (queries, keys, keys)]
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    plain = Side((q, k, v))
    of_plain = plain.results(backend)
    for configuration in configurations(plain, changes):
        one, other = configuration.sides
        (out, lse), (other_out, other_lse) = (of_plain if x is plain else x.results(backend) for x in (one, other))
        out_equal, out_ulps = difference(out, other_out)
        lse_equal, lse_ulps = (None, None) if lse is None else difference(lse[..., None], other_lse[..., None])
        of_bounds = None
        if one.bound and other.bound:
            apart = np.abs(out.astype(np.float64) - other_out.astype(np.float64))
            of_bounds = float((apart / (one.bound_of_out() + other.bound_of_out())).max())
        yield {
            "configuration": configuration.name,
            "sums": SAME if configuration.same else OTHER,
            "dtype": dtype,
            "out_equal": out_equal,
            "lse_equal": lse_equal,
            "out_ulps": out_ulps,
            "lse_ulps": lse_ulps,
            "out_of_bounds": of_bounds,
        }
        bar.update()


def measure(backend, queries: int, keys: int, head_dim: int, dtypes: list[str], changes: list[str]) -> list[Row]:
    """A row for each configuration and dtype."""
    with ptxsim.settings(arch=ARCH, mma=MMA), tqdm(unit="configuration") as bar:
        sizes = queries, keys, head_dim, changes
        return [row for dtype in dtypes for row in measure_dtype(backend, dtype, *sizes, bar)]


def dtypes_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["dtype"] for row in rows))


def draw(figure, rows: list[Row]) -> None:
    """A matrix: configurations down, results of each dtype across."""
    axes = figure.subplots()
    names, dtypes = list(dict.fromkeys(row["configuration"] for row in rows)), dtypes_of(rows)
    columns = [(result, dtype) for result in ("out", "lse") for dtype in dtypes]
    equal = np.full((len(names), len(columns)), np.nan)
    for row in rows:
        for result in "out", "lse":
            place = names.index(row["configuration"]), columns.index((result, row["dtype"]))
            share, ulps = row[f"{result}_equal"], row[f"{result}_ulps"]
            if share is None:
                continue
            equal[place] = share
            text = "all" if share == 1 else f"{100 * share:.4g} %, {ulps:.2g} ulp"
            axes.text(place[1], place[0], text, ha="center", va="center", fontsize=9,
                      color="white" if share > 0.75 else "black")  # fmt: skip
    axes.imshow(equal, vmin=0, vmax=1.25, cmap="Blues", aspect="auto")
    last_same = max((names.index(row["configuration"]) for row in rows if row["sums"] == SAME), default=-1)
    axes.axhline(last_same + 0.5, color=record.STANDARD, linewidth=2.5)
    axes.axvline(len(dtypes) - 0.5, color="white", linewidth=4)
    axes.set_xticks(range(len(columns)), [f"{result}\n{dtype}" for result, dtype in columns])
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_xlabel(
        "elements that are equal, and the largest difference in units in the last place of the row's largest element;\n"
        "above the line all are expected to be equal, but for a constant v in float32, and below it not (blank: lse is "
        "another one)"
    )


def exceptions(rows: list[Row]) -> list[str]:
    """Configurations that should keep every bit and do not."""
    return [
        f"{row['configuration']} ({row['dtype']})"
        for row in rows
        if row["sums"] == SAME and (row["out_equal"] < 1 or row["lse_equal"] not in (1, None))
    ]


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Both halves of the matrix, and what is known of some of its rows; of the changes that were made."""
    same, other = ([row for row in rows if row["sums"] == which] for which in (SAME, OTHER))
    fixed, two_parts = (
        [min(row["out_equal"], row["lse_equal"]) for row in rows if row["configuration"] == name]
        for name in ("fixed split size: decoding", "two parts: decoding")
    )
    return [
        *([_same_sums(same)] if same else []),
        *([_decoding(fixed, two_parts)] if fixed and two_parts else []),
        *(_other_sums(other) if any(row["configuration"] == WITHIN_TILE for row in other) else []),
    ]


def _same_sums(same: list[Row]) -> Outcome:
    different = exceptions(same)
    return Outcome(
        "the same sums: equal in every bit",
        f"all {len(same)} (predicted; emulated: all but 4 v with subnormal results)",
        f"{len(same) - len(different)}; not {', '.join(different)}" if different else f"all {len(same)}",
        not different,
        "4 v: results of float16 below 2^-14 are subnormal, with fewer bits. A bias of 0: a kernel with a bias "
        "scales each score before the maximum is taken, one without it inside the exponent, so that their "
        "roundings differ",
    )


def _decoding(fixed: list[float], two_parts: list[float]) -> Outcome:
    return Outcome(
        "a decoded row's bits, whatever else is in the call: with a fixed split size; with two parts of any length",
        "equal; not equal (published: Thinking Machines 2025)",
        f"{min(fixed):.0%} of the elements; {min(two_parts):.0%} to {max(two_parts):.0%} of out or lse",
        min(fixed) == 1 and max(two_parts) < 1,
    )


def _other_sums(other: list[Row]) -> list[Outcome]:
    half = [dtype for dtype in dtypes_of(other) if dtype in ("float16", "bfloat16")]
    of_half = [row for row in other if row["dtype"] in half]
    equal_in_single = [row["configuration"] for row in other if row["dtype"] == "float32" and row["out_equal"] == 1]
    within_tile = [row["out_equal"] for row in of_half if row["configuration"] == WITHIN_TILE]
    of_bounds = max(row["out_of_bounds"] for row in other if row["out_of_bounds"] is not None)
    ulps = {dtype: max(row["out_ulps"] for row in other if row["dtype"] == dtype) for dtype in dtypes_of(other)}
    found = [
        Outcome(
            "other sums: largest difference / sum of both bounds",
            "at most 0.38 (emulated)",
            f"{of_bounds:.2f}",
            of_bounds <= 0.38,
        ),
    ]
    if half:
        found += [
            Outcome(
                "other sums: largest difference in 16 bits, units in the last place of the row's largest element",
                "at most 2: the last rounding, and those of the weights, which average out (predicted)",
                ", ".join(f"{dtype} {ulps[dtype]:.2g}" for dtype in half),
                all(ulps[dtype] <= 2 for dtype in half),
            ),
            Outcome(
                "keys in another order within their tile: equal elements in 16 bits",
                "at least 98 % (emulated: 59 of 60 problems in every bit)",
                ", ".join(f"{share:.2%}" for share in within_tile),
                all(share >= 0.98 for share in within_tile),
            ),
        ]
    if "float32" in ulps:
        found.append(
            Outcome(
                "other sums, float32: configurations with a different bit",
                "all (emulated: no problem in every bit)",
                "all" if not equal_in_single else f"not: {', '.join(equal_in_single)}",
                not equal_in_single,
            )
        )
    return found


EXPERIMENT = Experiment(
    claim="A result keeps its bits where a change leaves the order of every sum: batch, strides, queries, heads, and a "
    "fixed split size, but not a number of parts (Thinking Machines 2025), tiles or the order of keys",
    caption="Equal elements and largest differences of two calls that differ as the row says.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={
        "queries": 64,
        "keys": 512,
        "head_dim": 64,
        "dtypes": ["float16", "bfloat16", "float32"],
        "changes": list(CHANGES),
    },
    quick={"queries": 16, "keys": 512, "head_dim": 16, "dtypes": ["float16"], "changes": ["splits", "order"]},
    figure_size=(13.0, 11.0),
    on_gpu=True,
)
