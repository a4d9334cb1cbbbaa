"""Few queries of heads that share their keys: the same bits, and keys are read once for all of them."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import Numerics, _launch, attention, block_mask, bounds, ptxsim, reference
from cupyflash._arrays import BFLOAT16
from cupyflash.testing import assert_same_bits, assert_within_bound
from tests.test_cupy_path import allocated, recorded_gpu

TILES = {np.float16: (128, 16), BFLOAT16: (32, 16), np.float32: (16, 16)}  # small ones compile fast
MODS = {
    "score_mod": "score * float(1 + h % 3) + 0.125f * float(i + L) - 0.01f * float(j + b)",
    "mask_mod": "(i + 2 * h + j) % 5 != 0",
}

#: An option's value for (batch, heads, queries, keys).
OPTIONS = {
    "seqlens_q": lambda rng, batch, heads, queries, keys: rng.choice([0, 1, queries, queries], batch),
    "seqlens_k": lambda rng, batch, heads, queries, keys: rng.choice([0, keys, rng.integers(keys + 1)], batch),
    "causal": lambda rng, *shape: True,
    "window_size": lambda rng, *shape: [(5, 1), (40, None), (None, 3)][rng.integers(3)],
    "softcap": lambda rng, *shape: 3.0,
    "attn_sink": lambda rng, batch, heads, queries, keys: rng.standard_normal(heads).astype(np.float32),
    "alibi_slopes": lambda rng, batch, heads, queries, keys: rng.random((batch, heads)).astype(np.float32),
    "mask": lambda rng, batch, heads, queries, keys: rng.random((batch, 1, queries, keys)) < 0.7,
    "bias": lambda rng, batch, heads, queries, keys: rng.standard_normal((heads, queries, keys)).astype(np.float32),
    "score_mod": lambda rng, *shape: MODS["score_mod"],
    "mask_mod": lambda rng, *shape: MODS["mask_mod"],
    "split_size": lambda rng, *shape: 128,
}

#: What a call has: dtype, architecture, options.
KINDS = {
    "nothing": (np.float16, "sm_80"),
    "keys' lengths": (BFLOAT16, "sm_80", "seqlens_k"),
    "float32": (np.float32, "sm_80", "seqlens_k", "softcap", "split_size"),
    "causal": (np.float16, "sm_80", "causal"),
    "causal with keys' lengths": (BFLOAT16, "sm_80", "seqlens_k", "causal"),
    "window, sink": (np.float16, "sm_75", "seqlens_q", "seqlens_k", "window_size", "attn_sink"),
    "softcap, ALiBi, sink, parts": (
        np.float16, "sm_80", "seqlens_q", "seqlens_k", "softcap", "alibi_slopes", "attn_sink", "split_size",
    ),
    "mask, bias": (BFLOAT16, "sm_80", "seqlens_q", "mask", "bias"),
    "functions": (np.float16, "sm_80", "seqlens_k", "causal", "score_mod", "mask_mod"),
}  # fmt: skip


def normal(seed, dtype, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def heads_first(x):
    """(B, H, L, D) over the memory of (B, L, H, D)."""
    return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 1, 2)), 1, 2)


def apart(q, *keys):
    """The same arrays, with keys repeated for every head of q."""
    keys = (x if x.ndim > 2 else x[None] for x in keys)
    return q, *(np.repeat(x, q.shape[1] // x.shape[-3], -3) for x in keys)


def poison_behind(x, lengths):
    """NaN in rows that do not count; lengths are those of the batches, or the longest of them."""
    for matrices, length in zip(x if x.ndim == 4 else [x], lengths if x.ndim == 4 else [lengths.max()], strict=True):
        matrices[..., length:, :] = np.nan


@st.composite
def calls(draw, dtype, names):
    """q, k, v and options."""
    batch, num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 16))
    seqlen_q, seqlen_k = draw(st.integers(1, 8)), draw(st.integers(1, 200))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    key_heads = draw(st.sampled_from([(batch, num_kv_heads), (num_kv_heads,), ()]))
    heads = group * num_kv_heads
    head_dim, head_dim_v = (draw(st.sampled_from([16, 8, 12])) for _ in "qv")  # one kernel, and packed copies of rows
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in (
            (batch, heads, seqlen_q, head_dim),
            (*key_heads, seqlen_k, head_dim),
            (*key_heads, seqlen_k, head_dim_v),
        )
    )
    options = {name: OPTIONS[name](rng, batch, heads, seqlen_q, seqlen_k) for name in names}
    if {"causal", "window_size", "alibi_slopes"} & set(names):
        options["align"] = draw(st.sampled_from(["bottom-right", "top-left"]))
    if draw(st.booleans()):
        k[..., draw(st.integers(0, seqlen_k - 1)), :] = np.nan
    if "seqlens_k" in options:
        poison_behind(k, options["seqlens_k"])
        poison_behind(v, options["seqlens_k"])
    if "seqlens_q" in options:
        poison_behind(q, options["seqlens_q"])
    if draw(st.booleans()):
        q = heads_first(q)
    return (q, k, v), options


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(data=st.data(), mma=st.sampled_from(["fp32", "exact"]))
def test_bits_are_those_of_heads_apart(kind, data, mma):
    dtype, arch, *names = KINDS[kind]
    arrays, options = data.draw(calls(dtype, names))
    options |= {"numerics": Numerics(tile=TILES[dtype]), "return_lse": True, "return_max": True}
    with ptxsim.settings(arch=arch, mma=mma):
        results = attention(*arrays, **options), attention(*apart(*arrays), **options)
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


def counted(q, k, v, **options):
    """What the call returns, and what its attention kernel did."""
    with ptxsim.profile() as profile:
        results = attention(q, k, v, **options)
    (kernel,) = (kernel for kernel in profile.kernels if kernel.name.startswith("flash_fwd"))
    return results, kernel


def blocks(kernel):
    (shape,) = kernel.shapes
    return shape.blocks


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom-right"}], ids=["all keys", "causal"])
@pytest.mark.parametrize("layout", ["rows", "heads first", "one key head"])
def test_keys_are_read_once_for_a_group(options, layout):
    num_kv_heads = 1 if layout == "one key head" else 2
    q, k, v = normal(3, np.float16, (1, 8, 3, 64), (1, num_kv_heads, 512, 64), (1, num_kv_heads, 512, 32))
    if layout == "heads first":
        q = heads_first(q)
    stacked, once = counted(q, k, v, return_lse=True, **options)
    alone, often = counted(*apart(q, k, v), return_lse=True, **options)
    assert_within_bound(stacked[0], reference.attention(q, k, v, **options), bounds.attention(q, k, v, **options))
    assert once.global_load_bytes == q.nbytes + k.nbytes + v.nbytes
    assert often.global_load_bytes == q.nbytes + 8 // num_kv_heads * (k.nbytes + v.nbytes)
    assert blocks(once) == num_kv_heads and blocks(often) == 8
    for ours, theirs in zip(stacked, alone, strict=True):
        assert_same_bits(ours, theirs)


def test_of_padded_batches_only_what_counts_is_read():
    seqlens_q, seqlens_k = np.array([2, 3, 0, 3]), np.array([512, 77, 300, 0])
    q, k, v = normal(6, np.float16, (4, 8, 3, 64), (4, 2, 512, 64), (4, 2, 512, 32))
    options = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "causal": True, "align": "bottom-right"}
    _, kernel = counted(q, k, v, **options)
    assert blocks(kernel) == 4 * 2
    queries, keys = 8 * seqlens_q.sum() * 64, 2 * (seqlens_k * (seqlens_q > 0)).sum() * (64 + 32)
    lengths = 2 * 4 * blocks(kernel) * 128  # every thread reads both
    assert kernel.global_load_bytes == 2 * (queries + keys) + lengths


@pytest.mark.parametrize("kind", [kind for kind, (*_, last) in KINDS.items() if last not in ("attn_sink", "bias")])
def test_more_keys_cost_reading_them_once(kind):
    """Whatever else is read; not under a window, which sees no more, nor of operands for each pair."""
    dtype, arch, *names = KINDS[kind]
    rng = np.random.default_rng(7)
    q, k, v = normal(8, dtype, (2, 8, 1, 16), (2, 2, 384, 16), (2, 2, 384, 16))
    options = {name: OPTIONS[name](rng, 2, 8, 1, 384) for name in names if not name.startswith("seqlens")}
    options |= {"numerics": Numerics(tile=TILES[dtype]), "align": "bottom-right"}
    if "split_size" in names:
        options["split_size"] = 512

    def loaded(seqlen_k):
        lengths = {"seqlens_k": np.array([seqlen_k, seqlen_k])} if "seqlens_k" in names else {}
        if "seqlens_q" in names:
            lengths["seqlens_q"] = np.array([1, 1])
        keys = (k, v) if lengths else (k[:, :, :seqlen_k], v[:, :, :seqlen_k])
        return counted(q, *keys, **options, **lengths)[1].global_load_bytes

    with ptxsim.settings(arch=arch):
        assert loaded(384) - loaded(256) == k[:, :, 256:].nbytes + v[:, :, 256:].nbytes


def test_no_key_is_read_that_no_query_sees():
    q, k, v = normal(5, np.float16, (1, 8, 33, 64), (1, 512, 64), (1, 512, 64))
    _, kernel = counted(q, k, v, causal=True, align="top-left")
    assert blocks(kernel) == 3  # 264 rows
    assert kernel.global_load_bytes == q.nbytes + 3 * (k[:, :128].nbytes + v[:, :128].nbytes)


STACKED, APART = 2 * 8, 2 * 32
LENGTHS = np.array([3, 16])


@pytest.mark.parametrize(
    ("case", "options", "expected"),
    [
        ({}, {}, STACKED),
        ({"seqlen_k": 300}, {"split_size": 128}, 3 * STACKED),
        ({"seqlen_q": 64}, {}, 2 * STACKED),  # a tile of 128 rows holds two heads
        ({"seqlen_q": 65}, {}, APART),
        ({}, {"seqlens_k": LENGTHS, "causal": True, "align": "bottom-right"}, STACKED),
        ({}, {"softcap": 1.0, "attn_sink": np.ones(32, np.float32)}, STACKED),
        ({"dtype": np.float32}, {"softcap": 1.0, "seqlens_k": LENGTHS}, STACKED),
        ({"dtype": np.float32}, {"causal": True, "align": "bottom-right"}, APART),
        ({"dtype": np.float32}, {"attn_sink": np.ones(32, np.float32)}, APART),
        ({}, {"dropout_p": 0.5, "seed": 1}, APART),
        ({}, {"mask_mod": "j > 0"}, STACKED),
        ({}, {"mask_mod": block_mask("j > 0", 1, 16)}, APART),
    ],
)
def test_which_calls_stack_heads(case, options, expected):
    case = {"seqlen_q": 1, "seqlen_k": 16, "dtype": np.float16} | case
    keys = 2, 8, case["seqlen_k"], 8
    q, k, v = normal(0, case["dtype"], (2, 32, case["seqlen_q"], 8), keys, keys)
    assert blocks_launched(q, k, v, **options) == expected


def blocks_launched(q, k, v, **options):
    """Of the attention kernel; nothing is compiled."""
    launches = []
    with mock.patch.object(_launch, "run", lambda _, more: launches.extend(more)):
        attention(q, k, v, **options)
    return launches[0].config.grid


def test_heads_with_lengths_of_their_own_stay_apart():
    q, k = normal(1, np.float16, (4, 1, 8), (16, 8))
    assert blocks_launched(q, k, k) == blocks_launched(q, k, k, seqlens_k=np.array([5])) == 1
    assert blocks_launched(q, k, k, seqlens_k=np.array([5, 6, 7, 8])) == 4


@pytest.mark.parametrize("layout", ["rows", "heads first"])
@pytest.mark.parametrize(("dtype", "expected"), [(np.float16, 2), (np.float32, 8)])
def test_rows_that_do_not_lie_evenly(layout, dtype, expected):
    q, k, v = normal(4, dtype, (1, 8, 3, 64), (1, 2, 100, 64), (1, 2, 100, 64))
    assert blocks_launched(q, k, v) == 2
    assert blocks_launched(heads_first(q), k, v) == expected


@pytest.mark.parametrize(("heads", "rows"), [(2**28 - 1, 2**31 - 8), (2**28, 8)])
def test_stacked_rows_fit_32_bits(heads, rows):
    q, k = (allocated(shape, np.float16) for shape in ((heads, 8, 8), (5, 8)))
    with recorded_gpu() as gpu:
        attention(q, k, k)
    ((*_, (params,), _),) = gpu.launches
    assert params["seqlen_q"] == rows
