"""What the gradients must satisfy, without a reference: sums, and changes of the inputs that change no bit."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cupyflash import bounds, ptxsim, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned
from tests.backends import Simulator
from tests.test_invariants import single_heads

few = settings(max_examples=15)
FAMILIES = ("normal", "duplicates", "one sign")


@dataclass(frozen=True)
class Head:
    """One head's arguments and gradients in float64, and magnitudes that roundings are relative to."""

    unit: float
    scale: float
    dout: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    dlse: np.ndarray
    weights: np.ndarray
    dscores: np.ndarray  # at most |P| (|dP| + |delta|)
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    @staticmethod
    def of(backend, problem, dout_values="normal", with_dlse=True):
        arguments, options = BackwardProblem(problem, dout_values, with_dlse).arguments(backend.attention)
        gradients = backend.attention_backward(*arguments, **options)
        dout, q, k, v, out, lse = (x.astype(np.float64) for x in arguments)
        dlse = np.zeros(len(q)) if options["dlse"] is None else options["dlse"].astype(np.float64)
        scale = problem.head_dim**-0.5 if problem.softmax_scale is None else problem.softmax_scale
        sees_keys = lse != -np.inf
        weights = np.exp(scale * q @ k.T - np.where(sees_keys, lse, 0)[:, None])
        if problem.causal:
            shift = len(k) - len(q) if problem.align == "bottom-right" else 0
            weights = np.where(np.arange(len(k)) <= np.arange(len(q))[:, None] + shift, weights, 0)
        delta = (np.abs(dout) * np.abs(out)).sum(axis=1) + np.abs(dlse)
        return Head(
            unit=2.0**-11 if problem.dtype == "float16" else 2.0**-8,
            scale=scale,
            dout=np.where(sees_keys[:, None], dout, 0),
            q=q,
            k=k,
            v=v,
            out=out,
            dlse=np.where(sees_keys, dlse, 0),
            weights=weights,
            dscores=weights * (np.abs(dout) @ np.abs(v).T + delta[:, None]),
            **{name: x.astype(np.float64) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)},
        )

    def assert_equal(self, value, expected, magnitude):
        """Within 4 roundings of the magnitude of what is summed; subnormal results are rounded absolutely."""
        subnormal = 2.0**-20 if self.unit == 2.0**-11 else 0
        allowed = 4 * self.unit * magnitude + subnormal * max(len(self.q), len(self.k), 1)
        assert (np.abs(value - expected) <= allowed).all()


heads = single_heads(families=FAMILIES)


@few
@given(problem=heads, with_dlse=st.booleans())
def test_gradients_of_keys_sum_to_what_comes_through_lse(backend, problem, with_dlse):
    """Moving all keys together adds one constant to a query's scores: out stays, lse moves by it."""
    head = Head.of(backend, problem, with_dlse=with_dlse)
    magnitude = abs(head.scale) * (head.dscores.T @ np.abs(head.q)).sum(axis=0)
    head.assert_equal(head.dk.sum(axis=0), head.scale * head.dlse @ head.q, magnitude)


@few
@given(problem=heads)
def test_gradients_of_values_sum_to_those_of_the_output(backend, problem):
    head = Head.of(backend, problem)
    magnitude = (head.weights.T @ np.abs(head.dout)).sum(axis=0)
    head.assert_equal(head.dv.sum(axis=0), head.dout.sum(axis=0), magnitude)


@few
@given(problem=heads)
def test_queries_and_keys_share_their_gradient(backend, problem):
    """out depends on q and k through their products only: Q^T dQ = dK^T K."""
    head = Head.of(backend, problem)
    magnitude = abs(head.scale) * np.abs(head.q).T @ head.dscores @ np.abs(head.k)
    head.assert_equal(head.q.T @ head.dq, head.dk.T @ head.k, magnitude)


@few
@given(problem=heads)
def test_values_times_their_gradient_are_the_output_times_its_own(backend, problem):
    head = Head.of(backend, problem)
    magnitude = (np.abs(head.v) * (head.weights.T @ np.abs(head.dout))).sum()
    head.assert_equal((head.v * head.dv).sum(), (head.out * head.dout).sum(), magnitude)


