"""How much the backward's tensor-core kernels do, counted by the simulator, against what the algorithm asks for."""

import numpy as np
import pytest

from cupyflash import _backward_config, attention, attention_backward, ptxsim
from cupyflash._config import round_up
from cupyflash.testing import AttentionProblem as Problem

A100_FLOPS_PER_CYCLE = 2048  # of one multiprocessor, for a float16 product with float32 sums
TILES = {"flash_bwd_dq": _backward_config.flash_bwd_dq_tile, "flash_bwd_dkdv": _backward_config.flash_bwd_dkdv_tile}


def counted(problem, arch):
    """{kernel: its counters}. The work depends on no value, so that out and lse may be any."""
    q, k, v = problem.inputs()
    out, lse = problem.empty_out(), np.zeros(q.shape[:-1], np.float32)
    with ptxsim.settings(arch=arch), ptxsim.profile() as profile:
        attention_backward(np.ones_like(out), q, k, v, out, lse, **problem.options)
    return {kernel.name: kernel for kernel in profile.kernels if kernel.name in TILES}


def num_visited(problem, tile):
    """Pairs of a query tile and a key tile of which some query sees some key."""
    rows, columns = np.arange(problem.seqlen_q)[:, None], np.arange(problem.seqlen_k)
    seen = columns <= rows + (problem.seqlen_k - problem.seqlen_q) if problem.causal else columns >= 0 * rows
    return len({(i // tile.block_m, j // tile.block_n) for i, j in np.argwhere(seen).tolist()})


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 48), (128, 128), (192, 128)])
def test_no_product_is_taken_twice_and_no_bank_conflicts(head_dims, causal, arch):
    align = "bottom-right" if causal else None
    problem = Problem("float16", (), (), (), 150, 200, *head_dims, causal=causal, align=align)
    d, dv = (round_up(x, 16) for x in head_dims)
    # S and dP once for each kernel, and once more for dv alone where dk and dv are not computed together.
    columns = {"flash_bwd_dq": 2 * d + dv, "flash_bwd_dkdv": 2 * d + 2 * dv + (d if d + dv > 256 else 0)}
    kernels = counted(problem, arch)
    assert kernels.keys() == TILES.keys()
    for name, kernel in kernels.items():
        tile = TILES[name](*head_dims, arch)
        assert kernel.mma_flops == num_visited(problem, tile) * 2 * tile.block_m * tile.block_n * columns[name]
        assert kernel.shared_wavefronts == kernel.shared_ideal_wavefronts > 0


@pytest.mark.parametrize("name", TILES)
def test_at_head_dim_64_tensor_cores_are_busy_longer_than_shared_memory(name):
    """One more tile of a block's loop on an A100: its wavefronts, and cycles of its products."""
    tile = TILES[name](64, 64, "sm_80")
    lengths = (tile.block_m, 2 * tile.block_n), (tile.block_m, 3 * tile.block_n)
    if name == "flash_bwd_dkdv":
        lengths = (2 * tile.block_m, tile.block_n), (3 * tile.block_m, tile.block_n)
    fewer, more = (counted(Problem("float16", (), (), (), *n, 64, 64), "sm_80")[name] for n in lengths)
    cycles = (more.mma_flops - fewer.mma_flops) / A100_FLOPS_PER_CYCLE
    assert 0 < more.shared_wavefronts - fewer.shared_wavefronts <= cycles


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_buffer_and_two_give_the_same_bits(head_dim):
    """sm_86 has room for fewer buffers than sm_80. Warps that run in random order show a missing barrier."""
    problem = Problem("float16", (), (), (), 70, 130, head_dim, head_dim, causal=True, align="bottom-right")
    q, k, v = problem.inputs()
    out, lse = attention(q, k, v, return_lse=True, **problem.options)
    results, stages = [], []
    for arch, seed in ("sm_80", 1), ("sm_86", 2), ("sm_86", 3):
        with ptxsim.settings(arch=arch, schedule="random", seed=seed):
            gradients = attention_backward(np.ones_like(out), q, k, v, out, lse, **problem.options)
        results.append([gradient.tobytes() for gradient in gradients])
        stages.append([tile(head_dim, head_dim, arch).num_stages for tile in TILES.values()])
    assert results[0] == results[1] == results[2] and stages[0] != stages[1]
