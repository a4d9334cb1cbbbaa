"""Softmax of rows: `softmax.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

ROWS = 7


def rows(n, seed=1):
    return np.random.default_rng(seed).normal(size=(ROWS, n)).astype(np.float32)


def exact(x):
    p = np.exp(x.astype(float) - x.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def softmax(launch, kernel, n, grid, block, *first):
    x, out = 8 * rows(n), ptxsim.empty((ROWS, n), np.float32)
    launch("softmax", kernel, grid, block, x, out, *first, np.int32(n))
    return out, exact(x)


@pytest.mark.parametrize("kernel, n, block", [("three_pass", 301, 96), ("online", 50, 32)])
def test_softmax(launch, kernel, n, block):
    out, p = softmax(launch, kernel, n, ROWS, block)
    np.testing.assert_allclose(out, p, rtol=1e-5, atol=1e-36)


def test_warp_per_row(launch):
    out, p = softmax(launch, "warp_per_row", 101, 2, (32, 4), np.int32(ROWS))
    np.testing.assert_allclose(out, p, rtol=1e-5, atol=1e-36)


def test_backward(launch):
    p, dp, dx = exact(rows(75)).astype(np.float32), rows(75, seed=2), ptxsim.empty((ROWS, 75), np.float32)
    launch("softmax", "backward", ROWS, 64, p, dp, dx, np.int32(75))
    wide, weighted = p.astype(float), p.astype(float) * dp
    bound = 8 * 2.0**-24 * wide * (abs(dp) + abs(weighted).sum(1, keepdims=True))
    assert (abs(dx - wide * (dp - weighted.sum(1, keepdims=True))) <= bound).all()


def test_a_box_that_is_used_again_too_early_is_a_race(planted):
    launch = planted("  __syncthreads();  // the box has been read\n", "")
    softmax(launch, "three_pass", 301, ROWS, 96)
    assert launch.kinds == {"shared race"}


def test_a_sum_that_is_not_rescaled_is_wrong(planted):
    launch = planted("l = l * expf(previous - m) +", "l = l +")
    out, p = softmax(launch, "online", 50, ROWS, 32)
    assert not np.allclose(out, p, rtol=1e-2)
