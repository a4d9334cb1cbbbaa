"""The reference for packed sequences: a padded batch with lengths gives the same."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import reference


def padded(packed, offsets, longest):
    """(total, heads, columns) -> (num_seqs, heads, longest, columns), 0 behind the lengths."""
    result = np.zeros((len(offsets) - 1, packed.shape[1], longest, packed.shape[2]), packed.dtype)
    for number, (start, stop) in enumerate(itertools.pairwise(offsets)):
        result[number, :, : stop - start] = packed[start:stop].swapaxes(0, 1)
    return result


def packed(array, offsets, total):
    """And back; 0 in slack rows."""
    result = np.zeros((total, array.shape[1], array.shape[3]))
    for number, (start, stop) in enumerate(itertools.pairwise(offsets)):
        result[start:stop] = array[number, :, : stop - start].swapaxes(0, 1)
    return result


@st.composite
def calls(draw):
    """dout, q, k, v, dlse, both offsets, and options."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_seqs, num_kv_heads, group = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    offsets_q, offsets_k = (
        np.cumsum([0, *draw(st.lists(st.integers(0, 4), min_size=num_seqs, max_size=num_seqs))]) for _ in range(2)
    )
    totals = [offsets[-1] + draw(st.integers(0, 2)) for offsets in (offsets_q, offsets_k)]
    longest = [max(np.diff(offsets), default=0) for offsets in (offsets_q, offsets_k)]
    num_heads = num_kv_heads * group
    dtype = draw(st.sampled_from([np.float16, np.float64]))
    q, k, v, dout = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((totals[0], num_heads, 3), (totals[1], num_kv_heads, 3), (totals[1], num_kv_heads, 2),
                      (totals[0], num_heads, 2))
    )  # fmt: skip
    dlse = rng.standard_normal((num_heads, totals[0])).astype(np.float64 if dtype == np.float64 else np.float32)

    def array(full):
        own = [draw(st.sampled_from([1, size])) for size in full][draw(st.integers(0, len(full))) :]
        return np.asarray(rng.standard_normal(own))

    pairs, heads = (num_seqs, num_heads, *longest), (num_seqs, num_heads)
    given_options = {
        "softmax_scale": lambda: 0.7,
        "causal": lambda: True,
        "window_size": lambda: (1, 1),
        "mask": lambda: array(pairs) > -0.5,
        "bias": lambda: array(pairs),
        "softcap": lambda: 2.0,
        "alibi_slopes": lambda: array(heads),
        "attn_sink": lambda: array(heads),
        "dropout_p": lambda: 0.3,
    }
    options = {name: given_options[name]() for name in draw(st.sets(st.sampled_from(sorted(given_options))))}
    if "mask" in options:
        options["mask"] = np.asarray(options["mask"])
    options |= {"align": draw(st.sampled_from(["top-left", "bottom-right"])), "seed": 5}
    return (dout, q, k, v, dlse), (offsets_q, offsets_k), options


@settings(max_examples=100)
@given(calls())
def test_a_packed_batch_is_a_padded_one(call):
    (dout, q, k, v, dlse), (offsets_q, offsets_k), options = call
    out, lse, row_max = reference.attention_varlen(
        q, k, v, offsets_q, offsets_k, return_lse=True, return_max=True, **options
    )
    lengths_q, lengths_k = np.diff(offsets_q), np.diff(offsets_k)
    longest_q, longest_k = max(lengths_q, default=0), max(lengths_k, default=0)
    arrays = padded(q, offsets_q, longest_q), padded(k, offsets_k, longest_k), padded(v, offsets_k, longest_k)
    options |= {"seqlens_q": lengths_q, "seqlens_k": lengths_k}
    right_out, right_lse, right_max = reference.attention(*arrays, return_lse=True, return_max=True, **options)

    def same(result, right):
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, right, rtol=1e-13, atol=1e-14)

    same(out, packed(right_out, offsets_q, len(q)))
    for rows, right in ((lse, right_lse), (row_max, right_max)):
        expected = np.full(rows.shape, -np.inf)
        expected[:, : offsets_q[-1]] = packed(right[..., None], offsets_q, offsets_q[-1])[..., 0].T
        same(rows, expected)

    options = {name: value for name, value in options.items() if not name.startswith("seqlens")}
    out, lse = out.astype(q.dtype), lse.astype(dlse.dtype)
    gradients = reference.attention_varlen_backward(dout, q, k, v, out, lse, offsets_q, offsets_k, dlse=dlse, **options)
    right_gradients = reference.attention_backward(
        padded(dout, offsets_q, longest_q), *arrays, right_out.astype(q.dtype), right_lse.astype(dlse.dtype),
        dlse=padded(dlse.T[..., None], offsets_q, longest_q)[..., 0],
        seqlens_q=lengths_q, seqlens_k=lengths_k, **options,
    )  # fmt: skip
    same(gradients.dq, packed(right_gradients.dq, offsets_q, len(q)))
    same(gradients.dk, packed(right_gradients.dk, offsets_k, len(k)))
    same(gradients.dv, packed(right_gradients.dv, offsets_k, len(k)))
    for name in "bias", "alibi_slopes", "attn_sink":
        gradient, right = getattr(gradients, f"d{name}"), getattr(right_gradients, f"d{name}")
        assert (gradient is None) == (right is None) == (name not in options)
        if name in options:
            assert gradient.shape == options[name].shape
            same(gradient, right)
