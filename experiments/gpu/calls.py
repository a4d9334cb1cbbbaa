"""Calls of the library that together launch every kernel of its catalogue, small enough for the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash
from cupyflash import naive


@dataclass(frozen=True)
class Call:
    """A call of the library, with normal inputs: every launch of it is compared."""

    name: str
    run: Callable[[], Any]
    dtype: str = "float16"


def calls() -> list[Call]:
    """From the plain kernels to those of options; together they launch every kernel of the catalogue."""
    plain = [
        ("float16", 128, False), ("bfloat16", 64, True), ("float32", 64, True), ("float64", 64, False),
        ("float16", 256, True),
    ]  # fmt: skip
    found = [
        Call(f"{dtype}, head_dim {head_dim}{', causal' * causal}", _plain(dtype, head_dim, causal), dtype)
        for dtype, head_dim, causal in plain
    ]
    for dtype in "float16", "float32":
        found += [
            Call(f"standard method, {dtype}", _plain(dtype, 32, True, naive), dtype),
            Call(f"options and their gradients, {dtype}", _options(dtype), dtype),
            Call(f"split keys, {dtype}", _forward(dtype, split_size=128), dtype),
            Call(f"rows that are no whole chunks, {dtype}", _forward(dtype, head_dim=37), dtype),
        ]
    return found


def _inputs(dtype: str, head_dim: int, seqlen: int = 150) -> list[np.ndarray]:
    """q with two heads, k and v with one: more than a tile of queries and of keys, and a part of one."""
    rng = np.random.default_rng(head_dim)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return [rng.standard_normal((1, heads, seqlen, head_dim)).astype(dtype) for heads in (2, 1, 1)]


def _plain(dtype: str, head_dim: int, causal: bool, library=cupyflash) -> Callable[[], Any]:
    def run():
        q, k, v = _inputs(dtype, head_dim)
        out, lse = library.attention(q, k, v, causal=causal, return_lse=True)
        library.attention_backward(q[..., ::-1, :].copy(), q, k, v, out, lse, causal=causal)

    return run


def _forward(dtype: str, head_dim: int = 64, **options) -> Callable[[], Any]:
    return lambda: cupyflash.attention(*_inputs(dtype, head_dim), return_lse=True, **options)


def _options(dtype: str) -> Callable[[], Any]:
    def run():
        q, k, v = _inputs(dtype, 32)
        rng = np.random.default_rng(0)
        options = {
            "causal": True,
            "softcap": 5.0,
            "bias": rng.standard_normal((2, 150, 150)).astype(q.dtype),
            "alibi_slopes": rng.random(2).astype(np.float32),
            "attn_sink": rng.standard_normal(2).astype(np.float32),
            "dropout_p": 0.25,
            "seed": 3,
        }
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        cupyflash.attention_backward(q[..., ::-1, :].copy(), q, k, v, out, lse, **options)

    return run
