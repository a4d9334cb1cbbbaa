"""Kernel arguments as words of a command line, such as ``in:x.npy``, ``out:f32:1024x64`` and ``i32:7``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np

from cupyflash import ptxsim
from cupyflash._cli import files
from cupyflash._cli.errors import CommandError

DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    **{f"{kind}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)},
    "bool": np.dtype(np.bool_),
}

GRAMMAR = f"""\
kernel arguments, in the kernel's order; they count from 0:
  in:FILE.npy           an array that the kernel only reads
  inout:FILE.npy        an array that it may write; the file stays as it is
  out:TYPE:SHAPE        an array whose elements have no value before the kernel writes them
  zeros:TYPE:SHAPE      an array of zeros that it may write
  random:TYPE:SHAPE     standard normal numbers, for integers 0 to 99, by --seed; the kernel only reads them
  inout-random:TYPE:SHAPE  the same numbers in an array that it may write
  TYPE:VALUE            a scalar, such as i32:7, f32:0.5 or bool:1
  null                  a null pointer
TYPE is one of {", ".join(DTYPES)}; SHAPE is 1024 or 8x1024x64.
Two-byte elements without a type, as NumPy saves bfloat16, are bf16.
--global NAME=ARG sets a __constant__ or __device__ variable to the bytes of an argument that has values.
"""

_FILES, _SHAPES = ("in", "inout"), ("out", "zeros", "random", "inout-random")


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument, and whether the kernel may write it."""

    text: str
    value: np.ndarray | np.generic | None
    writable: bool = False
    file: Path | None = None  # that it was read from, links resolved


def parse(texts: list[str], seed: int) -> list[Argument]:
    """The kernel's arguments; raises CommandError that names the number of a wrong one."""
    parsed = []
    for number, text in enumerate(texts):
        try:
            parsed.append(_parsed(text, (seed, number)))
        except CommandError as error:
            raise CommandError(f"--arg {number}: {text}: {error}") from error
        except MemoryError as error:
            raise CommandError(f"--arg {number}: {text}: not enough memory") from error
    return parsed


def parse_globals(texts: list[str], seed: int) -> dict[str, Argument]:
    """Values of variables by their names; raises CommandError that repeats a wrong one."""
    parsed = {}
    for number, text in enumerate(texts):
        name, equals, rest = text.partition("=")
        try:
            if not name or not equals:
                raise CommandError("is not of the form NAME=ARG")
            if name in parsed:
                raise CommandError(f"{name} is set already")
            if rest == "null" or rest.startswith("out:"):
                raise CommandError(f"{rest} has no values")
            parsed[name] = _parsed(rest, (seed, number, 1))  # other numbers than those of arguments
        except CommandError as error:
            raise CommandError(f"--global {text}: {error}") from error
        except MemoryError as error:
            raise CommandError(f"--global {text}: not enough memory") from error
    return parsed


def _parsed(text: str, seed: tuple[int, ...]) -> Argument:
    if text == "null":
        return Argument(text, None)
    kind, colon, rest = text.partition(":")
    if colon and kind in _FILES:
        array = _read(Path(rest))
        array.flags.writeable = kind == "inout"
        return Argument(text, array, kind == "inout", Path(rest).resolve())
    if colon and kind in _SHAPES:
        name, _, shape = rest.partition(":")
        return Argument(text, _made(kind, _dtype(name), _shape(shape), seed), kind != "random")
    if colon and kind in DTYPES:
        return Argument(text, _scalar(rest, DTYPES[kind]))
    allowed = [f"{word}:..." for word in (*_FILES, *_SHAPES, *DTYPES)]
    raise CommandError(f"is not one of {', '.join(allowed)}, null")


def _read(path: Path) -> np.ndarray:
    array = files.read_npy(path)
    if array.dtype == files.OPAQUE:
        array = array.view(ml_dtypes.bfloat16)
    elif array.dtype.kind not in "fiubc":
        raise CommandError(f"dtype {array.dtype} is neither a number nor bool")
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _dtype(name: str) -> np.dtype:
    if name not in DTYPES:
        raise CommandError(f"type {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _shape(text: str) -> tuple[int, ...]:
    if not all(files.is_natural(length) for length in text.split("x")):
        raise CommandError(f"shape {text!r} is not of the form 1024 or 8x1024x64")
    return tuple(int(length) for length in text.split("x"))


def _made(kind: str, dtype: np.dtype, shape: tuple[int, ...], seed: tuple[int, ...]) -> np.ndarray:
    try:
        if kind in ("out", "zeros"):
            return ptxsim.empty(shape, dtype) if kind == "out" else np.zeros(shape, dtype)
        rng = np.random.default_rng(seed)
        integers = dtype.kind in "iub"
        drawn = rng.integers(0, 2 if dtype.kind == "b" else 100, shape) if integers else rng.standard_normal(shape)
        array = drawn.astype(dtype)
        array.flags.writeable = kind != "random"
        return array
    except (OverflowError, ValueError) as error:  # more bytes than an address has
        raise CommandError(error) from error


def _scalar(text: str, dtype: np.dtype) -> np.generic:
    if dtype.kind == "b":
        if text not in ("0", "1", "false", "true"):
            raise CommandError(f"{text!r} is not one of 0, 1, false, true")
        return np.bool_(text in ("1", "true"))
    try:
        if not text.isascii() or "_" in text:  # Python's numbers may have them
            raise ValueError
        value = int(text, 0) if dtype.kind in "iu" else float(text)
    except ValueError:
        raise CommandError(f"{text!r} is not a {'whole ' * (dtype.kind in 'iu')}number") from None
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise CommandError(f"{value} is not between {limits.min} and {limits.max}")
        return dtype.type(value)
    with np.errstate(over="ignore"):
        rounded = dtype.type(value)
    if np.isinf(rounded) and not np.isinf(value):
        raise CommandError(f"{text} is too large for {dtype} and would become infinite")
    return rounded
