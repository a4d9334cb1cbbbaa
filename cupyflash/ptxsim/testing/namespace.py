"""The simulated CuPy, as modules."""

import functools
import types

import cupy
import cupyx
import numpy as np

from .array import computed_by, ndarray
from .device import COMPILER, CUDA, RUNTIME, STREAM, MemoryPool
from .elementwise import ElementwiseKernel
from .functions import Concatenation, asnumpy, comparison, converting, empty, empty_like, in_common, memoize
from .random_numbers import RANDOM
from .raw import RawKernel, RawModule
from .reduction import ReductionKernel
from .ufunc import scattering

_COMPARISONS = (
    "assert_allclose",
    "assert_array_almost_equal",
    "assert_array_almost_equal_nulp",
    "assert_array_equal",
    "assert_array_less",
    "assert_array_max_ulp",
)


class SimulatedModule(types.ModuleType):
    """A module that has some of the names of CuPy's, or none, and says which ones it lacks."""

    def __init__(self, name, directories=(), contents=(), theirs=None):
        super().__init__(name, f"{name}, simulated by cupyflash.ptxsim.testing")
        self._directories, self._theirs = directories, theirs  # where CuPy's submodules are; CuPy's, if it is loaded
        self.__path__ = ()
        self.__file__, self.__spec__ = __file__, getattr(theirs, "__spec__", None)  # headers are found where CuPy is
        self.__dict__.update(contents)

    def __getattr__(self, name):
        reason = "not simulated"
        contents = {} if self._theirs is None else vars(self._theirs)
        if name in contents:
            reason = "not simulated, though CuPy has it"
        elif contents and "__getattr__" not in contents:  # CuPy imports nothing for it when it is asked
            reason = "no such attribute"
        raise AttributeError(f"{self.__name__}.{name}: {reason}", name=name, obj=self)

    def __repr__(self):
        return f"<module {self.__name__!r}, simulated>"


def simulated_cupy():
    """A module to use in place of `cupy`: kernels run in the simulator, everything else is done by NumPy.

    It has `RawModule`, `RawKernel`, `ElementwiseKernel` and `ReductionKernel`; `ndarray`, and the functions that CuPy
    and NumPy have in common, also those of `linalg` and `fft`; `random`, with NumPy's generators; of `cuda` one
    device whose streams are always done; of `testing` the assertions. All other names raise an AttributeError.

    >>> cp = simulated_cupy()
    >>> x = cp.linspace(0, 1, 5, dtype=cp.float32)
    >>> square = cp.ElementwiseKernel("T x", "T y", "y = x * x", "square")
    >>> square(x)
    array([0.    , 0.0625, 0.25  , 0.5625, 1.    ], dtype=float32)
    >>> cp.fuse
    Traceback (most recent call last):
        ...
    AttributeError: cupy.fuse: not simulated, though CuPy has it
    """
    return simulated_modules()["cupy"]


@functools.cache
def simulated_modules():
    """Name -> module, of those that are not empty, and their parents."""
    contents = {
        "cupy.cuda.compiler": COMPILER,
        "cupy.cuda.runtime": RUNTIME,
        "cupy.cuda.stream": STREAM,
        "cupy.cuda": CUDA,
        "cupy.fft": in_common(cupy.fft, np.fft),
        "cupy.linalg": in_common(cupy.linalg, np.linalg),
        "cupy.random": RANDOM,
        "cupy.testing": {name: comparison(getattr(np.testing, name)) for name in _COMPARISONS},
        "cupy": _TOP,
        "cupyx": _CUPYX,
    }
    theirs = {"cupy": cupy, "cupyx": cupyx}
    modules = {}
    for name in sorted(contents):
        *parent, last = name.split(".")
        theirs[name] = theirs.get(name) or getattr(theirs[".".join(parent)], last)
        directories = getattr(theirs[name], "__path__", ())
        modules[name] = SimulatedModule(name, directories, contents[name], theirs[name])
        if parent:
            setattr(modules[".".join(parent)], last, modules[name])
    return modules


def get_array_module(*args):
    """The simulated CuPy where an argument is one of its arrays, else NumPy."""
    return simulated_cupy() if any(isinstance(a, ndarray) for a in args) else np


_TOP = {
    **in_common(cupy, np),
    **{
        name: converting(getattr(np, name))
        for name in ("array", "asanyarray", "asarray", "ascontiguousarray", "asfortranarray")
    },
    "ElementwiseKernel": ElementwiseKernel,
    "RawKernel": RawKernel,
    "RawModule": RawModule,
    "ReductionKernel": ReductionKernel,
    "__version__": cupy.__version__,
    "asnumpy": asnumpy,
    "c_": Concatenation(np.c_),
    "empty": empty,
    "empty_like": empty_like,
    "get_array_module": get_array_module,
    "get_default_memory_pool": MemoryPool,
    "get_default_pinned_memory_pool": MemoryPool,
    "is_available": lambda: True,
    "memoize": memoize,
    "ndarray": ndarray,
    "r_": Concatenation(np.r_),
}
_CUPYX = {
    "rsqrt": computed_by(lambda x: np.reciprocal(np.sqrt(x))),
    "scatter_add": scattering(np.add),
    "scatter_max": scattering(np.maximum),
    "scatter_min": scattering(np.minimum),
}
