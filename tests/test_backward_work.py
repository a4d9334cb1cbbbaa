"""How much the backward kernels do, counted by the simulator, against what the algorithm asks for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import _backward_config, attention, attention_backward, ptxsim, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import backward_work

ARCHITECTURES = ["sm_75", "sm_80", "sm_86"]
A100_FLOPS_PER_CYCLE = 2048  # of one multiprocessor, for a float16 product with float32 sums


@settings(max_examples=8)
@given(
    arch=st.sampled_from(ARCHITECTURES),
    seqlens=st.tuples(testing.seqlens(), st.integers(1, 300)).filter(all),
    head_dims=st.sampled_from([(16, 16), (64, 64), (24, 72), (128, 128)]),
    align=st.sampled_from([None, "bottom-right", "top-left"]),
)
def test_nothing_is_read_multiplied_or_awaited_twice(arch, seqlens, head_dims, align):
    """Nothing beyond the ends is read, and no tile is visited that holds no pair."""
    problem = Problem("float16", (2,), (2,), (2,), *seqlens, *head_dims, causal=align is not None, align=align)
    backward_work.assert_least(BackwardProblem(problem), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dims", [(16, 16), (80, 48), (128, 128), (256, 256)])
def test_work_of_each_size_of_tile(arch, head_dims):
    problem = Problem("float16", (), (), (), 100, 200, *head_dims, causal=True, align="bottom-right")
    backward_work.assert_least(BackwardProblem(problem), arch)


def test_dv_by_itself_reads_no_values():
    """Values that the batch shares have a gradient of their own launch, which needs the weights alone."""
    problem = Problem("float16", (2,), (2,), (), 40, 50, 64, 32)
    _, kernels = backward_work.counted(BackwardProblem(problem), "sm_80")
    dk, dv = kernels["flash_bwd_dkdv"]
    queries = 2 * 40 * (2 * (64 + 32) + 2 * 4)
    assert dk.global_load_bytes == queries + 2 * 50 * 2 * (64 + 32)
    assert dv.global_load_bytes == queries + 2 * 50 * 2 * 64


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["flash_bwd_dq", "flash_bwd_dkdv"])
def test_tensor_cores_are_busy_longer_than_shared_memory(name, head_dim):
    """One more tile of a block's loop on an A100: its wavefronts, and cycles of its products."""
    if name == "flash_bwd_dq":
        tile = _backward_config.flash_bwd_dq_tile(head_dim, head_dim, "sm_80")
        lengths = (tile.block_m, 2 * tile.block_n), (tile.block_m, 3 * tile.block_n)
    else:
        tile = _backward_config.flash_bwd_dkdv_tile(head_dim, head_dim, "sm_80")
        lengths = (2 * tile.block_m, tile.block_n), (3 * tile.block_m, tile.block_n)
    problems = (BackwardProblem(Problem("float16", (), (), (), *n, head_dim, head_dim)) for n in lengths)
    (fewer,), (more,) = (backward_work.counted(problem, "sm_80")[1][name] for problem in problems)
    cycles = (more.mma_flops - fewer.mma_flops) / A100_FLOPS_PER_CYCLE
    assert 0 < more.shared_wavefronts - fewer.shared_wavefronts <= cycles


def test_one_buffer_and_two_give_the_same_bits():
    """sm_86 has room for fewer buffers than sm_80. Warps that run in random order show a missing barrier."""
    head_dim = 64
    problem = Problem("float16", (), (), (), 70, 130, head_dim, head_dim, causal=True, align="bottom-right")
    q, k, v = problem.inputs()
    out, lse = attention(q, k, v, return_lse=True, **problem.options)
    results, stages = [], []
    for arch, seed in ("sm_80", 1), ("sm_86", 2), ("sm_86", 3):
        with ptxsim.settings(arch=arch, schedule="random", seed=seed):
            gradients = attention_backward(np.ones_like(out), q, k, v, out, lse, **problem.options)
        results.append([gradient.tobytes() for gradient in gradients])
        stages.append(_backward_config.flash_bwd_dq_tile(head_dim, head_dim, arch).num_stages)
    assert results[0] == results[1] == results[2] and stages[0] != stages[1]
