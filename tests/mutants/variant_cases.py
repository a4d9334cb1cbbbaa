"""The same for options of the forward: small problems with several options each; none hides another's fault."""

import numpy as np

import cupyflash
from cupyflash import bounds, reference, testing
from cupyflash.testing import AttentionProblem as Problem
from cupyflash.testing import Lengths, Operand, Variants
from tests import poisoned
from tests.mutants.case import SIMULATOR, Case
from tests.mutants.forward_cases import ForwardCase, within_bounds


class MaxCase(Case):
    """A call that returns the maximum, too."""

    def call(self):
        poisoned.attention(SIMULATOR, self.problem, arch=self.arch, return_max=True)


def with_max(case: Case) -> None:
    inputs, out, lse, row_max = poisoned.attention(SIMULATOR, case.problem, arch=case.arch, return_max=True)
    testing.assert_attention_within_bound(out, lse, *inputs, row_max=row_max, **case.problem.options)


class PackedCase(Case):
    """A packed batch; the problem is a seed."""

    def call(self):
        cupyflash.attention_varlen(*_packed(self.problem), return_lse=True, **PACKED_OPTIONS)


def packed_within_bounds(case: Case) -> None:
    arguments = _packed(case.problem)
    results = cupyflash.attention_varlen(*arguments, return_lse=True, **PACKED_OPTIONS)
    exact = reference.attention_varlen(*arguments, return_lse=True, **PACKED_OPTIONS)
    allowed = bounds.attention_varlen(*arguments, return_lse=True, **PACKED_OPTIONS)
    for name, result, value, error in zip(("out", "lse"), results, exact, allowed, strict=True):
        testing.assert_within_bound(result, value, error, name=name)


PACKED_OPTIONS = {"causal": True, "align": "bottom-right", "dropout_p": 0.3, "seed": 7}


def _packed(seed):
    rng = np.random.default_rng(seed)
    shapes = (60, 4, 16), (100, 2, 16), (100, 2, 16)
    return (
        *(rng.standard_normal(shape).astype(np.float16) for shape in shapes),
        np.array([0, 5, 5, 58]),
        np.array([0, 9, 20, 95]),
    )


ONE = ((), (), ())
HEADS = ((2, 3), (2, 3), (2, 3))
RIGHT = {"align": "bottom-right"}
SLOPES = Operand("normal", "heads", "float32")
SINK = Operand("normal", "heads", "float32")
#: Both of a kind in float16 and float32, whose kernels share most of the files.
PROBLEMS = [
    Problem("float16", *ONE, 70, 300, **RIGHT, variants=Variants(window_size=(70, 20), alibi_slopes=SLOPES)),
    Problem(
        "float16", *HEADS, 20, 70,
        variants=Variants(
            softcap=1.5, bias=Operand("normal", "pairs of heads"), mask=Operand("random"), attn_sink=SINK
        ),
    ),
    Problem(
        "float16", *HEADS, 40, 70, causal=True, **RIGHT,
        variants=Variants(seqlens_q=Lengths("random"), seqlens_k=Lengths("random"), dropout_p=0.5, attn_sink=SINK),
    ),
    Problem("float16", *ONE, 150, 200, **RIGHT, variants=Variants(window_size=(33, None))),
    Problem("float16", *ONE, 150, 200, align="top-left", variants=Variants(window_size=(64, 64))),
    Problem("float16", *ONE, 20, 150, variants=Variants(bias=Operand("some -inf", dtype="float32"))),
    Problem("float16", *ONE, 20, 150, variants=Variants(bias=Operand("finite minimum", dtype="float32"))),
    Problem("float16", *ONE, 20, 150, variants=Variants(score_mod="removed")),
    Problem(
        "float16", (3,), (3,), (3,), 150, 150,
        variants=Variants(mask=Operand("empty rows"), attn_sink=Operand("large")),
    ),
    Problem(
        "float16", *HEADS, 10, 300,
        variants=Variants(split_size=128, attn_sink=SINK, seqlens_k=Lengths("random"), dropout_p=0.2),
    ),
    Problem("float16", *HEADS, 10, 300, **RIGHT, variants=Variants(split_size=128, window_size=(140, 0))),
    Problem("float16", *HEADS, 20, 70, variants=Variants(dropout_p=0.5, origin=(2, 1, 9, 7))),
    Problem(
        "float16", *HEADS, 20, 70,
        variants=Variants(score_mod="distance", mask_mod="checkered", origin=(2, 1, 9, 6)),
    ),
    Problem("float32", *HEADS, 20, 40, variants=Variants(mask=Operand("random"), bias=Operand("normal"), softcap=1.5)),
    Problem(
        "float32", *HEADS, 30, 40, **RIGHT,
        variants=Variants(window_size=(9, 3), alibi_slopes=SLOPES, attn_sink=SINK, dropout_p=0.5),
    ),
    Problem(
        "float32", (2,), (2,), (2,), 30, 40, causal=True, **RIGHT,
        variants=Variants(seqlens_q=Lengths("random"), seqlens_k=Lengths("random"), score_mod="squared"),
    ),
    Problem(  # stacked heads
        "float16", (2, 6), (2, 2), (2, 2), 5, 70, 40, 24, causal=True, align="top-left",
        variants=Variants(seqlens_q=Lengths("random"), attn_sink=SINK, alibi_slopes=SLOPES),
    ),
]  # fmt: skip
CASES = [
    *(ForwardCase(within_bounds, problem) for problem in PROBLEMS),
    MaxCase(with_max, PROBLEMS[10]),
    MaxCase(with_max, PROBLEMS[2]),
    PackedCase(packed_within_bounds, 0),
]
