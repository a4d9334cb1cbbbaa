"""Block masks: a mask_mod looked at once, so that calls skip what it leaves nothing of."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyflash import _config, _launch
from cupyflash._arrays import array_kind, described
from cupyflash._block_mask import BITS, BlockMask
from cupyflash._options import SPLIT_STEP, check_expression, checked_aux
from cupyflash._score_mod import THREADS, params_dtype
from cupyflash._shapes import MAX_SEQLEN
from cupyflash._user_functions import UserFunctions, aux_params


def block_mask(
    mask_mod: str,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 1,
    num_heads: int = 1,
    aux: Mapping[str, Any] | None = None,
    block_size: int = 128,
    like=None,
) -> BlockMask:
    """A ``mask_mod`` for :func:`cupyflash.attention` whose empty blocks are skipped, forward and backward.

    Results are those of the expression alone, bit for bit; the work is that of the blocks that it leaves a pair of.

    Parameters
    ----------
    mask_mod : str
        As for :func:`cupyflash.attention`.
    seqlen_q, seqlen_k : int
        L and S of the calls that it is for, which give no lengths.
    batch, num_heads : int
        Sizes of the result's batch and heads, or 1 where the expression does not name ``b`` or ``h``: with 1 it is
        looked at for b = 0 or h = 0 alone, and a call with more of them refuses an expression that names them.
    aux : mapping of names to arrays, optional
        What the expression indexes. Calls need not give them again, and must not change them.
    block_size : int
        Queries and keys of a block, a positive multiple of 128.
    like : array, optional
        One of the kind and on the device of the calls, where ``aux`` has none; by default they are NumPy's.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what is allowed, and where the expression does not compile.

    Examples
    --------
    >>> window = block_mask("abs(i - j) < 100 || j < 4", 1024, 1024)
    >>> window.density
    0.4375
    >>> window.to_dense()[0, 0, 3].astype(int)
    array([1, 0, 1, 1, 1, 0, 0, 0])
    """
    if not isinstance(mask_mod, str):
        raise TypeError(f"mask_mod: expected a C++ expression as a str, not {described(mask_mod)}")
    check_expression("mask_mod", mask_mod)
    for name, value, least in (
        ("seqlen_q", seqlen_q, 0),
        ("seqlen_k", seqlen_k, 0),
        ("batch", batch, 1),
        ("num_heads", num_heads, 1),
        ("block_size", block_size, SPLIT_STEP),
    ):
        _check_size(name, value, least)
    if block_size % SPLIT_STEP:
        raise ValueError(f"block_size: {block_size} is not a multiple of {SPLIT_STEP}")
    place, what = like, "like"
    if place is None:
        place, what = next(iter(aux.values()) if isinstance(aux, Mapping) else iter(()), np.empty(0)), "aux"
    kind = array_kind(place, what)
    aux = checked_aux(aux, place, kind, with_expression=True)

    functions = UserFunctions(None, mask_mod, tuple((name, array.dtype) for name, array in aux.items()))
    rows = _config.ceil_div(seqlen_q, block_size)
    words = _config.ceil_div(_config.ceil_div(seqlen_k, block_size), BITS)
    device = _launch.device_of(kind, place)
    with device:
        bits = device.zeros((batch, num_heads, rows, words), np.uint32)
        matrices = batch * num_heads
        lengths = [device.from_host(np.full(matrices, length, np.int32)) for length in (seqlen_q, seqlen_k)]
        params = _launch.pack(
            params_dtype(aux),
            bits=bits,
            seqlens_q=lengths[0],
            seqlens_k=lengths[1],
            num_pairs=matrices * seqlen_q * seqlen_k,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            aux=aux_params(aux),
        )
        config = _config.KernelConfig(
            file="pair_functions",
            name="block_bits",
            defines={"THREADS": THREADS, "ERRORS": 0, **functions.constants, "BLOCK_MASK": block_size},
            grid=_config.grid_of(bits.size),
            block=THREADS,
            user_functions=functions,
        )
        _launch.run(device, [_launch.Launch(config, *params)])
    return BlockMask(mask_mod, MappingProxyType(aux), int(seqlen_q), int(seqlen_k), int(block_size), bits)


def _check_size(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected a whole number, not {described(value)}")
    if not least <= value <= MAX_SEQLEN:
        raise ValueError(f"{name}: {value} is not between {least} and {MAX_SEQLEN}")
