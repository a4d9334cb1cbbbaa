"""``Numerics``: what each choice does to results, and that the default is the plain kernel."""

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import Numerics, _backward_config, _config, bounds, reference
from cupyflash._problem import attention_problem
from cupyflash.ptxsim import settings

HALF = [np.float16, ml_dtypes.bfloat16]
DTYPES = [*HALF, np.float32, np.float64]


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_error_of_the_exponential_without_tensor_cores(dtype):
    q, k, v = arrays(dtype, shape=(2, 60))  # one tile: nothing is rescaled
    _, exact, _ = reference.attention(q, k, v, causal=True, return_lse=True, return_max=True)
    choices = ("ex2.approx", "poly3", "poly5", "accurate")
    error = {exp: np.abs(attention(q, k, v, exp=exp)[1] - exact).max() for exp in choices}
    assert 2e-5 < error["poly3"] < 8.9e-5
    if dtype == np.float64:  # float32 hides it
        assert 1e-8 < error["poly5"] < 8.7e-8 and error["accurate"] < 1e-14
    else:
        assert max(error["ex2.approx"], error["poly5"], error["accurate"]) < 2e-6


@pytest.mark.parametrize(
    ("exp", "dtype"),
    [
        ("poly3", np.float16),
        ("poly5", np.float32),
        ("poly3", np.float64),
        ("accurate", np.float16),
        ("accurate", np.float32),
    ],
)
def test_an_exponential_of_nothing_is_nothing(exp, dtype):
    """Masked keys, keys far below the maximum, a row without keys, and a NaN that stays in its row."""
    q, k, v = arrays(dtype, shape=(1, 40), head_dim=16)
    mask = np.tri(40, dtype=bool)
    mask[7] = False
    bias = np.zeros((40, 40), np.float32)
    bias[20, :3], bias[21, :3] = -200, -1e30
    bias[22, :3] = -np.inf
    bias[30, 2] = np.nan
    options = {"mask": mask, "bias": bias, "numerics": Numerics(exp=exp)}
    v[0, 35:] = np.nan
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    assert (out[0, 7] == 0).all() and lse[0, 7] == -np.inf
    seen = np.isnan(out[0]).any(axis=-1)
    np.testing.assert_array_equal(np.flatnonzero(seen), [30, *range(35, 40)])


@pytest.mark.parametrize("dtype", HALF)
def test_weights_in_float32_leave_the_rounding_of_the_result_alone(dtype):
    q, k, v = arrays(dtype)
    exact = reference.attention(q, k, v, causal=True)
    precise = exact.astype(dtype).astype(np.float64)
    plain, _, _ = attention(q, k, v)
    wide, _, _ = attention(q, k, v, p_dtype="float32")
    assert rms(wide - precise) < 0.3 * rms(plain - precise)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_threshold_spares_rescaling_and_leaves_the_maximum_true(dtype):
    q, k, v = arrays(dtype)
    plain, chosen = (attention(q, k, v, rescale_threshold=threshold) for threshold in (0, 8))
    np.testing.assert_array_equal(chosen[2], plain[2])
    assert (chosen[0] != plain[0]).any()
    np.testing.assert_allclose(chosen[0], plain[0], atol=4e-3)
    np.testing.assert_allclose(chosen[1], plain[1], atol=2e-6)


