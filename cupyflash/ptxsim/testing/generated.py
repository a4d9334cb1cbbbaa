"""Kernels whose CUDA C++ CuPy generates: their arguments, as its generator and its headers describe them.

CuPy decides types and writes sources without a GPU, in functions that it does not document: one that a version of it
lacks is an ImportError here.
"""

import numpy as np
from cupy import ndarray as CupyArray
from cupy._core._carray import Indexer
from cupy._core._kernel import _ArgInfo
from cupy._core._scalar import CScalar
from cupy._core.core import _cupy_header_list

from .. import rawmodule
from .array import ndarray, on_host
from .launches import made
from .memory import address
from .partial import Partial
from .raw import launch

_ARRAY, _INDEXER, _SCALAR = 1, 2, 3  # kinds of arguments of CuPy's generator
_HEADERS = "".join(f"#include <{name}>\n" for name in _cupy_header_list)
_MOST_BLOCKS = 2**31 - 1


class GeneratedKernel(Partial):
    """What elementwise and reduction kernels have in common. `theirs`: CuPy's object, never called."""

    def __init__(self, theirs):
        self._theirs = theirs
        self.name = theirs.name
        self._kernels = {}
        made(self.name)

    def __getattr__(self, name):
        if name in ("in_params", "out_params", "nin", "nout", "nargs", "preamble", "reduce_dims"):
            return getattr(self._theirs, name)
        return super().__getattr__(name)

    def _split(self, args):
        """Inputs, as NumPy has them, and outputs."""
        inputs, outputs = args[: self.nin], args[self.nin :]
        if len(inputs) != self.nin or len(outputs) not in (0, self.nout):
            raise TypeError(f"{self.name}: {len(args)} arguments, must be {self.nin}, or {self.nargs} with outputs")
        for output in outputs:
            check_output(output)
        return list(map(on_host, inputs)), list(outputs)

    def _broadcast(self, inputs, outputs=()):
        """The inputs, of which those that are no raw arrays have one shape; the shape, None where there are none."""
        values = [*inputs, *map(on_host, outputs)]
        parameters = (*self.in_params, *self.out_params)
        looped = [n for n, x in enumerate(values) if isinstance(x, np.ndarray) and not parameters[n].raw]
        if not looped:
            return inputs, None
        shape = np.broadcast_shapes(*(values[n].shape for n in looped))
        return [np.broadcast_to(x, shape) if n in looped else x for n, x in enumerate(inputs)], shape

    def _typed(self, inputs, outputs, decide):
        """The inputs, scalars as what the kernel takes; the outputs' dtypes; CuPy's map of the kernel's type names."""
        given = tuple(x.dtype if isinstance(x, np.ndarray) else None for x in inputs)
        types, out_types, type_map = decide(given, tuple(x.dtype for x in outputs))
        typed = [
            x if isinstance(x, np.ndarray) else np.asarray(x).astype(dtype)[()]
            for x, dtype in zip(inputs, types, strict=True)
        ]
        return typed, out_types, type_map

    def _with_outputs(self, outputs, types, shape):
        """New outputs where none are given."""
        if not outputs:
            return [ndarray(shape, dtype) for dtype in types]
        for x, parameter in zip(outputs, self.out_params, strict=True):
            if not parameter.raw and x.shape != shape:
                raise ValueError(f"{parameter.name}: shape {x.shape}, must be {shape}")
        return outputs

    def _launch(self, described, make_source, options, blocks, threads, values, others):
        """Launch what is compiled for arguments of this description: arrays and scalars, and others behind them."""
        if described not in self._kernels:
            self._kernels[described] = rawmodule.RawKernel(_HEADERS + make_source(), self.name, options)
        names = (parameter.name for parameter in (*self.in_params, *self.out_params))
        arrays = {name: x for name, x in zip(names, values, strict=True) if isinstance(x, np.ndarray)}
        args = (*map(_argument, values), *others)
        launch(self._kernels[described], self.name, (min(blocks, _MOST_BLOCKS),), (threads,), args, arrays)


def check_output(value):
    if not isinstance(value, ndarray):
        raise TypeError(f"output: {type(value).__name__}, must be cupy.ndarray")


def description(value):
    """What CuPy's generator has to know of an array or a scalar."""
    if isinstance(value, np.ndarray):
        small = value.nbytes < 2**31
        return _ArgInfo(_ARRAY, CupyArray, value.dtype, value.ndim, value.flags.c_contiguous, small)
    return _ArgInfo(_SCALAR, CScalar, value.dtype, 0, True, True)


def indexer_description(shape):
    return _ArgInfo(_INDEXER, Indexer, None, len(shape), True, count(shape) < 2**31)


def _argument(value):
    """An array as a CArray of cupy/carray.cuh lies in memory, a scalar as it is."""
    if not isinstance(value, np.ndarray):
        return value
    return _words(address(value), value.size, *value.shape, *value.strides)


def indexer(shape):
    """A CIndexer of cupy/carray.cuh: the size, the shape, and room for an index."""
    return _words(count(shape), *shape, *[0] * len(shape))


def _words(*values):
    return np.array(values, np.int64).view(f"V{8 * len(values)}")[0]


def count(shape):
    """Elements of an array of that shape."""
    return int(np.prod(shape, dtype=object))
