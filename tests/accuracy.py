"""Parts of the softmax by themselves: problems whose results are little else."""

from decimal import Decimal

import numpy as np

from cupyflash import testing

ULPS = 2  # of exp and log, as stated
ROUNDINGS = 1  # of the sum and of the division, half an ulp each


def assert_exp_is_accurate(backend, dtype, arch="sm_80"):
    """Two keys whose scores differ by x and whose values are 0 and 1: out = exp(-x) / (1 + exp(-x)).

    The keys lie in different tiles, so that the weight is once the factor of a rescaling; those between have none.
    """
    q = np.concatenate([np.arange(1, 40) / 7, np.arange(24, 87) + np.arange(63) / 64]).astype(dtype)[:, None]
    exact = [(-Decimal(float(x))).exp() for (x,) in q]
    exact = [weight / (1 + weight) for weight in exact]
    for first, last in ((0, -1), (-1, 0)):
        k = np.array([first, *[-1e4] * 70, last], dtype)[:, None]
        out, _ = backend.attention(q, k, (k == -1).astype(dtype), softmax_scale=1.0, arch=arch)
        assert_ulps(out[:, 0], exact, ULPS + ROUNDINGS)


def assert_log_is_accurate(backend, dtype, arch="sm_80"):
    """Scores of 0: query i sees i + 1 of them, and lse = log(i + 1)."""
    q, k = (np.zeros((100, 1), dtype) for _ in range(2))
    _, lse = backend.attention(q, k, k, causal=True, arch=arch)
    assert lse[0] == 0
    assert_ulps(lse[1:], [Decimal(n).ln() for n in range(2, 101)], ULPS)


def assert_ulps(result, exact, allowed):
    ulp = np.spacing(np.abs([float(x) for x in exact]).astype(result.dtype))
    error = [
        abs(float((Decimal(float(x)) - y) / Decimal(float(u)))) for x, y, u in zip(result, exact, ulp, strict=True)
    ]
    assert max(error) <= allowed, f"{max(error):.2f} ulp at {np.argmax(error)}"


def assert_maximum_is_found(backend, dtype, arch="sm_80"):
    """Batch b's key b leads by so much that exp overflows, were it left out of the maximum: out is its value."""
    seqlen_k = 70 if np.dtype(dtype).itemsize > 2 else 130  # more than a tile
    q = np.ones((seqlen_k, 20, 1), dtype)
    k = (1000 * np.eye(seqlen_k)[:, :, None]).astype(dtype)
    v = np.random.default_rng(0).standard_normal((seqlen_k, 3)).astype(dtype)
    out, lse = backend.attention(q, k, v, softmax_scale=1.0, arch=arch)
    testing.assert_same_bits(out, np.repeat(v[:, None], 20, axis=1))
    assert (lse == 1000).all()


def assert_backward_exp_is_accurate(backend, dtype, arch="sm_80"):
    """One query over keys with score 0 and -x, given lse = 0: with dout = 1, row j of dv is the weight of key j."""
    x = (np.arange(1, 80) + np.arange(79) / 79).astype(dtype)[:, None]
    q, dout = np.ones((2, 1, 1), dtype)
    k = -x
    gradients = backend.attention_backward(
        dout, q, k, np.zeros_like(k), np.zeros_like(q), np.zeros(1, dtype), softmax_scale=1.0, arch=arch
    )
    assert_ulps(gradients.dv[:, 0], [(-Decimal(float(y))).exp() for (y,) in x], ULPS)
    # With v = 1 and delta = out = 0, dS is the weight, too.
    k = np.concatenate([-x[:1], np.full_like(x, -1e4), np.zeros((1, 1), dtype)])
    for y in x[::40]:
        k[0] = -y
        v = (k == k[0]).astype(dtype)
        gradients = backend.attention_backward(
            dout, q, k, v, np.zeros_like(q), np.zeros(1, dtype), softmax_scale=1.0, arch=arch
        )
        assert_ulps(gradients.dk[:1, 0], [(-Decimal(float(y[0]))).exp()], ULPS)
        assert_ulps(-gradients.dq[:, 0], [Decimal(float(y[0])) * (-Decimal(float(y[0]))).exp()], ULPS + 1)
