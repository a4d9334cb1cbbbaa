"""Block masks: what is skipped, and that nothing else changes."""

import numpy as np
import pytest

import cupyflash
from cupyflash import attention, attention_backward, block_mask, ptxsim
from cupyflash.testing import assertions

LENGTH = 300
DOCUMENTS = np.repeat(np.arange(4), 75).astype(np.int32)
MASKS = {
    "documents": ("document[i] == document[j]", {"document": DOCUMENTS}),
    "prefix": ("j < 40 || j <= i", {}),
    "window and globals": ("abs(i - j) < 30 || j < 8 && h == 1", {}),
    "a batch sees nothing": ("b == 1 && i + j < 150", {}),
}


def inputs(dtype=np.float16, seqlen_q=LENGTH, heads=(2, 2)):
    rng = np.random.default_rng(2)
    shapes = (2, heads[0], seqlen_q, 16), (2, heads[1], LENGTH, 16), (2, heads[1], LENGTH, 16)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def dense(expression, aux, seqlen_q=LENGTH):
    """The mask's pairs, in NumPy."""
    b, h, i, j = np.ogrid[:2, :2, :seqlen_q, :LENGTH]
    names = {"b": b, "h": h, "i": i, "j": j, "abs": abs, **aux}
    python = expression.replace("||", "|").replace("&&", "&")
    for comparison in ("j < 40", "j <= i", "abs(i - j) < 30", "j < 8", "h == 1", "b == 1", "i + j < 150"):
        python = python.replace(comparison, f"({comparison})")
    return np.broadcast_to(eval(python, names), (2, 2, seqlen_q, LENGTH))


@pytest.mark.parametrize("name", MASKS)
def test_a_bit_says_whether_a_block_has_a_pair_that_is_left(name):
    expression, aux = MASKS[name]
    found = block_mask(expression, LENGTH, LENGTH, batch=2, num_heads=2, aux=aux).to_dense()
    pairs = np.zeros((2, 2, 384, 384), bool)
    pairs[..., :LENGTH, :LENGTH] = dense(expression, aux)
    blocks = pairs.reshape(2, 2, 3, 128, 3, 128).any(axis=(3, 5))
    np.testing.assert_array_equal(found, blocks)


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        pytest.param("documents", np.float16, {"causal": True}, marks=pytest.mark.deep),
        pytest.param("prefix", np.float16, {"window_size": (200, 250)}, marks=pytest.mark.deep),
        ("window and globals", np.float16, {"score_mod": "score / (1 + x[0] * i)", "aux": {"x": np.ones(1)}}),
        ("a batch sees nothing", np.float16, {"split_size": 128}),
        ("window and globals", np.float32, {}),
    ],
)
def test_the_same_bits_as_the_expression_alone(name, dtype, options):
    expression, aux = MASKS[name]
    q, k, v = inputs(dtype, heads=(2, 1))
    k[0, 0, 290] = np.nan  # in a block that some skip
    options = dict(options)
    given = {**aux, **options.pop("aux", {})}
    mask = block_mask(expression, LENGTH, LENGTH, batch=2, num_heads=2, aux=aux)
    with_bits = {"mask_mod": mask, **options, **({"aux": given} if given else {})}
    alone = {"mask_mod": expression, **options, **({"aux": given} if given else {})}
    out, lse = attention(q, k, v, return_lse=True, **with_bits)
    np.testing.assert_array_equal((out, lse)[0], (expected := attention(q, k, v, return_lse=True, **alone))[0])
    np.testing.assert_array_equal(lse, expected[1])
    if name != "a batch sees nothing":
        for gradient, exact in zip(
            attention_backward(q, q, k, v, out, lse, **with_bits),
            attention_backward(q, q, k, v, out, lse, **alone),
            strict=True,
        ):
            np.testing.assert_array_equal(gradient, exact)


def test_grouped_heads_and_one_mask_for_all():
    q, k, v = inputs(seqlen_q=140, heads=(4, 2))
    mask = block_mask("j >= 2 * i", 140, LENGTH)
    out, lse = attention(q, k, v, mask_mod=mask, return_lse=True)
    assertions.assert_attention_within_bound(out, lse, q, k, v, mask_mod=mask)
    gradients = attention_backward(q, q, k, v, out, lse, mask_mod=mask)
    exact = attention_backward(q, q, k, v, out, lse, mask_mod="j >= 2 * i")
    for gradient, expected in zip(gradients, exact, strict=True):
        np.testing.assert_array_equal(gradient, expected)


def mma_per_kernel(call):
    with ptxsim.profile() as profile:
        result = call()
    return result, {kernel.name: kernel.mma_flops for kernel in profile.kernels if kernel.mma_flops}


def test_the_work_is_that_of_the_blocks_that_are_left():
    """A third of them on the diagonal: each kernel multiplies a third of what it does without the bits."""
    q, k, v = (x[:1, :1] for x in inputs())
    q, k, v = (np.concatenate([x, x[..., :84, :]], axis=-2) for x in (q, k, v))
    mask = block_mask("i / 128 == j / 128", 384, 384)
    assert mask.density == 1 / 3

    def work(mask_mod):
        (out, lse), forward = mma_per_kernel(lambda: attention(q, k, v, mask_mod=mask_mod, return_lse=True))
        _, backward = mma_per_kernel(lambda: attention_backward(q, q, k, v, out, lse, mask_mod=mask_mod))
        return forward | backward

    skipped, all_tiles = work(mask), work(mask.mask_mod)
    assert sorted(skipped) == ["flash_bwd_dkdv", "flash_bwd_dq", "flash_fwd"]
    assert {name: 3 * count for name, count in skipped.items()} == all_tiles


