"""Small problems that between them exercise every path of the forward on tensor cores, and how results are judged.

Every judgement here is also a test of the suite, with drawn problems.
"""

import functools
import re

import numpy as np

from cupyflash import ptxsim, testing
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned, work
from tests.mutants.case import SIMULATOR, Case, text_of


class ForwardCase(Case):
    """A call of ``attention``."""

    def call(self):
        poisoned.attention(SIMULATOR, self.problem, arch=self.arch)


def within_bounds(case: Case) -> None:
    inputs, out, lse = poisoned.attention(SIMULATOR, case.problem, arch=case.arch)
    testing.assert_attention_within_bound(out, lse, *inputs, **case.problem.options)


def in_any_order(case: Case) -> None:
    """Within bounds, and the same bits whatever the order of warps and the time when copies land."""
    within_bounds(case)
    _, out, lse = poisoned.attention(SIMULATOR, case.problem, arch=case.arch)
    for seed in range(2):
        with ptxsim.settings(schedule="random", seed=seed):
            _, again, lse_again = poisoned.attention(SIMULATOR, case.problem, arch=case.arch)
        testing.assert_same_bits(again, out)
        testing.assert_same_bits(lse_again, lse)


def without_influence(case: Case) -> None:
    """Non-finite values, each behind the mask of some queries, change the other rows only."""
    q, k, v = case.problem.inputs()
    hidden = [np.where(np.arange(x.shape[-2])[:, None] > 0, x.dtype.type(np.nan), x) for x in (k, v)]
    first, _ = SIMULATOR.attention(q[..., :1, :], *hidden, arch=case.arch, causal=True, align="top-left")
    testing.assert_same_bits(first, np.ascontiguousarray(v[..., :1, :]))

    out, lse = SIMULATOR.attention(q, k, v, arch=case.arch, **case.problem.options)
    shift = k.shape[-2] - q.shape[-2] if case.problem.align == "bottom-right" else 0
    for column, key, value in (0, -1, np.nan), (1, -3, np.inf), (q.shape[-1] - 1, -40, -np.inf), (3, -130, np.nan):
        for operand in k, v:
            spoilt = operand.copy()
            spoilt[..., key, column % operand.shape[-1]] = value
            inputs = (q, spoilt, v) if operand is k else (q, k, spoilt)
            unseen = np.arange(q.shape[-2]) + shift < k.shape[-2] + key
            again, lse_again = SIMULATOR.attention(*inputs, arch=case.arch, **case.problem.options)
            testing.assert_same_bits(again[..., unseen, :], out[..., unseen, :])
            testing.assert_same_bits(lse_again[..., unseen], lse[..., unseen])
            testing.assert_attention_within_bound(again, lse_again, *inputs, **case.problem.options)
            if operand is v:  # the other columns do not depend on it
                other = np.arange(v.shape[-1]) != column % v.shape[-1]
                testing.assert_same_bits(again[..., other], out[..., other])


def each_masked_key(case: Case) -> None:
    testing.check_nonfinite_values_reach_who_sees_them(
        functools.partial(SIMULATOR.attention, arch=case.arch), case.problem
    )


def nonfinite_in_any_order(case: Case) -> None:
    """A value that some warps see and one warp takes out."""
    q, k, v = case.problem.inputs()
    v[..., -40, 0] = np.nan
    out, _ = SIMULATOR.attention(q, k, v, arch=case.arch, **case.problem.options)
    for seed in range(4):
        with ptxsim.settings(schedule="random", seed=seed):
            again, _ = SIMULATOR.attention(q, k, v, arch=case.arch, **case.problem.options)
        testing.assert_same_bits(again, out)


def independent_of_rescaling(case: Case) -> None:
    """Whether other rows of its tile are rescaled does not change a bit of a row at rest."""
    q, k, v = case.problem.inputs()
    q[..., ::2, :] = 0
    out, _ = SIMULATOR.attention(q, k, v, arch=case.arch, **case.problem.options)
    q[:] = 0
    at_rest, _ = SIMULATOR.attention(q, k, v, arch=case.arch, **case.problem.options)
    assert (out[..., ::2, :] != 0).any()
    testing.assert_same_bits(at_rest[..., ::2, :], out[..., ::2, :])


def unbiased(case: Case) -> None:
    inputs, out, lse = poisoned.attention(SIMULATOR, case.problem, arch=case.arch)
    exact, _ = testing.assert_attention_within_bound(out, lse, *inputs, **case.problem.options)
    testing.assert_unbiased(out, exact)


def no_more_work(case: Case) -> None:
    work.assert_least(case.problem, case.arch)


def fewest_masks(case: Case) -> None:
    work.assert_fewest_masks(case.problem, case.arch)


def fewest_rescales(case: Case) -> None:
    work.assert_fewest_rescales(case.problem, case.arch)


def waits_in_the_epilogue(case: Case) -> None:
    """What no simulated schedule shows is read in the PTX.

    A simulated copy lands when it is issued or awaited, a warp writes and stores its results undisturbed, and its
    lanes never drift apart. So query copies under way in a block without keys never land on results, and a lane never
    stores what another has yet to write.
    """
    flash_fwd = text_of(case, "flash_fwd")
    epilogue = flash_fwd[flash_fwd.rindex("mma.sync") :]
    before, _, after = epilogue.partition("st.shared.b32")
    assert re.search(r"cp\.async\.wait_group\s+0;.*bar(rier)?\.sync", before, re.DOTALL)
    assert "bar.warp.sync" in after[after.rindex("st.shared.b32") : after.index("ld.shared")]


