"""The same for the standard method, which has no tiles, no barriers and no order of warps."""

import numpy as np

from cupyflash import bounds, naive, ptxsim, reference, testing
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import accuracy
from tests.mutants.backward_cases import BACKWARD
from tests.mutants.case import Case


class ForwardCase(Case):
    """A call of ``naive.attention``."""

    def call(self):
        return _forward(self, *self.problem.inputs())


class BackwardCase(Case):
    """A call of ``naive.attention_backward``."""

    def call(self):
        return _backward(self, *self.problem.arguments(BACKWARD.attention))


def _forward(case, *inputs):
    with ptxsim.settings(arch=case.arch):
        return naive.attention(*inputs, out=case.problem.empty_out(), return_lse=True, **case.problem.options)


def _backward(case, arguments, options):
    with ptxsim.settings(arch=case.arch):
        return naive.attention_backward(*arguments, grads_out=case.problem.empty_grads(), **options)


def forward_within_bounds(case: Case) -> None:
    _assert_forward_within_bounds(case, case.problem.inputs(), *case.call())


def _assert_forward_within_bounds(case, inputs, out, lse):
    exact = reference.attention(*inputs, return_lse=True, **case.problem.options)
    allowed = bounds.attention_naive(*inputs, return_lse=True, **case.problem.options)
    for name, result, value, bound in zip(("out", "lse"), (out, lse), exact, allowed, strict=True):
        testing.assert_within_bound(result, value, bound, name=name)


def backward_within_bounds(case: Case) -> None:
    arguments, options = case.problem.arguments(BACKWARD.attention)
    _assert_backward_within_bounds(arguments, options, _backward(case, arguments, options))


def _assert_backward_within_bounds(arguments, options, gradients):
    exact = reference.attention_backward(*arguments, **options)
    allowed = bounds.attention_naive_backward(*arguments, **options)
    for name, gradient, value, bound in zip(("dq", "dk", "dv"), gradients, exact, allowed, strict=True):
        testing.assert_within_bound(gradient, value, bound, name=name)


def forward_without_influence(case: Case) -> None:
    """Non-finite values change what sees them, as the bounds say, and no bit of the rest."""
    clean, clean_lse = case.call()
    for name, row, value in ("q", 2, np.nan), ("k", -1, np.inf), ("k", 5, np.nan), ("v", -2, -np.inf):
        spoilt = [x.copy() for x in case.problem.inputs()]
        spoilt["qkv".index(name)][row, 1] = value
        out, lse = _forward(case, *spoilt)
        _assert_forward_within_bounds(case, spoilt, out, lse)
        unseen = np.isfinite(bounds.attention_naive(*spoilt, return_lse=True, **case.problem.options)[1])
        testing.assert_same_bits(out[unseen], clean[unseen])
        testing.assert_same_bits(lse[unseen], clean_lse[unseen])


def backward_without_influence(case: Case) -> None:
    arguments, options = case.problem.arguments(BACKWARD.attention)
    clean = _backward(case, arguments, options)
    for name, row, value in ("dout", 3, np.nan), ("q", 2, np.inf), ("k", -1, np.nan), ("v", 5, np.nan):
        spoilt = [x.copy() for x in arguments]
        spoilt[("dout", "q", "k", "v").index(name)][row, 1] = value
        gradients = _backward(case, spoilt, options)
        _assert_backward_within_bounds(spoilt, options, gradients)
        allowed = bounds.attention_naive_backward(*spoilt, **options)
        for gradient, before, bound in zip(gradients, clean, allowed, strict=True):
            testing.assert_same_bits(gradient[np.isfinite(bound)], before[np.isfinite(bound)])


class Naive:
    """The standard method as a backend."""

    @staticmethod
    def attention(*inputs, arch, **options):
        with ptxsim.settings(arch=arch):
            return naive.attention(*inputs, return_lse=True, **options)


def maximum(case: Case) -> None:
    accuracy.assert_maximum_is_found(Naive, testing.element_type(case.problem.dtype), case.arch)


CAUSAL = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}
STRIDED = {"views": ("reversed axes", "every third column", "rows before heads", "columns first")}
FORWARDS = [
    Problem("float16", (2, 6), (1, 3), (2, 3), 33, 40, 11, 16, **CAUSAL, **STRIDED),
    Problem("float32", (2,), (2,), (2,), 40, 33, 16, 11, **CAUSAL, **STRIDED),
    Problem("float64", (2,), (2,), (2,), 20, 70, 16, 11, softmax_scale=-0.3, values="rising"),
    Problem("bfloat16", (), (), (), 40, 70, 16, 11, **TOP_LEFT, values="peaked"),
    Problem("float32", (), (), (), 20, 0, 16, 16),
    Problem("float16", (), (), (), 20, 40, 16, 16),
]
BACKWARDS = [
    BackwardProblem(FORWARDS[0], with_dlse=True, dout_view="columns first", grad_views=("reversed axes",) * 3),
    BackwardProblem(
        Problem("float32", (3,), (2, 1), (2, 3), 40, 33, 16, 11, **CAUSAL, **STRIDED),
        with_dlse=True,
        strided_lse=True,
        dout_view="every third column",
        grad_views=("every other row", "columns first", "wide rows"),
    ),
    *(BackwardProblem(problem, with_dlse=True) for problem in FORWARDS[2:]),
]
CASES = [
    *(ForwardCase(forward_within_bounds, problem) for problem in FORWARDS),
    *(BackwardCase(backward_within_bounds, problem) for problem in BACKWARDS),
    ForwardCase(forward_without_influence, Problem("float32", (), (), (), 9, 12, 16, 16, **CAUSAL)),
    BackwardCase(backward_without_influence, BackwardProblem(Problem("float32", (), (), (), 9, 12, 16, 16, **CAUSAL))),
    ForwardCase(maximum, Problem("float32", (), (), (), 1, 1, 1, 3)),
    ForwardCase(forward_within_bounds, Problem("float16", (), (), (), 20, 40, 16, 16), "sm_75"),
]
