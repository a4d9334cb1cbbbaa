"""PTX that was compiled elsewhere: read from a file, and which GPUs it is for."""

import re
from pathlib import Path

_MACHINE_CODE = {b"\x7fELF": "a cubin", b"\x50\xed\x55\xba": "a fatbin"}
_TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)([af]?)", re.MULTILINE)


def is_ptx(text):
    """Whether a text is PTX, by the directive that each such file has."""
    return bool(_TARGET.search(text))


def read_ptx(path):
    """The text of a PTX file. Raises OSError, and ValueError for a file of anything else."""
    data = Path(path).read_bytes()
    for magic, kind in _MACHINE_CODE.items():
        if data.startswith(magic):
            raise ValueError(f"path: {path!r} is {kind}: machine code does not run here, only PTX or CUDA C++ does")
    text = data.decode(errors="replace")
    if not is_ptx(text):
        raise ValueError(f"path: {path!r} is no PTX: it has no line with .target sm_")
    return text


def check_target(path, text, arch):
    """Raise ValueError for PTX that a GPU of an architecture cannot load.

    PTX is for its target and all later ones; with the suffix a for that target only, with f for its family: those of
    the same major compute capability from it on (PTX ISA, .target).
    """
    number, suffix = _TARGET.search(text).groups()
    target, have = int(number), int(arch.removeprefix("sm_"))
    fits = {"": target <= have, "a": target == have, "f": target <= have and target // 10 == have // 10}[suffix]
    if not fits:
        raise ValueError(f"path: {path!r} is PTX for sm_{number}{suffix}, which {arch} cannot run (settings: arch)")
