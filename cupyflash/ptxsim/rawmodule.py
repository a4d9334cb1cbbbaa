"""RawModule and RawKernel: CUDA C++ or PTX whose kernels run on NumPy arrays, with CuPy's signatures."""

import threading

from .compile import assembler_log, compile_module
from .kernel import Kernel
from .loaded import LoadedModule
from .parse import parse
from .ptx_file import check_target, is_ptx, read_ptx
from .settings import current


class RawModule:
    """CUDA C++ source, compiled to PTX by NVRTC for the architecture of the settings in force, or a PTX file.

    A launch under other settings compiles again.

    Parameters
    ----------
    code : str
        CUDA C++ source.
    path : str
        In place of `code`: a file of PTX, which is run as it is. A cubin or fatbin is refused.
    options : tuple of str
        NVRTC options; the ones that CuPy adds are added here too, and its headers are found: see `compile_ptx`. Without
        meaning for a file.
    name_expressions : sequence of str, optional
        Names of template instances, to be asked for by `get_function` in exactly this spelling.
    enable_cooperative_groups : bool
        Launch cooperatively: all blocks of a grid at once, so that `this_grid().sync()` works. A grid that does not fit
        on a GPU is refused (CuPy cuts a one-dimensional one down, with a warning).
    backend, translate_cucomplex, jitify
        As `cupy.RawModule` has them, with CuPy's default only.

    Raises
    ------
    CompileError
        With NVRTC's log.
    ValueError
        For a choice of CuPy's that is not possible here, with the reason, for PTX as `code`, and for PTX that the
        architecture cannot run or that is none.
    TypeError
        Unless exactly one of `code` and `path` is given.
    """

    __slots__ = (
        "_arch", "_loaded", "_lock", "_ptx", "code", "dynamic_limits", "enable_cooperative_groups", "file_path",
        "name_expressions", "options",
    )  # fmt: skip

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
        if (code is None) == (path is None):
            raise TypeError("code, path: exactly one of the two must be given")
        if path is not None and name_expressions is not None:
            raise ValueError("name_expressions: need code, a file has no C++ names")
        _check_choices(backend, translate_cucomplex, jitify)
        name, text = ("code", code) if path is None else ("path", path)
        if not isinstance(text, str):
            raise TypeError(f"{name}: {type(text).__name__}, must be str")
        if path is None and is_ptx(code):
            raise ValueError("code: this is PTX: it runs from a file, path=")
        if not isinstance(options, tuple):
            raise TypeError(f"options: {type(options).__name__}, must be a tuple of str")
        self.code, self.file_path = code, path
        self.options = options if path is None else ()
        self.name_expressions = tuple(name_expressions or ())
        self.enable_cooperative_groups = bool(enable_cooperative_groups)
        self.dynamic_limits = {}  # kernel -> max_dynamic_shared_size_bytes that was set
        self._ptx = None if path is None else read_ptx(path)
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
        """The bytes of a `__device__` or `__constant__` variable, as a NumPy array that shares them.

        What is written to it is there in the next launch; `numpy.ndarray(shape, dtype, array)` gives it a shape and a
        type, as `cupy.ndarray` does to CuPy's. Each architecture of the settings has its own variables, like each GPU.
        Raises ValueError for an unknown name.

        >>> import numpy as np
        >>> source = '''__constant__ float weights[4];
        ... extern "C" __global__ void weigh(float* x) { x[threadIdx.x] *= weights[threadIdx.x]; }'''
        >>> module, x = RawModule(code=source), np.ones(4, np.float32)
        >>> np.ndarray(4, np.float32, module.get_global("weights"))[:] = [1, 2, 3, 4]
        >>> module.get_function("weigh")((1,), (4,), (x,))
        >>> x
        array([1., 2., 3., 4.], dtype=float32)
        """
        return self._load(current().arch).variable(name)

    @property
    def kernels(self):
        """Names of the kernels in this module, template instances by their name expressions."""
        return self._load(self._arch).kernels

    def compile(self, log_stream=None):
        """Compile for the settings in force now, not when they are first needed.

        `log_stream`: where NVRTC writes what it says of the code, warnings and resources.
        """
        arch = current().arch
        self._load(arch)
        if log_stream is not None and self.code is not None:
            log_stream.write(assembler_log(self.code, self.options, arch, self.name_expressions)[0])

    def _load(self, arch):
        with self._lock:
            if arch not in self._loaded:
                ptx, lowered = self._compile(arch)
                self._loaded[arch] = LoadedModule(self, parse(ptx), lowered, arch)
            return self._loaded[arch]

    def _compile(self, arch):
        """The PTX for an architecture, and what name expressions are called in it."""
        if self._ptx is None:
            return compile_module(self.code, self.options, arch, self.name_expressions)
        check_target(self.file_path, self._ptx, arch)
        return self._ptx, {}


def _check_choices(backend, translate_cucomplex, jitify):
    """Refuse what CuPy can and the simulator cannot."""
    if backend != "nvrtc":
        raise ValueError(f"backend: {backend!r}, must be 'nvrtc', which needs neither nvcc nor a host compiler")
    if translate_cucomplex:
        raise ValueError("translate_cucomplex: must be False; <cupy/complex.cuh> has the functions under its own names")
    if jitify:
        raise ValueError("jitify: must be False; CUB, Thrust and libcu++ are found without it")


class RawKernel(Kernel):
    """One kernel from its own source: `RawModule(code=code, options=options).get_function(name)`.

    The choices are those of `cupy.RawKernel`, taken and refused as `RawModule` does.

    >>> import numpy as np
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
        _check_choices(backend, translate_cucomplex, jitify)
        super().__init__(RawModule(code, options=options, enable_cooperative_groups=enable_cooperative_groups), name)
        self.module.get_function(name)
