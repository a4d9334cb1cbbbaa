"""Queries, keys and values of a sentence encoder: products of q and k reach 230 in magnitude."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import bounds, reference, testing
from cupyflash.demo import activations


def layers(dtype=np.float16):
    return [
        (f"layer {x.layer}, text {x.text}", [array.astype(dtype) for array in (x.q, x.k, x.v)])
        for x in activations.load()
    ]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.5}], ids=["full", "causal", "scaled"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_text_and_layer_stays_within_bounds(backend, dtype, options):
    for _, inputs in layers(dtype):
        out, lse = backend.attention(*inputs, **options)
        _, bound = testing.assert_attention_within_bound(out, lse, *inputs, **options)
        assert np.isfinite(bound).all()


def test_heads_as_the_encoder_stores_them(backend):
    """(tokens, heads, head_dim), as a view and as a copy."""
    for _, inputs in layers():
        stored = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in inputs]
        views = [x.swapaxes(-2, -3) for x in stored]
        for result, expected in zip(backend.attention(*views), backend.attention(*inputs), strict=True):
            testing.assert_same_bits(result, expected)


def test_a_padded_batch_holds_the_texts_one_by_one(backend):
    """Each text sliced from a padded batch, the padding NaN, gives the bits of the text alone."""
    texts = [inputs for name, inputs in layers() if name.startswith("layer 5")]
    longest = max(q.shape[1] for q, _, _ in texts)
    padded = [np.full((len(texts), 12, longest, 32), np.nan, np.float16) for _ in range(3)]
    for batch, inputs in enumerate(texts):
        for array, x in zip(padded, inputs, strict=True):
            array[batch, :, : x.shape[1]] = x
    for batch, inputs in enumerate(texts):
        length = inputs[0].shape[1]
        results = backend.attention(*(array[batch, :, :length] for array in padded))
        for result, expected in zip(results, backend.attention(*inputs), strict=True):
            testing.assert_same_bits(result, expected)


def test_errors_are_those_of_rounding_to_the_dtype(backend):
    """Root mean square of error over bound: rounding alone gives about a tenth, a wrong kernel much more."""
    for name, inputs in layers():
        out, _ = backend.attention(*inputs)
        ratio = (out.astype(np.float64) - reference.attention(*inputs)) / bounds.attention(*inputs)
        assert np.sqrt(np.mean(ratio**2)) < 0.25, name
