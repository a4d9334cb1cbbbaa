"""What is asked of the optional arguments of an attention call."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cupyflash._arrays import FLOAT32, FLOAT64, LOG2_E, check_element_aligned, check_same_place, described
from cupyflash._numerics import PLAIN, Numerics
from cupyflash._user_functions import ARRAY_TYPES, PLACES, check_one_expression

Align = Literal["bottom-right", "top-left"] | int
Window = tuple[int | None, int | None]

#: What an expression may name beside the arrays of ``aux``.
EXPRESSION_NAMES = ("score", *PLACES)
NO_ORIGIN = (0, 0, 0, 0)  # of batch, head, query and key
SPLIT_STEP = 128
DROPOUT_STEPS = 2**32  # a pair is dropped by comparing 32 random bits
MAX_SHIFT = 2**31 - 1  # of the key that a query stands at, either way


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, not {described(value)}")
    return bool(value)


def checked_scale(softmax_scale: Any, head_dim: int, dtype: np.dtype) -> float:
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    scale = _finite("softmax_scale", softmax_scale, "a real number or None")
    arithmetic = FLOAT64 if dtype == FLOAT64 else FLOAT32
    smallest, largest = float(np.finfo(arithmetic).tiny), float(np.finfo(arithmetic).max) / LOG2_E
    if scale and not smallest <= abs(scale) <= largest:
        raise ValueError(
            f"softmax_scale: {softmax_scale!r} is neither 0 nor, in magnitude, between {smallest:.3g} and "
            f"{largest:.3g}, where {arithmetic} holds it and its product with log2(e) as normal numbers"
        )
    return scale


def checked_softcap(softcap: Any, dtype: np.dtype) -> float | None:
    if softcap is None:
        return None
    value = _finite("softcap", softcap, "a positive number or None")
    arithmetic = FLOAT64 if dtype == FLOAT64 else FLOAT32
    smallest = float(np.finfo(arithmetic).tiny)
    if not smallest <= value <= 1 / smallest:
        raise ValueError(
            f"softcap: {softcap!r} is not between {smallest:.3g} and {1 / smallest:.3g}, where {arithmetic} holds it "
            "and its reciprocal as normal numbers; None is no cap"
        )
    return value


def checked_window(
    causal: bool,
    window_size: Any,
    align: Any,
    seqlen_q: int,
    seqlen_k: int,
    *,
    with_alibi: bool = False,
    varying: tuple[str, str] | None = None,
) -> tuple[Window, bool, int]:
    """The window, whether it is aligned to the last key, and else its shift; a side that no key is beyond is open.

    ``varying`` says what gives each batch its own lengths, and what shift is then.
    """
    bottom_right, shift = _checked_align(align)
    left, right = _checked_sides(window_size)
    if causal:
        right = 0
    what = "a causal mask" if causal else "a window" if (left, right) != (None, None) else "ALiBi" if with_alibi else ""
    if what and align is None and (varying or seqlen_q != seqlen_k):
        more_keys = seqlen_k - seqlen_q
        lengths, needed = f"seqlen_q {seqlen_q} and seqlen_k {seqlen_k}", f"{'+-'[more_keys < 0]} {abs(more_keys)}"
        if varying:
            lengths, needed = varying[0], f"+ {varying[1]}"
        meaning = {
            "a causal mask": "sees keys j <= {}",
            "a window": "sees keys around {}",
            "ALiBi": "is at distance |{} - j| of key j",
        }[what]
        to_last, to_first = meaning.format(f"i {needed}"), meaning.format("i")
        raise ValueError(
            f"align: {what} with {lengths} needs one of 'bottom-right' (query i {to_last}: the last query sees "
            f"all, as in decoding), 'top-left' (query i {to_first}) and a whole number (the key that query 0 is at)"
        )
    # The furthest that a key is to the left and to the right of its query's place, in any batch.
    furthest_left, furthest_right = (seqlen_k, seqlen_q) if bottom_right else (seqlen_q + shift, seqlen_k - shift)
    if left is not None and left >= max(furthest_left, 1):
        left = None
    if right is not None and right >= max(furthest_right, 1):
        right = None
    return (left, right), bottom_right, shift


def checked_dropout(dropout_p: Any, seed: Any) -> tuple[float, int]:
    probability = _finite("dropout_p", dropout_p, "a number from 0 to less than 1")
    if not 0 <= probability or drop_threshold(probability) >= DROPOUT_STEPS:
        raise ValueError(
            f"dropout_p: {dropout_p!r} is not at least 0 and, rounded to a multiple of 2**-32, less than 1"
        )
    if seed is None:
        if probability:
            raise ValueError(f"seed: None, but dropout_p is {dropout_p!r}; expected a whole number from 0 to 2**64 - 1")
        return probability, 0
    return probability, checked_seed(seed)


def drop_threshold(dropout_p: float) -> int:
    """A pair is dropped where its 32 random bits are below this number.

    >>> drop_threshold(0.25) == 2**30
    True
    """
    return round(dropout_p * DROPOUT_STEPS)


def checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed: expected a whole number from 0 to 2**64 - 1, not {described(seed)}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed!r} is not between 0 and 2**64 - 1")
    return int(seed)


def checked_origin(origin: Any, ends: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """What positions count from; ``ends`` are how many batches, heads, queries and keys there are."""
    if not isinstance(origin, tuple | list) or len(origin) != 4:
        raise TypeError(f"origin: expected (batch, head, query, key), not {described(origin)}")
    for place, size in zip(origin, ends, strict=True):
        if isinstance(place, bool) or not isinstance(place, numbers.Integral):
            raise TypeError(f"origin: expected whole numbers, not {described(origin)}")
        most = max(MAX_SHIFT - size, 0)
        if not 0 <= place <= most:
            raise ValueError(f"origin: {place} in {origin!r} is not between 0 and {most}")
    batch, head, query, key = map(int, origin)
    return batch, head, query, key


def check_expression(name: str, expression: Any) -> None:
    if expression is None:
        return
    if not isinstance(expression, str):
        allowed, instead = {
            "score_mod": ("a C++ expression as a str, or None", "bias= adds an array to the scores"),
            "mask_mod": ("a C++ expression as a str, a BlockMask or None", "use mask= for an array"),
        }[name]
        hint = f"; {instead}" if hasattr(expression, "dtype") else ""
        raise TypeError(f"{name}: expected {allowed}, not {described(expression)}{hint}")
    if not expression.strip() or not expression.isascii() or "\0" in expression:
        raise ValueError(f"{name}: {expression!r} is not a C++ expression in ASCII characters")
    check_one_expression(name, expression)


def checked_aux(aux: Any, q: Any, kind: str, *, with_expression: bool) -> dict[str, Any]:
    """The arrays that expressions name, by name."""
    if aux is None:
        return {}
    if not isinstance(aux, Mapping):
        raise TypeError(f"aux: expected a mapping of names to arrays, or None, not {type(aux).__name__}")
    if aux and not with_expression:
        raise ValueError(f"aux: {sorted(map(str, aux))} given, but neither score_mod nor mask_mod, which may name them")
    for name, array in aux.items():
        if not isinstance(name, str) or not name.isascii() or not name.isidentifier():
            raise ValueError(f"aux: {name!r} is not a name in ASCII letters, digits and underscores")
        if name in EXPRESSION_NAMES:
            raise ValueError(f"aux: {name!r} is one of {', '.join(EXPRESSION_NAMES)}, which mean something already")
        what = f"aux[{name!r}]"
        check_same_place(array, what, q, kind)
        dtype = array.dtype
        if dtype not in ARRAY_TYPES:
            raise TypeError(f"{what}: dtype {dtype.str} is not bool, an integer or a float of 2, 4 or 8 bytes")
        if not array.flags.c_contiguous:
            raise ValueError(f"{what}: is not C-contiguous, as an expression indexes it; shape {array.shape}")
        check_element_aligned(array, what)
    return dict(aux)


def check_split_size(split_size: Any) -> None:
    if split_size is None:
        return
    if isinstance(split_size, bool) or not isinstance(split_size, numbers.Integral):
        raise TypeError(
            f"split_size: expected a positive multiple of {SPLIT_STEP} or None, not {described(split_size)}"
        )
    if split_size <= 0 or split_size % SPLIT_STEP:
        raise ValueError(f"split_size: {split_size} is not a positive multiple of {SPLIT_STEP}")


def checked_numerics(numerics: Any) -> Numerics:
    if numerics is None:
        return PLAIN
    if not isinstance(numerics, Numerics):
        raise TypeError(f"numerics: expected a cupyflash.Numerics or None, not {described(numerics)}")
    return numerics


def check_operand(name: str, array: Any, q: Any, kind: str, shape: tuple[int, ...]) -> None:
    """Raise unless an optional array may be broadcast to ``shape``."""
    check_same_place(array, name, q, kind)
    if name == "mask":
        if array.dtype != np.bool_:
            raise TypeError(f"mask: dtype {array.dtype}, expected bool (True = attend)")
    elif not array.dtype.isnative:
        raise TypeError(f"{name}: dtype {array.dtype.str} has foreign byte order")
    elif array.dtype not in (q.dtype, FLOAT32, FLOAT64):
        allowed = ", ".join(dict.fromkeys(str(dtype) for dtype in (q.dtype, FLOAT32, FLOAT64)))
        raise TypeError(f"{name}: dtype {array.dtype} is not one of {allowed}")
    check_broadcasts(name, array.shape, shape)
    check_element_aligned(array, name)


def check_broadcasts(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(shape, target) == target
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: shape {shape} does not broadcast to {target}")


def _checked_align(align: Any) -> tuple[bool, int]:
    """Whether the last query is at the last key, and else at which key query 0 is."""
    if align is None or (isinstance(align, str) and align in ("bottom-right", "top-left")):
        return align == "bottom-right", 0
    if isinstance(align, bool) or not isinstance(align, numbers.Integral):
        raise ValueError(
            f"align: {described(align)} is not one of 'bottom-right', 'top-left', a whole number (the key that query 0 "
            "is at) and None"
        )
    if abs(align) > MAX_SHIFT:
        raise ValueError(f"align: {align} is not between {-MAX_SHIFT} and {MAX_SHIFT}")
    return False, int(align)


def _checked_sides(window_size: Any) -> Window:
    if window_size is None:
        return None, None
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size: expected (left, right) or None, not {described(window_size)}")
    for side in window_size:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise TypeError(f"window_size: expected whole numbers or None on both sides, not {described(window_size)}")
        if side < 0:
            raise ValueError(f"window_size: {side} in {window_size!r} is negative; None is an open side")
    left, right = (None if side is None else int(side) for side in window_size)
    return left, right


def _finite(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, not {described(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: {value!r} is not finite")
    return number
