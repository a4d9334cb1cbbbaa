"""Launches on a GPU that are given copies of host memory: what a simulated launch is compared with."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash import _launch
from cupyflash._launch import Launch


@dataclass(frozen=True)
class Region:
    """Bytes of host memory that arrays lie in."""

    start: int
    host: np.ndarray  # of uint8, the memory itself

    @property
    def stop(self) -> int:
        return self.start + self.host.size


def regions(arrays: Sequence[np.ndarray]) -> list[Region]:
    """What the arrays span, gaps included; what overlaps is one region."""
    spans = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays if array.size)
    merged: list[list[int]] = []
    for low, high in spans:
        if merged and low < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return [Region(low, _memory(low, high - low)) for low, high in merged]


def _memory(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def moved(array: np.ndarray, memory: Sequence[Region], addresses: Sequence[int]) -> int:
    """Where an array is once each region is at one of the addresses; 0 for one without elements."""
    place = array.__array_interface__["data"][0]
    return next((to + place - x.start for x, to in zip(memory, addresses, strict=True) if x.start <= place < x.stop), 0)


class Card:
    """Runs launches on the GPU, on copies of host memory."""

    def __init__(self, cupy: Any, folder: Path):
        self._cupy, self._folder = cupy, folder
        self.arch = f"sm_{cupy.cuda.Device().compute_capability}"

    def from_ptx(self, ptx: str, name: str) -> Any:
        """A kernel that the driver assembles. One that knows only older PTX is told that it is older.

        What newer versions of the ISA add is not in our kernels; the driver would say so.
        """
        own = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
        for version in _versions_down_from(int(own[1]), int(own[2])):
            text = f"{ptx[: own.start()]}.version {version}{ptx[own.end() :]}"
            path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.ptx"
            path.write_text(text)
            try:
                return self._cupy.RawModule(path=str(path)).get_function(name)
            except RuntimeError as error:  # CUDADriverError
                if "UNSUPPORTED_PTX_VERSION" not in str(error):
                    raise
        raise RuntimeError(f"the driver knows no PTX from {own[0].strip('.')} down")

    def from_source(self, source: str, name: str) -> Any:
        """A kernel that NVRTC assembles, as the library has it."""
        return self._cupy.RawModule(code=source, options=_launch.OPTIONS).get_function(name)

    def after(self, kernel: Any, launch: Launch, memory: Sequence[Region]) -> list[np.ndarray]:
        """What the launch leaves in each region, which stays as it is on the host."""
        copies = [self._copied(region) for region in memory]
        addresses = [copy.data.ptr for copy in copies]
        config = launch.config
        if config.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = config.shared_bytes
        params = launch.params.at(moved(array, memory, addresses) for array in launch.arrays)
        kernel((config.grid,), (config.block,), (params,), shared_mem=config.shared_bytes)
        return [copy.get() for copy in copies]

    def _copied(self, region: Region) -> Any:
        """As far from a multiple of 256 bytes as on the host, for kernels that load 16 at a time."""
        misalignment = region.start % 256
        memory = self._cupy.empty(misalignment + region.host.size, np.uint8)[misalignment:]
        memory.set(region.host)
        return memory

    def first_after(self, kernel: Any, grid: int, block: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The first array as a kernel leaves it whose arguments are these arrays."""
        copies = [self._cupy.asarray(array.view(np.uint8)) for array in arrays]
        kernel((grid,), (block,), tuple(copies))
        return copies[0].get().view(arrays[0].dtype)


def _versions_down_from(major: int, minor: int) -> Iterator[str]:
    """Of the PTX ISA, to that of CUDA 11.4.

    >>> list(_versions_down_from(9, 1))[:4]
    ['9.1', '9.0', '8.9', '8.8']
    """
    while (major, minor) >= (7, 4):
        yield f"{major}.{minor}"
        major, minor = (major, minor - 1) if minor else (major - 1, 9)
