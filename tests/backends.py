"""Where the tests compute attention: both take NumPy arrays with any strides and give NumPy arrays."""

import ctypes

import numpy as np
import pytest

import cupyflash
from cupyflash import ptxsim


class Simulator:
    """NumPy arrays in the simulator."""

    simulated = True
    architectures = ("sm_75", "sm_80", "sm_90")

    def attention(self, q, k, v, *, arch="sm_80", out=None, **options):
        """out and lse, as :func:`cupyflash.attention` computes them on ``arch``."""
        with ptxsim.settings(arch=arch):
            return cupyflash.attention(q, k, v, out=out, return_lse=True, **options)


class Gpu:
    """CuPy arrays with the strides and alignment of the NumPy arrays, on the first GPU."""

    simulated = False

    def __init__(self):
        import cupy

        try:
            self.architectures = (f"sm_{cupy.cuda.Device(0).compute_capability}",)
        except RuntimeError as error:
            raise pytest.UsageError(f"--backend gpu: CuPy finds no usable GPU ({error})") from error
        self._cupy = cupy

    def attention(self, q, k, v, *, arch=None, out=None, **options):
        if out is None:
            out, lse = cupyflash.attention(*map(self._copy, (q, k, v)), return_lse=True, **options)
            return out.get(), lse.get()
        device_out = self._copy(out)
        _, lse = cupyflash.attention(*map(self._copy, (q, k, v)), out=device_out, return_lse=True, **options)
        _bytes_spanned_by(out)[:] = device_out.base.get()[_misalignment(out) :]
        return out, lse.get()

    def _copy(self, array):
        """The bytes that ``array`` spans, those between its elements too, at an address as aligned as its own."""
        span = _bytes_spanned_by(array)
        memory = self._cupy.empty(_misalignment(array) + span.size, np.uint8)
        memory[_misalignment(array) :] = self._cupy.asarray(span)
        first = array.ctypes.data - span.ctypes.data if span.size else 0
        start = memory.data + _misalignment(array) + first
        view = self._cupy.ndarray(array.shape, array.dtype, memptr=start, strides=array.strides)
        view.base = memory
        return view


def _bytes_spanned_by(array):
    low, high = np.lib.array_utils.byte_bounds(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low)) if array.size else np.empty(0, "u1")


def _misalignment(array):
    return np.lib.array_utils.byte_bounds(array)[0] % 256
