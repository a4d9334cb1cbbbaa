"""Where the tests compute attention: both take NumPy arrays with any strides and give NumPy arrays."""

import ctypes

import numpy as np
import pytest

import cupyflash
from cupyflash import ptxsim


class Simulator:
    """NumPy arrays in the simulator."""

    architectures = ("sm_75", "sm_80", "sm_90")

    def attention(self, q, k, v, *, arch="sm_80", out=None, **options):
        """out and lse, as :func:`cupyflash.attention` computes them on ``arch``."""
        with ptxsim.settings(arch=arch):
            return cupyflash.attention(q, k, v, out=out, return_lse=True, **options)

    def attention_backward(self, dout, q, k, v, out, lse, *, arch="sm_80", dlse=None, grads_out=None, **options):
        """dq, dk, dv, as :func:`cupyflash.attention_backward` computes them on ``arch``."""
        with ptxsim.settings(arch=arch):
            return cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, **options)


class Gpu:
    """CuPy arrays with the strides and alignment of the NumPy arrays, on the first GPU."""

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

    def attention_backward(self, dout, q, k, v, out, lse, *, arch=None, dlse=None, grads_out=None, **options):
        inputs = [self._copy(array) for array in (dout, q, k, v, out, lse)]
        dlse = None if dlse is None else self._copy(dlse)
        if grads_out is None:
            gradients = cupyflash.attention_backward(*inputs, dlse=dlse, **options)
            return cupyflash.Gradients(*(gradient.get() for gradient in gradients))
        device_grads = [None if target is None else self._copy(target) for target in grads_out]
        gradients = cupyflash.attention_backward(*inputs, dlse=dlse, grads_out=device_grads, **options)
        results = []
        for target, device_target, gradient in zip(grads_out, device_grads, gradients, strict=True):
            if target is not None:
                _bytes_spanned_by(target)[:] = device_target.base.get()[_misalignment(target) :]
            results.append(gradient.get() if target is None else target)
        return cupyflash.Gradients(*results)

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
