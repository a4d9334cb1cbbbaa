"""One kernel of a module, with the signature and the attributes of CuPy's."""

import contextlib
import contextvars
import math
import numbers

import numpy as np

from .arguments import check_dtype, packed
from .cooperative import check_resident
from .launch import Launch
from .occupancy import most_threads
from .profile import current_profile
from .resources import resources
from .sanitizer import current_report
from .settings import current

_mapped = contextvars.ContextVar("ptxsim_mapped")  # name -> array
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_SHARED_UNASKED = 48 * 1024  # bytes a block may have without max_dynamic_shared_size_bytes
_ATTRIBUTES = (
    "max_threads_per_block",
    "shared_size_bytes",
    "const_size_bytes",
    "local_size_bytes",
    "num_regs",
    "ptx_version",
    "binary_version",
    "cache_mode_ca",
    "max_dynamic_shared_size_bytes",
    "preferred_shared_memory_carveout",
)


@contextlib.contextmanager
def device_memory(*arrays):
    """Within the block, kernels may also touch these arrays, through pointers inside their arguments.

    Arguments that are arrays themselves need no mention.
    """
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"device_memory: {type(array).__name__}, must be numpy.ndarray")
        check_dtype("device_memory", array)
    first = len(_mapped.get({}))
    with named_memory({f"device_memory array {i}": array for i, array in enumerate(arrays, first)}):
        yield


@contextlib.contextmanager
def named_memory(arrays):
    """The same for arrays by the names that faults and findings call them."""
    token = _mapped.set(_mapped.get({}) | arrays)
    try:
        yield
    finally:
        _mapped.reset(token)


