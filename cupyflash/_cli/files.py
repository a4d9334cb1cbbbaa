"""Arrays from files, and output files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from cupyflash._cli.errors import CommandError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = tuple(np.dtype(t) for t in (np.float16, np.float32, np.float64))
#: NumPy's file format knows no bfloat16: np.save writes such an array as two opaque bytes per element.
OPAQUE = np.dtype("V2")


def read_operands(paths: Sequence[Path], names: Sequence[str]) -> dict[str, np.ndarray]:
    """q, k and v, each under what messages call it, from three .npy files or from three arrays of one .npz."""
    if len(paths) == 3:
        return {f"{path} ({operand})": read_npy(path) for path, operand in zip(paths, "qkv", strict=True)}
    if len(paths) != 1:
        raise CommandError(f"{len(paths)} input files: expected three .npy files, q k v, or one .npz")
    return _read_npz(paths[0], names)


def read_npy(path: Path) -> np.ndarray:
    """The one array of a file."""
    loaded = _load(path)
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise CommandError(f"{path}: is an .npz archive, not one array")
    return loaded


def as_element(array: np.ndarray, name: str, dtype: np.dtype | None) -> np.ndarray:
    """``array`` in the dtype asked for, or in its own."""
    if array.dtype == OPAQUE:
        if dtype != _BFLOAT16:
            raise CommandError(
                f"{name}: elements are two opaque bytes, as NumPy saves bfloat16; --dtype bfloat16 says that they are"
            )
        return array.view(_BFLOAT16)
    if array.dtype.newbyteorder("=") not in _FLOATS:
        raise CommandError(f"{name}: dtype {array.dtype} is not one of float16, float32, float64, bfloat16 (as V2)")
    if dtype is None:
        dtype = array.dtype.newbyteorder("=")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    overflowed = np.count_nonzero(np.isinf(cast) & np.isfinite(array))
    if overflowed:
        raise CommandError(f"{name}: {overflowed} finite values are too large for {dtype} and would become infinite")
    return cast


def check_apart(outputs: Mapping[Path, Path], inputs: Collection[Path]) -> None:
    """Raise where an output, as it is given and with links resolved, is one of the inputs, their links resolved."""
    for path, target in outputs.items():
        if target in inputs:
            raise CommandError(f"{path}: would be written over, and is an input")


def check_target(path: Path) -> Path:
    """The file that a result goes to, links resolved; raises where it could not be written."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise CommandError(f"{path}: is a directory; name a file")
    if target.exists() and not target.is_file():
        raise CommandError(f"{path}: is not a regular file")
    if not target.parent.is_dir():
        raise CommandError(f"{path}: there is no directory {target.parent}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise CommandError(f"{path}: no permission to write in {target.parent}")
    return target


def is_natural(text: str) -> bool:
    """Whether a word of the command line is a whole number of at least 0, in ASCII digits alone."""
    return text.isascii() and text.isdecimal()


def write_files(contents: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write every file beside its target and then move all into place; on any failure nothing is left."""
    unfinished: dict[Path, Path] = {}
    try:
        for path, write in contents.items():
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            unfinished[path] = partial
            with open(partial, "xb") as file:
                write(file)
        for path in contents:
            os.replace(unfinished[path], path)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error
    finally:
        for partial in unfinished.values():
            partial.unlink(missing_ok=True)


def _read_npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    loaded = _load(path)
    if isinstance(loaded, np.ndarray):
        raise CommandError(f"{path}: is one array; expected three .npy files, q k v, or one .npz")
    with loaded:
        for name in names:
            if name not in loaded.files:
                found = ", ".join(loaded.files) or "none"
                raise CommandError(f"{path}: no array {name!r} in it, but {found}; --names Q K V chooses")
        return {
            f"{path}:{name} ({operand})": _checked(path, lambda name=name: loaded[name])
            for operand, name in zip("qkv", names, strict=True)
        }


def _load(path: Path):
    return _checked(path, lambda: np.load(path, allow_pickle=False))


def _checked(path: Path, read: Callable):
    try:
        return read()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CommandError(f"{path}: not enough memory ({error})") from error
    except Exception as error:  # damaged bytes surface as any error of NumPy's, zipfile's or tokenize's readers
        raise CommandError(f"{path}: not a readable .npy or .npz file ({error})") from error
