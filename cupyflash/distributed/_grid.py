"""The grid of chunks of a call: which chunks of keys a chunk of queries meets, and with which options."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import add
from typing import Any

import numpy as np
from dask import array as da

from cupyflash._block_mask import BlockMask
from cupyflash._lengths import per_batch
from cupyflash._options import MAX_SHIFT
from cupyflash._problem import Problem, check_names
from cupyflash.distributed._functions import Functions
from cupyflash.distributed._operands import (
    KEY_HEADS,
    KEYS,
    QUERIES,
    Dim,
    Operand,
    Span,
    as_dask,
    check_same_kind,
    in_common_chunks,
    stand_in,
)

_ARRAYS = ("mask", "bias", "alibi_slopes", "attn_sink")
_LENGTHS = ("seqlens_q", "seqlens_k")
Place = Mapping[Dim, int]


def check_options(options: Mapping[str, Any]) -> None:
    for name in ("out", "grads_out"):
        if options.get(name) is not None:
            raise TypeError(f"{name}: Dask arrays are not written to; leave it out")
    check_names({name: value for name, value in options.items() if name != "grads_out"})
    if isinstance(options.get("mask_mod"), BlockMask):
        raise TypeError("mask_mod: a BlockMask is of whole arrays; give its expression and arrays, .mask_mod and .aux")
    for name in _LENGTHS:
        if isinstance(options.get(name), da.Array):
            raise TypeError(f"{name}: the graph is made by it; use {name}.compute()")


def dask_arrays(
    inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, da.Array], dict[str, da.Array]]:
    """Those of ``inputs`` with what ``options`` has of arrays that may be in chunks; and those of ``aux``."""
    arrays = {name: as_dask(name, array, required=True) for name, array in inputs.items()}
    arrays |= {name: as_dask(name, options[name], required=False) for name in _ARRAYS if options.get(name) is not None}
    aux = options.get("aux")
    aux = {f"aux[{name!r}]": (name, array) for name, array in aux.items()} if isinstance(aux, Mapping) else {}
    in_aux = {what: as_dask(what, array, required=False) for what, (_, array) in aux.items()}
    check_same_kind(arrays | in_aux)
    return arrays, {name: in_aux[what] for what, (name, _) in aux.items()}


def validated(
    problem: Callable[..., Any], arrays: Mapping[str, da.Array], aux: Mapping[str, da.Array], options: Mapping[str, Any]
) -> Any:
    """What ``problem`` makes of the whole, whose arrays are stand-ins without elements to speak of."""
    stand_ins = {name: stand_in(array) for name, array in arrays.items()}
    if aux:
        stand_ins["aux"] = {name: np.empty(array.shape, array.dtype) for name, array in aux.items()}
    return problem(**{**options, **stand_ins})


@dataclass(frozen=True, eq=False)
class Grid:
    """A call on chunks. ``spans`` has for each dimension of the scores where its chunks start and stop."""

    problem: Problem
    functions: Functions
    operands: Mapping[str, Operand]
    spans: Mapping[Dim, list[Span]]

    @classmethod
    def of(cls, problem: Problem, arrays: Mapping[str, da.Array], aux: Mapping[str, da.Array]) -> Grid:
        _check_reach(problem)
        return cls(problem, Functions.of(problem, aux), *in_common_chunks(arrays, problem, _cuts(problem)))

    @property
    def collections(self) -> list[da.Array]:
        """What tasks take their arrays from."""
        return [*(operand.array for operand in self.operands.values()), *self.functions.aux.values()]

    def task(
        self, call: Callable[..., Any], place: Place, names: Sequence[str], options: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """``call`` of the named operands' chunks at a place, and of the options, as keyword arguments."""
        aux = self.functions.aux
        keys = [self.operands[name].key(place) for name in names]
        keys += [(array.name, *(0 for _ in array.shape)) for array in aux.values()]
        return partial(_called, call, tuple(names), tuple(aux), {**self.options(place), **options}), *keys

    @property
    def leading_dims(self) -> tuple[Dim, ...]:
        return tuple(range(-len(self.problem.leading_shape), 0))

    def rows(self) -> Iterator[Place]:
        """The places of chunks of queries, in order."""
        dims = (*self.leading_dims, QUERIES)
        for numbers in product(*(range(len(self.spans[dim])) for dim in dims)):
            place = dict(zip(dims, numbers, strict=True))
            if self.problem.grouped_heads:
                first = self.spans[-1][place[-1]][0] // self.problem.grouped_heads[1]
                place[KEY_HEADS] = next(n for n, span in enumerate(self.spans[KEY_HEADS]) if first < span[1])
            yield place

    def seen_from(self, row: Place) -> list[Place]:
        """The chunks of keys, in order, of which a query of the row may see a key."""
        return [{**row, KEYS: int(number)} for number in np.flatnonzero(self._seen(row))]

    def sizes(self, row: Place) -> tuple[int, ...]:
        """Shape of the row's lse."""
        spans = (self.spans[dim][row[dim]] for dim in (*self.leading_dims, QUERIES))
        return tuple(stop - start for start, stop in spans)

    def options(self, place: Place) -> dict[str, Any]:
        """Those of the call on the chunks of a place, but for arrays that are in chunks themselves."""
        problem = self.problem
        options = {
            name: getattr(problem, name) for name in ("softmax_scale", "softcap", "split_size", "numerics")
        } | self.lengths(place)
        if _aligned(problem):
            (first_query, _), (first_key, _) = self._pair(place)
            shift = (
                self._of_batches(_shifts(self.problem), place).reshape(-1)[:1].sum()
            )  # one for all of the place's batches, if any
            options |= {"window_size": problem.window, "align": int(shift) + first_query - first_key}
        if _counts_places(problem):
            options |= {"dropout_p": problem.dropout_p, "seed": problem.seed, "origin": self._origin(place)}
        return options | self.functions.expressions

    def lengths(self, place: Place) -> dict[str, np.ndarray]:
        """How many queries and, where the place is a pair, keys of its chunks there are in each batch."""
        dims = {"seqlens_q": QUERIES, "seqlens_k": KEYS}
        lengths = {}
        for name in _LENGTHS:
            if name in self.problem.operands and dims[name] in place:
                start, stop = self.spans[dims[name]][place[dims[name]]]
                lengths[name] = np.clip(self._of_batches(_lengths(self.problem, name), place) - start, 0, stop - start)
        return lengths

    def _seen(self, row: Place) -> np.ndarray:
        """Of each chunk of keys whether band and lengths leave a pair; j - i takes all values in between."""
        first_query, end_query = self.spans[QUERIES][row[QUERIES]]
        first_key, end_key = np.array(self.spans[KEYS]).T
        of_batches = [_lengths(self.problem, name) for name in _LENGTHS] + [_shifts(self.problem)]
        length_q, length_k, shift = (self._of_batches(values, row)[..., None] for values in of_batches)
        end_query, end_key = np.minimum(end_query, length_q), np.minimum(end_key, length_k)
        seen = (first_query < end_query) & (first_key < end_key)
        left, right = self.problem.window
        if left is not None:
            seen &= end_key - 1 - first_query >= shift - left
        if right is not None:
            seen &= first_key - (end_query - 1) <= shift + right
        return seen.reshape(-1, len(first_key)).any(axis=0)

    def _origin(self, place: Place) -> tuple[int, ...]:
        """Of the place's first batch, head, query and key."""
        sizes, starts = self.problem.leading_shape, [self.spans[dim][place[dim]][0] for dim in self.leading_dims]
        head = starts.pop() if len(sizes) >= 2 else 0
        batch = 0
        for size, start in zip(sizes, starts, strict=False):
            batch = batch * size + start
        (first_query, _), (first_key, _) = self._pair(place)
        return tuple(map(add, self.problem.origin, (batch, head, first_query, first_key)))

    def _pair(self, place: Place) -> tuple[Span, Span]:
        return self.spans[QUERIES][place[QUERIES]], self.spans[KEYS][place[KEYS]]

    def _of_batches(self, values: np.ndarray, place: Place) -> np.ndarray:
        """Of one value for each batch, those of the place."""
        dims = self.leading_dims[: values.ndim]
        return values[tuple(slice(*self.spans[dim][place[dim]]) for dim in dims)]


