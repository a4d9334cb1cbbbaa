"""ElementwiseKernel of the simulated CuPy."""

import cupy
import numpy as np
from cupy._core._kernel import _get_elementwise_kernel_code

from .array import on_host
from .generated import GeneratedKernel, count, description, indexer, indexer_description


class ElementwiseKernel(GeneratedKernel):
    """`cupy.ElementwiseKernel`, simulated: CuPy's own source for it, launched in the simulator.

    >>> from cupyflash.ptxsim.testing import simulated_cupy
    >>> cp = simulated_cupy()
    >>> shifted = cp.ElementwiseKernel("raw T x, int32 by", "T y", "y = x[(i + by) % _ind.size()]", "shifted")
    >>> shifted(cp.arange(5), 2, size=5)
    array([2, 3, 4, 0, 1])
    """

    def __init__(self, *args, **kwargs):
        super().__init__(cupy.ElementwiseKernel(*args, **kwargs))

    def __call__(self, *args, size=None, stream=None, block_size=128):
        inputs, outputs = self._split(args)
        if block_size < 1:
            raise ValueError(f"block_size: {block_size}, must be at least 1")
        inputs, shape = self._broadcast(inputs, outputs)
        if (shape is None) == (size is None):
            raise ValueError(f"{self.name}: size must be given if, and only if, all arrays are raw")
        if shape is None:
            shape = (size,)
        elif not outputs and any(p.raw for p in self.out_params):
            raise ValueError(f"{self.name}: a raw output has no size unless it is given")
        inputs, types, type_map = self._typed(inputs, outputs, self._theirs._decide_params_type)
        outputs = self._with_outputs(outputs, types, shape)
        if count(shape):
            self._run([*inputs, *map(on_host, outputs)], shape, type_map, block_size)
        if self._theirs.no_return:
            return None
        return outputs[0] if self.nout == 1 and not self._theirs.return_tuple else tuple(outputs)

    def _run(self, values, shape, type_map, block_size):
        theirs = self._theirs
        if self.reduce_dims:
            values, shape = self._flattened(values, shape)
        descriptions = (*map(description, values), indexer_description(shape))
        choices = dict(theirs.kwargs)
        options = tuple(choices.pop("options", ()))
        self._launch(
            (descriptions, type_map),
            lambda: _get_elementwise_kernel_code(
                descriptions, type_map, theirs.params, theirs.operation, self.name, self.preamble, **choices
            ),
            options,
            -(-count(shape) // block_size),
            min(count(shape), block_size),
            values,
            (indexer(shape),),
        )

    def _flattened(self, values, shape):
        """One dimension, where all arrays that are looped over are contiguous: no divisions for an index."""
        looped = [isinstance(x, np.ndarray) and not p.raw for x, p in zip(values, self._theirs.params, strict=False)]
        if not all(x.flags.c_contiguous for x, loops in zip(values, looped, strict=True) if loops):
            return values, shape
        return [x.reshape(-1) if loops else x for x, loops in zip(values, looped, strict=True)], (count(shape),)
