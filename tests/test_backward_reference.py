"""The reference gradients in cases that are plain to see; test_gradient_differences.py has the differences."""

import itertools

import numpy as np
import pytest

from cupyflash import reference


def made(shapes, options, with_dlse, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout = rng.standard_normal(out.shape)
    dlse = rng.standard_normal(lse.shape) if with_dlse else None
    return dout, q, k, v, out, lse, dlse


def test_a_view_that_repeats_an_operand_counts_as_a_full_array():
    dout, q, k, v, out, lse, _ = made(((3, 4, 2), (5, 2), (5, 3)), {}, False)
    summed = reference.attention_backward(dout, q, k, v, out, lse)
    repeated_k, repeated_v = (np.broadcast_to(x, (3, *x.shape)) for x in (k, v))
    full = reference.attention_backward(dout, q, repeated_k, repeated_v, out, lse)
    assert full.dk.shape == (3, 5, 2) and full.dv.shape == (3, 5, 3)
    np.testing.assert_allclose(full.dk.sum(axis=0), summed.dk, atol=1e-15)
    np.testing.assert_allclose(full.dv.sum(axis=0), summed.dv, atol=1e-15)


@pytest.mark.parametrize("shapes", [((0, 3), (4, 3), (4, 2)), ((4, 3), (0, 3), (0, 2)), ((0, 2, 3), (4, 3), (4, 2))])
def test_nothing_gives_zero(shapes):
    dout, q, k, v, out, lse, dlse = made(shapes, {}, True)
    for gradient, operand in zip(
        reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse), (q, k, v), strict=True
    ):
        np.testing.assert_array_equal(gradient, np.zeros(operand.shape))


def test_a_row_without_keys_gives_zero():
    options = {"causal": True, "align": "bottom-right"}
    dout, q, k, v, out, lse, dlse = made(((5, 3), (2, 3), (2, 2)), options, True)
    clean = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert (clean.dq[:3] == 0).all()
    q[0], dout[1], dlse[2] = np.nan, np.inf, np.nan
    for gradient, expected in zip(
        reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options), clean, strict=True
    ):
        np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize(("name", "bad"), list(itertools.product(["q", "k", "v", "dout"], [np.nan, np.inf])))
def test_a_non_finite_value_changes_only_what_sees_it(name, bad):
    dout, q, k, v, out, lse, _ = made(((6, 3), (6, 3), (6, 2)), {}, False)
    clean = reference.attention_backward(dout, q, k, v, out, lse, causal=True)
    {"q": q, "k": k, "v": v, "dout": dout}[name][3, 1] = bad
    spoilt = reference.attention_backward(dout, q, k, v, out, lse, causal=True)
    rows = [3] if name in ("q", "dout") else [3, 4, 5]
    untouched = np.setdiff1d(range(6), rows)
    np.testing.assert_array_equal(spoilt.dq[untouched], clean.dq[untouched])
    # Keys that no such row sees; the value of a key does not enter dv.
    for gradient, expected in ((spoilt.dk, clean.dk), (spoilt.dv, clean.dv)):
        seen_by_row = range(6) if name in ("k", "v") else range(4)
        unseen = np.setdiff1d(range(6), seen_by_row)
        np.testing.assert_array_equal(gradient[unseen], expected[unseen])
    if bad != np.inf or name != "k":  # a score of -inf removes its key
        assert not np.isfinite(spoilt.dq[rows]).any()
    if name == "v":
        np.testing.assert_array_equal(spoilt.dv, clean.dv)


def test_grads_out_receives_the_gradients():
    dout, q, k, v, out, lse, _ = made(((4, 3), (6, 3), (6, 2)), {}, False)
    dk = np.empty((3, 6)).T
    gradients = reference.attention_backward(dout, q, k, v, out, lse, grads_out=(None, dk, None))
    assert gradients.dk is dk
    np.testing.assert_array_equal(dk, reference.attention_backward(dout, q, k, v, out, lse).dk)
    with pytest.raises(TypeError, match="dk: dtype <f4, expected float64"):
        reference.attention_backward(dout, q, k, v, out, lse, grads_out=(None, dk.astype(np.float32), None))
