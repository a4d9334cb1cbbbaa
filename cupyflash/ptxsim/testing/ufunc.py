"""Universal functions of the simulated CuPy, and their scattered form."""

import numpy as np

from .array import computed_by, from_either, ndarray, on_host
from .partial import Partial

_SCATTERED = {  # dtypes that CuPy has atomics for
    np.add: ("int32", "uint32", "uint64", "float16", "float32", "float64"),
    np.maximum: ("int32", "uint32", "uint64", "float32", "float64"),
    np.minimum: ("int32", "uint32", "uint64", "float32", "float64"),
}
_FOLDED = np.add, np.multiply


class UniversalFunction(Partial):
    """A universal function of NumPy's for arrays of the device, with the methods that CuPy's has.

    >>> from cupyflash.ptxsim.testing import simulated_cupy
    >>> cp = simulated_cupy()
    >>> x = cp.zeros(3)
    >>> cp.add.at(x, cp.array([0, 2, 2]), 5)
    >>> x
    array([ 5.,  0., 10.])
    """

    def __init__(self, of_numpy):
        self.nin, self.nout, self.nargs = of_numpy.nin, of_numpy.nout, of_numpy.nargs
        self.compute = computed_by(of_numpy)
        if self.nin == 2:
            self.outer = computed_by(of_numpy.outer)
        if of_numpy in _SCATTERED:
            self.at = scattering(of_numpy)
        if of_numpy in _FOLDED:
            self.reduce, self.accumulate = computed_by(of_numpy.reduce), computed_by(of_numpy.accumulate)

    def __call__(self, *args, **kwargs):
        return self.compute(*args, **kwargs)


def scattering(function):
    """What applies a function to an array and values in place, once for each time that an index occurs."""

    def scatter(a, indices, b):
        if not isinstance(a, ndarray):
            raise TypeError(f"{type(a).__name__}, must be cupy.ndarray")
        if a.dtype not in _SCATTERED[function]:
            raise TypeError(f"{function.__name__}: {a.dtype}, must be one of {', '.join(_SCATTERED[function])}")
        function.at(on_host(a), from_either(indices), np.asarray(on_host(b)).astype(a.dtype))

    return scatter
