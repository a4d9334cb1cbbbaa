"""What kernels are told of a call's options: constants, and the members of ``VariantParams`` in variant.cuh.

An option that is off has neither. The optional operands' layouts are those of any other operand of the call: with
strides for each batch in the forward, and split into owners and reduced ones in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash._arrays import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from cupyflash._layouts import Layout
from cupyflash._lengths import heads_of
from cupyflash._options import NO_ORIGIN, drop_threshold
from cupyflash._problem import Problem
from cupyflash._shapes import MAX_SEQLEN
from cupyflash._user_functions import aux_dtype, aux_params, user_functions

#: Names of the element types in the kernels.
ELEMENT = {FLOAT16: "Half", BFLOAT16: "BFloat16", FLOAT32: "float", FLOAT64: "double"}

#: C++ name of the constant that holds an operand's element type.
_ELEMENT_CONSTANTS = {"bias": "BIAS", "alibi_slopes": "ALIBI", "attn_sink": "SINK"}
PADDED, PACKED = 1, 2  # values of LENGTHS
_PHILOX = np.dtype([("key_low", np.uint32), ("key_high", np.uint32)])
_PLACE = np.dtype([(name, np.int32) for name in ("batch", "head", "query", "key")])
_LENGTHS = ("seqlens_q", "seqlens_k")
_PAIR_OPERANDS = ("mask", "bias")  # one value for each query and key


def defines(problem: Problem, *, return_max: bool = False, split: bool = False) -> dict[str, int | str]:
    """Constants of the options that are on."""
    left, right = problem.window
    constants: dict[str, int | str] = {"BAND_RIGHT": int(right is not None)}
    if left is not None:
        constants["BAND_LEFT"] = 1
    if _with_lengths(problem):
        constants["LENGTHS"] = lengths(problem)
    if problem.stacked_heads > 1:
        constants["STACKED"] = 1
    for name, constant in (("softcap", "SOFTCAP"), ("dropout_p", "DROPOUT")):
        if getattr(problem, name):
            constants[constant] = 1
    if "mask" in problem.operands:
        constants["MASK"] = 1
    for name, constant in _ELEMENT_CONSTANTS.items():
        if name in problem.operands:
            constants[constant] = ELEMENT[problem.operands[name].dtype]
    if split:
        constants["SPLIT"] = 1
    if return_max:
        constants["RETURN_MAX"] = 1
    if functions := user_functions(problem):
        constants |= functions.constants
    if _with_origin(problem):
        constants["ORIGIN"] = 1
    if with_block_mask(problem):
        constants["BLOCK_MASK"] = problem.block_mask.block_size
    return constants


def lengths(problem: Problem) -> int:
    """``LENGTHS``, and 0 where all rows count."""
    return 0 if not _with_lengths(problem) else PACKED if problem.packed else PADDED


def pair_by_pair(problem: Problem) -> bool:
    """Whether kernels compute each score by its indices, and not from the product alone (``PAIR_BY_PAIR``)."""
    return (
        problem.softcap is not None
        or user_functions(problem) is not None
        or any(name in problem.operands for name in ("mask", "bias", "alibi_slopes"))
    )


def band(problem: Problem) -> dict[str, int]:
    """Query i sees key j iff i + band_left <= j <= i + band_right; lengths shift the band, too, in the kernel."""
    left, right = problem.window
    shift = _shift(problem)
    return {
        "band_left": max(-MAX_SEQLEN, shift - (left or 0)),
        "band_right": min(MAX_SEQLEN, shift + (right or 0)),
    }


def _shift(problem: Problem) -> int:
    """Of the diagonal, beside what each batch's lengths make of it in the kernel."""
    return problem.offset if _with_lengths(problem) else problem.shift


def arrays(problem: Problem, device: Any) -> dict[str, Any]:
    """The optional operands and the arrays of expressions, which kernels read, on the device."""
    result = {name: device.from_host(array) if name in _LENGTHS else array for name, array in problem.operands.items()}
    if problem.packed:
        offsets = problem.packed.offsets_q, problem.packed.offsets_k
        result |= {name: device.from_host(array) for name, array in zip(_LENGTHS, offsets, strict=True)}
    if with_block_mask(problem):
        result["block_mask"] = problem.block_mask.bits
    return result | {f"aux[{name!r}]": array for name, array in problem.aux.items()}


def layouts(problem: Problem) -> dict[str, Layout]:
    """Their layouts, and that of the batches' numbers: an operand at address 0, one byte for each batch."""
    result = dict(problem.layouts)
    if problem.packed:  # one sequence starts at each offset
        per_sequence = (int(problem.packed.num_seqs > 1), *(0 for _ in problem.batch_shape[1:]))
        result |= dict.fromkeys(_LENGTHS, Layout(per_sequence, 0, 0))
    if with_block_mask(problem):
        result["block_mask"] = problem.block_mask.layout(problem)
    if _with_batch_number(problem):
        sizes = problem.batch_shape
        strides = tuple(math.prod(sizes[axis + 1 :]) if size > 1 else 0 for axis, size in enumerate(sizes))
        result["batch_number"] = Layout(strides, 0, 0)
    return result


