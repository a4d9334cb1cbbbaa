"""Work under bands and lengths: tiles in which no query sees a key are not visited, counted by the simulator."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyflash import _backward_config, _config, attention, attention_backward, ptxsim
from cupyflash._problem import attention_problem
from cupyflash.reference.masks import visible_keys

LENGTHS = st.integers(1, 500)
SIDES = st.none() | st.integers(0, 300)
ALIGN = st.sampled_from(["bottom-right", "top-left"])


def counted(function):
    with ptxsim.profile() as profile:
        function()
    return {kernel.name: kernel for kernel in profile.kernels}


def visited_tiles(visible, block_m, block_n):
    """How many tiles hold a visible pair, over all batches."""
    *batch, seqlen_q, seqlen_k = visible.shape
    padded = np.zeros((*batch, -(-seqlen_q // block_m) * block_m, -(-seqlen_k // block_n) * block_n), bool)
    padded[..., :seqlen_q, :seqlen_k] = visible
    tiles = padded.reshape(*batch, padded.shape[-2] // block_m, block_m, padded.shape[-1] // block_n, block_n)
    return int(tiles.any(axis=(-3, -1)).sum())


def visible(problem):
    return np.broadcast_to(visible_keys(problem), (*problem.leading_shape, problem.seqlen_q, problem.seqlen_k))


def forward_tiles(q, k, options):
    """Tiles that the forward visits, and those in which somebody sees something."""
    problem = attention_problem(q, k, k, **options)
    defines = _config.forward(problem, "sm_80").defines
    block_m, block_n = defines["BLOCK_M"], defines["BLOCK_N"]
    flops = counted(lambda: attention(q, k, k, **options))["flash_fwd"].mma_flops
    visits, rest = divmod(flops, 2 * block_m * block_n * (defines["HEAD_DIM"] + defines["HEAD_DIM_V"]))
    assert rest == 0
    return visits, visited_tiles(visible(problem), block_m, block_n)


def backward_tiles(q, k, options):
    """The same of the kernel of dq and of that of dk and dv: pairs by the kernel's name."""
    problem = attention_problem(q, k, k, **options)
    out, lse = attention(q, k, k, return_lse=True, **options)
    kernels = counted(lambda: attention_backward(out, q, k, k, out, lse, **options))
    tiles = {}
    dkdv = _backward_config.dkdv(problem, "sm_80", 1, with_dkey=True, with_dvalue=True)
    for products, config in ((3, _backward_config.dq(problem, "sm_80", 1)), (4, dkdv)):
        name = config.name
        block_m, block_n = config.defines["BLOCK_M"], config.defines["BLOCK_N"]
        visits, rest = divmod(kernels[name].mma_flops, 2 * block_m * block_n * products * config.defines["HEAD_DIM"])
        assert rest == 0
        tiles[name] = visits, visited_tiles(visible(problem), block_m, block_n)
    return tiles


@settings(max_examples=15)
@given(
    lengths=st.tuples(LENGTHS, LENGTHS),
    window=st.tuples(SIDES, SIDES),
    align=ALIGN,
)
def test_a_window_visits_the_tiles_of_its_band(lengths, window, align):
    q, k = (np.zeros((length, 16), np.float16) for length in lengths)
    visits, needed = forward_tiles(q, k, {"window_size": window, "align": align})
    assert visits == needed


@settings(max_examples=15)
@given(data=st.data(), causal=st.booleans(), align=ALIGN)
def test_nothing_behind_a_length_is_visited(data, causal, align):
    q, k = (np.zeros((3, length, 16), np.float16) for length in (300, 400))
    lengths = [st.lists(st.integers(0, x.shape[1]), min_size=3, max_size=3) for x in (q, k)]
    seqlens_q, seqlens_k = (np.array(data.draw(n)) for n in lengths)
    options = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "causal": causal, "align": align}
    visits, needed = forward_tiles(q, k, options)
    assert visits == needed


@settings(max_examples=10)
@example(lengths=(65, 129), window=(None, 1), align="top-left")  # the last key's first query would be in its last tile
@given(lengths=st.tuples(LENGTHS, LENGTHS), window=st.tuples(SIDES, SIDES), align=ALIGN)
def test_a_window_visits_the_tiles_of_its_band_in_the_backward(lengths, window, align):
    q, k = (np.zeros((length, 16), np.float16) for length in lengths)
    for name, (visits, needed) in backward_tiles(q, k, {"window_size": window, "align": align}).items():
        assert visits == needed, name


@settings(max_examples=6)
@given(data=st.data(), causal=st.booleans(), align=ALIGN)
def test_nothing_behind_a_length_is_visited_in_the_backward(data, causal, align):
    q, k = (np.zeros((2, length, 16), np.float16) for length in (150, 200))
    lengths = [st.lists(st.integers(0, x.shape[1]), min_size=2, max_size=2) for x in (q, k)]
    seqlens_q, seqlens_k = (np.array(data.draw(n)) for n in lengths)
    options = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "causal": causal, "align": align}
    for name, (visits, needed) in backward_tiles(q, k, options).items():
        assert visits == needed, name


def test_the_work_of_a_window_grows_with_the_length_alone():
    window = {"window_size": (256, 0)}
    flops = []
    for length in (1024, 2048, 4096):
        x = np.zeros((length, 16), np.float16)
        flops.append(counted(lambda x=x: attention(x, x, x, **window))["flash_fwd"].mma_flops)
    assert flops[2] - flops[1] == 2 * (flops[1] - flops[0]) < 1.1 * flops[1]


@pytest.mark.parametrize("split_size", [128, 256])
def test_parts_do_the_work_of_the_whole(split_size):
    q, k = np.zeros((5, 16), np.float16), np.zeros((700, 16), np.float16)
    whole, parts = (
        counted(lambda options=options: attention(q, k, k, **options))["flash_fwd"].mma_flops
        for options in ({}, {"split_size": split_size})
    )
    assert parts == whole
