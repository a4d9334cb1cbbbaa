"""Join attention over parts of the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cupyflash import _combine, _launch, _packing
from cupyflash._arrays import (
    ALL_TYPES,
    FLOAT32,
    FLOAT64,
    array_kind,
    check_dtype_and_shape,
    check_element_aligned,
    check_same_place,
)
from cupyflash._launch import Launch
from cupyflash._layouts import Layout


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Attention over all keys from :func:`cupyflash.attention` over parts of them.

    Parameters
    ----------
    outs : sequence of arrays (..., L, Dv)
        One for each part, all of one shape, dtype and kind, any strides.
    lses : sequence of arrays (..., L)
        What was returned with them: float32, for float64 float64. A part that saw no key, with lse -inf, adds nothing.

    Returns
    -------
    out, lse : arrays
        Of the shapes, dtypes and kind of the parts': out = sum_s exp(lse_s - lse) out_s and lse = ln sum_s exp(lse_s),
        summed in the order given.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what is allowed.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 16)).astype(np.float32)
    >>> parts = [attention(q, k[part], v[part], return_lse=True) for part in (slice(0, 3), slice(3, 8))]
    >>> out, lse = merge(*zip(*parts))
    >>> bool(np.allclose(out, attention(q, k, v), atol=1e-6))
    True
    """
    outs, lses = checked_parts(outs, lses)
    device = _launch.device_of(array_kind(outs[0], "outs[0]"), outs[0])
    rows, head_dim_v = math.prod(lses[0].shape), outs[0].shape[-1]
    with device:
        out, lse = device.empty(outs[0].shape, outs[0].dtype), device.empty(lses[0].shape, lses[0].dtype)
        (stacked_outs, out_copies), (stacked_lses, lse_copies) = (
            _stacked(device, outs),
            _stacked(device, [lse[..., None] for lse in lses]),
        )
        params = _launch.pack(
            _combine.params_dtype(),
            partial_out=stacked_outs,
            partial_lse=stacked_lses,
            out={"data": out, "row_stride": head_dim_v},
            lse=lse,
            num_rows=rows,
            num_parts=len(outs),
            num_batches=1,
            seqlen_q=rows,
            head_dim_v=head_dim_v,
        )
        config = _combine.config(out.dtype, out.dtype, rows, {})
        joined = Launch(config, *params)
        _launch.run(device, [*out_copies, *lse_copies, joined])
    return out, lse


def checked_parts(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The arguments of :func:`merge`, or an error that says why not."""
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lses: {len(lses)} for {len(outs)} outs; expected as many, at least one")
    first = outs[0]
    kind = array_kind(first, "outs[0]")
    if first.ndim < 2:
        raise ValueError(f"outs[0]: needs at least 2 dimensions (..., seqlen, head_dim_v), but has shape {first.shape}")
    if first.dtype not in ALL_TYPES or not first.dtype.isnative:
        raise TypeError(f"outs[0]: dtype {first.dtype.str} is not one of {', '.join(map(str, ALL_TYPES))}")
    lse_dtype = FLOAT64 if first.dtype == FLOAT64 else FLOAT32
    for what, arrays, dtype, shape in (
        ("outs", outs, first.dtype, first.shape),
        ("lses", lses, lse_dtype, first.shape[:-1]),
    ):
        for number, array in enumerate(arrays):
            name = f"{what}[{number}]"
            check_same_place(array, name, first, kind)
            check_dtype_and_shape(name, array, dtype, shape)
            check_element_aligned(array, name)
    return outs, lses


def _stacked(device: Any, arrays: Sequence[Any]) -> tuple[Any, list[Launch]]:
    """One contiguous array of all, and the copies that fill it."""
    *leading, rows, columns = arrays[0].shape
    target = device.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    copies = [
        _packing.copy(array, _layout(array), place, _layout(place), tuple(leading), rows, columns)
        for array, place in zip(arrays, target, strict=True)
    ]
    return target, copies if target.size else []


def _layout(array: Any) -> Layout:
    *leading, row, column = (stride // array.dtype.itemsize for stride in array.strides)
    return Layout(tuple(leading), row, column)