def _aligned(problem: Problem) -> bool:
    """Whether anything depends on which key a query stands at."""
    return problem.window != (None, None) or "alibi_slopes" in problem.operands


def _lengths(problem: Problem, name: str) -> np.ndarray:
    """Of each batch, as int64."""
    default = problem.seqlen_q if name == "seqlens_q" else problem.seqlen_k
    lengths = np.asarray(problem.operands.get(name, default), np.int64)
    return np.broadcast_to(lengths, per_batch(problem.leading_shape))


def _shifts(problem: Problem) -> np.ndarray:
    """Of each batch: its query i is at key i + shift."""
    if problem.bottom_right:
        return _lengths(problem, "seqlens_k") - _lengths(problem, "seqlens_q")
    return np.full(per_batch(problem.leading_shape), problem.offset)


def _counts_places(problem: Problem) -> bool:
    """Whether anything depends on which batch, head, query and key a pair is of."""
    return problem.dropout_p > 0 or problem.score_mod is not None or problem.mask_mod is not None


def _check_reach(problem: Problem) -> None:
    """Raise where a query of some chunk may stand further from the keys of another than a call can say."""
    furthest = abs(problem.offset) + max(problem.seqlen_q, problem.seqlen_k)
    if _aligned(problem) and furthest > MAX_SHIFT:
        raise ValueError(
            f"align: {problem.offset} with seqlen_q {problem.seqlen_q} and seqlen_k {problem.seqlen_k} is further than "
            f"{MAX_SHIFT}, counted from the chunks' own first queries and keys"
        )


