"""The dropout mask on the host: Philox4x32-10, and how often what is kept."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from cupyflash._options import drop_threshold
from cupyflash.dropout import dropout_mask, philox

# From kat_vectors of Random123, the reference implementation: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert [int(word) for word in philox(words(counter), words(key))] == words(answer)


def kept(p, seed, batch, head, i, j):
    """One pair, from the definition, in Python's integers."""
    c0, c1, c2, c3 = j >> 2, i, head, batch
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (c0, c1, c2, c3)[j & 3] >= round(p * 2**32)


@given(
    leading=st.lists(st.integers(0, 3), max_size=4).map(tuple),
    rows=st.integers(0, 4),
    columns=st.integers(0, 9),
    p=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_pair_follows_from_where_it_is(leading, rows, columns, p, seed):
    mask = dropout_mask((*leading, rows, columns), p, seed)
    assert mask.shape == (*leading, rows, columns) and mask.dtype == bool
    per_head = leading[-1] if len(leading) >= 2 else 1
    for number, index in enumerate(itertools.product(*map(range, leading))):
        batch, head = divmod(number, per_head)
        for i, j in itertools.product(range(rows), range(columns)):
            assert mask[(*index, i, j)] == kept(p, seed, batch, head, i, j)


def test_a_smaller_mask_is_a_part_of_a_larger_one():
    large = dropout_mask((2, 3, 20, 30), 0.5, seed=1)
    assert (dropout_mask((1, 2, 7, 9), 0.5, seed=1) == large[:1, :2, :7, :9]).all()
    for key in range(6):
        part = dropout_mask((1, 2, 7, 9), 0.5, seed=1, origin=(1, 1, 5, key))
        assert (part == large[1:, 1:, 5:12, key : key + 9]).all()


@pytest.mark.parametrize("p", [2.0**-10, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_it_says(p):
    """Within 4.5 standard deviations, in the whole mask, per column of a group of 4, per head."""
    mask = dropout_mask((4, 8, 64, 128), p, seed=20)
    parts = [mask, *(mask[..., word::4] for word in range(4)), *(mask[:, head] for head in range(8)), *mask]
    for part in parts:
        assert abs(part.mean() - (1 - p)) < 4.5 * math.sqrt(p * (1 - p) / part.size)


def test_neighbours_heads_batches_and_seeds_are_independent():
    """Correlation within 4.5 standard deviations of 0."""
    mask = dropout_mask((2, 2, 128, 128), 0.5, seed=3) - 0.5
    other = dropout_mask((2, 2, 128, 128), 0.5, seed=3 + 2**32) - 0.5
    pairs = [
        (mask[..., 1:], mask[..., :-1]),
        (mask[..., 4:], mask[..., :-4]),
        (mask[..., 1:, :], mask[..., :-1, :]),
        (mask[:, 0], mask[:, 1]),
        (mask[0], mask[1]),
        (mask[0, 1], mask[1, 0]),
        (mask, other),
        (mask, mask.swapaxes(-1, -2)),
    ]
    for a, b in pairs:
        assert abs((a * b).mean() * 4) < 4.5 / math.sqrt(a.size)


def test_bounds_of_the_probability():
    assert dropout_mask((50, 50), 0.0, seed=0).all()
    assert dropout_mask((50, 50), 2.0**-40, seed=0).all()  # rounds to no pair in 2**32
    assert not dropout_mask((50, 50), 1 - 2.0**-32, seed=0).any()
    assert drop_threshold(1 - 2.0**-32) == 2**32 - 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((5, 0.5, 1), TypeError, r"shape: expected \(\.\.\., L, S\), not 5"),
        (((5,), 0.5, 1), ValueError, r"shape: \(5,\) has fewer than the 2 dimensions"),
        (((5, -1), 0.5, 1), ValueError, r"shape: -1 in \(5, -1\) is negative"),
        (((5, 2.0), 0.5, 1), TypeError, r"shape: expected whole numbers, not \(5, 2\.0\)"),
        (((5, True), 0.5, 1), TypeError, r"shape: expected whole numbers"),
        (((5, 5), 1, 1), ValueError, r"dropout_p: 1 is not at least 0 and, rounded to a multiple of 2\*\*-32, less"),
        (((5, 5), -0.1, 1), ValueError, r"dropout_p: -0\.1 is not at least 0"),
        (((5, 5), "0.5", 1), TypeError, r"dropout_p: expected a number from 0 to less than 1, not '0\.5'"),
        (((5, 5), 0.5, None), TypeError, r"seed: expected a whole number from 0 to 2\*\*64 - 1, not None"),
        (((5, 5), 0.5, 2**64), ValueError, r"seed: 18446744073709551616 is not between 0 and 2\*\*64 - 1"),
        (((5, 5), 0.5, -1), ValueError, r"seed: -1 is not between"),
    ],
)
def test_refusals(arguments, error, match):
    with pytest.raises(error, match=match):
        cupyflash.dropout_mask(*arguments)
