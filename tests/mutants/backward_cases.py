"""The same for the backward on tensor cores. Its out and lse come from the reference, which no mutant changes.

In float16, up to head_dim 64 flash_bwd_dkdv takes 64 queries and 128 keys a step, flash_bwd_dq 128 and 64.
"""

import re

import numpy as np

from cupyflash import ptxsim, reference, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import backward_checks, backward_work, poisoned
from tests.backends import Simulator
from tests.mutants.case import Case, text_of


class AfterReference(Simulator):
    """The simulator's backward of the reference's forward."""

    def attention(self, q, k, v, *, arch=None, out=None, return_lse=True, **options):
        exact, lse = reference.attention(q, k, v, return_lse=True, **options)
        out = np.empty(exact.shape, q.dtype) if out is None else out
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = exact
            return out, lse.astype(np.float64 if q.dtype == np.float64 else np.float32)


BACKWARD = AfterReference()


class BackwardCase(Case):
    """A call of ``attention_backward``."""

    def call(self):
        poisoned.attention_backward(BACKWARD, self.problem, self.arch)


def within_bounds(case: Case) -> None:
    arguments, options, gradients = poisoned.attention_backward(BACKWARD, case.problem, case.arch)
    testing.assert_gradients_within_bound(gradients, *arguments, **options)


def in_any_order(case: Case) -> None:
    """Within bounds, and the same bits whatever the order of warps and the time when copies land."""
    arguments, options, gradients = poisoned.attention_backward(BACKWARD, case.problem, case.arch)
    testing.assert_gradients_within_bound(gradients, *arguments, **options)
    _assert_same_in_any_order(case, arguments, options, gradients)


def nonfinite_in_any_order(case: Case) -> None:
    """Values that some warps see and others take out, each in a row that no other spoils."""
    arguments, options = case.problem.arguments(BACKWARD.attention)
    for array, part in zip(arguments[:3], (2 / 3, 0, 3 / 4), strict=True):
        array[..., int(part * array.shape[-2]), 0] = np.nan
    gradients = BACKWARD.attention_backward(*arguments, arch=case.arch, **options)
    _assert_same_in_any_order(case, arguments, options, gradients)


def _assert_same_in_any_order(case, arguments, options, gradients):
    half = case.problem.forward.dtype in ("float16", "bfloat16")
    for seed in range(2 if half else 1):  # register tiles are slow to simulate warp by warp
        with ptxsim.settings(schedule="random", seed=seed):
            again = BACKWARD.attention_backward(*arguments, arch=case.arch, **options)
        for gradient, expected in zip(again, gradients, strict=True):
            testing.assert_same_bits(gradient, expected)


def without_influence(case: Case) -> None:
    """A value that is not finite spoils what the bounds say, and changes no bit of the rest."""
    problem, names = case.problem, ("dout", "q", "k", "v")
    arguments, options, clean = poisoned.attention_backward(BACKWARD, problem, case.arch)
    for name, row, column, value in (
        ("k", -1, 0, np.nan), ("k", -40, 3, -np.inf), ("q", 0, 1, np.inf), ("q", 100, -1, np.nan),
        ("dout", 1, 0, np.nan), ("dout", 70, -1, np.inf), ("v", -1, 1, np.nan),
    ):  # fmt: skip
        spoilt = [array.copy() for array in arguments]
        spoilt[names.index(name)][..., row, column] = value
        spoilt[4:] = BACKWARD.attention(*spoilt[1:4], **problem.options)
        gradients = BACKWARD.attention_backward(*spoilt, arch=case.arch, **options)
        _, bound = testing.assert_gradients_within_bound(gradients, *spoilt, **options)
        for gradient, before, allowed in zip(gradients, clean, bound, strict=True):
            testing.assert_same_bits(gradient[np.isfinite(allowed)], before[np.isfinite(allowed)])


def each_nonfinite_row(case: Case) -> None:
    backward_checks.assert_nonfinite_rows_reach_who_sees_them(BACKWARD, case.problem, case.arch)


def unbiased(case: Case) -> None:
    """A weight, a dS or a result that is truncated instead of rounded errs to one side."""
    arguments, options, gradients = poisoned.attention_backward(BACKWARD, case.problem, case.arch)
    exact, _ = testing.assert_gradients_within_bound(gradients, *arguments, **options)
    for gradient, values in zip(gradients, exact, strict=True):
        backward_checks.assert_unbiased(gradient, values)


def no_more_work(case: Case) -> None:
    backward_work.assert_least(case.problem, case.arch)


def far_apart(case: Case) -> None:
    """Rows and matrices of every array that lie more than 2**31 elements from each other."""
    arguments, options = case.problem.arguments(BACKWARD.attention)
    expected = BACKWARD.attention_backward(*arguments, **options)
    far = [*(testing.spread_out(x) for x in arguments[:5]), arguments[5]]
    grads_out = [testing.spread_out(x) for x in expected]
    for gradient in grads_out:
        gradient[...] = np.nan
    gradients = BACKWARD.attention_backward(*far, grads_out=grads_out, **options)
    for gradient, value in zip(gradients, expected, strict=True):
        testing.assert_same_bits(np.array(gradient), value)


