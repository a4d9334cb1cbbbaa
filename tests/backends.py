"""Where the tests compute attention: both take NumPy arrays with any strides and give NumPy arrays."""

import ctypes

import numpy as np
import pytest

import cupyflash
from cupyflash import ptxsim


class Backend:
    """What both have."""

    def attention_vjp(self, q, k, v, *, return_lse=True, **options):
        """(out, lse) and the pullback of (dout, dlse), as the checks of :mod:`cupyflash.testing` call it."""
        out, lse = self.attention(q, k, v, **options)
        return (out, lse), lambda dout, dlse: self.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)


class Simulator(Backend):
    """NumPy arrays in the simulator."""

    simulated = True
    architectures = ("sm_75", "sm_80", "sm_90")

    def attention(self, q, k, v, *, arch="sm_80", out=None, return_lse=True, **options):
        """out and always lse, as :func:`cupyflash.attention` computes them on ``arch``."""
        with ptxsim.settings(arch=arch):
            return cupyflash.attention(q, k, v, out=out, return_lse=True, **options)

    def attention_backward(self, dout, q, k, v, out, lse, *, arch="sm_80", dlse=None, grads_out=None, **options):
        """dq, dk, dv, as :func:`cupyflash.attention_backward` computes them on ``arch``."""
        with ptxsim.settings(arch=arch):
            return cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, **options)


class Gpu(Backend):
    """CuPy arrays with the strides and alignment of the NumPy arrays, on the first GPU."""

    simulated = False

    def __init__(self):
        import cupy

        try:
            self.architectures = (f"sm_{cupy.cuda.Device(0).compute_capability}",)
        except RuntimeError as error:
            raise pytest.UsageError(f"--backend gpu: CuPy finds no usable GPU ({error})") from error
        self._cupy = cupy

    def attention(self, q, k, v, *, arch=None, out=None, return_lse=True, **options):
        """out and always lse; ``arch`` is the GPU's."""
        inputs, options = [self._copy(array)[0] for array in (q, k, v)], self._copied(options)
        if out is None:
            return tuple(x.get() for x in cupyflash.attention(*inputs, return_lse=True, **options))
        device_out, memory = self._copy(out)
        _, *others = cupyflash.attention(*inputs, out=device_out, return_lse=True, **options)
        _bytes_spanned_by(out)[:] = memory.get()
        return out, *(x.get() for x in others)

    def attention_backward(self, dout, q, k, v, out, lse, *, arch=None, dlse=None, grads_out=None, **options):
        """dq, dk, dv; ``arch`` is the GPU's."""
        inputs, options = [self._copy(array)[0] for array in (dout, q, k, v, out, lse)], self._copied(options)
        dlse = None if dlse is None else self._copy(dlse)[0]
        targets = grads_out or (None, None, None)
        copies = [(None, None) if target is None else self._copy(target) for target in targets]
        gradients = cupyflash.attention_backward(
            *inputs, dlse=dlse, grads_out=None if grads_out is None else [view for view, _ in copies], **options
        )
        results = []
        for target, (_, memory), gradient in zip(targets, copies, gradients, strict=True):
            if target is not None:
                _bytes_spanned_by(target)[:] = memory.get()
            results.append(gradient.get() if target is None else target)
        return cupyflash.Gradients(*results)

    def _copied(self, options):
        """Options whose arrays are on the device, those of ``aux`` among them."""
        return {
            name: self._copied(value)
            if name == "aux"
            else self._copy(value)[0]
            if isinstance(value, np.ndarray)
            else value
            for name, value in options.items()
        }

    def _copy(self, array):
        """A view of device memory as ``array`` is of the host's, and the bytes that it spans, gaps included."""
        span = _bytes_spanned_by(array)
        misalignment = span.ctypes.data % 256
        memory = self._cupy.empty(misalignment + span.size, np.uint8)[misalignment:]
        memory.set(span)
        first = array.ctypes.data - span.ctypes.data if span.size else 0
        view = self._cupy.ndarray(array.shape, array.dtype, memptr=memory.data + first, strides=array.strides)
        return view, memory


def _bytes_spanned_by(array):
    low, high = np.lib.array_utils.byte_bounds(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low)) if array.size else np.empty(0, "u1")
