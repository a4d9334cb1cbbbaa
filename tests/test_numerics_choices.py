"""``Numerics``: what each choice does to results, and that the default is the plain kernel."""

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import Numerics, _config, reference
from cupyflash._problem import attention_problem
from cupyflash.ptxsim import settings

HALF = [np.float16, ml_dtypes.bfloat16]


def arrays(dtype, seed=0, shape=(2, 300), head_dim=40):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((*shape, head_dim)) for _ in range(3))
    return [x.astype(dtype) for x in (q, k * np.linspace(0.1, 3, shape[-1])[:, None], np.abs(v) + 0.5)]  # rising scores


def rms(error):
    return np.sqrt(np.mean(np.square(error)))


def attention(q, k, v, **choices):
    options = {"return_lse": True, "return_max": True, "causal": True}
    results = cupyflash.attention(q, k, v, numerics=Numerics(**choices), **options)
    return [x.astype(np.float64) for x in results]


def test_the_default_is_the_plain_kernel():
    q, k, v = arrays(np.float16)
    plain, chosen = (_config.forward(attention_problem(q, k, v, numerics=n), "sm_80") for n in (None, Numerics()))
    assert plain == chosen


@pytest.mark.parametrize("dtype", HALF)
def test_the_error_of_the_exponential_shows_in_lse(dtype):
    q, k, v = arrays(dtype)
    _, exact, _ = reference.attention(q, k, v, causal=True, return_lse=True, return_max=True)
    error = {exp: np.abs(attention(q, k, v, exp=exp)[1] - exact).max() for exp in ("ex2.approx", "poly3", "poly5")}
    # FlashAttention-4 gives 8.8e-5 and 1.44e-7 as the largest relative errors of the polynomials.
    assert 2e-5 < error["poly3"] < 9e-5
    assert error["poly5"] < 2e-6 and error["ex2.approx"] < 2e-6


@pytest.mark.parametrize("exp", ["poly3", "poly5", "accurate"])
def test_an_exponential_of_nothing_is_nothing(exp):
    """Masked keys, keys far below the maximum, a row without keys, and a NaN that stays in its row."""
    q, k, v = arrays(np.float16, shape=(1, 40), head_dim=16)
    mask = np.tri(40, dtype=bool)
    mask[7] = False
    bias = np.zeros((40, 40), np.float32)
    bias[20, :3] = -200
    bias[30, 2] = np.nan
    options = {"mask": mask, "bias": bias, "numerics": Numerics(exp=exp)}
    v[0, 35:] = np.nan
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    assert (out[0, 7] == 0).all() and lse[0, 7] == -np.inf
    seen = np.isnan(out[0]).all(axis=-1)
    np.testing.assert_array_equal(np.flatnonzero(seen), [30, *range(35, 40)])


@pytest.mark.parametrize("dtype", HALF)
def test_weights_in_float32_leave_the_rounding_of_the_result_alone(dtype):
    q, k, v = arrays(dtype)
    exact = reference.attention(q, k, v, causal=True)
    precise = exact.astype(dtype).astype(np.float64)
    plain, _, _ = attention(q, k, v)
    wide, _, _ = attention(q, k, v, p_dtype="float32")
    assert rms(wide - precise) < 0.3 * rms(plain - precise)


def test_a_threshold_spares_rescaling_and_leaves_the_maximum_true():
    q, k, v = arrays(np.float16)
    plain, chosen = (attention(q, k, v, rescale_threshold=threshold) for threshold in (0, 8))
    np.testing.assert_array_equal(chosen[2], plain[2])
    assert (chosen[0] != plain[0]).any()
    np.testing.assert_allclose(chosen[0], plain[0], atol=4e-3)
    np.testing.assert_allclose(chosen[1], plain[1], atol=2e-6)


def test_two_levels_stop_the_drift_of_a_truncating_accumulator():
    """Uniform attention to positive values: on A100's tensor cores the running sum loses its low bits one way."""
    length = 6000
    q, k = np.zeros((1, 16), np.float16), np.zeros((length, 16), np.float16)
    v = np.random.default_rng(0).uniform(0.5, 1.5, (length, 16)).astype(np.float16)
    numerics = [Numerics(accumulate=levels, p_dtype="float32") for levels in ("one-level", "two-level")]
    exact = v.astype(np.float64).mean(axis=0)
    with settings(mma="ampere"):
        # Parts of the results are float32, before they are joined: the drift is below a rounding to float16.
        parts = [cupyflash.attention(q, k, v, split_size=8192, numerics=n) for n in numerics]
    assert all(np.allclose(part, exact, rtol=1e-3) for part in parts)


@pytest.mark.parametrize("tile", [(32, 16), (64, 32), (128, 64), (192, 128)])
def test_tiles(tile):
    q, k, v = arrays(np.float16)
    config = _config.forward(attention_problem(q, k, v, numerics=Numerics(tile=tile)), "sm_80")
    assert (config.defines["BLOCK_M"], config.defines["BLOCK_N"]) == tile
    plain, chosen = attention(q, k, v), attention(q, k, v, tile=tile)
    np.testing.assert_array_equal(chosen[2], plain[2])
    np.testing.assert_allclose(chosen[0], plain[0], atol=4e-3)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ((48, 64), r"tile \(48, 64\) has block_m 48; for float16 it is one of 32, 64"),
        ((64, 24), r"tile \(64, 24\) has block_n 24; for float16 it is one of 16, 32"),
        ((256, 128), r"tile \(256, 128\) needs 262144 bytes of shared memory for head_dim 256"),
    ],
)
def test_tiles_that_do_not_exist(tile, message):
    x = np.zeros((4, 256), np.float16)
    with pytest.raises(ValueError, match=message):
        cupyflash.attention(x, x, x, numerics=Numerics(tile=tile))
