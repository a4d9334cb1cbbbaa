"""What a launch of the forward kernel has to do, from the algorithm: to be compared with what the simulator counts."""

from dataclasses import dataclass

from cupyflash import _config
from cupyflash._problem import Problem


@dataclass(frozen=True)
class Work:
    """Totals of one launch."""

    mma_flops: int
    global_load_bytes: int
    global_store_bytes: int


def flash_fwd(problem: Problem, arch: str) -> Work:
    """Each query tile is read once, and each key tile of which a query sees something once per query tile.

    head_dim and head_dim_v are multiples of 8, so that rows are whole chunks.
    """
    config = _config.flash_fwd(problem, arch)
    block_m, block_n = config.defines["BLOCK_M"], config.defines["BLOCK_N"]
    key_tiles = loaded_keys = 0
    for first_query in range(0, problem.seqlen_q, block_m):
        last_query = min(first_query + block_m, problem.seqlen_q) - 1
        seen = last_query + problem.causal_shift + 1 if problem.causal else problem.seqlen_k
        tiles = _config.ceil_div(min(max(seen, 0), problem.seqlen_k), block_n)
        key_tiles += tiles
        loaded_keys += min(tiles * block_n, problem.seqlen_k)
    padded = config.defines["HEAD_DIM"] + config.defines["HEAD_DIM_V"]
    row_bytes = 2 * (problem.head_dim + problem.head_dim_v)
    queries = problem.num_batches * problem.seqlen_q
    return Work(
        mma_flops=problem.num_batches * key_tiles * 2 * block_m * block_n * padded,
        global_load_bytes=problem.num_batches * loaded_keys * row_bytes + 2 * queries * problem.head_dim,
        global_store_bytes=queries * (2 * problem.head_dim_v + 4),
    )