def share_of_small_values_lost(accumulate):
    """Half the values are 2^-15, half sum up to what is rounded down, unless the small ones, or their part that is
    left to be necessary in a column, count."""
    length, columns, small = 4096, 64, 2.0**-15
    v = np.full((length, columns), small, np.float16)
    v[::2] = 1 + 2.0**-10 * (np.arange(length // 2)[:, None] % 2)
    for column in range(columns):
        larger = np.flatnonzero(v[:, column] > 1)
        given_up = round(column / columns * (length // 2) * small * 2**10)
        v[np.random.default_rng(column).choice(larger, given_up, replace=False), column] = 1
    below, above = 0.5, 0.5 + 2.0**-11
    assert (v.astype(np.float64).mean(axis=0) > (below + above) / 2).all()
    q, k = np.zeros((1, 16), np.float16), np.zeros((length, 16), np.float16)
    numerics = Numerics(accumulate=accumulate, tile=(32, 64))
    out = cupyflash.attention(q, k, v, numerics=numerics).astype(np.float64)
    assert ((out == below) | (out == above)).all()
    return np.mean(out == below)


def test_two_levels_keep_what_a_truncating_accumulator_loses():
    """Uniform attention on A100's tensor cores: beside a sum of 1024, the low bits of what is added are cut off."""
    with settings(mma="ampere"):
        assert share_of_small_values_lost("one-level") > 0.3
        assert share_of_small_values_lost("two-level") == 0
    assert share_of_small_values_lost("one-level") == 0  # tensor cores that round


@pytest.mark.parametrize("tile", [(32, 16), (64, 32), (192, 128)])
def test_tiles(tile):
    q, k, v = arrays(np.float16)
    config = _config.forward(attention_problem(q, k, v, numerics=Numerics(tile=tile)), "sm_80")
    assert (config.defines["BLOCK_M"], config.defines["BLOCK_N"]) == tile
    plain, chosen = attention(q, k, v), attention(q, k, v, tile=tile)
    np.testing.assert_array_equal(chosen[2], plain[2])
    np.testing.assert_allclose(chosen[0], plain[0], atol=4e-3)


@pytest.mark.parametrize("tile", [(8, 16), (16, 128), (64, 32), (128, 64)])
def test_tiles_without_tensor_cores(tile):
    """A mask that removes single pairs, of which a thread has up to two words of bits, with NaN behind it."""
    q, k, v = arrays(np.float32, shape=(1, 140), head_dim=16)
    mask = np.random.default_rng(1).random((140, 140)) < 0.7
    mask[:, 5] = False
    mask[np.ix_(range(0, 140, 9), range(140))] = False
    mask[:, 109] = np.arange(140) == 30
    v[0, 5] = v[0, 109] = np.nan
    plain, chosen = (cupyflash.attention(q, k, v, mask=mask, numerics=n) for n in (None, Numerics(tile=tile)))
    assert np.flatnonzero(np.isnan(chosen[0]).any(axis=-1)).tolist() == [30]
    assert (chosen[0, ::9] == 0).all()
    np.testing.assert_allclose(chosen, plain, rtol=2e-6)


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


ALL_CHOICES = [
    Numerics("float32", "poly5", 8, (32, 16), "two-level"),
    Numerics("float32", "poly3", 8, (64, 32), "one-level"),
]


@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [
        (np.float16, ALL_CHOICES[0]),
        (np.float32, ALL_CHOICES[1]),
        pytest.param(ml_dtypes.bfloat16, ALL_CHOICES[1], marks=pytest.mark.deep),
        pytest.param(np.float64, ALL_CHOICES[0], marks=pytest.mark.deep),
    ],
)
def test_results_stay_within_their_bounds_with_every_option(dtype, numerics):
    q, k, v = arrays(dtype, shape=(2, 70), head_dim=16)
    rng = np.random.default_rng(1)
    options = {
        "bias": rng.standard_normal((70, 70)).astype(dtype),
        "attn_sink": rng.standard_normal(2).astype(dtype),
        "dropout_p": 0.2,
        "seed": 3,
        "window_size": (50, 10),
        "align": "top-left",
    }
    q, k, v = (x[:, None] for x in (q, k, v))
    options["attn_sink"] = options["attn_sink"][:1]
    (out, lse), pullback = cupyflash.attention_vjp(q, k, v, return_lse=True, numerics=numerics, **options)
    exact = reference.attention(q, k, v, return_lse=True, **options)
    allowed = bounds.attention(q, k, v, return_lse=True, numerics=numerics, **options)
    for result, expected, bound in zip((out, lse), exact, allowed, strict=True):
        assert (np.abs(result.astype(np.float64) - expected) <= bound).all()
    dout = rng.standard_normal(out.shape).astype(dtype)
    exact = reference.attention_backward(dout, q, k, v, out, lse, **options)
    allowed = bounds.attention_backward(dout, q, k, v, out, lse, numerics=numerics, **options)
    gradients = pullback(dout)
    for name in "dq", "dk", "dv", "dbias", "dattn_sink":
        error = np.abs(getattr(gradients, name).astype(np.float64) - getattr(exact, name))
        assert (error <= getattr(allowed, name)).all(), name


@pytest.mark.parametrize(("dtype", "numerics"), [(np.float16, ALL_CHOICES[1]), (np.float32, ALL_CHOICES[0])])
def test_parts_of_the_keys_stay_within_their_bounds(dtype, numerics):
    q, k, v = arrays(dtype, shape=(1, 200), head_dim=16)
    options = {"split_size": 128, "return_lse": True, "return_max": True}
    results = cupyflash.attention(q[:, :20], k, v, numerics=numerics, **options)
    exact = reference.attention(q[:, :20], k, v, **options)
    allowed = bounds.attention(q[:, :20], k, v, numerics=numerics, **options)
    for result, expected, bound in zip(results, exact, allowed, strict=True):
        assert (np.abs(result.astype(np.float64) - expected) <= bound).all()


def gradients(dtype, numerics, **options):
    q, k, v = arrays(dtype, shape=(1, 100), head_dim=16)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    inputs = (v[:, ::-1], q, k, v, out, lse)
    exact = reference.attention_backward(*inputs, **options)
    computed = cupyflash.attention_backward(*inputs, numerics=numerics, **options)
    return [x.astype(np.float64) for x in computed], [np.asarray(x) for x in exact]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backward_has_no_threshold_and_no_tile_to_choose(dtype):
    x = np.zeros((2, 100, 16), dtype)
    plain, default, threshold = (
        attention_problem(x, x, x, numerics=n) for n in (None, Numerics(), Numerics(rescale_threshold=8, tile=(32, 16)))
    )
    both = {"with_dkey": True, "with_dvalue": True}
    for problem in default, threshold:
        assert _backward_config.dq(problem, "sm_80", 2) == _backward_config.dq(plain, "sm_80", 2)
        assert _backward_config.dkdv(problem, "sm_80", 2, **both) == _backward_config.dkdv(plain, "sm_80", 2, **both)


@pytest.mark.parametrize("dtype", HALF)
def test_p_in_float32_leaves_the_rounding_of_dv_alone(dtype):
    (_, _, plain), (_, _, exact) = gradients(dtype, None)
    (_, _, wide), _ = gradients(dtype, Numerics(p_dtype="float32"))
    precise = exact.astype(dtype).astype(np.float64)
    assert rms(wide - precise) < 0.3 * rms(plain - precise)


def test_the_error_of_the_exponential_shows_in_gradients():
    """Of weights from an exact lse, summed with one sign: dv."""
    error = {}
    for exp in "ex2.approx", "poly3", "poly5", "accurate":
        (_, _, dv), (_, _, exact) = gradients(np.float64, Numerics(exp=exp))
        error[exp] = np.abs(dv / exact - 1).max()
    assert 1e-5 < error["poly3"] < 8.8e-5 and 1e-8 < error["poly5"] < 8.6e-8
    assert max(error["ex2.approx"], error["accurate"]) < 1e-14


def test_one_level_sums_every_row_of_a_gradient_in_one():
    """float32: sums of tiles by themselves err less than one running sum."""
    one, two = (gradients(np.float32, Numerics(accumulate=levels)) for levels in ("one-level", "two-level"))
    plain, _ = gradients(np.float32, None)
    for x, y in zip(two[0], plain, strict=True):
        np.testing.assert_array_equal(x, y)
    (_, _, one_dv), (_, _, exact) = one
    assert rms(two[0][2] - exact) < rms(one_dv - exact)
