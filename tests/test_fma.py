"""float32 and float64: every element within its bound, exact where it can be, and no bank conflicts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from cupyflash import _config, _launch, _source, attention, ptxsim, reference, testing
from cupyflash.testing import AttentionProblem as Problem
from tests import accuracy, backends, fma_work, poisoned

DTYPES = ["float32", "float64"]
FAMILIES = [family for family in testing.FAMILIES if family != "underflowing weights"]  # a matter of float16


def check(backend, problem, arch="sm_80"):
    """Inputs, results and what is known of them, every element compared."""
    inputs, out, lse = poisoned.attention(backend, problem, arch=arch)
    exact, bound = testing.assert_attention_within_bound(out, lse, *inputs, **problem.options)
    return inputs, out, lse, exact, bound


@settings(max_examples=10)
@given(problem=testing.attention_problems(dtypes=DTYPES))
@example(problem=Problem("float32", seqlen_q=0, seqlen_k=3, leading_q=(2,)))
@example(problem=Problem("float64", seqlen_q=5, seqlen_k=0, head_dim_v=13))
@example(problem=Problem("float32", seqlen_q=130, seqlen_k=3, causal=True, align="bottom-right"))
@example(problem=Problem("float64", seqlen_q=3, seqlen_k=300, causal=True, align="top-left"))
def test_stays_within_bounds(backend, arch, problem):
    *_, bound = check(backend, problem, arch)
    event("bound finite everywhere" if np.isfinite(bound).all() else "bound infinite somewhere")


@pytest.mark.parametrize("values", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_family_of_values(backend, dtype, values):
    """Several key tiles, so that the maximum moves between them; and the bound says something."""
    problem = Problem(
        dtype, (2,), (2,), (2,), 40, 300, 64, 48, causal=True, align="bottom-right", values=values, seed=1
    )
    *_, bound = check(backend, problem)
    assert values == "huge values" or np.isfinite(bound).all()


def of_head_dims(dtype, head_dims):
    return Problem(dtype, (), (), (), 70, 140, *head_dims, causal=True, align="bottom-right", seed=2)


@pytest.mark.parametrize("head_dims", [(80, 96), (192, 128), (255, 249)])
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
    problem = Problem(dtype, (), (), (), 20, 150, 64, 64, softmax_scale=softmax_scale, seed=3)
    check(backend, problem)


@settings(max_examples=12)
@given(
    problem=testing.attention_problems(dtypes=DTYPES, families=["normal", "one sign", "rising"], scales=[None, -0.5]),
    places=testing.hostile_values(),
)
@example(
    problem=Problem("float32", (), (), (), 6, 200, 64, 64, causal=True, align="bottom-right"),
    places=[("v", 200 * 64 - 1, np.inf)],
)
@example(
    problem=Problem("float64", (), (), (), 70, 70, 64, 64, causal=True, align="bottom-right"),
    places=[("v", 50 * 64, np.nan), ("k", 30 * 64, np.nan)],
)
def test_a_non_finite_value_changes_only_the_rows_that_see_it(backend, problem, places):
    testing.check_nonfinite_values_change_only_rows_that_see_them(
        poisoned.into_views(backend, problem), problem, places=places
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_keys_is_zero(backend, dtype):
    problem = Problem(dtype, (2,), (2,), (2,), 130, 40, causal=True, align="bottom-right", values="one sign")
    _, out, lse = poisoned.attention(backend, problem)
    assert (out[:, :90] == 0).all() and (lse[:, :90] == -np.inf).all()
    assert (out[:, 90:] > 0).all() and np.isfinite(lse[:, 90:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_gives_its_value(backend, dtype):
    """Its weight is exp(0) = 1 exactly, whatever the score."""
    problem = Problem(dtype, (2,), (2,), (2,), 9, 9, 64, 48, causal=True, values="peaked")
    (_, _, v), out, _ = poisoned.attention(backend, problem)
    testing.assert_same_bits(out[:, 0], v[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_invariants(backend, dtype):
    """Two runs, another layout, one head of a batch, signs and powers of two: the same bits."""
    problem = Problem(dtype, (2, 4), (2, 2), (2, 2), 70, 90, 64, 48, causal=True, align="bottom-right", seed=7)
    q, k, v = problem.inputs()
    out, lse = backend.attention(q, k, v, **problem.options)

    def assert_same(a, b, c, expected=out, expected_lse=lse):
        other, other_lse = backend.attention(a, b, c, **problem.options)
        testing.assert_same_bits(other, expected)
        testing.assert_same_bits(other_lse, expected_lse)

    assert_same(q, k, v)
    views = replace(problem, views=("rows before heads", "every third column", "misaligned", "plain"))
    assert_same(*views.inputs())
    assert_same(*(np.repeat(x, 2, axis=1) if x is not q else x for x in (q, k, v)))
    assert_same(q[1, 3], k[1, 1], v[1, 1], out[1, 3], lse[1, 3])
    assert_same(-q, -k, 4 * v, 4 * out)
    assert_same(4 * q, k / 4, -v, -out)
    # A tile that nobody sees, and a query that is not there.
    more_keys = [np.concatenate([x, np.full((*x.shape[:-2], 70, x.shape[-1]), np.nan, dtype)], axis=-2) for x in (k, v)]
    shifted = {**problem.options, "align": "top-left"}
    few, few_lse = backend.attention(q, k, v, **shifted)
    many, many_lse = backend.attention(q, *more_keys, **shifted)
    testing.assert_same_bits(many, few)
    testing.assert_same_bits(many_lse, few_lse)


@pytest.mark.parametrize("seqlen_k", [512, 1024])
def test_float32_is_as_accurate_as_numpy(backend, seqlen_k):
    """Against the three steps in NumPy's float32, on zero-mean inputs."""
    problem = Problem("float32", (2,), (2,), (2,), 64, seqlen_k, 64, 64, seed=8)
    (q, k, v), out, _ = poisoned.attention(backend, problem)
    scores = q @ k.swapaxes(-1, -2) * np.float32(1 / math.sqrt(64))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    numpy_out = (weights / weights.sum(axis=-1, keepdims=True)) @ v
    exact = reference.attention(q, k, v)
    error, numpy_error = (np.sqrt(np.mean((x - exact) ** 2)) for x in (out, numpy_out))
    assert error <= 1.2 * numpy_error


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (80, 16), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_memory_is_free_of_bank_conflicts(dtype, head_dims, arch):
    q, k, v = Problem(dtype, (), (), (), 70, 90, *head_dims, causal=True, align="top-left").inputs()
    with ptxsim.settings(arch=arch), ptxsim.profile() as profile:
        attention(q, k, v, causal=True, align="top-left")
    (kernel,) = profile.kernels
    assert kernel.name == "flash_fwd_fma" and kernel.mma_flops == 0
    assert kernel.shared_wavefronts == kernel.shared_ideal_wavefronts > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_key_tiles_that_nobody_sees_are_not_read(dtype):
    """Bytes of a causal call from keys and values: tiles up to the diagonal only."""
    q, k, v = Problem(dtype, (), (), (), 256, 256, 64, 64).inputs()
    tile = _config.flash_fwd_fma_tile(q.dtype, 64, 64, "sm_80")
    with ptxsim.profile() as profile:
        attention(q, k, v, causal=True)
    row_bytes = 64 * q.itemsize
    key_rows = sum(first + tile.block_m for first in range(0, 256, tile.block_m))
    assert profile.kernels[0].global_load_bytes == (256 + 2 * key_rows) * row_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_and_log_are_accurate(backend, arch, dtype):
    """To 2 ulp: far closer than any bound on a result asks for."""
    accuracy.assert_exp_is_accurate(backend, dtype, arch)
    accuracy.assert_log_is_accurate(backend, dtype, arch)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_is_no_approximation(dtype):
    """The simulator rounds ``lg2.approx`` correctly, as no GPU does: only the PTX tells one log from the other."""
    defines = _config.flash_fwd_fma_defines(np.dtype(dtype), 64, 64, causal=False, arch="sm_80")
    ptx = ptxsim.compile_ptx(_source.render("flash_fwd_fma", defines), _launch.OPTIONS, arch="sm_80")
    assert "lg2.approx" not in ptx and ("ex2.approx" in ptx) == (dtype == np.float32)  # a part of its exp


