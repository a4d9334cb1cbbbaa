"""Property-based tests of attention kernels, one's own or cupyflash's: problems, assertions and ready checks.

Needs Hypothesis: ``pip install "cupyflash[testing]"``.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError('cupyflash.testing needs hypothesis >= 6.100: pip install "cupyflash[testing]"') from error

from cupyflash.testing.assertions import (
    assert_attention_within_bound,
    assert_gradients_within_bound,
    assert_same_bits,
    assert_unbiased,
    assert_within_bound,
)
from cupyflash.testing.backward_problems import AttentionBackwardProblem, attention_backward_problems
from cupyflash.testing.invariants import (
    check_nonfinite_values_change_only_rows_that_see_them,
    check_nonfinite_values_reach_who_sees_them,
)
from cupyflash.testing.layouts import OUT_VIEWS, VIEWS, laid_out, spread_out, surroundings
from cupyflash.testing.problems import SCALES, AttentionProblem, attention_problems, head_dims, leading_dims, seqlens
from cupyflash.testing.values import DOUT_FAMILIES, EXACT_SCALE, FAMILIES, element_type

__all__ = [
    "DOUT_FAMILIES",
    "EXACT_SCALE",
    "FAMILIES",
    "OUT_VIEWS",
    "SCALES",
    "VIEWS",
    "AttentionBackwardProblem",
    "AttentionProblem",
    "assert_attention_within_bound",
    "assert_gradients_within_bound",
    "assert_same_bits",
    "assert_unbiased",
    "assert_within_bound",
    "attention_backward_problems",
    "attention_problems",
    "check_nonfinite_values_change_only_rows_that_see_them",
    "check_nonfinite_values_reach_who_sees_them",
    "element_type",
    "head_dims",
    "laid_out",
    "leading_dims",
    "seqlens",
    "spread_out",
    "surroundings",
]