def _cuts(problem: Problem) -> dict[Dim, set[int]]:
    """Where to cut batches so that all in one chunk have one shift, and their numbers follow on each other."""
    cuts: dict[Dim, set[int]] = defaultdict(set)
    shape = problem.leading_shape
    if _aligned(problem):
        shifts = _shifts(problem)
        for axis in range(shifts.ndim):
            others = tuple(n for n in range(shifts.ndim) if n != axis)
            changes = np.diff(shifts, axis=axis).any(axis=others)
            cuts[axis - len(shape)] |= {int(n) + 1 for n in np.flatnonzero(changes)}
    if _counts_places(problem):
        for axis, size in enumerate(shape[:-2]):
            cuts[axis - len(shape)] |= set(range(size))
    return cuts


def _called(
    call: Callable[..., Any],
    names: Sequence[str],
    aux_names: Sequence[str],
    options: Mapping[str, Any],
    *arrays: Any,
) -> Any:
    """A call on chunks, with lengths and arrays of expressions where the chunks are."""
    given = dict(zip(names, map(aligned, arrays[: len(names)]), strict=True))
    aux = {
        name: aligned(np.asarray(array if array.flags.c_contiguous else array.copy(), like=given["q"]))
        for name, array in zip(aux_names, arrays[len(names) :], strict=True)
    }
    lengths = {name: np.array(options[name], like=given["q"]) for name in _LENGTHS if name in options}
    return call(**given, **{**options, **lengths}, **({"aux": aux} if aux else {}))


def aligned(array: Any) -> Any:
    """What comes from another process may lie anywhere in the message that brought it."""
    return np.require(array, requirements=["ALIGNED"]) if isinstance(array, np.ndarray) else array
