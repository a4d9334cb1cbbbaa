"""Layer norm and its derivatives: `layer_norm.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

ROWS, N, EPSILON = 11, 75, 1e-5


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def moments(x):
    wide = x.astype(float)
    return wide.mean(1, keepdims=True), 1 / np.sqrt(wide.var(1, keepdims=True) + EPSILON)


def empty(*shape):
    return ptxsim.empty(shape, np.float32)


def forward(launch):
    x, scale, shift = 3 + 2 * normal(ROWS, N), normal(N, seed=2), normal(N, seed=3)
    y, mean, rstd = empty(ROWS, N), empty(ROWS), empty(ROWS)
    arguments = (x, scale, shift, y, mean, rstd, np.int32(N), np.float32(EPSILON))
    launch("layer_norm", "forward", ROWS, 64, *arguments, shared_mem=4 * (N + 2))
    exact_mean, exact_rstd = moments(x)
    return y, (x - exact_mean) * exact_rstd * scale + shift, (mean, exact_mean[:, 0]), (rstd, exact_rstd[:, 0])


def test_forward(launch):
    y, expected, *kept = forward(launch)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-6)
    for got, exact in kept:
        np.testing.assert_allclose(got, exact, rtol=2e-6)


def test_running_moments(launch):
    x, scale = (3 + 2 * normal(ROWS, N)).astype(np.float16), normal(N, seed=3)
    y = ptxsim.empty((ROWS, N), np.float16)
    launch("layer_norm", "running_moments", ROWS, 32, x, scale, y, np.int32(N), np.float32(EPSILON))
    mean, rstd = moments(x)
    expected = (x - mean) * rstd * scale
    np.testing.assert_allclose(y, expected, rtol=2.0**-11 + 2e-6, atol=2e-6)


def backward(launch):
    x, scale, dy = 3 + 2 * normal(ROWS, N), normal(N, seed=2), normal(ROWS, N, seed=4)
    mean, rstd = moments(x)
    kept = [a.astype(np.float32) for a in (mean, rstd)]
    dx, dscale, dshift = empty(ROWS, N), empty(N), empty(N)
    sizes = np.int32(ROWS), np.int32(N)
    launch("layer_norm", "backward_x", 4, 96, x, scale, dy, *kept, dx, *sizes)
    launch("layer_norm", "backward_parameters", 3, (32, 8), x, dy, *kept, dscale, dshift, *sizes)
    z, g = (x - mean) * rstd, dy.astype(float) * scale
    return (
        (dx, rstd * (g - g.mean(1, keepdims=True) - z * (g * z).mean(1, keepdims=True))),
        (dscale, (dy * z).sum(0)),
        (dshift, dy.astype(float).sum(0)),
    )


def test_backward(launch):
    for got, exact in backward(launch):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "problem, before, after",
    [
        (forward, "    __syncthreads();  // of_warp has been read\n", ""),
        (backward, "    __syncthreads();  // of the step before\n", ""),
    ],
    ids=["forward", "backward"],
)
def test_a_missing_barrier_is_a_race(planted, problem, before, after):
    launch = planted(before, after)
    problem(launch)
    assert launch.kinds == {"shared race"}
