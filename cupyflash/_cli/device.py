"""Where the command line computes: on a GPU where CuPy finds one, else in the simulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import ptxsim
from cupyflash._cli.errors import CommandError
from cupyflash._cli.progress import progress_bar
from cupyflash.ptxsim.binding import give_cupy_a_cache

CHOICES = ("auto", "gpu", "simulator")


@dataclass(frozen=True)
class Device:
    """Moves arrays to where attention computes, and back."""

    description: str
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    arch: str | None  # what the simulator imitates

    @contextlib.contextmanager
    def working(self, description: str) -> Iterator[None]:
        """Within the block, simulated launches imitate ``arch`` and show their progress."""
        if self.arch is None:
            yield
            return
        with ptxsim.settings(arch=self.arch), progress_bar(description):
            yield


def choose(device: str, arch: str | None) -> Device:
    """The device for one of CHOICES; ``arch`` is only for the simulator."""
    cupy, reason = (None, "") if device == "simulator" or (device == "auto" and arch) else _usable_cupy()
    if cupy is None:
        if device == "gpu":
            raise CommandError(f"--device gpu: no usable GPU ({reason}); --device simulator needs none")
        arch = arch or "sm_80"
        return Device(f"in the simulator, as {arch}", np.asarray, np.asarray, arch)
    if arch:
        raise CommandError(f"--arch {arch}: chooses what the simulator imitates, and this runs on a GPU")
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    name = f"on {properties['name'].decode()}, sm_{cupy.cuda.Device().compute_capability}"
    return Device(name, cupy.asarray, cupy.asnumpy, None)


def _usable_cupy() -> tuple[Any, str]:
    try:
        give_cupy_a_cache()
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            return cupy, ""
    except (ImportError, RuntimeError) as error:
        return None, str(error)
    return None, "CuPy finds none"
