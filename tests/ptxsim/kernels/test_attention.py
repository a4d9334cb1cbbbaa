"""Attention of one head and its derivatives: `attention.cu`."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ptxsim

D = 64
SCALE = np.float32(D**-0.5)
BF16 = ml_dtypes.bfloat16
LENGTHS = [(70, 77, False), (70, 77, True)]  # queries, keys, causal


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


def empty(*shape, dtype=np.float32):
    return ptxsim.empty(shape, dtype)


class Problem:
    """Operands of a dtype, and what float64 makes of them."""

    def __init__(self, queries, keys, causal, dtype):
        self.q, self.dout = (normal(queries, D, seed=n).astype(dtype) for n in (1, 2))
        self.k, self.v = (normal(keys, D, seed=n).astype(dtype) for n in (3, 4))
        self.choices = np.int32(queries), np.int32(keys), SCALE, np.int32(causal)
        q, k, v, dout = (x.astype(float) for x in (self.q, self.k, self.v, self.dout))
        s = float(SCALE) * q @ k.T
        if causal:
            s[np.arange(keys) > np.arange(queries)[:, None] + keys - queries] = -np.inf
        largest = s.max(1, keepdims=True)
        total = np.exp(s - largest).sum(1, keepdims=True)
        self.p, self.lse = np.exp(s - largest) / total, (largest + np.log(total))[:, 0]
        self.out = self.p @ v
        self.delta = (self.out * dout).sum(1)
        ds = float(SCALE) * self.p * (dout @ v.T - self.delta[:, None])
        self.dq, self.dk, self.dv = ds @ k, ds.T @ q, self.p.T @ dout


def forward(launch, kernel, queries, keys, causal):
    tensor = kernel == "tiled<32>"
    problem = Problem(queries, keys, causal, BF16 if tensor else np.float32)
    out, lse = empty(queries, D, dtype=problem.q.dtype), empty(queries)
    grid, block = (-(-queries // 64), 128) if tensor else (-(-queries // 4), 128)
    launch("attention", kernel, grid, block, problem.q, problem.k, problem.v, out, lse, *problem.choices)
    return (out, problem.out), (lse, problem.lse)


@pytest.mark.parametrize("lengths", [(9, 21, False), (9, 21, True)])
def test_warp_per_query(launch, lengths):
    for got, exact in forward(launch, "warp_per_query", *lengths):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=2e-6)


def assert_close_in_bfloat16(got, exact):
    """What is rounded are the weights, 2**-9 each, and the result, 2**-9 of it."""
    np.testing.assert_allclose(got.astype(float), exact, rtol=2.0**-8, atol=2.0**-8 * abs(exact).max())


@pytest.mark.parametrize("lengths", LENGTHS)
def test_tiled(launch, lengths):
    (out, exact), (lse, exact_lse) = forward(launch, "tiled<32>", *lengths)
    assert_close_in_bfloat16(out, exact)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_warp_per_query_backward(launch, causal):
    queries, keys = 7, 10
    problem = Problem(queries, keys, causal, np.float32)
    kept = (x.astype(np.float32) for x in (problem.out, problem.dout, problem.lse))
    dq, dk, dv = empty(queries, D), np.zeros((keys, D), np.float32), np.zeros((keys, D), np.float32)
    gradients = dq, dk, dv
    operands = problem.q, problem.k, problem.v
    launch("attention", "warp_per_query_backward", 2, 128, *operands, *kept, *gradients, *problem.choices)
    for got, exact in zip(gradients, (problem.dq, problem.dk, problem.dv), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def tiled_backward(launch, queries, keys, causal):
    problem = Problem(queries, keys, causal, BF16)
    kept = (x.astype(np.float32) for x in (problem.lse, problem.delta))
    dk, dv = empty(keys, D), empty(keys, D)
    operands = problem.q, problem.k, problem.v, problem.dout
    grid = -(-keys // 32)
    launch("attention", "tiled_backward_keys<2>", grid, 64, *operands, *kept, dk, dv, *problem.choices)
    return (dk, problem.dk), (dv, problem.dv)


@pytest.mark.parametrize("lengths", [(37, 45, False), (37, 45, True)])
def test_tiled_backward_keys(launch, lengths):
    for got, exact in tiled_backward(launch, *lengths):
        assert_close_in_bfloat16(got, exact)


@pytest.mark.parametrize(
    "problem, before, after, kind",
    [
        (forward, "    __syncthreads();  // V has been read\n", "", "shared race"),
        (forward, "    __syncthreads();  // K has been read\n", "", "shared race"),
        (tiled_backward, "    __syncthreads();  // Q and dO have been read\n", "", "shared race"),
        (tiled_backward, "wait<0>();", "wait<1>();", "missing cp.async wait"),
    ],
    ids=["V", "K", "Q", "wait"],
)
def test_faults_are_found(planted, problem, before, after, kind):
    launch = planted(before, after)
    if problem is forward:
        forward(launch, "tiled<32>", *LENGTHS[0])
    else:
        tiled_backward(launch, 37, 45, False)
    assert kind in launch.kinds


@pytest.mark.parametrize(
    "before, after",
    [
        ("float factor = exp2f(m[half] - larger);", "float factor = 1.0f;"),
        ("row + 8 * half + keys - queries + 1)", "row + 8 * half + keys - queries)"),
        ("a[1] = pack(s[0][2], s[0][3]);", "a[1] = pack(s[1][0], s[1][1]);"),
    ],
    ids=["rescale", "diagonal", "operand"],
)
def test_faults_show_in_the_result(planted, before, after):
    (out, exact), _ = forward(planted(before, after), "tiled<32>", *LENGTHS[1])
    with pytest.raises(AssertionError):
        assert_close_in_bfloat16(out, exact)
