"""Keys in parts: split_size, and merging partial results."""

import numpy as np
import pytest

import cupyflash
from cupyflash import reference
from cupyflash.merge import merge

BR = {"align": "bottom-right"}
SINK = np.array([1.0, 2.0, -3.0, -np.inf], np.float32)


def arrays(seed=0, dtype=np.float16, shape=(2, 4, 5), seqlen_k=300, kv_heads=2, head_dim=40, head_dim_v=19):
    rng = np.random.default_rng(seed)
    batch, _, _ = shape
    shapes = (*shape, head_dim), (batch, kv_heads, seqlen_k, head_dim), (batch, kv_heads, seqlen_k, head_dim_v)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, **BR},
    "window": {"window_size": (100, None), **BR},
    "lengths": {"seqlens_q": np.array([4, 5]), "seqlens_k": np.array([0, 257]), "attn_sink": SINK},
    "dropout": {"dropout_p": 0.3, "seed": 3},
    "bias": {"bias": np.where(np.arange(300) < 130, -np.inf, 0.5).astype(np.float32), "attn_sink": SINK},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("split_size", [128, 256, 10**12])
def test_parts_are_the_whole(options, split_size):
    q, k, v = arrays()
    q, k, v = (x[..., :: 1 if x is v else -1, :] for x in (q, k, v))
    results = cupyflash.attention(q, k, v, return_lse=True, return_max=True, split_size=split_size, **options)
    whole = cupyflash.attention(q, k, v, return_lse=True, return_max=True, **options)
    exact = reference.attention(q, k, v, return_lse=True, return_max=True, **options)
    for part, one, right, tolerance in zip(results, whole, exact, (2e-3, 2e-6, 1e-6), strict=True):
        assert part.dtype == one.dtype and part.shape == one.shape
        np.testing.assert_allclose(part.astype(float), right, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(results[2], whole[2])


def test_bits_depend_neither_on_the_batch_nor_on_longer_keys_in_it():
    q, k, v = arrays()
    together = cupyflash.attention(q, k, v, split_size=128)
    for batch in range(2):
        alone = cupyflash.attention(q[batch : batch + 1], k[batch : batch + 1], v[batch : batch + 1], split_size=128)
        np.testing.assert_array_equal(together[batch], alone[0])
    short = cupyflash.attention(q, k[..., :130, :], v[..., :130, :], split_size=128)
    padded = cupyflash.attention(q, k, v, split_size=128, seqlens_k=np.array([130, 130]))
    np.testing.assert_array_equal(short, padded)


def test_a_part_behind_the_last_key_is_not_read():
    q, k, v = arrays()
    k[:, :, 200:], v[:, :, 200:] = np.nan, np.nan
    out = cupyflash.attention(q, k, v, split_size=128, seqlens_k=np.array([200, 20]))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_merge_of_parts_one_of_them_empty(dtype):
    q, k, v = arrays(dtype=dtype)
    bounds = (0, 100), (100, 100), (100, 300)
    parts = [cupyflash.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in bounds]
    outs, lses = zip(*parts, strict=True)
    out, lse = merge(outs, lses)
    exact, exact_lse = reference.merge(outs, lses)
    unit = np.finfo(dtype).eps
    lse_unit = np.finfo(lse.dtype).eps
    np.testing.assert_allclose(out, exact, atol=4 * max(unit, lse_unit), rtol=0)
    np.testing.assert_allclose(lse, exact_lse, atol=8 * lse_unit, rtol=0)
    assert out.dtype == dtype and lse.dtype == lses[0].dtype


def test_merge_takes_any_strides_and_no_part_that_saw_a_key():
    outs = [np.asfortranarray(np.full((3, 2, 5), value, np.float32)) for value in (1, 2)]
    nothing = np.full((2, 3), -np.inf, np.float32).T
    out, lse = merge(outs, [nothing, nothing])
    assert (out == 0).all() and (lse == -np.inf).all()
    out, lse = merge(outs, [nothing, np.ones((2, 3), np.float32).T])
    assert (out == 2).all() and (lse == 1).all()


def test_merge_keeps_a_nan_in_its_row():
    outs, lses = np.ones((2, 4, 3), np.float32), np.zeros((2, 4), np.float32)
    lses[0, 1] = np.nan
    out, lse = merge(outs, lses)
    np.testing.assert_array_equal(np.isnan(lse), [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(out).all(axis=1), np.isnan(lse))
    np.testing.assert_array_equal(out[0], 1)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "lses: 0 for 0 outs; expected as many, at least one"),
        ([np.zeros((2, 3))], [], "lses: 0 for 1 outs"),
        ([np.zeros(3)], [np.zeros(())], r"outs\[0\]: needs at least 2 dimensions"),
        ([np.zeros((2, 3), int)], [np.zeros(2)], r"outs\[0\]: dtype <i8 is not one of float16"),
        ([np.zeros((2, 3), np.float32)], [np.zeros(2)], r"lses\[0\]: dtype <f8, expected float32"),
        ([np.zeros((2, 3)), np.zeros((3, 3))], [np.zeros(2)] * 2, r"outs\[1\]: shape \(3, 3\), expected \(2, 3\)"),
    ],
)
def test_merge_says_what_does_not_fit(outs, lses, message):
    with pytest.raises((TypeError, ValueError), match=message):
        merge(outs, lses)
