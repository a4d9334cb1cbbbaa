"""Property-based tests of attention kernels, one's own or cupyflash's: problems, assertions and ready checks.

Needs Hypothesis: ``pip install "cupyflash[testing]"``. Somebody's own attention, in NumPy float32 and without masks:

>>> import numpy as np
>>> from cupyflash import testing
>>> def mine(q, k, v):
...     scores = q.shape[-1] ** -0.5 * (q @ k.mT)
...     weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
...     return weights / weights.sum(axis=-1, keepdims=True) @ v
>>> fn = testing.adapt(mine, ["float32"], layout="BHLD", grouped=False, empty=False)
>>> testing.check_within_bound(fn)
>>> testing.check_key_permutation(fn)

A wrong one is told where it is wrong, by which bound, and how to see it again:

>>> wrong = lambda q, k, v: mine(q, k[..., ::-1, :], v)
>>> testing.check_within_bound(  # doctest: +ELLIPSIS
...     wrong, testing.AttentionProblem("float32", (1, 1), (1, 1), (1, 1), 2, 3)
... )
Traceback (most recent call last):
AssertionError: out[0, 0, 1, 4] is -0.1356..., exact 0.6378...: error 0.774 is 2.58e+05 times its bound 3e-06; 32 of ...
of the bound there: scores 66%, exponential 14%, row sum 11%
within bound: Every element of out and lse is within its bound of the reference, and as finite.
to repeat, with names of cupyflash.testing: check_within_bound(fn, AttentionProblem(dtype='float32', leading_q=(1, 1)...

* :func:`adapt` and :func:`adapt_vjp` say what a function is for; what it does not take, by its signature, is not asked.
  :func:`report` runs every check of it and gives a table of what each has found.
* Strategies draw structure and a seed, never floats: :func:`attention_problems`, :func:`attention_backward_problems`,
  :func:`strided_arrays`, :func:`hostile_values`. What they draw shrinks towards one plain query and key, and its
  ``repr`` makes it again. ``attention_problems(variants=VARIANTS)`` draws windows, masks, biases and whatever else
  :func:`cupyflash.attention` takes, in any combination.
* Assertions: :func:`assert_within_bound` for any arrays, :func:`assert_attention_within_bound` and
  :func:`assert_gradients_within_bound` against the reference, :func:`assert_same_bits`.
* Ready checks of a function like :func:`cupyflash.attention` (:mod:`cupyflash.testing.invariants`), all of them:
  :func:`check_attention`; of one like :func:`cupyflash.attention_vjp` (:mod:`cupyflash.testing.gradient_checks`), all
  of them: :func:`check_vjp`. Each takes one problem, as in ``@given(problem=attention_problems())``, or a strategy, and
  then draws by itself.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError('cupyflash.testing needs hypothesis >= 6.170.1: pip install "cupyflash[testing]"') from error

from cupyflash import bounds
from cupyflash.testing.adapt import LAYOUTS, NotApplicable, adapt, adapt_vjp
from cupyflash.testing.assertions import (
    assert_attention_within_bound,
    assert_gradients_within_bound,
    assert_same_bits,
    assert_unbiased,
    assert_within_bound,
)
from cupyflash.testing.backward_problems import (
    AttentionBackwardProblem,
    attention_backward_problems,
)
from cupyflash.testing.expressions import MASK_EXPRESSIONS, SCORE_EXPRESSIONS
from cupyflash.testing.gradient_checks import (
    VJP_CHECKS,
    check_gradients_within_bound,
    check_lse_gradient,
    check_vjp,
    check_vjp_batch_independence,
    check_vjp_causal_prefix,
    check_vjp_constant_values,
    check_vjp_grouped_heads,
    check_vjp_identities,
    check_vjp_key_permutation,
    check_vjp_linearity,
    check_vjp_nonfinite_values_change_only_what_sees_them,
    check_vjp_powers_of_two,
    check_vjp_query_permutation,
    check_vjp_strides,
    check_vjp_two_runs,
)
from cupyflash.testing.invariants import (
    FORWARD_CHECKS,
    check_alignments,
    check_attention,
    check_batch_independence,
    check_causal_prefix,
    check_constant_values,
    check_convexity,
    check_decoding,
    check_grouped_heads,
    check_head_dim_permutation,
    check_key_permutation,
    check_lse_range,
    check_masked_keys_have_no_influence,
    check_nonfinite_values_change_only_rows_that_see_them,
    check_nonfinite_values_reach_who_sees_them,
    check_one_key,
    check_query_independence,
    check_query_key_powers_of_two,
    check_query_permutation,
    check_signs,
    check_strides,
    check_two_runs,
    check_value_column_permutation,
    check_value_linearity,
    check_value_powers_of_two,
    check_within_bound,
)
from cupyflash.testing.layouts import (
    OUT_VIEWS,
    VIEWS,
    laid_out,
    spread_out,
    strided_arrays,
    surroundings,
)
from cupyflash.testing.operands import (
    BIAS_FAMILIES,
    HEAD_FORMS,
    LENGTH_FAMILIES,
    MASK_FAMILIES,
    OPERAND_TYPES,
    PAIR_FORMS,
    SINK_FAMILIES,
    SLOPE_FAMILIES,
)
from cupyflash.testing.problems import (
    SCALES,
    AttentionProblem,
    attention_problems,
    head_dims,
    leading_dims,
    seqlens,
)
from cupyflash.testing.reports import FAILED, LEFT_OUT, PASSED, ROUNDED, VERDICTS, Finding, Report, report
from cupyflash.testing.values import (
    DOUT_FAMILIES,
    EXACT_SCALE,
    FAMILIES,
    element_type,
    hostile_values,
    with_values,
)
from cupyflash.testing.variants import VARIANTS, Lengths, Operand, Variants

__all__ = [
    "BIAS_FAMILIES",
    "DOUT_FAMILIES",
    "EXACT_SCALE",
    "FAILED",
    "FAMILIES",
    "FORWARD_CHECKS",
    "HEAD_FORMS",
    "LAYOUTS",
    "LEFT_OUT",
    "LENGTH_FAMILIES",
    "MASK_EXPRESSIONS",
    "MASK_FAMILIES",
    "OPERAND_TYPES",
    "OUT_VIEWS",
    "PAIR_FORMS",
    "PASSED",
    "ROUNDED",
    "SCALES",
    "SCORE_EXPRESSIONS",
    "SINK_FAMILIES",
    "SLOPE_FAMILIES",
    "VARIANTS",
    "VERDICTS",
    "VIEWS",
    "VJP_CHECKS",
    "AttentionBackwardProblem",
    "AttentionProblem",
    "Finding",
    "Lengths",
    "NotApplicable",
    "Operand",
    "Report",
    "Variants",
    "adapt",
    "adapt_vjp",
    "assert_attention_within_bound",
    "assert_gradients_within_bound",
    "assert_same_bits",
    "assert_unbiased",
    "assert_within_bound",
    "attention_backward_problems",
    "attention_problems",
    "bounds",
    "check_alignments",
    "check_attention",
    "check_batch_independence",
    "check_causal_prefix",
    "check_constant_values",
    "check_convexity",
    "check_decoding",
    "check_gradients_within_bound",
    "check_grouped_heads",
    "check_head_dim_permutation",
    "check_key_permutation",
    "check_lse_gradient",
    "check_lse_range",
    "check_masked_keys_have_no_influence",
    "check_nonfinite_values_change_only_rows_that_see_them",
    "check_nonfinite_values_reach_who_sees_them",
    "check_one_key",
    "check_query_independence",
    "check_query_key_powers_of_two",
    "check_query_permutation",
    "check_signs",
    "check_strides",
    "check_two_runs",
    "check_value_column_permutation",
    "check_value_linearity",
    "check_value_powers_of_two",
    "check_vjp",
    "check_vjp_batch_independence",
    "check_vjp_causal_prefix",
    "check_vjp_constant_values",
    "check_vjp_grouped_heads",
    "check_vjp_identities",
    "check_vjp_key_permutation",
    "check_vjp_linearity",
    "check_vjp_nonfinite_values_change_only_what_sees_them",
    "check_vjp_powers_of_two",
    "check_vjp_query_permutation",
    "check_vjp_strides",
    "check_vjp_two_runs",
    "check_within_bound",
    "element_type",
    "head_dims",
    "hostile_values",
    "laid_out",
    "leading_dims",
    "report",
    "seqlens",
    "spread_out",
    "strided_arrays",
    "surroundings",
    "with_values",
]
