"""RawKernel and RawModule of the simulated CuPy: those of `ptxsim`, launched on arrays of the simulated device."""

import functools
import numbers
from types import MappingProxyType

import numpy as np

from .. import rawmodule
from ..kernel import named_memory
from .array import ndarray, on_host
from .launches import launched, made
from .memory import MemoryPointer, address, adopted, exposed
from .partial import Partial


def _of_the_kernel(name):
    return property(lambda self: getattr(self._kernel, name))


class Kernel(Partial):
    """What both have: a kernel that is compiled when it is first needed, as CuPy's are."""

    _kernel: object  # of ptxsim; a cached property

    def __call__(self, grid, block, args, *, stream=None, **choices):
        launch(self._kernel, self.name, _at_least_one(grid), block, args, **choices)

    def compile(self, log_stream=None):
        """Compile now."""
        self._kernel  # noqa: B018

    @property
    def max_dynamic_shared_size_bytes(self):
        return self._kernel.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value):
        self._kernel.max_dynamic_shared_size_bytes = value

    preferred_shared_memory_carveout = -1
    attributes = _of_the_kernel("attributes")
    binary_version = _of_the_kernel("binary_version")
    cache_mode_ca = _of_the_kernel("cache_mode_ca")
    const_size_bytes = _of_the_kernel("const_size_bytes")
    enable_cooperative_groups = _of_the_kernel("enable_cooperative_groups")
    local_size_bytes = _of_the_kernel("local_size_bytes")
    max_threads_per_block = _of_the_kernel("max_threads_per_block")
    num_regs = _of_the_kernel("num_regs")
    ptx_version = _of_the_kernel("ptx_version")
    shared_size_bytes = _of_the_kernel("shared_size_bytes")


class RawKernel(Kernel):
    """`cupy.RawKernel`, simulated; the choices are those of `ptxsim.RawKernel`."""

    def __init__(self, code, name, *args, **choices):
        self.code, self.name = code, name
        self._make = functools.partial(rawmodule.RawKernel, code, name, *args, **choices)
        made(name)

    @functools.cached_property
    def _kernel(self):
        return self._make()


class RawModule(Partial):
    """`cupy.RawModule`, simulated; the choices are those of `ptxsim.RawModule`."""

    def __init__(self, code=None, **choices):
        self.code = code
        self._make = functools.partial(rawmodule.RawModule, code, **choices)

    @functools.cached_property
    def module(self):
        module = self._make()
        for name in module.kernels:
            made(name)
        return module

    def compile(self, log_stream=None):
        """Compile now."""
        self.module  # noqa: B018

    def get_function(self, name):
        return _FunctionOfModule(name, self.module.get_function(name))

    def get_global(self, name):
        return MemoryPointer.to(adopted(self.module.get_global(name)))


class _FunctionOfModule(Kernel):
    def __init__(self, name, kernel):
        self.name, self._kernel = name, kernel


def launch(kernel, name, grid, block, args, reachable=MappingProxyType({}), **choices):
    """Launch a kernel of `ptxsim`, and count it. `reachable`: name -> NumPy array whose address its arguments hold."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"args: {type(args).__name__}, must be a tuple")
    single = {f"args[{i}]": on_host(x) for i, x in enumerate(args) if isinstance(x, ndarray) and x.size == 1}
    args = tuple(_argument(number, value) for number, value in enumerate(args))
    launched(name)
    with named_memory({**single, **reachable, **exposed()}):
        kernel(grid, block, args, **choices)


def _argument(number, value):
    """As `ptxsim` takes it, which passes an array of one element by its value where that may be meant."""
    if isinstance(value, MemoryPointer):
        return np.uint64(value.ptr)
    if isinstance(value, ndarray):
        host = on_host(value)
        return np.uint64(address(host)) if host.size == 1 else host
    if not isinstance(value, np.ndarray):
        return value
    if value.size != 1:
        raise TypeError(f"args[{number}]: numpy.ndarray, lies in host memory; cupy.asarray(x) copies it to the device")
    return value.reshape(())[()]  # CuPy passes it by its value


def _at_least_one(grid):
    """CuPy launches at least one block in each direction."""
    if isinstance(grid, numbers.Integral):
        return max(1, grid)
    return tuple(max(1, blocks) for blocks in grid)
