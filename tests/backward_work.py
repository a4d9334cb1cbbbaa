"""What the backward kernels have to do, from the algorithm: to be compared with what the simulator counts."""

from collections import defaultdict

import numpy as np

from cupyflash import _backward_config, attention_backward, ptxsim, reference
from cupyflash._config import ceil_div
from cupyflash._problem import Problem, attention_problem
from cupyflash.testing import AttentionBackwardProblem
from tests.work import Work, assert_counts, seen


def flash_bwd_dq(problem: Problem, arch: str) -> Work:
    """Each query tile is read once, and each key tile of which a query sees something once per query tile."""
    tile = _backward_config.flash_bwd_dq_tile(problem.head_dim, problem.head_dim_v, arch)
    queries, row_bytes = problem.num_batches * problem.seqlen_q, 2 * (problem.head_dim + problem.head_dim_v)
    tiles = loaded_keys = barriers = 0
    for first_query in range(0, problem.seqlen_q, tile.block_m):
        last_query = min(first_query + tile.block_m, problem.seqlen_q) - 1
        visited = ceil_div(seen(problem, last_query), tile.block_n)
        masked = visited - seen(problem, first_query) // tile.block_n
        tiles += visited
        loaded_keys += min(visited * tile.block_n, problem.seqlen_k)
        # Before a tile is used, before the only buffer is filled again, in masked tiles, at the end.
        barriers += visited + (max(visited - 1, 0) if tile.num_stages == 1 else 0) + masked + 1
    head_dim, head_dim_v = _padded(problem)
    return Work(
        mma_flops=problem.num_batches * tiles * 2 * tile.block_m * tile.block_n * (2 * head_dim + head_dim_v),
        # lse and delta of a query are read by the four lanes that share it.
        global_load_bytes=(problem.num_batches * loaded_keys + queries) * row_bytes + queries * 2 * 4 * 4,
        global_store_bytes=queries * 2 * problem.head_dim,
        barriers=problem.num_batches * barriers,
    )


def flash_bwd_dkdv(problem: Problem, arch: str) -> Work:
    """Each key tile is read once, and each query tile that sees some of it once per key tile."""
    tile = _backward_config.flash_bwd_dkdv_tile(problem.head_dim, problem.head_dim_v, arch)
    keys, row_bytes = problem.num_batches * problem.seqlen_k, 2 * (problem.head_dim + problem.head_dim_v)
    tiles = loaded_queries = barriers = 0
    num_tiles = ceil_div(problem.seqlen_q, tile.block_m)
    for first_key in range(0, problem.seqlen_k, tile.block_n):
        last_key = min(first_key + tile.block_n, problem.seqlen_k) - 1
        first, unmasked = (first_query(problem, key) for key in (first_key, last_key))
        begin = first // tile.block_m if first < problem.seqlen_q else num_tiles
        interior = min(ceil_div(unmasked, tile.block_m), num_tiles)
        tiles += num_tiles - begin
        loaded_queries += max(problem.seqlen_q - begin * tile.block_m, 0)
        # Before a tile is used, where P goes from one warp to another, in masked tiles to ask for values that are not
        # finite; before the keys and values are taken to registers, and at the end.
        barriers += 2 * (num_tiles - begin) + (interior - begin) + 2
    return Work(
        mma_flops=problem.num_batches * tiles * 2 * tile.block_m * tile.block_n * 2 * sum(_padded(problem)),
        global_load_bytes=keys * row_bytes + problem.num_batches * loaded_queries * (row_bytes + 2 * 4),
        global_store_bytes=keys * row_bytes,
        barriers=problem.num_batches * barriers,
    )


def first_query(problem: Problem, key: int) -> int:
    return max(key - problem.causal_shift, 0) if problem.causal else 0


def _padded(problem: Problem) -> tuple[int, int]:
    return tuple(ceil_div(size, 16) * 16 for size in (problem.head_dim, problem.head_dim_v))


def assert_least(case: AttentionBackwardProblem, arch: str) -> None:
    """Work as the algorithm says, without bank conflicts. head_dim and head_dim_v are multiples of 8."""
    arguments, kernels = counted(case, arch)
    problem = attention_problem(*arguments[1:4], **case.options)
    assert_counts(kernels["flash_bwd_dq"], flash_bwd_dq(problem, arch))
    assert_counts(kernels["flash_bwd_dkdv"], flash_bwd_dkdv(problem, arch))


def counted(case: AttentionBackwardProblem, arch: str):
    """The case's arguments, and what the simulator counted for the variants of each kernel of the backward."""
    q, k, v = case.forward.inputs()
    out, lse = reference.attention(q, k, v, return_lse=True, **case.options)
    out, lse = out.astype(q.dtype), lse.astype(np.float64 if q.dtype == np.float64 else np.float32)
    with ptxsim.settings(arch=arch), ptxsim.profile() as profile:
        attention_backward(out, q, k, v, out, lse, grads_out=case.empty_grads(), **case.options)
    kernels = defaultdict(list)
    for kernel in profile.kernels:
        kernels[kernel.name].append(kernel)
    return (out, q, k, v, out, lse), kernels
