"""Run CUDA kernels on NumPy arrays: the PTX that NVRTC makes of them, executed without a GPU.

The interface is that of `cupy.RawModule` and `cupy.RawKernel`, for any kernel:

>>> import numpy as np
>>> source = '''
... extern "C" __global__ void scale(float* x, float factor, int n) {
...     int i = blockIdx.x * blockDim.x + threadIdx.x;
...     if (i < n) x[i] *= factor;
... }'''
>>> x = np.arange(5, dtype=np.float32)
>>> kernel = RawModule(code=source).get_function("scale")
>>> kernel((1,), (32,), (x, np.float32(0.5), np.int32(4)))
>>> x
array([0. , 0.5, 1. , 1.5, 4. ], dtype=float32)

An access outside the arrays raises, and names the thread and the source line:

>>> kernel((1,), (32,), (x, np.float32(0.5), np.int32(6)))  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
cupyflash.ptxsim.errors.MemoryFault: read of 4 bytes in global memory at 0x...; kernel scale, thread (5, 0, 0) of ...

`cupyflash.ptxsim.testing` is a plugin for pytest with which a project that launches its kernels through CuPy runs its
tests without a GPU.
"""

from .compile import compile_ptx
from .errors import CompileError, CompilerMissing, Deadlock, MemoryFault, SimulationError
from .kernel import device_memory
from .occupancy import occupancy
from .profile import KernelProfile, profile
from .rawmodule import RawKernel, RawModule
from .resources import resources
from .sanitizer import Finding, Report, empty, sanitize
from .settings import settings

__all__ = [
    "CompileError",
    "CompilerMissing",
    "Deadlock",
    "Finding",
    "KernelProfile",
    "MemoryFault",
    "RawKernel",
    "RawModule",
    "Report",
    "SimulationError",
    "compile_ptx",
    "device_memory",
    "empty",
    "occupancy",
    "profile",
    "resources",
    "sanitize",
    "settings",
]
