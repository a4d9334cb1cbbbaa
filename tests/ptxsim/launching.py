"""Compile once, launch often: what tests of whole kernels share."""

import functools
import re

import numpy as np

from cupyflash import ptxsim

OPTIONS = ("-std=c++17", "-fmad=false")

SCHEDULES = [{"schedule": "lockstep"}, {"schedule": "random", "seed": 1}, {"schedule": "random", "seed": 2}]


def schedule_name(settings):
    """The id of a parametrised schedule."""
    return "-".join(str(value) for value in settings.values())


@functools.cache
def module(source, arch="sm_80", options=OPTIONS):
    """The module of a source for an arch; equal sources are compiled once."""
    with ptxsim.settings(arch=arch):
        return ptxsim.RawModule(code=source, options=options)


def launch(source, grid, block, *args, name=None, arch="sm_80", shared_mem=0, **settings):
    """Run one kernel of a source (its first, unless named). Ints for grid and block mean one dimension."""
    name = name or re.search(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", source).group(1)
    grid, block = ((n,) if isinstance(n, int) else tuple(n) for n in (grid, block))
    with ptxsim.settings(arch=arch, **settings):
        module(source, arch).get_function(name)(grid, block, args, shared_mem=shared_mem)


def poisoned(shape, dtype):
    """An output that is wrong everywhere until a kernel writes it: NaN, or a pattern of 0xA5."""
    out = np.empty(shape, dtype)
    out.view(np.uint8)[...] = 0xA5
    if np.dtype(dtype).kind == "f":
        out[...] = np.nan
    return out


def zeros(count, dtype=np.float32):
    """An array of zeros, of float32 unless told."""
    return np.zeros(count, dtype)


def python_threads(function, grid, block):
    """function(block, thread) for every thread of a 1-D launch, as one array: the model to compare with."""
    return np.array([[function(b, t) for t in range(block)] for b in range(grid)])
