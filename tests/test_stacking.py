"""Few queries of heads that share their keys: the same bits, and keys are read once for all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import Numerics, _stacking, attention, bounds, ptxsim, reference
from cupyflash._arrays import BFLOAT16
from cupyflash.testing import assert_same_bits, assert_within_bound
from tests.forgetting import no_plans
from tests.test_cupy_path import allocated, recorded_gpu


def both_ways(call):
    """What the call returns with heads stacked where they may be, and apart."""
    stacked = call()
    with pytest.MonkeyPatch.context() as patch, no_plans():
        patch.setattr(_stacking, "stacked", lambda problem, layouts, arch: (problem, layouts))
        return stacked, call()


def counted(call):
    """What the call returns, and what its attention kernel did."""
    with ptxsim.profile() as profile:
        results = call()
    (kernel,) = (kernel for kernel in profile.kernels if kernel.name.startswith("flash_fwd"))
    return results, kernel


def blocks(kernel):
    (shape,) = kernel.shapes
    return shape.blocks


def normal(seed, dtype, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def heads_first(x):
    """(B, H, L, D) over the memory of (B, L, H, D)."""
    return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 1, 2)), 1, 2)


@st.composite
def calls(draw):
    """q, k, v and options, of which some let heads be stacked."""
    dtype = draw(st.sampled_from([np.float16, BFLOAT16, np.float32]))
    batch, num_kv_heads, group = (draw(st.integers(1, top)) for top in (2, 3, 5))
    seqlen_q, seqlen_k = draw(st.sampled_from([1, 1, 2, 3, 7])), draw(st.integers(1, 300))
    head_dim, head_dim_v = (draw(st.sampled_from([8, 16, 20, 40])) for _ in "qv")
    key_heads = draw(st.sampled_from([(batch, num_kv_heads), (num_kv_heads,), ()]))
    q, k, v = normal(
        draw(st.integers(0, 2**32)), dtype, (batch, num_kv_heads * group, seqlen_q, head_dim),
        (*key_heads, seqlen_k, head_dim), (*key_heads, seqlen_k, head_dim_v),
    )  # fmt: skip
    if draw(st.booleans()):
        q = heads_first(q)
    if draw(st.booleans()):
        k[..., draw(st.integers(0, seqlen_k - 1)), :] = np.nan
    options = draw(
        st.sampled_from([{}, {"causal": True}, {"window_size": (5, 1)}, {"window_size": (40, None)},
                         {"softcap": 3.0}, {"attn_sink": np.zeros((), dtype)}])
    )  # fmt: skip
    if options and "softcap" not in options and "attn_sink" not in options:
        options = options | {"align": draw(st.sampled_from(["bottom-right", "top-left"]))}
    if draw(st.booleans()):
        options = options | {"split_size": 128}
    if draw(st.booleans()):
        options = options | {"numerics": Numerics(tile=(32, 32))}
    return (q, k, v), options


@settings(max_examples=16)
@given(calls())
def test_bits_are_those_of_heads_apart(call):
    arrays, options = call
    stacked, apart = both_ways(lambda: attention(*arrays, return_lse=True, return_max=True, **options))
    for ours, theirs in zip(stacked, apart, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom-right"}], ids=["all keys", "causal"])
@pytest.mark.parametrize("layout", ["rows", "heads first", "one key head"])
def test_keys_are_read_once_for_a_group(options, layout):
    num_kv_heads, seqlen_q = (1, 3) if layout == "one key head" else (2, 1 if layout == "heads first" else 3)
    q, k, v = normal(3, np.float16, (1, 8, seqlen_q, 64), (1, num_kv_heads, 512, 64), (1, num_kv_heads, 512, 32))
    if layout == "heads first":
        q = heads_first(q)
    (stacked, once), (apart, often) = both_ways(lambda: counted(lambda: attention(q, k, v, return_lse=True, **options)))
    assert_within_bound(stacked[0], reference.attention(q, k, v, **options), bounds.attention(q, k, v, **options))
    assert once.global_load_bytes == q.nbytes + k.nbytes + v.nbytes
    assert often.global_load_bytes == q.nbytes + 8 // num_kv_heads * (k.nbytes + v.nbytes)
    assert blocks(once) == num_kv_heads and blocks(often) == 8
    for ours, theirs in zip(stacked, apart, strict=True):
        assert_same_bits(ours, theirs)


def test_rows_that_do_not_lie_evenly_stay_apart():
    q, k, v = normal(4, np.float16, (1, 8, 3, 64), (1, 2, 100, 64), (1, 2, 100, 64))
    _, apart = counted(lambda: attention(heads_first(q), k, v))
    _, stacked = counted(lambda: attention(q, k, v))
    assert blocks(apart) == 8 and blocks(stacked) == 2


def test_no_key_is_read_that_no_query_sees():
    q, k, v = normal(5, np.float16, (1, 8, 33, 64), (1, 512, 64), (1, 512, 64))
    _, kernel = counted(lambda: attention(q, k, v, causal=True, align="top-left"))
    assert blocks(kernel) == 3  # 264 rows
    assert kernel.global_load_bytes == q.nbytes + 3 * (k[:, :128].nbytes + v[:, :128].nbytes)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 2 * 8),
        ({"seqlen_k": 300, "options": {"split_size": 128}}, 2 * 8 * 3),
        ({"seqlen_q": 64}, 2 * 8 * 2),  # a tile of 128 rows holds two heads
        ({"seqlen_q": 65}, 2 * 32),
        ({"options": {"softcap": 1.0}}, 2 * 32),
        ({"options": {"alibi_slopes": np.ones(32, np.float32), "align": "top-left"}}, 2 * 32),
    ],
)
def test_which_calls_stack_heads(changed, expected):
    case = {"batch": 2, "seqlen_q": 1, "seqlen_k": 16, "options": {}} | changed
    keys = case["batch"], 8, case["seqlen_k"], 8
    q, k, v = normal(0, np.float16, (case["batch"], 32, case["seqlen_q"], 8), keys, keys)
    _, kernel = counted(lambda: attention(q, k, v, **case["options"]))
    assert blocks(kernel) == expected


@pytest.mark.parametrize(("heads", "rows"), [(2**28 - 1, 2**31 - 8), (2**28, 8)])
def test_stacked_rows_fit_32_bits(heads, rows):
    q, k = (allocated(shape, np.float16) for shape in ((heads, 8, 8), (5, 8)))
    with recorded_gpu() as gpu:
        attention(q, k, k)
    ((*_, (params,), _),) = gpu.launches
    assert params["seqlen_q"] == rows
