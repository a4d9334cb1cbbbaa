import cupy as cp
import imaging
import numpy as np
import pytest


@pytest.mark.parametrize("shape", [(16, 16), (37, 50), (1, 70)])
@pytest.mark.parametrize("radius", [0, 1, 3])
def test_box_blur(rng, shape, radius):
    image = rng.random(shape, dtype=np.float32)
    padded = np.pad(image.astype(np.float64), radius, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * radius + 1,) * 2)
    out = imaging.box_blur(cp.asarray(image), radius)
    assert out.dtype == cp.float32
    np.testing.assert_allclose(cp.asnumpy(out), windows.mean((-2, -1)), rtol=1e-5)


def test_histogram(rng):
    image = rng.integers(0, 256, (45, 61), dtype=np.uint8)
    bins = imaging.histogram(cp.asarray(image))
    assert int(bins.sum()) == image.size
    cp.testing.assert_array_equal(bins, np.bincount(image.ravel(), minlength=256))


def test_equalise(rng):
    image = (rng.random((40, 40)) ** 3 * 255).astype(np.uint8)
    out = imaging.equalise(cp.array(image)).get()
    sums = np.bincount(image.ravel(), minlength=256).cumsum()
    expected = (np.float32(255) * sums.astype(np.float32) / np.float32(image.size)).astype(np.uint8)[image]
    assert np.abs(out.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("dtype", [cp.float32, cp.float64])
def test_gamma(dtype):
    cp.random.seed(3)
    image = cp.random.rand(20, 30).astype(dtype)
    cp.testing.assert_allclose(imaging.gamma(image, 2.2), image.get() ** 2.2, rtol=1e-5)
    cp.testing.assert_allclose(imaging.gamma(image[:, ::2], 0.5), cp.sqrt(image[:, ::2]), rtol=1e-5)


def test_contrast(rng):
    image = rng.standard_normal((33, 100)).astype(np.float32)
    differences = np.abs(image[:, 1:] - image[:, :-1])
    assert float(imaging.contrast(cp.asarray(image))) == differences.max()
    per_row = imaging.contrast(cp.asarray(image), axis=1)
    assert per_row.shape == (33,)
    cp.testing.assert_array_equal(per_row, differences.max(axis=1))


def test_a_pipeline_on_a_stream(rng):
    image = cp.asarray(rng.random((24, 24), dtype=np.float32))
    with cp.cuda.Stream(non_blocking=True) as stream:
        out = imaging.box_blur(imaging.gamma(image, 1.5), 2)
    stream.synchronize()
    assert cp.isfinite(out).all() and out.max() <= image.max()