@pytest.mark.parametrize("simulated", ["sm_75", "sm_80"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [None, 15 * 192])
def test_the_order_of_warps_does_not_matter(simulated, dtype, position):
    """No warp reads what another has yet to write, or writes what another still reads; beside an infinity, too."""
    q, k, v = Problem(dtype, (), (), (), 14, 40, 256, 192, causal=True, align="bottom-right", seed=9).inputs()
    if position is not None:
        v.reshape(-1)[-position] = np.inf
    simulator = backends.Simulator()
    options = {"arch": simulated, "causal": True, "align": "bottom-right"}
    out, lse = simulator.attention(q, k, v, **options)
    with ptxsim.settings(schedule="random", seed=9):
        again, lse_again = simulator.attention(q, k, v, **options)
    testing.assert_same_bits(again, out)
    testing.assert_same_bits(lse_again, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dims", [(16, 13), (250, 203)])
def test_nonfinite_values_reach_who_sees_them(backend, dtype, head_dims):
    problem = Problem(dtype, (), (), (), 70, 70, *head_dims, causal=True, align="bottom-right")
    testing.check_nonfinite_values_reach_who_sees_them(backend.attention, problem)


@settings(max_examples=10)
@given(
    arch=st.sampled_from(["sm_75", "sm_80"]),
    dtype=st.sampled_from(DTYPES),
    seqlens=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    head_dims=st.sampled_from([(16, 16), (64, 36), (128, 128), (256, 192)]),
    align=st.sampled_from([None, "bottom-right", "top-left"]),
)
def test_nothing_is_read_or_awaited_twice(arch, dtype, seqlens, head_dims, align):
    problem = Problem(dtype, (2,), (2,), (2,), *seqlens, *head_dims, causal=align is not None, align=align)
    fma_work.assert_least(problem, arch)


@pytest.mark.parametrize("align", [None, "bottom-right"])
def test_only_boundary_tiles_cost_a_mask(align):
    """In float32, whose functions take the same instructions for all numbers."""
    problem = Problem(
        "float32", head_dim=256, head_dim_v=256, causal=align is not None, align=align, softmax_scale=1e-37
    )
    fma_work.assert_fewest_masks(problem, "sm_80")