@few
@given(problem=heads)
def test_the_gradient_through_lse_is_the_mean_key(backend, problem):
    """d lse / d q = scale P K: attention with the keys as values."""
    arguments, options = BackwardProblem(problem, with_dlse=True).arguments(backend.attention)
    dout, q, k, v, out, lse = arguments
    dq, _, dv = backend.attention_backward(np.zeros_like(dout), q, k, v, out, lse, **options)
    mean_key, _ = backend.attention(q, k, k, **problem.options)
    scale = problem.head_dim**-0.5 if problem.softmax_scale is None else problem.softmax_scale
    dlse = options["dlse"].astype(np.float64)[:, None]
    largest = np.abs(k.astype(np.float64)).max(axis=0, initial=0)
    unit = 2.0**-11 if problem.dtype == "float16" else 2.0**-8
    error = np.abs(dq.astype(np.float64) - scale * dlse * mean_key.astype(np.float64))
    assert (error <= 4 * unit * abs(scale) * np.abs(dlse) * largest + 1e-5).all()
    assert (dv == 0).all()


@few
@given(problem=testing.attention_backward_problems(families=FAMILIES, scales=[None, -0.3]), power=st.integers(-3, 3))
def test_powers_of_two_pass_through_the_output_gradient(backend, problem, power):
    """Exactly, as long as nothing is subnormal: bfloat16."""
    problem = replace(problem.plain(), forward=replace(problem.forward, dtype="bfloat16").plain())
    (dout, *rest), options = replace(problem, dout_values="one sign").arguments(backend.attention)
    dlse = options.pop("dlse")
    factor = 2.0**power
    gradients = backend.attention_backward(dout, *rest, dlse=dlse, **options)
    scaled_dlse = None if dlse is None else dlse * np.float32(-factor)
    scaled = backend.attention_backward(dout * dout.dtype.type(-factor), *rest, dlse=scaled_dlse, **options)
    for gradient, value in zip(scaled, gradients, strict=True):
        np.testing.assert_array_equal(gradient.astype(np.float64), -factor * value.astype(np.float64))


def assert_same(gradients, expected):
    for gradient, value in zip(gradients, expected, strict=True):
        testing.assert_same_bits(gradient, value)


@few
@given(problem=testing.attention_backward_problems())
def test_the_same_call_twice_and_strides(backend, problem):
    arguments, options, gradients = poisoned.attention_backward(backend, problem)
    assert_same(backend.attention_backward(*arguments, **options), gradients)
    copies = [np.array(array, order="C") for array in arguments]
    dlse = options.pop("dlse")
    dlse = None if dlse is None else dlse.copy()
    assert_same(backend.attention_backward(*copies, dlse=dlse, **options), gradients)


@few
@given(problem=heads, num_batches=st.integers(2, 3), with_dlse=st.booleans())
def test_a_head_does_not_depend_on_the_others(backend, problem, num_batches, with_dlse):
    leading = (num_batches,)
    together = BackwardProblem(
        replace(problem, leading_q=leading, leading_k=leading, leading_v=leading), with_dlse=with_dlse
    )
    arguments, options = together.arguments(backend.attention)
    gradients = backend.attention_backward(*arguments, **options)
    dlse = options.pop("dlse")
    for index in range(num_batches):
        alone = backend.attention_backward(
            *(x[index] for x in arguments), dlse=None if dlse is None else dlse[index], **options
        )
        assert_same(alone, (x[index] for x in gradients))


@few
@given(problem=single_heads(families=("integers",)), group=st.integers(2, 3))
def test_grouped_heads_are_expanded_heads(backend, problem, group):
    """dq bit for bit; dk and dv are sums over the group, rounded once."""
    grouped = BackwardProblem(
        replace(
            problem, softmax_scale=testing.EXACT_SCALE, leading_q=(1, 2 * group), leading_k=(1, 2), leading_v=(1, 2)
        ),
        with_dlse=True,
    )
    (dout, q, k, v, out, lse), options = grouped.arguments(backend.attention)
    gradients = backend.attention_backward(dout, q, k, v, out, lse, **options)
    expanded = dout, q, *(np.repeat(x, group, axis=1) for x in (k, v)), out, lse
    full = backend.attention_backward(*expanded, **options)
    testing.assert_same_bits(gradients.dq, full.dq)
    bound = bounds.attention_backward(dout, q, k, v, out, lse, **options)
    full_bound = bounds.attention_backward(*expanded, **options)
    for name in "dk", "dv":
        summed, allowed = (
            getattr(x, name).astype(np.float64).reshape(1, 2, group, *getattr(gradients, name).shape[2:]).sum(axis=2)
            for x in (full, full_bound)
        )
        error = np.abs(getattr(gradients, name).astype(np.float64) - summed)
        assert (error <= allowed + getattr(bound, name)).all()