def waits_in_the_epilogue(case: Case) -> None:
    """What no simulated schedule shows is read in the PTX.

    A simulated copy lands when it is issued or awaited, and a warp stores its gradients undisturbed. So copies under
    way in a block that visits no tile never land on results, and a lane never stores what another has yet to write.
    """
    for file, wait in ("flash_bwd_dkdv", ""), ("flash_bwd_dq", r"cp\.async\.wait_group\s+0;.*"):
        ptx = text_of(case, file)
        before, store, after = ptx[ptx.rindex("mma.sync") :].partition("st.shared.b32")
        assert re.search(wait + r"bar(rier)?\.sync", before, re.DOTALL)
        assert not re.search(r"st\.shared\.b32((?!bar\.warp\.sync).)*ld\.shared", store + after, re.DOTALL)


BATCHES = ("float16", (2,), (2,), (2,))
CAUSAL = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}
HALF = ("float16", (), (), ())
CASES = [
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 150, 333, 16, 13, **CAUSAL), with_dlse=True)),
    BackwardCase(
        within_bounds,
        BackwardProblem(
            Problem("float16", (2, 6), (1, 3), (2, 3), 33, 70, 11, 16, values="one sign", seed=2), "one sign"
        ),
    ),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 40, 300, 16, 16, seed=1), "one sign", with_dlse=True)),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 300, 130, 16, 16, **CAUSAL, seed=3), with_dlse=True)),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 70, 300, 16, 16, **TOP_LEFT, seed=3), with_dlse=True)),
    BackwardCase(in_any_order, BackwardProblem(Problem(*HALF, 140, 200, 64, 48, **CAUSAL, seed=4), with_dlse=True)),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 20, 0, 16, 16), with_dlse=True)),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 0, 20, 16, 16), with_dlse=True)),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 1, 1, 16, 16))),
    BackwardCase(waits_in_the_epilogue, BackwardProblem(Problem(*HALF, 1, 1, 16, 16))),
    BackwardCase(far_apart, BackwardProblem(Problem(*BATCHES, 20, 20, 16, 16, seed=9), with_dlse=True)),
    BackwardCase(no_more_work, BackwardProblem(Problem(*BATCHES, 140, 290, 16, 16))),
    BackwardCase(no_more_work, BackwardProblem(Problem(*HALF, 300, 290, 16, 16, **CAUSAL))),
    BackwardCase(no_more_work, BackwardProblem(Problem(*HALF, 300, 70, 16, 16, **TOP_LEFT))),
    BackwardCase(in_any_order, BackwardProblem(Problem("float16", (), (2,), (2,), 70, 130, 16, 16, seed=5))),
    BackwardCase(in_any_order, BackwardProblem(Problem("float16", (2,), (), (), 70, 130, 16, 16, seed=5))),
    BackwardCase(each_nonfinite_row, BackwardProblem(Problem(*HALF, 150, 150, 16, 16, **CAUSAL), with_dlse=True)),
    BackwardCase(nonfinite_in_any_order, BackwardProblem(Problem(*HALF, 130, 130, 16, 16, **CAUSAL))),
    BackwardCase(  # no two strides are equal
        within_bounds,
        BackwardProblem(
            Problem(
                *("float16", (2, 1, 2), (2, 2, 1), (2, 2), 140, 150, 64, 48),
                **CAUSAL,
                views=("plain", "wide rows", "every other row", "part of more rows"),
                seed=4,
            ),
            dout_view="rows before heads",
            grad_views=("wide rows", "every other row", "reversed rows"),
            strided_lse=True,
            with_dlse=True,
        ),
    ),
    BackwardCase(without_influence, BackwardProblem(Problem(*HALF, 150, 200, 64, 40, **CAUSAL), with_dlse=True)),
    BackwardCase(
        without_influence, BackwardProblem(Problem("bfloat16", (), (), (), 150, 200, 48, 64, **CAUSAL, seed=6))
    ),
    BackwardCase(
        unbiased, BackwardProblem(Problem(*HALF, 128, 128, 64, 64, values="one sign", seed=5), "one sign")
    ),
    BackwardCase(
        within_bounds,
        BackwardProblem(Problem(*HALF, 40, 150, 64, 64, softmax_scale=-0.3, values="rising", seed=8), with_dlse=True),
    ),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 40, 150, 64, 64, softmax_scale=0.0, **CAUSAL, seed=8))),
    BackwardCase(in_any_order, BackwardProblem(Problem(*HALF, 100, 130, 80, 96, **CAUSAL, seed=10), with_dlse=True)),
    BackwardCase(no_more_work, BackwardProblem(Problem(*HALF, 140, 150, 128, 128, **CAUSAL))),
    BackwardCase(nonfinite_in_any_order, BackwardProblem(Problem(*HALF, 100, 100, 128, 128, **CAUSAL, seed=11))),
    BackwardCase(within_bounds, BackwardProblem(Problem(*HALF, 70, 90, 250, 203, **CAUSAL, seed=12), with_dlse=True)),
    BackwardCase(no_more_work, BackwardProblem(Problem(*HALF, 70, 150, 256, 256))),
    BackwardCase(in_any_order, BackwardProblem(Problem(*HALF, 100, 150, 64, 64, **CAUSAL, seed=13)), "sm_75"),
    BackwardCase(in_any_order, BackwardProblem(Problem(*HALF, 70, 70, 128, 120, **TOP_LEFT, seed=14)), "sm_75"),
    BackwardCase(in_any_order, BackwardProblem(Problem(*HALF, 36, 40, 250, 203, **CAUSAL, seed=15)), "sm_75"),
    BackwardCase(no_more_work, BackwardProblem(Problem(*HALF, 100, 150, 64, 64)), "sm_75"),
]  # fmt: skip
