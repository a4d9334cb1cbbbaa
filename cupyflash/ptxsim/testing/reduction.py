"""ReductionKernel of the simulated CuPy."""

import cupy
import numpy as np
from cupy._core._kernel import _decide_params_type, _TypeMap
from cupy._core._reduction import (
    _get_axis,
    _get_block_specs,
    _get_out_shape,
    _ReductionKernel_get_cached_function_code,
)

from .array import on_host
from .generated import GeneratedKernel, check_output, count, description, indexer, indexer_description


class ReductionKernel(GeneratedKernel):
    """`cupy.ReductionKernel`, simulated: CuPy's own source for it, launched in the simulator.

    On a GPU CuPy may take CUB's reduction instead, which rounds sums otherwise.

    >>> from cupyflash.ptxsim.testing import simulated_cupy
    >>> cp = simulated_cupy()
    >>> l2norm = cp.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "l2norm")
    >>> l2norm(cp.array([[3.0, 4.0], [6.0, 8.0]]), axis=1)
    array([ 5., 10.])
    """

    def __init__(self, *args, **kwargs):
        super().__init__(cupy.ReductionKernel(*args, **kwargs))

    def __call__(self, *args, out=None, axis=None, keepdims=False, stream=None):
        inputs, outputs = self._split(args)
        if out is not None:
            if outputs or self.nout != 1:
                raise ValueError(f"{self.name}: out is for kernels of one output, which is not among the arguments")
            check_output(out)
            outputs = [out]
        inputs, shape = self._broadcast(inputs)
        if shape is None:
            raise ValueError(f"{self.name}: there is no array to reduce")
        reduced, kept = _get_axis(axis, len(shape))
        inputs, types, type_map = self._typed(inputs, outputs, self._decide)
        outputs = self._with_outputs(outputs, types, tuple(_get_out_shape(shape, reduced, kept, keepdims)))
        if outputs[0].size:
            if not self._theirs.identity and 0 in shape:
                raise ValueError(f"{self.name}: there is nothing to reduce, and no identity")
            axes = (*reduced, *kept)
            self._run(self._permuted(inputs, axes), list(map(on_host, outputs)), [shape[i] for i in axes], type_map)
        return outputs[0] if self.nout == 1 else tuple(outputs)

    def _decide(self, types, out_types):
        return _decide_params_type(self.in_params, self.out_params, types, out_types)

    def _permuted(self, inputs, axes):
        """The inputs with the axes in front that are reduced."""
        if axes == tuple(range(len(axes))):
            return inputs
        if any(p.raw for p in self.in_params):
            raise NotImplementedError(f"{self.name}: CuPy reduces the first axes only where there are raw inputs")
        return [x.transpose(axes) if isinstance(x, np.ndarray) else x for x in inputs]

    def _run(self, inputs, outputs, shape, type_map):
        theirs, out_shape, values = self._theirs, outputs[0].shape, [*inputs, *outputs]
        threads, stride, blocks = _get_block_specs(count(shape), count(out_shape), 1, -1)
        stride = np.int32(stride)
        index_type = "int32" if count(shape) // count(out_shape) < 2**31 else "int64"
        type_map = _TypeMap((*type_map._pairs, ("IndexT", index_type)))
        descriptions = (
            *map(description, values), indexer_description(shape), indexer_description(out_shape), description(stride),
        )  # fmt: skip
        self._launch(
            (descriptions, type_map),
            lambda: _ReductionKernel_get_cached_function_code(
                self.nin, self.nout, theirs._params, descriptions, type_map,
                self.name, threads, theirs.reduce_type, theirs.identity,
                theirs.map_expr, theirs.reduce_expr, theirs.post_map_expr,
                self.preamble, theirs.options,
            ),
            tuple(theirs.options),
            blocks,
            threads,
            values,
            (indexer(shape), indexer(out_shape), stride),
        )  # fmt: skip
