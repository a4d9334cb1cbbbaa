"""How a call computes, where the definition of attention leaves a choice."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cupyflash._arrays import described

PDtype = Literal["input", "float32"]
Exponential = Literal["ex2.approx", "poly3", "poly5", "accurate"]
Accumulation = Literal["one-level", "two-level"]
TILE_STEP = 8  # rows and columns of a tile come in multiples of it
RESCALE_THRESHOLDS = (0.0, 8.0)


@dataclass(frozen=True)
class Numerics:
    """Compile-time choices of the kernels, for research; the default is the plain kernel, bit for bit.

    The backward has them as the forward has, except ``rescale_threshold`` and ``tile``, of which it has nothing to
    choose: its weights come from lse, and its tiles stay. :mod:`cupyflash.bounds` follows all of them. In the simulator
    ``accumulate`` shows where ``ptxsim.settings`` names a GPU's tensor cores: by default they sum in float32.

    Parameters
    ----------
    p_dtype : "input" or "float32"
        What the weights, and in the backward dS, are rounded to before they multiply v, dout, k or q: the inputs'
        dtype, or float32, as the sum of two numbers of the inputs' dtype, at twice these products. float32 and float64
        inputs are never rounded: there is no difference.
    exp : "ex2.approx", "poly3", "poly5" or "accurate"
        The exponential of weights and rescaling factors: the kernels' own (the instruction for float16 and bfloat16,
        ``exp`` for float32 and float64); 2^x by a polynomial of degree 3 or 5 in the fraction of x, off by at most
        8.8e-5 or 8.6e-8 before float32 roundings; or through double precision. What joins parts of split keys, and the
        gradient of attn_sink, take ``exp`` always.
    rescale_threshold : 0 or 8
        By how many powers of 2 a row's maximum may grow before what is accumulated is rescaled to it. Weights are then
        up to 2^8.
    tile : (block_m, block_n), optional
        Queries and keys of a tile, by default chosen for dtype, head_dim and architecture: for float16 and bfloat16
        32, 64, 128, 192 or 256 by 16, 32, 64 or 128, for float32 and float64 8, 16, 32, 64 or 128 by the same, as far
        as shared memory goes.
    accumulate : "one-level" or "two-level", optional
        Add each tile's products to one running sum, or to a sum of their own first, which is then added; by default
        one-level on tensor cores, and two-level for float32 and float64.

    Raises
    ------
    TypeError, ValueError
        Naming the field, its value and what is allowed.

    Examples
    --------
    >>> Numerics() == Numerics(p_dtype="input", exp="ex2.approx", rescale_threshold=0, tile=None, accumulate=None)
    True
    >>> Numerics(exp="poly4")
    Traceback (most recent call last):
        ...
    ValueError: exp: 'poly4' is not one of 'ex2.approx', 'poly3', 'poly5', 'accurate'
    """

    p_dtype: PDtype = "input"
    exp: Exponential = "ex2.approx"
    rescale_threshold: float = 0.0
    tile: tuple[int, int] | None = None
    accumulate: Accumulation | None = None

    def __post_init__(self):
        _check_choice("p_dtype", self.p_dtype, get_args(PDtype))
        _check_choice("exp", self.exp, get_args(Exponential))
        _check_choice("accumulate", self.accumulate, (None, *get_args(Accumulation)))
        threshold = self.rescale_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
            raise TypeError(f"rescale_threshold: expected 0 or 8, not {described(threshold)}")
        _check_choice("rescale_threshold", threshold, RESCALE_THRESHOLDS)
        object.__setattr__(self, "rescale_threshold", float(threshold))
        if self.tile is not None:
            object.__setattr__(self, "tile", _checked_tile(self.tile))


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(value, str | numbers.Real | None) and value in allowed:
        return
    raise ValueError(f"{name}: {described(value)} is not one of {', '.join(map(repr, allowed))}")


def _checked_tile(tile: Any) -> tuple[int, int]:
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        raise TypeError(f"tile: expected (block_m, block_n) or None, not {described(tile)}")
    for size in tile:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"tile: expected (block_m, block_n), both whole numbers, or None, not {described(tile)}")
        if size <= 0 or size % TILE_STEP:
            raise ValueError(f"tile: {size} in {tile!r} is not a positive multiple of {TILE_STEP}")
    return int(tile[0]), int(tile[1])


PLAIN = Numerics()


def defines(numerics: Numerics, *, backward: bool = False) -> dict[str, int | str]:
    """Constants of numerics.cuh that are not their defaults; the tile's are the kernel's own.

    >>> defines(Numerics(exp="poly3", rescale_threshold=8), backward=True)
    {'EXP_DEGREE': 3}
    """
    constants: dict[str, int | str] = {}
    if numerics.exp == "accurate":
        constants["EXP_ACCURATE"] = 1
    elif numerics.exp != "ex2.approx":
        constants["EXP_DEGREE"] = int(numerics.exp.removeprefix("poly"))
    if numerics.p_dtype == "float32":
        constants["P_FLOAT32"] = 1
    if numerics.rescale_threshold and not backward:
        constants["RESCALE_THRESHOLD"] = int(numerics.rescale_threshold)
    if numerics.accumulate is not None:
        constants["TWO_LEVEL"] = int(numerics.accumulate == "two-level")
    return constants