def test_tiles_that_do_not_lie_in_blocks_skip_nothing():
    q, k, v = inputs()
    expression, aux = MASKS["documents"]
    mask = block_mask(expression, LENGTH, LENGTH, aux=aux)
    numerics = cupyflash.Numerics(tile=(192, 64))
    found = attention(q, k, v, mask_mod=mask, numerics=numerics)
    np.testing.assert_array_equal(found, attention(q, k, v, mask_mod=expression, aux=aux, numerics=numerics))


def test_more_than_32_blocks_of_keys():
    mask = block_mask("j == 5000 || j == 130", 2, 5001)
    dense = mask.to_dense()
    assert mask.bits.shape == (1, 1, 1, 2) and np.flatnonzero(dense).tolist() == [1, 39]
    assert block_mask("true", 1, 300, block_size=256).to_dense().shape == (1, 1, 1, 2)
    q = np.ones((1, 16), np.float16)
    k = np.ones((5001, 16), np.float16)
    v = np.arange(5001, dtype=np.float16)[:, None] % 1024 * np.ones(16, np.float16)
    np.testing.assert_array_equal(
        attention(q, k, v, mask_mod=block_mask("j == 5000 || j == 130", 1, 5001))[0], (v[5000] + v[130]) / 2
    )


def test_what_it_says():
    mask = block_mask("i >= j", 256, 256, num_heads=3)
    assert repr(mask) == (
        "BlockMask('i >= j', seqlen_q=256, seqlen_k=256, batch=1, num_heads=3, block_size=128, density=0.75)"
    )
    with pytest.raises(AttributeError):
        mask.seqlen_q = 3
    assert block_mask("true", 0, 0).density == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mask_mod": None}, TypeError, "mask_mod: expected a C.. expression"),
        ({"mask_mod": "score > 0"}, ValueError, 'identifier "score" is undefined'),
        ({"mask_mod": "i)"}, ValueError, "closes nothing"),
        ({"seqlen_q": -1}, ValueError, "seqlen_q: -1 is not between 0 and"),
        ({"seqlen_k": 2.0}, TypeError, "seqlen_k: expected a whole number, not 2.0"),
        ({"batch": 0}, ValueError, "batch: 0 is not between 1 and"),
        ({"num_heads": True}, TypeError, "num_heads: expected a whole number, not True"),
        ({"block_size": 64}, ValueError, "block_size: 64 is not between 128"),
        ({"block_size": 200}, ValueError, "block_size: 200 is not a multiple of 128"),
        ({"aux": [1]}, TypeError, "aux: expected a mapping"),
        ({"like": [1]}, TypeError, "like: expected a numpy.ndarray"),
    ],
)
def test_faulty_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        block_mask(**{"mask_mod": "i >= j", "seqlen_q": 3, "seqlen_k": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"seqlen_q": 3}, {}, "mask_mod: BlockMask.* is not for seqlen_q 300"),
        ({"seqlen_k": 3}, {}, "mask_mod: BlockMask.* is not for seqlen_k 300"),
        ({"batch": 3}, {}, r"mask_mod: BlockMask.*expected batch 1 or 2"),
        ({"num_heads": 4}, {}, r"mask_mod: BlockMask.*expected num_heads 1 or 2"),
        ({}, {"seqlens_k": np.array([3, 4])}, "is not for batches with lengths of their own"),
        ({"aux": {"x": np.ones(3)}}, {"aux": {"x": np.ones(3)}}, "aux: 'x' is an array of the BlockMask already"),
    ],
)
def test_a_mask_that_is_not_for_the_call(arguments, options, message):
    mask = block_mask("i >= j", **{"seqlen_q": LENGTH, "seqlen_k": LENGTH, **arguments})
    with pytest.raises(ValueError, match=message):
        attention(*inputs(), mask_mod=mask, **options)


@pytest.mark.parametrize(
    ("expression", "sizes", "message"),
    [
        (
            "j <= i + h",
            {"batch": 2},
            "depends on h, but its block mask was made for num_heads 1; the call has 2 heads: use",
        ),
        (
            "i > b",
            {"num_heads": 2},
            "depends on b, but its block mask was made for batch 1; the call has 2 batches: use",
        ),
        ("x[h] < j", {}, r"depends on h, .*: use block_mask\(\.\.\., num_heads=2\)"),
    ],
)
def test_one_mask_for_all_does_not_depend_on_what_they_differ_in(expression, sizes, message):
    aux = {"x": np.zeros(2)} if "x" in expression else None
    with pytest.raises(ValueError, match=f"mask_mod: {message}"):
        attention(*inputs(), mask_mod=block_mask(expression, LENGTH, LENGTH, aux=aux, **sizes))


def test_a_mask_for_all_may_have_h_in_other_words_and_comments():
    q, k, v = (x[:, :, :20] for x in inputs())
    mask = block_mask("both[j] >= 0x1b /* h and b */", 20, 20, aux={"both": np.full(20, 27)})
    np.testing.assert_array_equal(attention(q, k, v, mask_mod=mask), attention(q, k, v))
    one = [x[:1, :1] for x in (q, k, v)]
    mask = block_mask("j >= b + h", 20, 20)
    np.testing.assert_array_equal(attention(*one, mask_mod=mask), attention(*one))


def test_an_array_is_no_expression():
    with pytest.raises(TypeError, match=r"mask_mod: .* not numpy.ndarray of shape \(300, 300\), dtype bool$"):
        block_mask(np.ones((300, 300), bool), 300, 300)


def test_a_block_mask_in_the_place_of_an_array():
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"^mask: a BlockMask is given as mask_mod$"):
        attention(q, k, v, mask=block_mask("j <= i", LENGTH, LENGTH))
