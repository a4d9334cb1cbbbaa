"""A part of a call, told with ``origin`` where it begins, drops and modifies the same pairs."""

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import testing
from cupyflash._problem import attention_problem
from cupyflash._score_mod import evaluate, evaluate_mask

DTYPES = [np.float16, np.float32, ml_dtypes.bfloat16, np.float64]
FUNCTIONS = {
    "score_mod": "score * (1 + b) - 0.125f * table[h] * abs(i - 2 * j)",
    "mask_mod": "(b + 2 * h + 3 * i + j) % 5 != 0",
    "aux": {"table": np.array([1.0, 0.5, 2.0, 3.0], np.float32)},
}
DROPOUT = {"dropout_p": 0.4, "seed": 11}


def drawn(dtype, seqlen_q=40, seqlen_k=75):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((3, 4, n, 16)).astype(dtype) for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)]


@pytest.mark.parametrize("dtype", [np.float16, *(pytest.param(t, marks=pytest.mark.deep) for t in DTYPES[1:])])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(DROPOUT, id="dropout", marks=pytest.mark.deep),
        pytest.param(FUNCTIONS, id="functions", marks=pytest.mark.deep),
        pytest.param(DROPOUT | FUNCTIONS, id="both"),
    ],
)
def test_queries_of_a_part_get_the_same_bits(dtype, options):
    q, k, v, dout = drawn(dtype)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dq = cupyflash.attention_backward(dout, q, k, v, out, lse, **options).dq
    heads, queries = np.s_[2:, 1:3], np.s_[2:, 1:3, 17:]
    origin = (2, 1, 17, 0)
    part = q[queries], k[heads], v[heads]
    results = cupyflash.attention(*part, return_lse=True, origin=origin, **options)
    testing.assert_same_bits(results[0], out[queries])
    testing.assert_same_bits(results[1], lse[queries])
    gradients = cupyflash.attention_backward(dout[queries], *part, *results, origin=origin, **options)
    testing.assert_same_bits(gradients.dq, dq[queries])


@pytest.mark.parametrize("dtype", [*DTYPES[:2], *(pytest.param(t, marks=pytest.mark.deep) for t in DTYPES[2:])])
@pytest.mark.parametrize("first_key", [1, 7, 64])
def test_parts_of_the_keys(dtype, first_key):
    """Pairs of keys that share a counter in the whole may not in a part, which may begin at any key."""
    q, k, v, dout = drawn(dtype)
    q, k, v, dout = q[:1], k[:1, :, first_key:], v[:1, :, first_key:], dout[:1]
    options = DROPOUT | FUNCTIONS | {"origin": (0, 0, 0, first_key)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    testing.assert_attention_within_bound(out, lse, q, k, v, **options)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    testing.assert_gradients_within_bound(gradients, dout, q, k, v, out, lse, **options)


def test_functions_see_the_places_of_the_whole():
    q, k, v, _ = drawn(np.float64)
    whole = attention_problem(q, k, v, **FUNCTIONS)
    part = attention_problem(q[1:, 2:, 9:], k[1:, 2:, 30:], v[1:, 2:, 30:], origin=(1, 2, 9, 30), **FUNCTIONS)
    scores = np.random.default_rng(1).standard_normal((3, 4, 40, 75))
    taken = np.s_[1:, 2:, 9:, 30:]
    assert (evaluate_mask(part) == evaluate_mask(whole)[taken]).all()
    for of_part, of_whole in zip(evaluate(part, scores[taken]), evaluate(whole, scores), strict=True):
        testing.assert_same_bits(of_part, np.ascontiguousarray(of_whole[taken]))


def test_lengths_count_from_the_part():
    """A query behind its batch's length does not exist, wherever counting begins."""
    q, k, v, _ = (x[:1] for x in drawn(np.float64))
    lengths = {"seqlens_q": np.array([5]), "seqlens_k": np.array([8])}
    problem = attention_problem(q, k, v, origin=(0, 0, 9, 30), mask_mod="i >= 9 && j >= 30", **lengths)
    keep = evaluate_mask(problem)
    assert keep[..., :5, :8].all() and keep.sum() == 4 * 5 * 8


def test_places_reach_to_the_last_number():
    x = drawn(np.float16, 3, 3)[0]
    last = 2**31 - 1 - 3
    options = {"mask_mod": f"i >= {last} && j == {last + 2}", "origin": (0, 0, last, last)}
    assert (cupyflash.attention(x, x, x, **options) == x[:, :, 2:]).all()
    assert cupyflash.attention(x, x, x, origin=(2**31 - 4, 2**31 - 5, 0, last), **DROPOUT).any()


def test_packed_sequences_count_from_the_first():
    q, k, v, _ = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in drawn(np.float16))
    offsets_q, offsets_k = np.array([0, 12, 20, 40]), np.array([0, 30, 31, 75])
    options = DROPOUT | FUNCTIONS
    out = cupyflash.attention_varlen(q, k, v, offsets_q, offsets_k, **options)
    rest = cupyflash.attention_varlen(
        q[12:], k[30:], v[30:], offsets_q[1:] - 12, offsets_k[1:] - 30, origin=(1, 0, 0, 0), **options
    )
    testing.assert_same_bits(rest, out[12:])


def test_a_block_mask_counts_from_0():
    x = drawn(np.float16, 8, 8)[0]
    mask = cupyflash.block_mask("j <= i", 8, 8)
    with pytest.raises(ValueError, match=r"origin: .* with a BlockMask, which counts from 0; give the expression"):
        cupyflash.attention(x, x, x, mask_mod=mask, origin=(0, 0, 1, 0))
