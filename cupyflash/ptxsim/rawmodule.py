"""RawModule and RawKernel: CUDA C++ source whose kernels run on NumPy arrays, with CuPy's signatures."""

import re
import threading

import numpy as np

from . import parse
from .compile import compile_module
from .kernel import Kernel
from .memory import zeros_at
from .program import Program
from .settings import current


class RawModule:
    """CUDA C++ source, compiled to PTX by NVRTC for the architecture of the settings in force.

    A launch under other settings compiles again.

    Parameters
    ----------
    code : str
        CUDA C++ source.
    options : tuple of str
        NVRTC options; the ones that CuPy adds are added here too, and its headers are found: see `compile_ptx`.
    name_expressions : sequence of str, optional
        Names of template instances, to be asked for by `get_function` in exactly this spelling.
    path, backend, translate_cucomplex, enable_cooperative_groups, jitify
        As `cupy.RawModule` has them, with CuPy's default only.

    Raises
    ------
    CompileError
        With NVRTC's log.
    ValueError
        For a choice of CuPy's that is not possible here, with the reason.
    """

    __slots__ = ("_arch", "_loaded", "_lock", "code", "dynamic_limits", "name_expressions", "options")

    def __init__(
        self,
        code=None,
        *,
        path=None,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        enable_cooperative_groups=False,
        name_expressions=None,
        jitify=None,
    ):
        if path is not None:
            raise ValueError(f"path: {path!r}, cannot be loaded: only CUDA C++ runs here, given as code")
        _check_choices(backend, translate_cucomplex, enable_cooperative_groups, jitify)
        if not isinstance(code, str):
            raise TypeError(f"code: {type(code).__name__}, must be str")
        if not isinstance(options, tuple):
            raise TypeError(f"options: {type(options).__name__}, must be a tuple of str")
        self.code, self.options = code, options
        self.name_expressions = tuple(name_expressions or ())
        self.dynamic_limits = {}  # kernel -> max_dynamic_shared_size_bytes that was set
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
        """Names of the kernels in this module, template instances by their name expressions."""
        return self._load(self._arch).kernels

    def _load(self, arch):
        with self._lock:
            if arch not in self._loaded:
                ptx, lowered = compile_module(self.code, self.options, arch, self.name_expressions)
                self._loaded[arch] = LoadedModule(self, parse.parse(ptx), lowered, arch)
            return self._loaded[arch]


def _check_choices(backend, translate_cucomplex, enable_cooperative_groups, jitify):
    """Refuse what CuPy can and the simulator cannot."""
    if backend != "nvrtc":
        raise ValueError(f"backend: {backend!r}, must be 'nvrtc', which needs neither nvcc nor a host compiler")
    if translate_cucomplex:
        raise ValueError("translate_cucomplex: must be False; <cupy/complex.cuh> has the functions under its own names")
    if enable_cooperative_groups:
        raise ValueError(
            "enable_cooperative_groups: must be False, a grid cannot be synchronised here; groups within a block need "
            "no such choice"
        )
    if jitify:
        raise ValueError("jitify: must be False; CUB, Thrust and libcu++ are found without it")


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
        self.titles = {name: expression for expression, name in lowered.items()}

    @property
    def kernels(self):
        """Names of the kernels, template instances by their name expressions."""
        return [self.titles.get(f.name, f.name) for f in self.parsed.functions.values() if f.entry]

    def program(self, name, profiled=False, sanitized=False):
        """The executable form of a kernel, with or without counters and checks."""
        key = (name, profiled, sanitized)
        if key not in self.programs:
            function = self.parsed.functions.get(self.lowered.get(name, name))
            if function is None or not function.entry:
                known = ", ".join(self.kernels) or "none"
                raise ValueError(f"no kernel {name!r} in this module; it has {known}{self.hint(name)}")
            title = self.titles.get(function.name, function.name)
            self.programs[key] = Program(self, title, function, profiled, sanitized)
        return self.programs[key]

    def hint(self, name):
        """How a function that the source has becomes a kernel of the module."""
        if any(known.startswith(f"{name}<") for known in self.titles.values()):
            return ""
        if not re.search(rf"\b{re.escape(name)}\b", self.raw.code):
            return ""
        return f'; a C++ function needs extern "C" or name_expressions=({name!r},), a template such as {name}<float>'


class RawKernel(Kernel):
    """One kernel from its own source: `RawModule(code=code, options=options).get_function(name)`.

    The choices are those of `cupy.RawKernel`, and refused as `RawModule` refuses them.

    >>> kernel = RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
    >>> x = np.arange(4, dtype=np.float32)
    >>> kernel((1,), (4,), (x,))
    >>> x
    array([0., 2., 4., 6.], dtype=float32)
    """

    __slots__ = ()

    def __init__(
        self,
        code,
        name,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        *,
        enable_cooperative_groups=False,
        jitify=None,
    ):
        _check_choices(backend, translate_cucomplex, enable_cooperative_groups, jitify)
        super().__init__(RawModule(code, options=options), name)
        self.module.get_function(name)
