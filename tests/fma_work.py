"""What the kernels of float32 and float64 have to do, from the algorithm, against what the simulator counts."""

from dataclasses import replace

from cupyflash import _backward_config, _config, testing
from cupyflash._problem import Problem, attention_problem
from tests import backward_work
from tests.work import Work, assert_counts, counted, seen

ROW_LANES = 16  # that share a row of a register tile


def visits(problem: Problem, tile: _config.Tile) -> tuple[int, int, int]:
    """Key tiles that the query tiles of one head visit, those of them with a masked pair, and the keys that exist."""
    tiles = masked_tiles = loaded_keys = 0
    for first_query in range(0, problem.seqlen_q, tile.block_m):
        last_query = min(first_query + tile.block_m, problem.seqlen_q) - 1
        visited = _config.ceil_div(seen(problem, last_query), tile.block_n)
        tiles += visited
        masked_tiles += visited - seen(problem, first_query) // tile.block_n
        loaded_keys += min(visited * tile.block_n, problem.seqlen_k)
    return tiles, masked_tiles, loaded_keys


def flash_fwd_fma(problem: Problem, arch: str) -> Work:
    """Each query tile is read once, and each key tile of which a query sees something once per query tile."""
    tile = _config.flash_fwd_fma_tile(problem.dtype, problem.head_dim, problem.head_dim_v, arch)
    tiles, masked_tiles, loaded_keys = visits(problem, tile)
    item, queries = problem.dtype.itemsize, problem.num_batches * problem.seqlen_q
    row_bytes = item * (problem.head_dim + problem.head_dim_v)
    return Work(
        mma_flops=0,
        global_load_bytes=problem.num_batches * loaded_keys * row_bytes + queries * item * problem.head_dim,
        global_store_bytes=queries * item * (problem.head_dim_v + 1),
        # Around the copy of the keys, before values take their place, before these are used, and in causally masked
        # tiles to ask for values that are not finite.
        barriers=problem.num_batches * (4 * tiles + problem.causal * masked_tiles),
    )


def flash_bwd_dq_fma(problem: Problem, arch: str) -> Work:
    """As in the forward, with dout beside the queries."""
    tile = _backward_config.flash_bwd_dq_fma_tile(problem.dtype, problem.head_dim, problem.head_dim_v, arch)
    tiles, masked_tiles, loaded_keys = visits(problem, tile)
    query_tiles = _config.ceil_div(problem.seqlen_q, tile.block_m)
    item, queries = problem.dtype.itemsize, problem.num_batches * problem.seqlen_q
    row_bytes = item * (problem.head_dim + problem.head_dim_v)
    return Work(
        mma_flops=0,
        # lse and delta of a query are read by the lanes that share it.
        global_load_bytes=(problem.num_batches * loaded_keys + queries) * row_bytes + queries * 2 * ROW_LANES * item,
        global_store_bytes=queries * item * problem.head_dim,
        # Around the copies of values and of keys, where non-finite keys are asked for, and before another batch's
        # queries take the place of these.
        barriers=problem.num_batches * (4 * tiles + problem.causal * masked_tiles + query_tiles),
    )


def flash_bwd_dkdv_fma(problem: Problem, arch: str) -> Work:
    """Each key tile is read once and each query tile that sees some of it twice, or in a pass for dv alone once."""
    tile = _backward_config.flash_bwd_dkdv_fma_tile(problem.dtype, problem.head_dim, problem.head_dim_v, arch)
    num_tiles = _config.ceil_div(problem.seqlen_q, tile.block_m)
    tiles = masked_tiles = loaded_queries = 0
    for first_key in range(0, problem.seqlen_k, tile.block_n):
        last_key = min(first_key + tile.block_n, problem.seqlen_k) - 1
        first, unmasked = (backward_work.first_query(problem, key) for key in (first_key, last_key))
        begin = first // tile.block_m if first < problem.seqlen_q else num_tiles
        tiles += num_tiles - begin
        masked_tiles += min(_config.ceil_div(unmasked, tile.block_m), num_tiles) - begin
        loaded_queries += max(problem.seqlen_q - begin * tile.block_m, 0)
    together = _backward_config.one_pass_for_keys_and_values(problem)
    item, keys = problem.dtype.itemsize, problem.num_batches * problem.seqlen_k
    queries, dim, dim_v = problem.num_batches * loaded_queries, problem.head_dim, problem.head_dim_v
    row_bytes = item * (dim + dim_v)
    # Every 16 lanes read lse and delta of the queries of a tile.
    per_query = 2 * item * tile.num_warps * _config.WARP_SIZE // ROW_LANES
    alone = keys * item * dim + queries * (row_bytes + per_query // 2)  # dv, in a pass that needs no delta
    asked = problem.causal * masked_tiles
    return Work(
        mma_flops=0,
        global_load_bytes=keys * row_bytes
        + queries * (row_bytes + item * dim + per_query)
        + (0 if together else alone),
        global_store_bytes=keys * row_bytes,
        barriers=problem.num_batches * (6 * tiles + 2 * asked + (0 if together else 4 * tiles)),
    )


def assert_least(case: testing.AttentionProblem, arch: str) -> None:
    """Work as the algorithm says, without bank conflicts. Rows are whole 16-byte chunks."""
    inputs, kernel = counted(case, arch)
    assert_counts([kernel], flash_fwd_fma(attention_problem(*inputs, **case.options), arch))


def assert_least_backward(case: testing.AttentionBackwardProblem, arch: str) -> None:
    """The same for the gradients."""
    arguments, kernels = backward_work.counted(case, arch)
    problem = attention_problem(*arguments[1:4], **case.options)
    assert_counts(kernels["flash_bwd_dq_fma"], flash_bwd_dq_fma(problem, arch))
    assert_counts(kernels["flash_bwd_dkdv_fma"], flash_bwd_dkdv_fma(problem, arch))


def assert_fewest_masks(case: testing.AttentionProblem, arch: str) -> None:
    """Whole tiles all cost the same, and a tile that lacks a key costs a mask, which is work on each of its scores."""
    dtype = testing.element_type(case.dtype)
    tile = _config.flash_fwd_fma_tile(dtype, case.head_dim, case.head_dim_v, arch)
    lengths = [n * tile.block_n - missing for n, missing in ((2, 0), (3, 0), (4, 0), (3, 1), (4, 1))]
    two, three, four, three_less, four_less = (
        sum(counted(replace(case, seqlen_k=n), arch)[1].instructions.values()) for n in lengths
    )
    assert four - three == three - two  # the first tile has nothing to rescale
    assert four_less - four == three_less - three >= tile.block_m * tile.block_n // 32
