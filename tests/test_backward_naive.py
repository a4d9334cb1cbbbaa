"""The standard backward on the simulator, against the reference and its bound."""

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import bounds, naive, ptxsim, reference

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def made(*shapes, dtype, with_dlse=True, **options):
    """Arguments of a backward call."""
    rng = np.random.default_rng(sum(map(sum, shapes)))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    out, lse = naive.attention(q, k, v, return_lse=True, **options)
    dout = rng.standard_normal(out.shape).astype(dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype) if with_dlse else None
    return (dout, q, k, v, out, lse), {"dlse": dlse, **options}


def assert_within_bound(arguments, options):
    gradients = naive.attention_backward(*arguments, **options)
    exact = reference.attention_backward(*arguments, **options)
    bound = bounds.attention_naive_backward(*arguments, **options)
    for gradient, operand, values, allowed in zip(gradients, arguments[1:4], exact, bound, strict=True):
        assert gradient.dtype == operand.dtype and gradient.shape == operand.shape and gradient.flags.c_contiguous
        assert np.isfinite(allowed).all()
        assert (np.abs(gradient.astype(np.float64) - values) <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((5, 8), (5, 8), (5, 8)), {}),
        (((1, 1), (1, 1), (1, 1)), {}),
        (((33, 40), (70, 40), (70, 24)), {"softmax_scale": -0.3}),
        (((3, 40), (7, 40), (7, 24)), {"softmax_scale": 0}),
        (((2, 6, 9, 16), (1, 3, 40, 16), (2, 3, 40, 16)), {"causal": True, "align": "bottom-right"}),
        (((2, 6, 40, 16), (1, 3, 9, 16), (2, 3, 9, 16)), {"causal": True, "align": "bottom-right"}),
        (((4, 9, 16), (17, 16), (1, 17, 5)), {"causal": True, "align": "top-left"}),
        (((3, 9, 16), (4, 1, 17, 16), (3, 17, 5)), {}),
        (((9, 16), (2, 3, 17, 16), (3, 17, 5)), {}),
        (((2, 3, 63), (0, 63), (2, 0, 5)), {}),
        (((2, 0, 63), (4, 63), (2, 4, 5)), {}),
        (((0, 3, 63), (4, 63), (4, 5)), {}),
        (((3, 63), (4, 63), (0, 4, 5)), {}),
    ],
)
def test_stays_within_its_bound(shapes, options, dtype):
    for with_dlse in False, True:
        assert_within_bound(*made(*shapes, dtype=dtype, with_dlse=with_dlse, **options))


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_stays_within_its_bound_on_other_architectures(arch):
    with ptxsim.settings(arch=arch):
        assert_within_bound(*made((2, 9, 16), (9, 16), (9, 16), dtype=np.float16, causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_change_a_bit(dtype):
    arguments, options = made((2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 6), dtype=dtype)
    expected = naive.attention_backward(*arguments, **options)
    views = []
    for array in arguments:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::-2] = array
        views.append(wide[..., ::-2])
    dlse = np.repeat(options["dlse"], 2, axis=-1)[..., ::2]
    grads_out = tuple(np.full(x.shape[::-1], 7, dtype).transpose() for x in arguments[1:4])
    gradients = naive.attention_backward(*views, dlse=dlse, grads_out=grads_out)
    for gradient, target, value in zip(gradients, grads_out, expected, strict=True):
        assert gradient is target
        np.testing.assert_array_equal(gradient, value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_pairs_have_no_influence(dtype):
    arguments, options = made((9, 16), (9, 16), (9, 16), dtype=dtype, causal=True)
    dout, q, k, v, *_ = arguments
    clean = naive.attention_backward(*arguments, **options)
    k[5], v[6], q[7], dout[8] = np.inf, np.nan, np.nan, np.inf
    dq, dk, dv = naive.attention_backward(*arguments, **options)
    np.testing.assert_array_equal(dq[:5], clean.dq[:5])
    assert not np.isfinite(dq[5:].astype(np.float64)).any()
    # In the other order: queries 0 to 4 are spoilt, which only keys 0 to 4 are seen by.
    arguments, options = made((9, 16), (9, 16), (9, 16), dtype=dtype, causal=True)
    clean = naive.attention_backward(*arguments, **options)
    arguments[1][4], arguments[0][3] = np.nan, np.nan
    dq, dk, dv = naive.attention_backward(*arguments, **options)
    for gradient, value in (dk, clean.dk), (dv, clean.dv):
        np.testing.assert_array_equal(gradient[5:], value[5:])
        assert not np.isfinite(gradient[:5].astype(np.float64)).any()


def test_what_is_stored_in_float16_may_overflow():
    arguments, options = made((3, 4), (5, 4), (5, 4), dtype=np.float16)
    arguments[0][...] = 3e4
    arguments[3][...] = 3e4 * np.sign(arguments[3])
    assert np.isinf(bounds.attention_naive_backward(*arguments, **options).dq).any()
    assert not np.isfinite(naive.attention_backward(*arguments, **options).dq.astype(np.float64)).all()


def test_float32_stays_close_to_the_tensor_cores_result():
    arguments, options = made((2, 20, 16), (2, 30, 16), (2, 30, 24), dtype=np.float16)
    half = cupyflash.attention_backward(*arguments, **options)
    wide = [x.astype(np.float32) for x in arguments]
    for a, b in zip(half, naive.attention_backward(*wide, **options), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b, atol=2e-3 * np.abs(b).max())
