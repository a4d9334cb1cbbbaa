"""Families of optional arrays: masks, biases, slopes, sinks and lengths, in any form that broadcasts."""

import numpy as np

from cupyflash.testing import layouts
from cupyflash.testing.values import element_type

#: Shapes that broadcast to (*leading, L, S), by what they have a value for.
PAIR_FORMS = {
    "all": lambda leading, rows, columns: (*leading, rows, columns),
    "pairs": lambda leading, rows, columns: (rows, columns),
    "pairs of heads": lambda leading, rows, columns: (*leading[-1:], rows, columns),
    "pairs of batches": lambda leading, rows, columns: (*leading[:-1], *(1 for _ in leading[-1:]), rows, columns),
    "keys": lambda leading, rows, columns: (columns,),
    "keys of batches": lambda leading, rows, columns: (*leading[:-1], *(1 for _ in leading[-1:]), 1, columns),
    "queries": lambda leading, rows, columns: (*leading, rows, 1),
    "number": lambda leading, rows, columns: (),
}
#: Shapes that broadcast to the leading dimensions.
HEAD_FORMS = {
    "all": lambda leading: leading,
    "heads": lambda leading: leading[-1:],
    "batches": lambda leading: (*leading[:-1], *(1 for _ in leading[-1:])),
    "number": lambda leading: (),
}
OPERAND_TYPES = ["inputs", "float32", "float64"]

MASK_FAMILIES = [
    "random", "sparse", "empty rows", "empty columns", "first tile removed", "band", "prefix", "all", "none",
]  # fmt: skip
BIAS_FAMILIES = ["normal", "some -inf", "finite minimum", "large offsets", "zero"]
SLOPE_FAMILIES = ["geometric", "normal", "zero"]
SINK_FAMILIES = ["normal", "large", "small", "-inf", "some -inf"]
LENGTH_FAMILIES = ["random", "whole", "short", "some 0"]


def operand_dtype(name, inputs):
    """float32 and float64 are names of themselves, "inputs" is that of q, k and v."""
    return element_type(inputs if name == "inputs" else name)


def viewed(array, view):
    """A copy of an array of any number of dimensions in the layout; those that it lacks count as 1."""
    missing = max(2 - array.ndim, 0)
    return layouts.laid_out(array[(None,) * missing], view)[(0,) * missing + (...,)]


def mask_family(name, rng, shape):
    full = (*(1 for _ in range(2 - len(shape))), *shape)
    rows, columns = full[-2:]
    query, key = np.ogrid[:rows, :columns]
    mask = rng.random(full) < (0.1 if name == "sparse" else 0.7)
    if name == "empty rows":
        mask &= rng.random((rows, 1)) < 0.7
    elif name == "empty columns":
        mask &= rng.random(columns) < 0.7
    elif name == "first tile removed":
        mask &= key >= min(64 * rng.integers(1, 3), columns - 1)
    elif name == "band":
        mask[...] = abs(key - query) < 10
    elif name == "prefix":
        mask[...] = (key <= query) | (key < columns // 2)
    elif name in ("all", "none"):
        mask[...] = name == "all"
    return mask.reshape(shape)


def bias_family(name, rng, shape, dtype):
    bias = rng.standard_normal(shape)
    if name == "some -inf":
        bias = np.where(rng.random(shape) < 0.3, -np.inf, bias)
    elif name == "finite minimum":  # what is used for a mask, but is none
        smallest = np.finfo(np.float32).min if dtype.itemsize > 2 else float(np.finfo(np.float16).min)
        whole_rows = rng.random((*shape[:-1], 1)[: len(shape)]) < 0.2
        bias = np.where(whole_rows | (rng.random(shape) < 0.3), smallest, bias)
    elif name == "large offsets":
        bias = bias + 100 * rng.standard_normal((*shape[:-1], 1)[: len(shape)])
    elif name == "zero":
        bias = np.zeros(shape)
    return np.asarray(bias).astype(dtype)


def slope_family(name, rng, shape, dtype):
    heads = shape[-1] if shape else 1
    slopes = rng.standard_normal(shape)
    if name == "geometric":
        slopes = np.broadcast_to(2.0 ** (-8 * np.arange(1, heads + 1) / max(heads, 1)), (*shape[:-1], heads))
    elif name == "zero":
        slopes = np.zeros(shape)
    return np.asarray(slopes).reshape(shape).astype(dtype)


def sink_family(name, rng, shape, dtype):
    sinks = rng.standard_normal(shape) + {"large": 30, "small": -30}.get(name, 0)
    if name == "-inf":
        sinks = np.full(shape, -np.inf)
    elif name == "some -inf":
        sinks = np.where(rng.random(shape) < 0.5, -np.inf, sinks)
    return np.asarray(sinks).astype(dtype)


def length_family(name, rng, shape, longest):
    if name == "whole":
        return np.full(shape, longest)
    lengths = rng.integers(0, longest, shape, endpoint=True)
    if name == "short":
        lengths = lengths // 8
    elif name == "some 0":
        lengths = np.where(rng.random(shape) < 0.4, 0, lengths)
    return np.asarray(lengths)
