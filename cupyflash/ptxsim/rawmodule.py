"""RawModule: CUDA C++ source whose kernels run on NumPy arrays, with CuPy's signatures."""

import contextlib
import contextvars
import functools
import numbers
import threading

import numpy as np

from . import parse
from .compile import compile_module
from .launch import Launch
from .memory import zeros_at
from .profile import current_profile
from .program import Program
from .sanitizer import current_report
from .settings import current

_mapped = contextvars.ContextVar("ptxsim_mapped", default=())
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


@contextlib.contextmanager
def device_memory(*arrays):
    """Within the block, kernels may also touch these arrays, through pointers inside their arguments.

    Arguments that are arrays themselves need no mention.
    """
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"device_memory: {type(array).__name__}, must be numpy.ndarray")
        _check_byte_order("device_memory", array)
    token = _mapped.set((*_mapped.get(), *arrays))
    try:
        yield
    finally:
        _mapped.reset(token)


class RawModule:
    """CUDA C++ source, compiled to PTX by NVRTC for the architecture of the settings in force.

    A launch under other settings compiles again.

    Parameters
    ----------
    code : str
        CUDA C++ source.
    options : tuple of str
        NVRTC options; the ones that CuPy adds are added here too.
    name_expressions : sequence of str, optional
        Names of template instances, to be asked for by `get_function` in exactly this spelling.

    Raises
    ------
    CompileError
        With NVRTC's log.
    """

    def __init__(self, *, code, options=(), name_expressions=None):
        if not isinstance(code, str):
            raise TypeError(f"code: {type(code).__name__}, must be str")
        if not isinstance(options, tuple):
            raise TypeError(f"options: {type(options).__name__}, must be a tuple of str")
        self.code, self.options = code, options
        self.name_expressions = tuple(name_expressions or ())
        self._loaded = {}
        self._lock = threading.Lock()
        self._arch = current().arch
        self._load(self._arch)

    def get_function(self, name):
        """A kernel by its name, or by a name expression.

        Raises ValueError for an unknown name, and NotImplementedError with a list of all instructions
        of the kernel that the simulator does not know.
        """
        self._load(self._arch).program(name)
        return Kernel(self, name)

    def get_global(self, name):
        """The bytes of a `__device__` variable, as a NumPy array that shares them.

        Raises ValueError for an unknown name, and for a `__constant__` variable.
        """
        loaded = self._load(current().arch)
        name = loaded.lowered.get(name, name)
        if name not in loaded.memory:
            declared = loaded.parsed.variables.get(name)
            if declared is not None and declared.space == "const":
                raise ValueError(f"global {name!r}: is a __constant__ variable, only __device__ ones can be had")
            raise ValueError(f"no global {name!r} in this module; it has {', '.join(loaded.memory) or 'none'}")
        return loaded.memory[name]

    @property
    def kernels(self):
        """Names of the kernels in this module, as compiled."""
        return [f.name for f in self._load(self._arch).parsed.functions.values() if f.entry]

    def _load(self, arch):
        with self._lock:
            if arch not in self._loaded:
                ptx, lowered = compile_module(self.code, self.options, arch, self.name_expressions)
                self._loaded[arch] = LoadedModule(self, parse.parse(ptx), lowered, arch)
            return self._loaded[arch]


class LoadedModule:
    """A parsed module with its module-scope variables in memory."""

    def __init__(self, raw, parsed, lowered, arch):
        self.raw, self.parsed, self.lowered, self.arch = raw, parsed, lowered, arch
        self.memory, self.addresses = {}, {}
        for variable in parsed.variables.values():
            if variable.space == "global":
                self.memory[variable.name] = array = zeros_at(max(variable.align, 16), max(variable.size, 1))
                array[: variable.size] = np.frombuffer(variable.data, np.uint8) if variable.data else 0
                self.addresses[variable.name] = array.ctypes.data
        self.programs = {}

    def program(self, name, profiled=False, sanitized=False):
        """The executable form of a kernel, with or without counters and checks."""
        key = (name, profiled, sanitized)
        if key not in self.programs:
            function = self.parsed.functions.get(self.lowered.get(name, name))
            if function is None or not function.entry:
                known = ", ".join(f.name for f in self.parsed.functions.values() if f.entry)
                raise ValueError(f"no kernel {name!r} in this module; it has {known or 'none'}")
            self.programs[key] = Program(self, function, profiled, sanitized)
        return self.programs[key]


