"""The GPU that is measured: what CuPy and the driver say of it, and the first columns of every table about it."""

from __future__ import annotations

import datetime
import functools
import hashlib
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash
from cupyflash.ptxsim.binding import give_cupy_a_cache
from experiments import record
from experiments.experiment import Row

COLUMNS = ("card", "driver", "date", "arch", "cuda", "nvrtc", "cupy", "numpy", "python", "machine", "cupyflash", "code")
_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("kernels_cu/*.cu*", "cupyflash/**/*.py")
_STATE = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu", "ecc.mode.current")


class NoGpu(Exception):
    """Why none can be used, in one line."""


@functools.cache
def usable_cupy() -> Any:
    """The module ``cupy`` on a machine with a GPU, or NoGpu."""
    try:
        give_cupy_a_cache()
        import cupy

        cupy.cuda.Device().compute_capability  # raises where there is none  # noqa: B018
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NoGpu(f"CuPy finds no usable GPU ({reason})") from error
    return cupy


@functools.cache
def environment() -> Row:
    """The first columns: card, driver and date, then versions; ``code`` stands for all sources of the library."""
    cupy = usable_cupy()
    values = (
        properties()["name"].decode(),
        state()["driver_version"] or _driver_of_the_kernel(),
        datetime.date.today().isoformat(),
        f"sm_{cupy.cuda.Device().compute_capability}",
        cuda_version(cupy.cuda.runtime.driverGetVersion()),
        record.nvrtc_version(),
        cupy.__version__,
        np.__version__,
        platform.python_version(),
        record.machine(),
        cupyflash.__version__,
        code_digest(_ROOT),
    )
    return dict(zip(COLUMNS, values, strict=True))


def properties() -> dict[str, Any]:
    """As the CUDA runtime has them."""
    cupy = usable_cupy()
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)


@functools.cache
def state() -> Row:
    """What nvidia-smi says of the card, None where there is no such command or value."""
    command = ["nvidia-smi", f"--id={usable_cupy().cuda.Device().pci_bus_id}"]
    try:
        said = subprocess.run(
            [*command, f"--query-gpu={','.join(_STATE)}", "--format=csv,noheader"],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=20,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(_STATE)
    return parsed_state(said)


def parsed_state(said: str) -> Row:
    """Of one line of nvidia-smi.

    >>> parsed_state("580.65.06, 1980 MHz, 3201 MHz, 700.00 W, 31, Enabled")["clocks.max.sm"]
    '1980 MHz'
    """
    values = [value.strip() for value in said.strip().split(",")]
    if len(values) != len(_STATE):
        return dict.fromkeys(_STATE)
    return {name: None if "[" in value else value for name, value in zip(_STATE, values, strict=True)}


def _driver_of_the_kernel() -> str:
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", said)
    return found[0] if found else "unknown"


def cuda_version(number: int) -> str:
    """As it is written.

    >>> cuda_version(12090), cuda_version(13000)
    ('12.9', '13.0')
    """
    return f"{number // 1000}.{number % 1000 // 10}"


def code_digest(root: Path) -> str:
    """Eight digits that change with any source of the library: results of one code are not mixed with another's."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _CODE for path in root.glob(pattern)):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]
