"""NVIDIA's C++ standard library: `libcudacxx.cu`."""

import numpy as np

from cupyflash import ptxsim

OPTIONS = ("-fmad=false",)  # products and sums of complex numbers are those of NumPy


def messages(launch):
    whole, message, flag = np.zeros(1, np.int32), np.zeros(2, np.int32), np.zeros(1, np.int32)
    launch("libcudacxx", "messages", 2, 64, whole, message, flag, options=OPTIONS)
    return whole[0], message


def test_messages(launch):
    whole, message = messages(launch)
    assert whole == 2 * sum(range(64)) and message.tolist() == [5, 5]


def test_escapes(launch):
    real, imaginary = np.random.default_rng(1).uniform(-2, 1, (2, 64)).astype(np.float32)
    turns = ptxsim.empty(64, np.uint8)
    launch("libcudacxx", "escapes", 1, 64, real, imaginary, turns, np.int32(30), options=OPTIONS)
    c = real + 1j * imaginary
    z, expected = np.zeros_like(c), np.zeros(64, int)
    for _ in range(30):
        inside = z.real * z.real + z.imag * z.imag <= np.float32(4)
        z[inside] = (z * z + c)[inside]
        expected += inside
    np.testing.assert_array_equal(turns, expected)


def test_least(launch):
    x, out = np.random.default_rng(2).normal(size=(32, 9)).astype(np.float32), ptxsim.empty((32, 2), np.float32)
    launch("libcudacxx", "least", 1, 32, x, out, np.int32(9), options=OPTIONS)
    running = np.minimum.accumulate(x, axis=1)
    second = [next((a for a in row[::-1] if a != row[-1]), np.finfo(np.float32).max) for row in running]
    np.testing.assert_array_equal(out, np.column_stack([running[:, -1], second]))


def test_a_flag_that_is_raised_too_weakly_is_a_race(planted):
    launch = planted("raised.store(1, cuda::memory_order_release)", "raised.store(1, cuda::memory_order_relaxed)")
    messages(launch)
    assert launch.kinds == {"global race"}
