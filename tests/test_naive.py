"""The standard method on the simulator, against the reference and its bound."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import bounds, naive, ptxsim, reference
from tests import accuracy

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def draw(*shapes, dtype):
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_within_bound(arrays, **options):
    out, lse = naive.attention(*arrays, return_lse=True, **options)
    exact, exact_lse = reference.attention(*arrays, return_lse=True, **options)
    bound, lse_bound = bounds.attention_naive(*arrays, return_lse=True, **options)
    assert out.dtype == arrays[0].dtype and out.shape == exact.shape and out.flags.c_contiguous
    assert lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
    assert (np.abs(out.astype(np.float64) - exact) <= bound).all()
    empty = exact_lse == -np.inf
    assert (lse[empty] == -np.inf).all()
    assert (np.abs(lse[~empty] - exact_lse[~empty]) <= lse_bound[~empty]).all()


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
        (((2, 3, 63), (0, 63), (2, 0, 5)), {}),
        (((2, 0, 63), (4, 63), (2, 4, 5)), {}),
        (((0, 3, 63), (4, 63), (4, 5)), {}),
    ],
)
def test_stays_within_its_bound(shapes, options, dtype):
    assert_within_bound(draw(*shapes, dtype=dtype), **options)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_stays_within_its_bound_on_other_architectures(arch):
    with ptxsim.settings(arch=arch):
        assert_within_bound(draw((2, 9, 16), (9, 16), (9, 16), dtype=np.float16), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_change_a_bit(dtype):
    q, k, v = draw((2, 9, 4, 16), (2, 11, 4, 16), (2, 11, 4, 6), dtype=dtype)
    views = q.swapaxes(1, 2)[..., ::-1, ::2], k.swapaxes(1, 2)[..., 1:8, 1::2], v.swapaxes(1, 2)[..., :7, ::-1]
    out = np.full((2, 4, 6, 9), 7, dtype).swapaxes(-1, -2)
    assert naive.attention(*views, out=out) is out
    np.testing.assert_array_equal(out, naive.attention(*(view.copy() for view in views)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_keys_have_no_influence(dtype):
    q, k, v = draw((9, 16), (9, 16), (9, 16), dtype=dtype)
    clean, clean_lse = naive.attention(q, k, v, causal=True, return_lse=True)
    k[5:], v[5:] = np.inf, np.nan
    out, lse = naive.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(out[:5], clean[:5])
    np.testing.assert_array_equal(lse[:5], clean_lse[:5])
    assert not np.isfinite(out[5:].astype(np.float64)).any()


def test_a_stored_float16_score_overflows():
    q, k, v = np.full((1, 4), 300, np.float16), np.full((2, 4), 300, np.float16), np.ones((2, 4), np.float16)
    assert not np.isfinite(naive.attention(q, k, v)).any()
    assert np.isinf(bounds.attention_naive(q, k, v)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_score_in_each_place(dtype):
    class Naive:
        @staticmethod
        def attention(*inputs, arch, **options):
            return naive.attention(*inputs, return_lse=True, **options)

    accuracy.assert_maximum_is_found(Naive, dtype)
