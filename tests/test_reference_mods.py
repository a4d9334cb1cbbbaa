"""A score_mod and a mask_mod in the reference: where they enter, against the definition with the same in Python."""

import mpmath
import numpy as np
import pytest

from cupyflash import reference
from tests import attention_by_definition

AUX = {"shift": np.array([0.5, -1.0, 2.0])}
EXPRESSIONS = {
    "score_mod": "i + j == 0 ? -INFINITY : score * score / 4 + score * (b - h) + shift[h] * (L + S - j)",
    "mask_mod": "(b + h + i + j) % 4 != 3",
    "aux": AUX,
}


def score(s, b, h, i, j, length_q, length_k):
    if i + j == 0:
        return mpmath.mpf("-inf")
    return s**2 / 4 + s * (b - h) + AUX["shift"][h] * (length_q + length_k - j)


def sees(b, h, i, j, length_q, length_k):
    return (b + h + i + j) % 4 != 3


def drawn(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, 4)).astype(dtype) for n in (3, 5, 5))
    options = {"softcap": 2.0, "bias": rng.standard_normal((3, 3, 5)), "attn_sink": rng.standard_normal(3)}
    return q, k, v, options | {"seqlens_k": np.array([5, 4]), "window_size": (2, None), "align": "top-left"}


def test_expressions_see_every_head_of_the_result():
    q, k, v, _ = drawn(np.float64)
    out = reference.attention(q[0, 0], k[0, 0], v, **EXPRESSIONS)
    full_q, full_k = (np.broadcast_to(x[0, 0], x.shape) for x in (q, k))
    np.testing.assert_array_equal(out, reference.attention(full_q, full_k, v, **EXPRESSIONS))


def test_lengths_that_are_broadcast_over_the_first_dimension_of_a_batch():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 1, 8, 4))
    lengths = np.array([[8, 3, 5]])
    of_all = {"seqlens_q": np.repeat(lengths, 2, axis=0), "mask_mod": "j <= i || L > 3"}
    expected = reference.attention(x, x, x, **of_all)
    for lengths_of_batches in lengths, lengths[0]:
        options = of_all | {"seqlens_q": lengths_of_batches}
        np.testing.assert_array_equal(reference.attention(x, x, x, **options), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_they_stand_between_softcap_and_bias(dtype):
    q, k, v, options = drawn(dtype)
    results = reference.attention(q, k, v, return_lse=True, return_max=True, **options, **EXPRESSIONS)
    expected = attention_by_definition.attention(q, k, v, score=score, sees=sees, **options)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, right.astype(float), rtol=1e-13, atol=1e-14)


def test_their_derivative_enters_before_that_of_the_softcap():
    q, k, v, options = drawn(np.float64)
    options |= EXPRESSIONS
    rng = np.random.default_rng(1)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert all(np.isfinite(x).all() for x in vars(gradients).values() if x is not None)
    operands = {"q": q, "k": k, "v": v, "bias": options["bias"], "attn_sink": options["attn_sink"]}
    for name, operand in operands.items():
        direction = rng.standard_normal(operand.shape)

        def along(step, name=name, direction=direction):
            changed = {**operands, name: operands[name] + step * direction}
            three = [changed.pop(x) for x in "qkv"]
            out, lse = reference.attention(*three, return_lse=True, **{**options, **changed})
            return (dout * out).sum() + (dlse * lse).sum()

        difference = (along(1e-5) - along(-1e-5)) / 2e-5
        expected = (getattr(gradients, f"d{name}") * direction).sum()
        np.testing.assert_allclose(difference, expected, rtol=1e-7, atol=1e-8)


def test_what_they_remove_may_be_anything():
    q, k, v, options = drawn(np.float64)
    options["bias"] = np.broadcast_to(options["bias"], (2, 3, 3, 5)).copy()
    options |= EXPRESSIONS

    def results():
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
        gradients = reference.attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
        return [out, lse, *(x for x in vars(gradients).values() if x is not None)]

    clean = results()
    b, h, i, j = np.indices(options["bias"].shape)
    removed = (i + j == 0) | ((b + h + i + j) % 4 == 3)
    options["bias"][removed] = np.nan
    for result, right in zip(results(), clean, strict=True):
        np.testing.assert_array_equal(result, right)


def test_a_sequence_of_a_packed_batch_keeps_its_number():
    q, k, v, options = drawn(np.float64)
    del options["seqlens_k"]
    options |= EXPRESSIONS
    packed = [x.swapaxes(1, 2).reshape(-1, *x.shape[1::2]) for x in (q, k, v)]
    out = reference.attention_varlen(*packed, np.array([0, 3, 6]), np.array([0, 5, 10]), **options)
    padded = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, padded.swapaxes(1, 2).reshape(out.shape), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("expressions", "options"),
    [
        ({"score_mod": "2.0 * tanh(score / 2.0)"}, {"softcap": 2.0}),
        ({"score_mod": "score + shift[h]", "aux": AUX}, {"bias": AUX["shift"][:, None, None]}),
        ({"score_mod": "score - 0.5 * abs(i - j)"}, {"alibi_slopes": np.array(0.5), "align": "top-left"}),
        ({"mask_mod": "j <= i"}, {"causal": True, "align": "top-left"}),
        ({"score_mod": "j <= i ? score : -INFINITY"}, {"causal": True, "align": "top-left"}),
    ],
)
def test_expressions_that_say_what_an_option_does(expressions, options):
    q, k, v, _ = drawn(np.float64)
    dout = np.random.default_rng(2).standard_normal((2, 3, 3, 4))

    def results(options):
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
        return [out, lse, *reference.attention_backward(dout, q, k, v, out, lse, **options)]

    for result, right in zip(results(expressions), results(options), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-13, atol=1e-15)
