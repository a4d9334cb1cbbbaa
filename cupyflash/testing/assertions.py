"""What results must satisfy: bounds, bits and no bias."""

import ml_dtypes
import numpy as np

from cupyflash import bounds, reference
from cupyflash._gradients import Gradients


def assert_within_bound(result, exact, bound, *, name="result", terms=None):
    """Each element of ``result`` is within ``bound`` of ``exact``, and not finite where exact is not.

    ``exact`` and ``bound`` are broadcast to the shape of ``result``, or raise ValueError, as does a bound that is
    negative or NaN. Where the bound is infinite nothing else is asked. The error names the element furthest beyond its
    bound, and the largest of the bound's terms there: ``terms()``, called only then, gives arrays by name.

    >>> assert_within_bound(np.array([1.0, 2.5]), np.array([1.0, 2.0]), np.array([0.1, 0.1]))
    Traceback (most recent call last):
    AssertionError: result[1] is 2.5, exact 2.0: error 0.5 is 5 times its bound 0.1; 1 of 2 elements are wrong
    """
    result, exact, bound = (np.asarray(x).astype(np.float64) for x in (result, exact, bound))
    try:
        exact, bound = (np.broadcast_to(x, result.shape) for x in (exact, bound))
    except ValueError:
        shapes = f"exact of shape {exact.shape} and bound of shape {bound.shape}"
        raise ValueError(f"{name}: shape {result.shape}, to which {shapes} do not broadcast") from None
    if not (bound >= 0).all():
        raise ValueError(f"{name}: a bound is negative or NaN, which bounds nothing")
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(result == exact, 0, np.abs(result - exact))
        right = error <= bound
        wrong = np.where(np.isfinite(bound), ~right, ~np.isfinite(exact) & np.isfinite(result))
        if not wrong.any():
            return
        ratio = np.where(np.isnan(error), np.inf, np.where(error == 0, 0, error / bound))
    index = np.unravel_index(np.argmax(np.where(wrong, ratio, -1)), wrong.shape)
    index = tuple(int(i) for i in index)
    where = f"{name}[{', '.join(map(str, index))}]"
    said = f"error {error[index]:.3g} is {ratio[index]:.3g} times its bound {bound[index]:.3g}"
    if not np.isfinite(bound[index]):
        said = "and should not be finite"
    message = f"{where} is {result[index]!s}, exact {exact[index]!s}: {said}"
    message += f"; {wrong.sum()} of {wrong.size} elements are wrong"
    if terms is not None and 0 < bound[index] < np.inf:
        there = {term: float(np.broadcast_to(values, wrong.shape)[index]) for term, values in terms().items()}
        largest = sorted(there, key=there.get, reverse=True)[:3]
        message += "\nof the bound there: " + ", ".join(f"{term} {there[term] / bound[index]:.0%}" for term in largest)
    raise AssertionError(message)


def assert_attention_within_bound(out, lse, q, k, v, *, row_max=None, bound=bounds.attention, **options):
    """Every element of out, lse and row_max is as close to the reference as its bound says, and as finite.

    ``options`` are those of :func:`cupyflash.attention` that say what is computed; ``row_max`` is what return_max
    returns; ``bound`` has the signature of :func:`bounds.attention`. lse and row_max may be None. Returns the
    reference's out and the bound on it.
    """
    results = {"out": out, "lse": lse, "max": row_max}
    returns = {"return_lse": True, **({} if row_max is None else {"return_max": True})}
    exact = reference.attention(q, k, v, **returns, **options)
    allowed = bound(q, k, v, **returns, **options)
    lse_dtype = np.float64 if q.dtype == np.float64 else np.float32
    for which, ((name, result), values, errors) in enumerate(zip(results.items(), exact, allowed, strict=False)):

        def terms(which=which):
            return {term: pair[which] for term, pair in bounds.attention_terms(q, k, v, **options).items()}

        if result is None:
            continue
        _assert_like(result, name, values.shape, q.dtype if name == "out" else lse_dtype)
        has_terms = bound is bounds.attention and name != "max"
        assert_within_bound(result, values, errors, name=name, terms=terms if has_terms else None)
    return exact[0], allowed[0]


def assert_gradients_within_bound(gradients, dout, q, k, v, out, lse, *, bound=bounds.attention_backward, **options):
    """Every element of every gradient is as close to the reference as its bound says, and as finite.

    ``options`` are those of :func:`cupyflash.attention_backward`, dlse among them; ``bound`` has the signature of
    :func:`bounds.attention_backward`. Returns the reference's gradients and the bounds on them.
    """
    exact = reference.attention_backward(dout, q, k, v, out, lse, **options)
    allowed = bound(dout, q, k, v, out, lse, **options)
    gradients = gradients if isinstance(gradients, Gradients) else Gradients(*gradients)
    operands = {"q": q, "k": k, "v": v, **options}
    for name, values in vars(exact).items():
        gradient = getattr(gradients, name)
        if values is None:
            assert gradient is None, f"{name}: {gradient!r}, expected None"
            continue
        assert gradient is not None, f"{name}: None, expected an array of shape {values.shape}"

        def terms(name=name):
            of_all = bounds.attention_backward_terms(dout, q, k, v, out, lse, **options)
            return {term: getattr(gradients, name) for term, gradients in of_all.items()}

        operand = operands[name[1:]]
        _assert_like(gradient, name, operand.shape, operand.dtype)
        known = bound is bounds.attention_backward
        assert_within_bound(gradient, values, getattr(allowed, name), name=name, terms=terms if known else None)
    return exact, allowed


def _assert_like(result, name, shape, dtype):
    assert result.shape == shape, f"{name}: shape {result.shape}, expected {shape}"
    assert result.dtype == dtype, f"{name}: dtype {result.dtype}, expected {np.dtype(dtype)}"


def assert_same_bits(result, expected, *, name="result"):
    """Equal bit patterns, NaN and the sign of zero included."""
    _assert_like(result, name, expected.shape, expected.dtype)
    bits, expected_bits = (np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (result, expected))
    different = np.argwhere(bits != expected_bits)
    if len(different):
        index = tuple(int(i) for i in different[0])
        raise AssertionError(
            f"{name}[{', '.join(map(str, index))}] is {result[index]!s}, expected the bits of {expected[index]!s}; "
            f"{len(different)} of {result.size} elements differ"
        )


def assert_unbiased(out, exact):
    """Errors of positive results average to nothing: a truncated weight or result is below by 0.7 units."""
    unit = float(ml_dtypes.finfo(out.dtype).eps) / 2
    bias = np.mean((out.astype(np.float64) - exact) / (unit * exact))
    assert abs(bias) < 0.1, f"mean error {bias:+.3f} units"
