import functools

import numpy as np
import pytest

from cupyflash import Numerics, attention, bounds, naive, reference
from cupyflash._arrays import BFLOAT16
from experiments import emulation


def to(dtype):
    return {np.dtype(np.float16): emulation.to_float16, BFLOAT16: emulation.to_bfloat16}[np.dtype(dtype)]


@functools.cache
def problem(dtype):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((n, 64)).astype(dtype) for n in (96, 300, 300))
    return (q * np.array(3, dtype), k, v), emulation.scaled_scores(q * np.array(3, dtype), k)


def largest_error_over_bound(out, arrays, **options):
    return (np.abs(out - reference.attention(*arrays)) / bounds.attention(*arrays, **options)).max()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("threshold", [0, 8])
def test_tiled_is_the_kernel(dtype, threshold):
    arrays, scores = problem(dtype)
    numerics = Numerics(tile=(64, 32), rescale_threshold=threshold)
    kernel = attention(*arrays, numerics=numerics).astype(np.float32)
    emulated = {
        name: to(dtype)(emulation.tiled(scores, arrays[2], tile=32, weights_to=rounding, threshold=threshold).out)
        for name, rounding in {"kernel's": to(dtype), "none": emulation.exact}.items()
    }
    assert 0.1 < largest_error_over_bound(emulated["kernel's"], arrays, numerics=numerics) < 1
    equal = {name: (out == kernel).mean() for name, out in emulated.items()}
    assert equal["kernel's"] > 0.97 and equal["none"] < 0.9, equal


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_standard_is_the_naive_kernels(dtype):
    arrays, scores = problem(dtype)
    kernel = naive.attention(*arrays).astype(np.float32)
    emulated = {
        name: to(dtype)(emulation.standard(scores, arrays[2], scores_to=rounding, weights_to=to(dtype)))
        for name, rounding in {"kernel's": to(dtype), "none": emulation.exact}.items()
    }
    equal = {name: (out == kernel).mean() for name, out in emulated.items()}
    assert equal["kernel's"] > 0.97 and equal["none"] < 0.9, equal


@pytest.mark.parametrize("options", [{}, {"offset": 8}, {"threshold": 4}, {"normalise_each_tile": True}])
def test_without_roundings_all_are_exact(options):
    (_, _, v), scores = problem(np.float16)
    weights = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v.astype(np.float64)
    out = emulation.tiled(scores, v, tile=32, weights_to=emulation.exact, **options).out
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)


def test_state_is_rounded_after_every_tile():
    scores, v = np.zeros((1, 768), np.float32), np.ones((768, 1), np.float32)
    v[256:] = 1 / 128
    kept = {
        name: emulation.tiled(
            scores, v, tile=1, weights_to=emulation.exact, state_to=rounding, normalise_each_tile=False
        ).out.item()
        for name, rounding in {"float32": emulation.exact, "bfloat16": emulation.to_bfloat16}.items()
    }
    assert kept["float32"] == pytest.approx((256 + 4) / 768)
    assert kept["bfloat16"] == 1  # output and sum stay at 256, to which bfloat16 can add neither 1/128 nor 1


def test_maximum_follows_beyond_the_threshold_only():
    largest = []

    def recorded(weights):
        largest.append(weights.max())
        return weights

    rising = np.repeat(np.arange(5.0, dtype=np.float32), 2)[None] / np.float32(emulation.LOG2_E)
    emulation.tiled(rising, np.ones((10, 1)), tile=2, weights_to=recorded, threshold=2, offset=1)
    np.testing.assert_allclose(largest, [2, 4, 8, 2, 4], rtol=1e-6)  # 0, 1 and 2 above, then followed


def test_e4m3():
    numbers = [448, 449, 1e6, -1e6, 2**-9, 2**-10, 1.01 * 2**-10, 1.0624, 1.0626, 17, 19]
    rounded = [448, 448, 448, -448, 2**-9, 0, 2**-9, 1, 1.125, 16, 20]
    np.testing.assert_array_equal(emulation.to_float8(np.array(numbers, np.float32)), np.array(rounded, np.float32))
