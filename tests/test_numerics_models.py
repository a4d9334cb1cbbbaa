"""Results within their bounds in every arithmetic of the simulator: tensor cores that truncate, approximations at the
limit of what the PTX ISA allows."""

import numpy as np
import pytest

import cupyflash
from cupyflash import ptxsim, reference, testing
from cupyflash.ptxsim import tensor_core
from cupyflash.ptxsim.settings import MMA_MODELS
from cupyflash.testing import AttentionProblem as Problem

FAMILIES = ("normal", "peaked", "rising to tiny values", "one sign", "underflowing weights")
TYPES = [("float16", "sm_75"), ("float16", "sm_80"), ("bfloat16", "sm_80")]


def compute(problem, **settings):
    """Arguments of a backward call, its gradients and the options of both calls."""
    q, k, v = problem.inputs()
    with ptxsim.settings(**settings):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **problem.options)
        dout = np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)
        arguments = dout, q, k, v, out, lse
        return arguments, cupyflash.attention_backward(*arguments, **problem.options), problem.options


def check(problem, **settings):
    arguments, gradients, options = compute(problem, **settings)
    testing.assert_attention_within_bound(*arguments[4:], *arguments[1:4], **options)
    testing.assert_gradients_within_bound(gradients, *arguments, **options)


def problem(values, dtype, seqlen_q=20, seqlen_k=150, head_dim=32):
    sizes = seqlen_q, seqlen_k, head_dim, 24
    return Problem(dtype, (), (), (), *sizes, causal=True, align="bottom-right", values=values, seed=1)


@pytest.mark.parametrize("model", MMA_MODELS)
@pytest.mark.parametrize("dtype, arch", TYPES)
def test_tensor_cores(dtype, arch, model):
    for seed, values in enumerate(FAMILIES):
        check(problem(values, dtype), mma=model, ulp_noise=2, seed=seed, arch=arch)


def test_fused_multiply_adds():
    for seed, values in enumerate(("normal", "peaked")):
        check(problem(values, "float32", seqlen_q=20, seqlen_k=70, head_dim=16), ulp_noise=2, seed=seed)


def test_models_differ_where_tensor_cores_do():
    """Ada is Ampere and Blackwell is Hopper; else no two have the same bits, and none those of one rounding."""
    one = problem("one sign", "float16")
    lse = {model: compute(one, mma=model)[0][5] for model in MMA_MODELS}
    assert (lse["ampere"] == lse["ada"]).all() and (lse["hopper"] == lse["blackwell"]).all()
    for a, b in ("exact", "volta"), ("exact", "ampere"), ("exact", "hopper"), ("volta", "ampere"), ("ampere", "hopper"):
        assert (lse[a] != lse[b]).any(), (a, b)


def test_truncation_shows_as_a_bias():
    """Sums of one sign come out too small where they are cut off: so do the scores, and with them lse."""
    q, k = (np.random.default_rng(n).uniform(1, 2, (16, 256)).astype(np.float16) for n in range(2))
    exact = reference.attention(q, k, k, return_lse=True)[1]
    bias = {}
    for model in ("exact", "volta", "ampere", "hopper"):
        with ptxsim.settings(mma=model):
            lse = cupyflash.attention(q, k, k, return_lse=True)[1]
        bias[model] = np.mean((lse - exact) / exact)
    assert bias["volta"] < bias["ampere"] < bias["hopper"] < -3 * abs(bias["exact"]), bias


def test_noise_moves_lse_within_its_bound():
    one = problem("normal", "float16")
    lse = [compute(one, ulp_noise=noise, seed=seed)[0][5] for noise, seed in ((0, 0), (2, 0), (2, 1), (2, 0))]
    assert (lse[1] == lse[3]).all()
    assert all((a != b).mean() > 0.3 for a, b in ((lse[0], lse[1]), (lse[0], lse[2]), (lse[1], lse[2])))


def test_a_thread_that_flushes_subnormals_gives_the_same_bits(monkeypatch):
    """XLA's threads do, those that call back from JAX: the subnormals of halves are read by another way there."""
    problem = Problem("float16", (), (), (), 33, 70, 16, 16, values="rising", seed=1)
    out = cupyflash.attention(*problem.inputs())
    monkeypatch.setattr(tensor_core, "_keeps_subnormals", lambda: False)
    testing.assert_same_bits(cupyflash.attention(*problem.inputs()), out)
