"""The strided copy on the simulator, and what is packed with it."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import _launch, _packing
from cupyflash._layouts import Layout

RNG = np.random.default_rng(0)


def layout(array):
    *batch, row, column = (stride // array.itemsize for stride in array.strides)
    return Layout(tuple(batch), row, column)


def copy(source, target):
    device = _launch.device_of("numpy", source)
    launch = _packing.copy(source, layout(source), target, layout(target), source.shape[:-2], *source.shape[-2:])
    _launch.run(device, [launch])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.swapaxes(-1, -2),
        lambda x: x.swapaxes(0, 2)[:, ::-1],
        lambda x: x[..., ::-2, 1::3],
        lambda x: np.broadcast_to(x[:, :1, :, :1], (3, 4, 5, 7)),
        lambda x: x[:0],
        lambda x: x[:1, 2:3],
    ],
)
def test_copies_between_any_strides(view, dtype):
    source = view(RNG.standard_normal((3, 4, 5, 7)).astype(dtype))
    memory = np.full((source.size + 9) * 2, 7, dtype)
    target = memory[: source.size * 2 : 2].reshape(source.shape[::-1]).transpose()
    copy(source, target)
    np.testing.assert_array_equal(target, source)
    target[...] = 7
    assert (memory == 7).all()


def test_a_packed_array_has_whole_zero_padded_chunks_and_keeps_broadcasts():
    source = np.broadcast_to(RNG.standard_normal((2, 1, 5, 11)).astype(np.float16), (2, 3, 5, 11))
    device = _launch.device_of("numpy", source)
    packed, packed_layout = _packing.packed(device, source.dtype, layout(source), (2, 3), 5, 11)
    assert packed.shape == (2, 1, 5, 16) and packed_layout == Layout((80, 0), 16, 1)
    assert _packing.in_chunks(packed.ctypes.data % 16, packed.itemsize, packed_layout, (2, 3), 5, 16)
    _launch.run(device, [_packing.copy(source, layout(source), packed, packed_layout, (2, 3), 5, 11)])
    np.testing.assert_array_equal(packed[..., :11], source[:, :1])
    assert (packed[..., 11:] == 0).all()