class Kernel:
    """One kernel of a module. Call it as `kernel(grid, block, args, shared_mem=0)`.

    Arguments follow `cupy.RawKernel`: an array passes the address of its element [0, ..., 0], an int
    passes 8 bytes, a float a double, a complex two, a bool one byte, a NumPy scalar (structured ones too) its own
    bytes, None a null pointer. Unlike CuPy's, number and sizes are checked against the kernel.
    """

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, grid, block, args, *, shared_mem=0):
        grid, block = _triple("grid", grid, _MAX_GRID), _triple("block", block, _MAX_BLOCK)
        threads = block[0] * block[1] * block[2]
        if threads > 1024:
            raise ValueError(f"block: {block} has {threads} threads, at most 1024 are possible")
        profile, report = current_profile(), current_report()
        program = self.module._load(current().arch).program(self.name, profile is not None, report is not None)
        required = program.function.attributes.get("maxntid") or program.function.attributes.get("reqntid")
        if required and threads > functools.reduce(lambda a, b: a * b, required):
            raise ValueError(f"block: {block} has {threads} threads, {self.name} is compiled for at most {required}")
        if isinstance(shared_mem, bool) or not isinstance(shared_mem, numbers.Integral) or shared_mem < 0:
            raise ValueError(f"shared_mem: {shared_mem!r}, must be a non-negative integer")
        used, limit = program.shared_bytes + int(shared_mem), current().shared_limit
        if used > limit:
            raise ValueError(f"shared_mem: {used} bytes with the static ones, {current().arch} has {limit} per block")
        parameters = _packed(program, args)
        arrays = {f"args[{i}]": a for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        arrays |= {f"device_memory array {i}": a for i, a in enumerate(_mapped.get())}
        with np.errstate(all="ignore"):
            Launch(program, grid, block, parameters, arrays, used, profile, report).run()


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


def _packed(program, args):
    """The parameter block, checked against the kernel's declaration."""
    parameters = program.function.parameters
    if not isinstance(args, tuple | list):
        raise TypeError(f"args: {type(args).__name__}, must be a tuple")
    if len(args) != len(parameters):
        raise ValueError(f"args: {len(args)} arguments, {program.name} takes {len(parameters)}")
    data = bytearray(program.parameter_bytes)
    for number, (value, parameter) in enumerate(zip(args, parameters, strict=True)):
        bits = _bytes_of(number, value)
        if len(bits) != parameter.size:
            wanted = f"{program.name} takes {parameter.size} there"
            raise TypeError(f"args[{number}]: {type(value).__name__} has {len(bits)} bytes, {wanted}")
        data[parameter.offset : parameter.offset + parameter.size] = bits
    return bytes(data)


def _check_byte_order(name, value):
    if not value.dtype.isnative:
        raise TypeError(f"{name}: dtype {value.dtype} is not in this machine's byte order")


def _bytes_of(number, value):
    if isinstance(value, np.ndarray | np.generic):
        _check_byte_order(f"args[{number}]", value)
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0].to_bytes(8, "little")
    if value is None:
        return bytes(8)
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise OverflowError(f"args[{number}]: {value} does not fit in 64 bits")
        return (value & 2**64 - 1).to_bytes(8, "little")
    if isinstance(value, float | complex):
        return np.array(value).tobytes()
    raise TypeError(
        f"args[{number}]: {type(value).__name__}, must be a numpy array or scalar, int, float, complex, bool or None"
    )
