"""What results must satisfy: bounds, bits and no bias."""

import ml_dtypes
import numpy as np

from cupyflash import bounds, reference


def assert_attention_within_bound(out, lse, q, k, v, **options):
    """Every element of out and lse is as close to the reference as its bound says, and as finite.

    Returns the reference's out and the bound on it.
    """
    exact, exact_lse = reference.attention(q, k, v, return_lse=True, **options)
    bound, lse_bound = bounds.attention(q, k, v, return_lse=True, **options)
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert lse.shape == exact_lse.shape and lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
    assert_within_bound(out, exact, bound, name="out")
    assert_within_bound(lse, exact_lse, lse_bound, name="lse")
    return exact, bound


def assert_gradients_within_bound(gradients, dout, q, k, v, out, lse, **options):
    """Every element of dq, dk and dv is as close to the reference as its bound says, and as finite.

    Returns the reference's gradients and the bounds on them.
    """
    exact = reference.attention_backward(dout, q, k, v, out, lse, **options)
    bound = bounds.attention_backward(dout, q, k, v, out, lse, **options)
    for name, gradient, operand, values, allowed in zip(
        ("dq", "dk", "dv"), gradients, (q, k, v), exact, bound, strict=True
    ):
        assert gradient.shape == operand.shape and gradient.dtype == operand.dtype
        assert_within_bound(gradient, values, allowed, name=name)
    return exact, bound


def assert_within_bound(result, exact, bound, *, name="result"):
    """Within the bound, equal where the reference is -inf, and not finite where it is not."""
    result = result.astype(np.float64)
    with np.errstate(invalid="ignore"):
        right = (np.abs(result - exact) <= bound) | (result == exact)
    claimed = np.isfinite(bound)
    wrong = np.where(claimed, ~right, ~np.isfinite(exact) & np.isfinite(result))
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.size} elements are wrong, the first at {first}: {result[first]!r}, "
            f"exact {exact[first]!r}, bound {bound[first]!r}"
        )


def assert_same_bits(result, expected):
    """Equal bit patterns, NaN and the sign of zero included."""
    assert result.shape == expected.shape and result.dtype == expected.dtype
    integer = np.dtype(f"u{result.itemsize}")
    result, expected = (np.ascontiguousarray(x).view(integer) for x in (result, expected))
    different = np.argwhere(result != expected)
    assert len(different) == 0, (
        f"{len(different)} of {result.size} elements differ, the first at {different[0].tolist()}"
    )


def assert_unbiased(out, exact):
    """Errors of positive results average to nothing: a truncated weight or result is below by 0.7 units."""
    unit = float(ml_dtypes.finfo(out.dtype).eps) / 2
    bias = np.mean((out.astype(np.float64) - exact) / (unit * exact))
    assert abs(bias) < 0.1, f"mean error {bias:+.3f} units"