class Kernel:
    """One kernel of a module. Call it as `kernel(grid, block, args, shared_mem=0, stream=None)`.

    Arguments follow `cupy.RawKernel`: an array passes the address of its element [0, ..., 0], an int
    passes 8 bytes, a float a double, a complex two, a bool one byte, a NumPy scalar (structured ones too) its own
    bytes, None a null pointer. An array of one element is passed by value, as CuPy passes NumPy's, where the kernel
    takes a structure, or anything that is too small or too large for an address. Unlike CuPy's, number and sizes are
    checked against the kernel; of an integer the low bytes do where the parameter is a smaller integer that holds its
    value.

    A launch has ended when the call returns, which keeps the order of every stream: a CuPy stream is taken, and changes
    nothing.

    The attributes are CuPy's. For `num_regs`, `shared_size_bytes`, `local_size_bytes` and, without
    `__launch_bounds__`, `max_threads_per_block`, NVRTC assembles the code for the architecture of the settings in force
    when one of them is first asked for.
    """

    __slots__ = ("__name__", "module", "name", "preferred_shared_memory_carveout")

    def __init__(self, module, name):
        self.module, self.name, self.__name__ = module, name, name
        self.preferred_shared_memory_carveout = -1  # a hint to the hardware

    def __call__(self, grid, block, args, *, shared_mem=0, stream=None):
        if stream is not None and not hasattr(stream, "ptr"):
            raise TypeError(f"stream: {type(stream).__name__}, must be a cupy.cuda.Stream or None")
        grid, block = _triple("grid", grid, _MAX_GRID), _triple("block", block, _MAX_BLOCK)
        threads = block[0] * block[1] * block[2]
        if threads > 1024:
            raise ValueError(f"block: {block} has {threads} threads, at most 1024 are possible")
        profile, report = current_profile(), current_report()
        program = self.module._load(current().arch).program(self.name, profile is not None, report is not None)
        bound = _bound(program.function)
        if bound and threads > bound:
            raise ValueError(f"block: {block} has {threads} threads, {self.name} is compiled for at most {bound}")
        required = program.function.attributes.get("reqntid")
        if required and (*required, 1, 1)[:3] != block:
            raise ValueError(f"block: {block}, {self.name} is compiled for {required} only")
        if isinstance(shared_mem, bool) or not isinstance(shared_mem, numbers.Integral) or shared_mem < 0:
            raise ValueError(f"shared_mem: {shared_mem!r}, must be a non-negative integer")
        used, limit = program.shared_bytes + int(shared_mem), current().shared_limit
        if used > limit:
            raise ValueError(f"shared_mem: {used} bytes with the static ones, {current().arch} has {limit} per block")
        if program.shared_bytes > _SHARED_UNASKED:
            raise ValueError(
                f"{self.name}: {program.shared_bytes} bytes of static shared memory, at most 49152 assemble"
            )
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise ValueError(
                f"shared_mem: {shared_mem} bytes, a GPU launches this kernel with at most "
                f"{self.max_dynamic_shared_size_bytes} until its max_dynamic_shared_size_bytes is set"
            )
        parameters = packed(program, args)
        arrays = {f"args[{i}]": a for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        arrays |= _mapped.get({})
        if self.enable_cooperative_groups:
            check_resident(self.module, self.name, current().arch, math.prod(grid), threads, used)
        with np.errstate(all="ignore"):
            Launch(program, grid, block, parameters, arrays, used, profile, report).run()

    def compile(self, log_stream=None):
        """Compile its module now, for the settings in force: see `RawModule.compile`."""
        self.module.compile(log_stream)

    @property
    def max_dynamic_shared_size_bytes(self):
        """The most `shared_mem` that a launch may have; can be set, also above the 48 KiB of a GPU's default."""
        unasked = max(0, _SHARED_UNASKED - self._program.shared_bytes)
        return self.module.dynamic_limits.get(self.name, unasked)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
            raise ValueError(f"max_dynamic_shared_size_bytes: {value!r}, must be a non-negative integer")
        used, limit = self._program.shared_bytes + int(value), current().shared_limit
        if used > limit:
            raise ValueError(
                f"max_dynamic_shared_size_bytes: {used} bytes with the static ones, {current().arch} has {limit} "
                "per block"
            )
        self.module.dynamic_limits[self.name] = int(value)

    @property
    def enable_cooperative_groups(self):
        """Whether its launches are cooperative."""
        return self.module.enable_cooperative_groups

    @property
    def num_regs(self):
        """Registers of a thread."""
        return self._resources.registers

    @property
    def shared_size_bytes(self):
        """Static shared memory of a block."""
        return self._resources.static_shared_bytes

    @property
    def const_size_bytes(self):
        """The `__constant__` variables of its module."""
        return self.module._load(current().arch).constant_memory.size

    @property
    def local_size_bytes(self):
        """Local memory of a thread: its stack, with spilled registers."""
        return self._resources.stack_bytes

    @property
    def max_threads_per_block(self):
        """The largest block: by `__launch_bounds__` if there are any, else by the registers."""
        return _bound(self._program.function) or most_threads(self._resources.registers)

    @property
    def ptx_version(self):
        """The compute capability that its PTX is for, times 10."""
        return int(self.module._load(current().arch).parsed.target.removeprefix("sm_").rstrip("af"))

    @property
    def binary_version(self):
        """The compute capability of the GPU that is imitated, times 10."""
        return int(current().arch.removeprefix("sm_"))

    @property
    def cache_mode_ca(self):
        """Whether an option asked the assembler for `dlcm=ca`, as 0 or 1."""
        return int(any("dlcm=ca" in option for option in self.module.options))

    @property
    def attributes(self):
        """What CuPy's `attributes` hold, by name."""
        return {name: getattr(self, name) for name in _ATTRIBUTES}

    @property
    def _resources(self):
        return resources(self.module, self.name, current().arch)

    @property
    def _program(self):
        return self.module._load(current().arch).program(self.name)


def _bound(function):
    """Threads of a block that a kernel is compiled for at most, 0 where it does not say."""
    return math.prod(function.attributes.get("maxntid") or function.attributes.get("reqntid") or (0,))


def _triple(name, value, limits):
    values = (value,) if isinstance(value, numbers.Integral) else tuple(value)
    if not 1 <= len(values) <= 3 or not all(
        isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in values
    ):
        raise ValueError(f"{name}: {value!r}, must be 1 to 3 integers")
    values = tuple(int(v) for v in values) + (1,) * (3 - len(values))
    for v, limit in zip(values, limits, strict=True):
        if not 1 <= v <= limit:
            raise ValueError(f"{name}: {value!r}, each must be from 1 to {limits}")
    return values
