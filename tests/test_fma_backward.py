"""Gradients in float32 and float64: every element within its bound, as accurate as NumPy, and no bank conflicts."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import event, example, given, settings

from cupyflash import _backward_config, _config, bounds, reference, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import backward_checks, fma_work, poisoned
from tests.test_config import ARCHITECTURES, HEAD_DIMS, assert_compiles, problem

DTYPES = ["float32", "float64"]
FAMILIES = [family for family in testing.FAMILIES if family != "underflowing weights"]  # a matter of float16


def check(backend, problem, arch="sm_80"):
    arguments, options, gradients = poisoned.attention_backward(backend, problem, arch)
    _, bound = testing.assert_gradients_within_bound(gradients, *arguments, **options)
    return bound


@settings(max_examples=4)
@given(problem=testing.attention_backward_problems(dtypes=DTYPES))
@example(problem=BackwardProblem(Problem("float32", seqlen_q=0, seqlen_k=3, leading_q=(2,))))
@example(problem=BackwardProblem(Problem("float64", seqlen_q=5, seqlen_k=0, head_dim_v=13), with_dlse=True))
@example(problem=BackwardProblem(Problem("float32", seqlen_q=130, seqlen_k=3, causal=True, align="bottom-right")))
@example(problem=BackwardProblem(Problem("float64", seqlen_q=3, seqlen_k=200, causal=True, align="top-left")))
@example(problem=BackwardProblem(Problem("float64", (), (3, 2), (2,), 5, 7, 9, 20), dout_view="one column"))
def test_stays_within_bounds(backend, arch, problem):
    bound = check(backend, problem, arch)
    event("bound finite everywhere" if all(np.isfinite(x).all() for x in bound) else "bound infinite somewhere")


@pytest.mark.parametrize("values", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_family_of_values(backend, dtype, values):
    forward = Problem(dtype, (), (), (), 70, 140, 64, 48, causal=True, align="bottom-right", values=values, seed=1)
    bound = check(backend, BackwardProblem(forward, with_dlse=True))
    assert values == "huge values" or all(np.isfinite(x).all() for x in bound)


def of_head_dims(dtype, head_dims):
    forward = Problem(dtype, (), (), (), 40, 70, *head_dims, causal=True, align="bottom-right", seed=2)
    return BackwardProblem(forward, with_dlse=True)


@pytest.mark.parametrize("head_dims", [(80, 96), (255, 249)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_each_architecture(backend, arch, dtype, head_dims):
    check(backend, of_head_dims(dtype, head_dims), arch)


@pytest.mark.parametrize("head_dims", [(1, 1), (7, 256), (256, 3), (160, 160)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(backend, dtype, head_dims):
    check(backend, of_head_dims(dtype, head_dims))


@pytest.mark.parametrize("softmax_scale", dict.fromkeys([*testing.SCALES, 2.0**127]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales(backend, softmax_scale, dtype):
    check(backend, BackwardProblem(Problem(dtype, (), (), (), 20, 70, 64, 64, softmax_scale=softmax_scale, seed=3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("leading_q", "leading_k", "leading_v"),
    [((2, 4), (2, 2), (2, 1)), ((), (3,), ()), ((3,), (), ()), ((2, 1), (2,), ())],
)
def test_sums_over_broadcast_dimensions_and_grouped_heads(backend, dtype, leading_q, leading_k, leading_v):
    forward = Problem(dtype, leading_q, leading_k, leading_v, 20, 70, 16, 24, causal=True, align="top-left", seed=4)
    check(backend, BackwardProblem(forward, with_dlse=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_rows_reach_who_sees_them(backend, dtype):
    forward = Problem(dtype, (), (), (), 75, 75, 16, 24, causal=True, align="bottom-right", seed=6)
    backward_checks.assert_nonfinite_rows_reach_who_sees_them(
        backend, BackwardProblem(forward, with_dlse=True), "sm_80"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_keys_and_a_key_without_rows_have_gradient_zero(backend, dtype):
    more_queries = Problem(dtype, (), (), (), 90, 40, causal=True, align="bottom-right", values="one sign")
    _, _, gradients = poisoned.attention_backward(backend, BackwardProblem(more_queries, "one sign", with_dlse=True))
    assert (gradients.dq[:50] == 0).all() and (gradients.dq[51:] != 0).any() and (gradients.dv > 0).all()
    more_keys = Problem(dtype, (), (), (), 40, 150, causal=True, align="top-left", values="one sign")
    _, _, gradients = poisoned.attention_backward(backend, BackwardProblem(more_keys, "one sign"))
    assert (gradients.dk[40:] == 0).all() and (gradients.dv[40:] == 0).all() and (gradients.dv[:40] > 0).all()


@pytest.mark.parametrize("seqlen", [256, 512])
def test_float32_is_as_accurate_as_numpy(backend, seqlen):
    """Against the same steps in NumPy's float32, with the weights at hand, on zero-mean inputs."""
    problem = BackwardProblem(Problem("float32", (), (), (), seqlen, seqlen, 64, 64, seed=8))
    arguments, options, gradients = poisoned.attention_backward(backend, problem)
    dout, q, k, v, *_ = arguments
    scale = np.float32(1 / math.sqrt(64))
    scores = q @ k.T * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dscores = weights * (dout @ v.T - (dout * (weights @ v)).sum(axis=-1, keepdims=True)) * scale
    exact = reference.attention_backward(*arguments, **options)
    for gradient, by_numpy, values in zip(
        gradients, (dscores @ k, dscores.T @ q, weights.T @ dout), exact, strict=True
    ):
        error, numpy_error = (np.sqrt(np.mean((x - values) ** 2)) for x in (gradient, by_numpy))
        assert error <= 1.2 * numpy_error


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize(
    "head_dims",
    [(80, 16), (256, 256), *(pytest.param(dims, marks=pytest.mark.deep) for dims in ((64, 64), (128, 128)))],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_work(dtype, head_dims, arch):
    """Bytes, barriers and bank conflicts; tiles that are masked as a whole are not read."""
    forward = Problem(dtype, (), (), (), 40, 90, *head_dims, causal=True, align="top-left")
    fma_work.assert_least_backward(BackwardProblem(forward), arch)


def configs(call, arch):
    both = _backward_config.one_pass_for_keys_and_values(call)
    yield _backward_config.dq(call, arch, 6)
    for with_dkey, with_dvalue in [(True, True)] if both else [(True, False), (False, True)]:
        yield _backward_config.dkdv(call, arch, 6, with_dkey=with_dkey, with_dvalue=with_dvalue)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiles_fit(dtype, arch):
    sizes = [n + d for n in (0, 16, 32, 64, 128, 160, 192, 240) for d in (1, 16)]
    smallest, largest = bounds.arithmetic.FMA_TILES
    for head_dim, head_dim_v in itertools.product(sizes, sizes):
        call = problem(head_dim, head_dim_v, dtype)
        for config in configs(call, arch):
            assert config.name.endswith("_fma")
            assert config.shared_bytes <= min(99 * 1024, _config.shared_memory_per_block(arch)), call
            owned, visited, length = (
                ("BLOCK_M", "BLOCK_N", 300) if "dq" in config.name else ("BLOCK_N", "BLOCK_M", call.seqlen_k)
            )
            assert smallest <= config.defines[visited] <= largest and config.defines[visited] % 16 == 0
            assert config.defines[owned] % (2 * config.defines["NUM_WARPS"]) == 0
            assert config.grid == 6 * -(-length // config.defines[owned])


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shared_memory_is_what_the_kernels_use(dtype, head_dim, head_dim_v, arch):
    used = {
        "flash_bwd_dq_fma": "QueryTile::BYTES + DoutTile::BYTES + DscoreTile::BYTES + "
        "max_of(KeyTile::BYTES, ValueTile::BYTES)",
        "flash_bwd_dkdv_fma": "KeyTile::BYTES + (WITH_DKEY ? ValueTile::BYTES : 0) + WeightTile::BYTES + "
        "max_of(QueryTile::BYTES, DoutTile::BYTES)",
    }
    for config in configs(problem(head_dim, head_dim_v, dtype), arch):
        assert_compiles(config, f'static_assert({used[config.name]} == {config.shared_bytes}, "bytes");', arch)
