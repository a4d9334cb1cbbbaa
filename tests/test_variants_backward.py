"""Gradients with every option in the tensor-core kernels, against the exact reference."""

import numpy as np
import pytest

import cupyflash
from cupyflash import reference
from cupyflash._arrays import BFLOAT16

RIGHT = {"align": "bottom-right"}
LEADING = {
    "heads": ((2, 4), (2, 2), (2, 2)),
    "queries shared": ((1, 2), (2, 2), (2, 2)),
    "keys shared": ((2, 2), (1, 1), (1, 2)),
}


def case(dtype, leading, seqlen_q, seqlen_k, head_dim=16, head_dim_v=16, *, seed=0):
    rng = np.random.default_rng(seed)
    matrices = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)
    shapes = [(*lead, *matrix) for lead, matrix in zip(leading, matrices, strict=True)]
    return rng, [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def options_of(names, rng, batch, heads, seqlen_q, seqlen_k):
    options = {}
    for name in names.split():
        if name == "causal":
            options |= {"causal": True, **RIGHT}
        elif name == "window":
            options |= {"window_size": (20, 5), **RIGHT}
        elif name == "left":
            options |= {"window_size": (7, None), "align": "top-left"}
        elif name == "softcap":
            options["softcap"] = 1.5
        elif name == "mask":
            options["mask"] = mask = rng.random((batch, 1, seqlen_q, seqlen_k)) < 0.5
            mask[:, :, 5] = False
        elif name == "bias":
            options["bias"] = bias = rng.standard_normal((heads, seqlen_q, seqlen_k)).astype(np.float32)
            bias[:, 3] = -np.inf
            bias[0, 10, 4] = -np.inf
            bias[0, 11] = -3.2e38
        elif name == "alibi":
            options |= {"alibi_slopes": np.linspace(0.3, 0.01, heads, dtype=np.float32), **RIGHT}
        elif name == "sink":
            options["attn_sink"] = np.linspace(1, -2, heads, dtype=np.float32)
        elif name == "dropout":
            options |= {"dropout_p": 0.3, "seed": 5}
        elif name == "lengths":
            options |= {
                "seqlens_q": np.array([33, seqlen_q][:batch]),
                "seqlens_k": np.array([seqlen_k - 1, 40][:batch]),
            }
        elif name == "nothing":
            options |= {"seqlens_q": np.array([0, seqlen_q]), "seqlens_k": np.array([seqlen_k, 0])}
    return options


def assert_close(result, exact, name):
    result, exact = result.astype(np.float64), np.asarray(exact, np.float64)
    assert np.array_equal(np.isnan(result), np.isnan(exact)), name
    error = np.nanmax(np.abs(result - exact), initial=0)
    assert error <= 0.02 * max(1, np.nanmax(np.abs(exact), initial=0)), (name, error)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "names",
    [
        "",
        "window",
        "left",
        "softcap",
        "mask",
        "dropout",
        "lengths",
        "nothing",
        "causal lengths",
        "lengths window softcap mask dropout",
    ],
)
@pytest.mark.parametrize("leading", LEADING)
def test_gradients(names, dtype, leading):
    seqlen_q, seqlen_k = 70, 150
    rng, (q, k, v) = case(dtype, LEADING[leading], seqlen_q, seqlen_k)
    options = options_of(names, rng, 2, 4 if leading == "heads" else 2, seqlen_q, seqlen_k)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape).astype(dtype), rng.standard_normal(lse.shape).astype(lse.dtype)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    exact = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for name, result, expected in zip(("dq", "dk", "dv"), gradients, exact, strict=True):
        assert_close(result, expected, name)