@few
@given(problem=heads, length=st.integers(0, 200))
def test_a_causal_prefix_of_queries_has_the_gradient_of_the_prefix(backend, problem, length):
    problem = replace(problem, causal=True, align="top-left")
    arguments, options = BackwardProblem(problem).arguments(backend.attention)
    dout, q, k, v, out, lse = arguments
    full = backend.attention_backward(*arguments, **options)
    rows = min(length, len(q))
    prefix = backend.attention_backward(dout[:rows], q[:rows], k[:rows], v[:rows], out[:rows], lse[:rows], **options)
    testing.assert_same_bits(prefix.dq, full.dq[:rows])
    # The last keys are seen by the last queries alone.
    suffix = backend.attention_backward(
        np.concatenate([np.full_like(dout[:rows], np.nan), dout[rows:]]), q, k, v, out, lse, **options
    )
    for gradient, value in (suffix.dk, full.dk), (suffix.dv, full.dv):
        testing.assert_same_bits(gradient[rows:], value[rows:])


@few
@given(problem=heads)
def test_constant_values_leave_nothing_to_the_scores(backend, problem):
    """Where v is constant, out is, whatever the scores: dq and dk come through lse alone."""
    problem = replace(problem, values="constant", causal=False, align=None)
    assume(problem.seqlen_q and problem.seqlen_k)
    head = Head.of(backend, problem, "one sign", with_dlse=False)
    # out is rounded, so that delta is off by a rounding of it.
    moved = 2 * head.unit * np.abs(head.dout).sum(axis=1, keepdims=True) * head.weights
    assert (np.abs(head.dq) <= abs(head.scale) * moved @ np.abs(head.k) + 1e-6).all()
    assert (np.abs(head.dk) <= abs(head.scale) * moved.T @ np.abs(head.q) + 1e-6).all()


@pytest.mark.parametrize("simulated", ["sm_75", "sm_80"])
@settings(max_examples=8)
@given(problem=single_heads(dtypes=("float16",)), seed=st.integers(0, 1000))
def test_the_order_of_warps_does_not_matter(simulated, problem, seed):
    """No warp reads what another has yet to write, or writes what another still reads."""
    simulator = Simulator()
    problem = BackwardProblem(replace(problem, seqlen_q=problem.seqlen_q + 64))
    arguments, options = problem.arguments(simulator.attention)
    results = []
    for schedule in "lockstep", "random":
        with ptxsim.settings(schedule=schedule, seed=seed):
            results.append(simulator.attention_backward(*arguments, arch=simulated, **options))
    assert_same(*results)


@pytest.mark.parametrize("simulated", ["sm_75", "sm_80"])
@pytest.mark.parametrize(
    ("leading_q", "leading_k", "name", "position"),
    [
        ((), (3,), None, 0),  # dq is summed, over several passes through all keys
        ((3,), (), None, 0),
        ((), (), "dout", 70 * 64),  # values that are taken out of the shared tiles
        ((), (), "q", 70 * 64),
        ((), (), "k", 70 * 64),
    ],
)
def test_the_order_of_warps_does_not_matter_in_passes_and_beside_non_finite_values(
    simulated, leading_q, leading_k, name, position
):
    simulator = Simulator()
    forward = Problem("float16", leading_q, leading_k, leading_k, 150, 170, 64, 64, True, "top-left", seed=7)
    arguments, options = BackwardProblem(forward).arguments(simulator.attention)
    if name is not None:
        {"dout": arguments[0], "q": arguments[1], "k": arguments[2]}[name].reshape(-1)[position] = np.inf
    expected = simulator.attention_backward(*arguments, arch=simulated, **options)
    for seed in range(2):
        with ptxsim.settings(schedule="random", seed=seed):
            assert_same(simulator.attention_backward(*arguments, arch=simulated, **options), expected)


@few
@given(problem=testing.attention_backward_problems(families=("normal",)), lanes=st.sampled_from([1, 256, 1024]))
def test_how_blocks_are_simulated_together_does_not_matter(problem, lanes):
    simulator = Simulator()
    arguments, options = problem.arguments(simulator.attention)
    expected = simulator.attention_backward(*arguments, **options)
    with ptxsim.settings(chunk_lanes=lanes):
        assert_same(simulator.attention_backward(*arguments, **options), expected)


def test_many_queries_and_keys(backend):
    """More tiles than any of the drawn problems has."""
    forward = Problem("float16", (), (), (), 700, 900, 64, 64, causal=True, align="bottom-right", seed=6)
    arguments, options, gradients = poisoned.attention_backward(backend, BackwardProblem(forward, with_dlse=True))
    testing.assert_gradients_within_bound(gradients, *arguments, **options)
