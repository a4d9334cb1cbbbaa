"""A user's expressions on chunks: the arrays that they index are whole, and L and S are lengths of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask import array as da

from cupyflash._lengths import per_batch
from cupyflash._problem import Problem
from cupyflash._user_functions import names_in

_LENGTHS = {"L": ("seqlens_q", "seqlen_q"), "S": ("seqlens_k", "seqlen_k")}


@dataclass(frozen=True, eq=False)
class Functions:
    """Expressions by their options' names, and their arrays, each in one chunk."""

    expressions: Mapping[str, str]
    aux: Mapping[str, da.Array]

    @classmethod
    def of(cls, problem: Problem, aux: Mapping[str, da.Array]) -> Functions:
        """Those of a problem. Lengths are NumPy arrays, which tasks bring to where their chunks are."""
        expressions = {name: getattr(problem, name) for name in ("score_mod", "mask_mod")}
        expressions = {name: text for name, text in expressions.items() if text is not None}
        aux = {name: array.rechunk(-1) for name, array in aux.items()}
        with_lengths = {name for name, text in expressions.items() if names_in(text) & {*_LENGTHS}}
        if with_lengths:
            tables = {place: _free_name(f"{place}_of_batch", aux) for place in _LENGTHS}
            # In the kernel L and S are the chunk's: a function whose parameters hide them takes the whole's.
            lengths = ", ".join(f"{table}[b - {problem.origin[0]}]" for table in tables.values())
            for name in with_lengths:
                expressions[name] = f"[&](int L, int S) {{ return ({expressions[name]}\n); }}({lengths})"
            for place, table in tables.items():
                aux[table] = da.from_array(_of_batches(problem, place), chunks=-1)
        return cls(expressions, aux)


def _of_batches(problem: Problem, place: str) -> np.ndarray:
    """L or S of each batch, in order."""
    array, longest = _LENGTHS[place]
    lengths = problem.operands.get(array, getattr(problem, longest))
    batches = per_batch(problem.leading_shape)
    return np.broadcast_to(np.asarray(lengths, np.int32), batches).reshape(math.prod(batches))


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    return _free_name(f"{name}_", taken) if name in taken else name
