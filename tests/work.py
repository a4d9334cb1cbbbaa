"""What a launch of the forward kernel has to do, from the algorithm: to be compared with what the simulator counts."""

from dataclasses import dataclass, fields, replace

from cupyflash import _config, attention, ptxsim
from cupyflash._problem import Problem, attention_problem
from cupyflash.ptxsim.profile import KernelProfile


@dataclass(frozen=True)
class Work:
    """Totals of one launch."""

    mma_flops: int
    global_load_bytes: int
    global_store_bytes: int
    barriers: int


def flash_fwd(problem: Problem, arch: str) -> Work:
    """Each query tile is read once, and each key tile of which a query sees something once per query tile.

    head_dim and head_dim_v are multiples of 8, so that rows are whole chunks.
    """
    config = _config.flash_fwd(problem, arch)
    block_m, block_n = config.defines["BLOCK_M"], config.defines["BLOCK_N"]
    blocks = range(0, problem.seqlen_q, block_m)
    key_tiles = masked_tiles = loaded_keys = 0
    for first_query in blocks:
        last_query = min(first_query + block_m, problem.seqlen_q) - 1
        tiles = _config.ceil_div(seen(problem, last_query), block_n)
        key_tiles += tiles
        masked_tiles += tiles - seen(problem, first_query) // block_n
        loaded_keys += min(tiles * block_n, problem.seqlen_k)
    padded = config.defines["HEAD_DIM"] + config.defines["HEAD_DIM_V"]
    row_bytes = 2 * (problem.head_dim + problem.head_dim_v)
    queries = problem.num_batches * problem.seqlen_q
    return Work(
        mma_flops=problem.num_batches * key_tiles * 2 * block_m * block_n * padded,
        global_load_bytes=problem.num_batches * loaded_keys * row_bytes + 2 * queries * problem.head_dim,
        global_store_bytes=queries * (2 * problem.head_dim_v + 4),
        # Before a value tile is loaded, before it is used, in causally masked tiles to ask for values that are not
        # finite, and before the result takes the place of the queries.
        barriers=problem.num_batches * (2 * key_tiles + problem.causal * masked_tiles + len(blocks)),
    )


def seen(problem: Problem, query: int) -> int:
    """How many keys the query sees."""
    seen = query + problem.causal_shift + 1 if problem.causal else problem.seqlen_k
    return min(max(seen, 0), problem.seqlen_k)


def assert_least(case, arch: str) -> None:
    """Work as the algorithm says, and every access coalesced and without bank conflicts."""
    inputs, kernel = counted(case, arch)
    assert_counts([kernel], flash_fwd(attention_problem(*inputs, **case.options), arch))
    if case.head_dim % 16 == case.head_dim_v % 16 == 0:
        assert 32 * kernel.global_load_sectors == kernel.global_load_bytes


def assert_counts(variants: list[KernelProfile], expected: Work) -> None:
    """What the variants of a kernel did together is as much, and shared memory is free of bank conflicts."""
    found = Work(*(sum(getattr(x, field.name) for x in variants) for field in fields(Work)))
    assert found == expected, f"{variants[0].name}: {found}, expected {expected}"
    assert all(x.shared_wavefronts == x.shared_ideal_wavefronts for x in variants)


def assert_fewest_masks(case, arch: str) -> None:
    """Whole tiles all cost the same, and a tile that lacks a key costs a mask, which is work on each of its scores.

    The case has one query, and scores so close that nothing is rescaled.
    """
    tile = _config.flash_fwd_tile(case.head_dim, case.head_dim_v, arch)
    lengths = [n * tile.block_n - missing for n, missing in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1))]
    one, two, three, two_less, three_less = (_instructions(replace(case, seqlen_k=n), arch) for n in lengths)
    assert three - two == two - one
    assert three_less - three == two_less - two >= tile.block_m * tile.block_n // 32


def assert_fewest_rescales(case, arch: str) -> None:
    """Accumulators are multiplied where a maximum moved, and only there."""
    tile = _config.flash_fwd_tile(case.head_dim, case.head_dim_v, arch)
    case = replace(case, seqlen_q=tile.block_m, seqlen_k=3 * tile.block_n)
    moving = _instructions(replace(case, values="rising"), arch)
    resting = _instructions(replace(case, softmax_scale=1e-37), arch)
    assert moving - resting >= 2 * tile.block_m * case.head_dim_v // 32


def _instructions(case, arch: str) -> int:
    return sum(counted(case, arch)[1].instructions.values())


def counted(case, arch: str):
    """The case's inputs, and what the simulator counted for them."""
    inputs, out = case.inputs(), case.empty_out()
    with ptxsim.settings(arch=arch), ptxsim.profile() as profile:
        attention(*inputs, out=out, return_lse=True, **case.options)
    (kernel,) = profile.kernels
    return inputs, kernel
