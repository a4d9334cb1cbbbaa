"""How much the forward kernel does, counted by the simulator, against what the algorithm asks for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import _config, attention, ptxsim
from cupyflash._problem import attention_problem
from tests import strategies, work
from tests.strategies import Problem

ARCHITECTURES = ["sm_75", "sm_80"]


def counted(problem, arch):
    """What the simulator counted, and the work that the algorithm asks for."""
    inputs, out = problem.inputs(), problem.empty_out()
    with ptxsim.settings(arch=arch), ptxsim.profile() as profile:
        attention(*inputs, out=out, return_lse=True, **problem.options)
    (kernel,) = profile.kernels
    return kernel, work.flash_fwd(attention_problem(*inputs, **problem.options), arch)


@settings(max_examples=25)
@given(
    arch=st.sampled_from(ARCHITECTURES),
    seqlens=st.tuples(strategies.lengths(), st.integers(1, 400)).filter(all),
    head_dims=st.sampled_from([(16, 16), (64, 64), (48, 80), (128, 128)]),
    align=st.sampled_from([None, "bottom-right", "top-left"]),
)
def test_operands_are_read_and_tiles_multiplied_as_often_as_the_algorithm_says(arch, seqlens, head_dims, align):
    """Nothing beyond the ends is read, and no key tile is visited of which no query sees a key."""
    problem = Problem("float16", (2,), (2,), (2,), *seqlens, *head_dims, causal=align is not None, align=align)
    kernel, expected = counted(problem, arch)
    counts = work.Work(kernel.mma_flops, kernel.global_load_bytes, kernel.global_store_bytes)
    assert counts == expected


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dims", [(16, 16), (32, 64), (64, 64), (80, 48), (128, 128), (256, 256)])
def test_accesses_are_coalesced_and_without_bank_conflicts(arch, head_dims):
    problem = Problem("float16", (), (), (), 130, 300, *head_dims, causal=True, align="bottom-right")
    kernel, _ = counted(problem, arch)
    assert kernel.shared_wavefronts == kernel.shared_ideal_wavefronts
    assert 32 * kernel.global_load_sectors == kernel.global_load_bytes


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("causal", [False, True])
def test_only_boundary_tiles_cost_a_mask(arch, causal):
    block_n = _config.flash_fwd_tile(64, 64, arch).block_n
    align = "bottom-right" if causal else None

    def instructions(seqlen_k):
        problem = Problem(
            seqlen_k=seqlen_k, head_dim=64, head_dim_v=64, causal=causal, align=align, softmax_scale=1e-37
        )  # scores so close that nothing is rescaled
        return sum(counted(problem, arch)[0].instructions.values())

    step = instructions(2 * block_n) - instructions(block_n)
    assert instructions(3 * block_n) - instructions(2 * block_n) == step
    mask = instructions(2 * block_n - 1) - instructions(2 * block_n)
    assert 0 < mask < step
    assert instructions(3 * block_n - 1) - instructions(3 * block_n) == mask


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_barriers(arch):
    """One before a value tile is loaded, one before it is used, and one before the result takes the queries' place."""
    tile = _config.flash_fwd_tile(64, 64, arch)
    kernel, _ = counted(Problem("float16", (), (), (), 1, 3 * tile.block_n, 64, 64), arch)
    assert kernel.barriers == 2 * 3 + 1
