"""The same for the backward in float32 and float64.

Up to rows of 256 bytes a step takes 64 queries and 64 keys; of WIDE ones in float64, flash_bwd_dkdv_fma takes 16
queries and 8 keys, flash_bwd_dq_fma 8 and 16.
"""

import re

from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from tests import accuracy, fma_work
from tests.mutants import backward_cases as backward
from tests.mutants.backward_cases import BACKWARD, BackwardCase
from tests.mutants.case import Case, text_of
from tests.mutants.fma_cases import CAUSAL, DOUBLE, SINGLE, TOP_LEFT, WIDE


def no_more_work(case: Case) -> None:
    fma_work.assert_least_backward(case.problem, case.arch)


def accurate_exp(case: Case) -> None:
    accuracy.assert_backward_exp_is_accurate(BACKWARD, case.problem.forward.dtype, case.arch)


def waits_before_products(case: Case) -> None:
    """The lanes of a simulated warp never drift apart: that they wait for each other's dS is read in the PTX."""
    ptx = text_of(case, "flash_bwd_dq_fma")
    assert re.search(r"st\.shared\.v2\.b32[^;]*;\s*bar\.warp\.sync", ptx)


CASES = [
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*DOUBLE, 40, 40, *WIDE, **CAUSAL), with_dlse=True)),
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*SINGLE, 90, 100, 16, 13, **CAUSAL), with_dlse=True)),
    BackwardCase(backward.in_any_order, BackwardProblem(Problem(*DOUBLE, 18, 19, *WIDE, **CAUSAL), with_dlse=True)),
    BackwardCase(waits_before_products, BackwardProblem(Problem(*DOUBLE, 1, 1, 16, 16))),
    BackwardCase(accurate_exp, BackwardProblem(Problem(*SINGLE, 1, 1, 1, 1))),
    BackwardCase(
        backward.within_bounds,
        BackwardProblem(
            Problem("float32", (2, 6), (1, 3), (2, 3), 33, 70, 11, 16, values="one sign", seed=2), "one sign"
        ),
    ),
    BackwardCase(
        backward.within_bounds, BackwardProblem(Problem(*SINGLE, 100, 40, 250, 16, **CAUSAL, seed=3), with_dlse=True)
    ),
    BackwardCase(
        backward.within_bounds, BackwardProblem(Problem(*SINGLE, 40, 100, 16, 250, **TOP_LEFT, seed=3), with_dlse=True)
    ),
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*SINGLE, 20, 0, 16, 16), with_dlse=True)),
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*SINGLE, 0, 20, 16, 16), with_dlse=True)),
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*DOUBLE, 1, 1, 16, 16))),
    BackwardCase(
        backward.far_apart,
        BackwardProblem(Problem("float64", (2,), (2,), (2,), 10, 20, *WIDE, seed=9), with_dlse=True),
    ),
    BackwardCase(no_more_work, BackwardProblem(Problem("float32", (2,), (2,), (2,), 140, 70, 32, 64))),
    BackwardCase(no_more_work, BackwardProblem(Problem(*DOUBLE, 40, 40, 256, 192, **CAUSAL))),
    BackwardCase(no_more_work, BackwardProblem(Problem(*SINGLE, 140, 40, 256, 192, **CAUSAL))),
    BackwardCase(accurate_exp, BackwardProblem(Problem(*DOUBLE, 1, 1, 1, 1))),
    BackwardCase(backward.in_any_order, BackwardProblem(Problem("float64", (2,), (), (), 9, 10, *WIDE, seed=5))),
    BackwardCase(backward.in_any_order, BackwardProblem(Problem("float64", (), (2,), (2,), 17, 8, *WIDE, seed=5))),
    BackwardCase(
        backward.each_nonfinite_row, BackwardProblem(Problem(*DOUBLE, 34, 34, *WIDE, **CAUSAL), with_dlse=True)
    ),
    BackwardCase(  # a thread owns eight rows
        backward.each_nonfinite_row, BackwardProblem(Problem("float32", (), (), (), 34, 34, 16, 16, **CAUSAL))
    ),
    BackwardCase(backward.nonfinite_in_any_order, BackwardProblem(Problem(*DOUBLE, 18, 18, *WIDE, **CAUSAL))),
    BackwardCase(  # no two strides are equal
        backward.within_bounds,
        BackwardProblem(
            Problem(
                *("float32", (2, 1, 2), (2, 2, 1), (2, 2), 40, 70, 32, 24),
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
    BackwardCase(
        backward.within_bounds,
        BackwardProblem(Problem(*SINGLE, 40, 70, 64, 64, softmax_scale=-0.3, values="rising", seed=8), with_dlse=True),
    ),
    BackwardCase(
        backward.within_bounds, BackwardProblem(Problem(*SINGLE, 40, 70, 64, 64, softmax_scale=0.0, **CAUSAL, seed=8))
    ),
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*SINGLE, 40, 70, 80, 96, **CAUSAL, seed=10))),
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*DOUBLE, 70, 70, 64, 48, **CAUSAL, seed=11))),
    BackwardCase(backward.within_bounds, BackwardProblem(Problem(*SINGLE, 70, 70, 64, 64, **CAUSAL, seed=14)), "sm_75"),
    BackwardCase(backward.in_any_order, BackwardProblem(Problem(*DOUBLE, 5, 20, *WIDE, **CAUSAL, seed=15)), "sm_75"),
    BackwardCase(no_more_work, BackwardProblem(Problem(*DOUBLE, 20, 40, 256, 256)), "sm_75"),
]