def far_apart(case: Case) -> None:
    """Rows, heads and results that lie more than 2**31 elements from each other."""
    problem = case.problem
    near = problem.inputs()
    expected = SIMULATOR.attention(*near, **problem.options)
    far = [testing.spread_out(x) for x in near]
    out = testing.spread_out(expected[0])
    out[...] = np.nan
    results = SIMULATOR.attention(*far, out=out, **problem.options)
    for result, value in zip(results, expected, strict=True):
        testing.assert_same_bits(np.array(result), value)


CAUSAL = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}
#: Cheap ones first: most mutants are caught by those.
CASES = [
    ForwardCase(within_bounds, Problem("float16", (), (), (), 150, 333, 16, 13, **CAUSAL, values="rising")),
    ForwardCase(
        independent_of_rescaling,
        Problem("bfloat16", (), (), (), 64, 500, 64, 40, **CAUSAL, values="rising to tiny values"),
    ),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 40, 400, 16, 16, values="normal", seed=1)),
    ForwardCase(
        within_bounds,
        Problem("float16", (2, 6), (1, 3), (2, 3), 33, 70, 11, 16, views=("rows before heads",) * 4, seed=2),
    ),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 300, 130, 16, 16, **CAUSAL, values="one sign", seed=3)),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 200, 70, 16, 16, **TOP_LEFT, values="peaked", seed=3)),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 20, 0, 16, 16)),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 1, 1, 16, 16)),
    ForwardCase(waits_in_the_epilogue, Problem("float16", (), (), (), 1, 1, 16, 16)),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 17, 129, 16, 16, values="subnormal")),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 17, 300, 16, 16, values="underflowing weights")),
    ForwardCase(far_apart, Problem("float16", (2,), (2,), (2,), 20, 20, 16, 16, seed=9)),
    ForwardCase(far_apart, Problem("float16", (2,), (2,), (2,), 2, 20, 15, 15, seed=9)),
    ForwardCase(no_more_work, Problem("float16", (2,), (2,), (2,), 140, 290, 16, 16)),
    ForwardCase(no_more_work, Problem("float16", (), (), (), 300, 30, 16, 16, **CAUSAL)),
    ForwardCase(no_more_work, Problem("float16", (2,), (2,), (2,), 300, 290, 64, 48, **TOP_LEFT)),
    ForwardCase(fewest_masks, Problem("float16", head_dim=16, head_dim_v=16, softmax_scale=1e-37)),
    ForwardCase(fewest_rescales, Problem("float16", head_dim=16, head_dim_v=16)),
    ForwardCase(fewest_masks, Problem("float16", head_dim=16, head_dim_v=16, softmax_scale=1e-37, **CAUSAL)),
    ForwardCase(  # no two strides are equal
        within_bounds,
        Problem(
            *("float16", (2, 1, 2), (2, 2, 1), (2, 2), 140, 150, 64, 48),
            views=("plain", "wide rows", "every other row", "part of more rows"),
            seed=4,
        ),
    ),
    ForwardCase(in_any_order, Problem("float16", (), (), (), 150, 333, 16, 13, **CAUSAL, values="rising")),
    ForwardCase(in_any_order, Problem("float16", (), (), (), 300, 30, 16, 16, **CAUSAL)),
    ForwardCase(each_masked_key, Problem("float16", (), (), (), 150, 150, 16, 16, **CAUSAL)),
    ForwardCase(nonfinite_in_any_order, Problem("float16", (), (), (), 128, 200, 16, 16, **CAUSAL)),
    ForwardCase(in_any_order, Problem("float16", (), (), (), 40, 400, 64, 48, values="normal", seed=1)),
    ForwardCase(
        within_bounds,
        Problem("float16", (2,), (2,), (2,), 70, 270, 57, 43, **CAUSAL, views=("reversed axes",) * 4, seed=5),
    ),
    ForwardCase(without_influence, Problem("float16", (), (), (), 150, 200, 64, 40, **CAUSAL, seed=6)),
    ForwardCase(without_influence, Problem("bfloat16", (), (), (), 150, 200, 64, 64, **CAUSAL, seed=6)),
    ForwardCase(unbiased, Problem("float16", (), (), (), 128, 128, 64, 64, values="one sign", seed=7)),
    ForwardCase(unbiased, Problem("bfloat16", (), (), (), 128, 128, 64, 64, values="one sign", seed=7)),
    ForwardCase(unbiased, Problem("float16", (), (), (), 128, 128, 64, 64, values="one sign", seed=7), "sm_75"),
    ForwardCase(in_any_order, Problem("float16", (), (), (), 70, 200, 64, 64, **CAUSAL, values="rising"), "sm_75"),
    ForwardCase(no_more_work, Problem("float16", (), (), (), 140, 290, 64, 64), "sm_75"),
    ForwardCase(
        within_bounds, Problem("float16", (), (), (), 40, 200, 64, 64, softmax_scale=-0.3, values="rising", seed=8)
    ),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 40, 200, 64, 64, softmax_scale=0.0, seed=8, **CAUSAL)),
    ForwardCase(in_any_order, Problem("bfloat16", (), (), (), 40, 200, 80, 96, seed=10)),
    ForwardCase(no_more_work, Problem("float16", (), (), (), 140, 290, 128, 128, **TOP_LEFT)),
    ForwardCase(in_any_order, Problem("float16", (), (), (), 130, 150, 144, 32, **CAUSAL, seed=11)),
    ForwardCase(no_more_work, Problem("float16", (), (), (), 140, 90, 256, 256, **CAUSAL)),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 140, 90, 250, 203, seed=12)),
    ForwardCase(within_bounds, Problem("float16", (), (), (), 70, 90, 250, 203, **CAUSAL, seed=13), "sm_75"),
    ForwardCase(without_influence, Problem("float16", (), (), (), 70, 140, 144, 203, **CAUSAL, seed=14)),
]
assert all(case.problem.values in (*testing.FAMILIES, "integers") for case in CASES)
