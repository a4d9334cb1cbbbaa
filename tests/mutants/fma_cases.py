"""The same for float32 and float64.

Up to rows of 256 bytes flash_fwd_fma takes 64 queries and 64 keys a step.
"""

import functools

import numpy as np

from cupyflash import ptxsim, testing
from cupyflash.testing import AttentionProblem as Problem
from tests import accuracy, fma_work
from tests.mutants import forward_cases as forward
from tests.mutants.case import SIMULATOR, Case, text_of
from tests.mutants.forward_cases import ForwardCase


def no_more_work(case: Case) -> None:
    fma_work.assert_least(case.problem, case.arch)


def fewest_masks(case: Case) -> None:
    fma_work.assert_fewest_masks(case.problem, case.arch)


def without_influence(case: Case) -> None:
    """Non-finite values, each behind the mask of some queries, change the other rows only."""
    for places in [("v", -1, np.nan)], [("k", -33 * case.problem.head_dim, np.inf), ("v", 0, np.nan)]:
        testing.check_nonfinite_values_change_only_rows_that_see_them(
            functools.partial(SIMULATOR.attention, arch=case.arch), case.problem, places=places
        )


def nonfinite_in_any_order(case: Case) -> None:
    """A value that some warps see and one warp takes out."""
    q, k, v = case.problem.inputs()
    v[..., -8, 0] = np.nan
    out, _ = SIMULATOR.attention(q, k, v, arch=case.arch, **case.problem.options)
    for seed in range(2):
        with ptxsim.settings(schedule="random", seed=seed):
            again, _ = SIMULATOR.attention(q, k, v, arch=case.arch, **case.problem.options)
        testing.assert_same_bits(again, out)


def accurate_functions(case: Case) -> None:
    """exp and log, in one of the dtypes."""
    accuracy.assert_exp_is_accurate(SIMULATOR, case.problem.dtype, case.arch)
    accuracy.assert_log_is_accurate(SIMULATOR, case.problem.dtype, case.arch)
    assert "lg2.approx" not in text_of(case, "flash_fwd_fma")


def maximum(case: Case) -> None:
    accuracy.assert_maximum_is_found(SIMULATOR, testing.element_type(case.problem.dtype), case.arch)


CAUSAL = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}
SINGLE, DOUBLE = (("float32", (), (), ()), ("float64", (), (), ()))
WIDE = (135, 131)  # in float64 the smallest tiles, on sm_80 of 16 queries and keys
CASES = [
    ForwardCase(forward.within_bounds, Problem(*DOUBLE, 40, 40, *WIDE, **CAUSAL, values="rising")),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 90, 100, 16, 13, **CAUSAL, values="rising")),
    ForwardCase(forward.in_any_order, Problem(*DOUBLE, 12, 40, *WIDE, **CAUSAL, values="rising")),
    ForwardCase(accurate_functions, Problem(*SINGLE, 1, 1, 1, 1)),
    ForwardCase(maximum, Problem(*SINGLE, 1, 1, 1, 3)),
    ForwardCase(
        forward.within_bounds,
        Problem("float32", (2, 6), (1, 3), (2, 3), 33, 70, 11, 16, views=("rows before heads",) * 4, seed=2),
    ),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 100, 40, 250, 16, **CAUSAL, values="one sign", seed=3)),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 40, 100, 16, 250, **TOP_LEFT, values="peaked", seed=3)),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 20, 0, 16, 16)),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 1, 1, 16, 16)),
    ForwardCase(forward.far_apart, Problem("float32", (2,), (2,), (2,), 20, 20, 16, 16, seed=9)),
    ForwardCase(forward.far_apart, Problem("float64", (2,), (2,), (2,), 2, 20, 15, 15, seed=9)),
    ForwardCase(no_more_work, Problem("float32", (2,), (2,), (2,), 140, 70, 32, 64)),
    ForwardCase(no_more_work, Problem(*DOUBLE, 40, 40, 256, 192, **CAUSAL)),
    ForwardCase(no_more_work, Problem(*SINGLE, 140, 30, 32, 32, **CAUSAL)),
    ForwardCase(accurate_functions, Problem(*DOUBLE, 1, 1, 1, 1)),
    ForwardCase(forward.each_masked_key, Problem(*SINGLE, 70, 70, 250, 203, **CAUSAL)),
    ForwardCase(forward.each_masked_key, Problem(*DOUBLE, 70, 70, *WIDE, **CAUSAL)),
    ForwardCase(nonfinite_in_any_order, Problem(*DOUBLE, 14, 25, *WIDE, **CAUSAL)),
    ForwardCase(  # no two strides are equal
        forward.within_bounds,
        Problem(
            *("float32", (2, 1, 2), (2, 2, 1), (2, 2), 70, 90, 64, 48),
            views=("plain", "wide rows", "every other row", "part of more rows"),
            seed=4,
        ),
    ),
    ForwardCase(without_influence, Problem(*SINGLE, 70, 90, 64, 40, **CAUSAL, seed=6)),
    ForwardCase(without_influence, Problem(*DOUBLE, 40, 50, *WIDE, **CAUSAL, seed=6)),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 40, 70, 64, 64, softmax_scale=-0.3, values="rising", seed=8)),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 40, 70, 64, 64, softmax_scale=0.0, **CAUSAL, seed=8)),
    ForwardCase(fewest_masks, Problem(*SINGLE, 1, 1, 256, 256, softmax_scale=1e-37, **CAUSAL)),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 40, 70, 80, 96, **CAUSAL, seed=10)),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 36, 40, 250, 203, **CAUSAL, seed=12)),
    ForwardCase(forward.within_bounds, Problem(*DOUBLE, 70, 70, 64, 48, **CAUSAL, seed=11)),
    ForwardCase(no_more_work, Problem(*SINGLE, 40, 50, 256, 192, **CAUSAL)),
    ForwardCase(no_more_work, Problem(*DOUBLE, 20, 40, 256, 256)),
    ForwardCase(forward.in_any_order, Problem(*DOUBLE, 12, 20, *WIDE, **CAUSAL, seed=15), "sm_75"),
    ForwardCase(forward.within_bounds, Problem(*SINGLE, 70, 70, 64, 64, **CAUSAL, seed=14), "sm_75"),
]