def params_dtype(
    problem: Problem, operand: np.dtype, *, return_max: bool = False, split: bool = False, with_dslope: bool = False
) -> np.dtype:
    """``VariantParams`` over operands of this structure; an empty structure is one byte."""
    compute = problem.lse_dtype
    pairs = np.dtype([("operand", operand), ("column_stride", np.int64)], align=True)
    fields: list[tuple[str, Any]] = []
    if _with_lengths(problem):
        fields += [(name, operand) for name in _LENGTHS]
        if problem.packed:
            fields.append(("total_queries", np.int64))
        fields.append(("bottom_right", np.int32))
    if problem.stacked_heads > 1:
        fields.append(("stacked_heads", np.int32))
    if problem.softcap is not None:
        fields.append(("softcap", compute))
    fields += [(name, pairs) for name in _PAIR_OPERANDS if name in problem.operands]
    if "alibi_slopes" in problem.operands:
        fields += [("alibi_slopes", operand), ("shift", np.int32)]
    if with_dslope:
        fields.append(("dslope_rows", operand))
    if "attn_sink" in problem.operands:
        fields.append(("attn_sink", operand))
    if problem.dropout_p:
        fields += [("philox", _PHILOX), ("drop_below", np.uint32), ("keep_scale", compute)]
    if _with_batch_number(problem):
        fields += [("batch_number", operand), ("num_heads", np.int32)]
    if _with_origin(problem):
        fields.append(("origin", _PLACE))
    if split:
        fields += [
            ("split_size", np.int32),
            ("num_splits", np.int32),
            ("num_rows", np.int64),
            ("partial_out", np.uint64),
        ]
    if return_max:
        fields.append(("row_max", np.uint64))
    if user_functions(problem):
        fields.append(("aux", aux_dtype(problem.aux)))
    if with_block_mask(problem):
        fields.append(("block_mask", operand))
    return np.dtype(fields or [("empty", np.uint8)], align=True)


def params(
    problem: Problem,
    operands: Mapping[str, dict[str, Any]],
    row_max: Any = None,
    parts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Values of ``VariantParams``; ``operands`` has those of each optional operand's structure, with its array.

    ``row_max`` is an array, ``parts`` has the members of a kernel whose keys are split.
    """
    values: dict[str, Any] = dict(parts or {})
    if _with_lengths(problem):
        values |= {name: operands[name] for name in _LENGTHS if name in operands}
        values["bottom_right"] = problem.bottom_right
        if problem.packed:
            values["total_queries"] = problem.packed.total_q
    if problem.stacked_heads > 1:
        values["stacked_heads"] = problem.stacked_heads
    if problem.softcap is not None:
        values["softcap"] = problem.softcap
    for name in _PAIR_OPERANDS:
        if name in operands:
            values[name] = {"operand": operands[name], "column_stride": problem.layouts[name].column_stride}
    if "alibi_slopes" in operands:
        values |= {"alibi_slopes": operands["alibi_slopes"], "shift": _shift(problem)}
    if "dslope_rows" in operands:
        values["dslope_rows"] = operands["dslope_rows"]
    if "attn_sink" in operands:
        values["attn_sink"] = operands["attn_sink"]
    if problem.dropout_p:
        values |= {
            "philox": {"key_low": problem.seed % 2**32, "key_high": problem.seed // 2**32},
            "drop_below": drop_threshold(problem.dropout_p),
            "keep_scale": 1 / (1 - problem.dropout_p),
        }
    if _with_batch_number(problem):
        values |= {"batch_number": operands["batch_number"], "num_heads": heads_of(problem.leading_shape)}
    if _with_origin(problem):
        values["origin"] = dict(zip(_PLACE.names, problem.origin, strict=True))
    if row_max is not None:
        values["row_max"] = row_max
    if user_functions(problem):
        values["aux"] = aux_params(problem.aux)
    if with_block_mask(problem):
        values["block_mask"] = operands["block_mask"]
    return values


def with_block_mask(problem: Problem) -> bool:
    """Whether kernels skip what a block mask leaves nothing of: where each of their tiles lies in one of its blocks."""
    mask, tile = problem.block_mask, problem.numerics.tile or ()
    return mask is not None and all(mask.block_size % size == 0 for size in tile)


def _with_lengths(problem: Problem) -> bool:
    return problem.packed is not None or any(name in problem.operands for name in _LENGTHS)


def _with_batch_number(problem: Problem) -> bool:
    return problem.dropout_p > 0 or problem.packed is not None or user_functions(problem) is not None


def _with_origin(problem: Problem) -> bool:
    return problem.origin != NO_ORIGIN and (problem.dropout_p > 0 or user_functions(problem) is not None)
