"""Bounds on the error of each element of out, lse and max, against the exact result for the same inputs.

With s_j the final scores of a row, m their maximum, l = sum_j exp(s_j - m), P_j = exp(s_j - m) / l and O = P V, a
kernel computes the weight of key j in the numerator as P_j (1 + w_j)(1 + t_j)(1 + r_j) and in the denominator as
P_j (1 + w_j)(1 + g_j). w_j is what both share (score, exponential, rescaling), t_j the rounding of P, r_j the
accumulation of P V and g_j that of l. Then exactly

    O^ - O = (sum_j P_j w_j (V_j - O) + sum_j P_j (1 + w_j) (((1 + t_j)(1 + r_j) - 1) V_j - g_j O)) / D,
    D = 1 + sum_j P_j ((1 + w_j)(1 + g_j) - 1):

shared errors multiply V - O, so that they cancel where V is constant. :mod:`cupyflash.bounds.arithmetic` has the
building blocks, :mod:`cupyflash.bounds.steps` w, t, r and g. The reference's last rounding, to float64, counts, which
matters for float64 kernels only. Options change this as follows.

- What is done to a score adds to its error, and thus to w (:mod:`cupyflash.bounds.scores`).
- A sink is one more key of the row, with the value 0: m is the larger one of the maximum and the sink, and with P_s
  its weight, P_s (w_s (0 - O) - g_s (1 + w_s) O) joins the sums. The kernels rescale to that m at the end, one more
  factor in w, in which the old maximum's distance to it counts. A weight is rounded against the keys' own maximum.
- Dropout multiplies key j's value, for each query on its own, by z_ij = 0 or 1 / (1 - p), and nothing else: V_j
  becomes z_ij V_j above, while D stays. The kernels sum without the factor and apply it at the end, 2 roundings.
- Keys outside a window, behind a length or a mask add zeros, which no sum rounds: n is counted per row, from the first
  key that it sees to the last. Rows behind a length, and those that see no key, are exact.
- The maximum of scores that err by e_j is at most max_j (x_j + e_j) above the exact one, and no further below.
- Parts of split keys are joined by factors exp(lse_p - max_p lse_p), the same in numerator and denominator: what the
  logarithm, the difference and exp err by is one more term of w_j for all keys j of part p, whose maximum is at most
  |m| + |x_j|, and whose sum at most the number of its keys. Sums are of a part's keys and then of the parts.
- Numerics: another exponential errs by another amount; where a maximum may be t powers of 2 behind, exponents are up
  to t ln 2 above 0, |M| is up to so much more, and the sums up to 2^t times as large; P as a sum of two numbers of 16
  bits is rounded by u^2, and has twice the terms.

A bound is infinite where the call promises nothing: a row that sees a non-finite input, a score that may overflow
float32 (or is the maximum, and as low: kernels keep finite scores above -3.4e38), a result that may overflow its
dtype, or scores so large that their rounding alone moves a weight by a quarter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupyflash._arrays import HALF_TYPES
from cupyflash._problem import Problem, attention_problem
from cupyflash.bounds.arithmetic import ILL_CONDITIONED, SLACK, U64, Precision, claimed, largest
from cupyflash.bounds.exact import Exact
from cupyflash.bounds.steps import Errors, terms_of, tiled_errors, with_score_function_apart
from cupyflash.reference.arrays import returned


def attention(q, k, v, *, return_lse: bool = False, return_max: bool = False, out=None, **options):
    """Largest error that each element of :func:`cupyflash.attention` may have, against :mod:`cupyflash.reference`.

    Shapes, options and errors are those of :func:`cupyflash.attention`. Returns float64 arrays of the inputs' kind:
    for out (..., L, Dv), with ``return_lse`` and ``return_max`` also for lse and max, (..., L). A row that sees no key
    is exact: bound 0, both lse -inf. ``out``, float64, receives the first.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 8)).astype(np.float16)
    >>> bound, lse_bound = attention(q, k, v, causal=True, return_lse=True)
    >>> bool((bound < 2e-3 * np.abs(v).max()).all()), bool((lse_bound < 1e-4).all())
    (True, True)
    """
    problem = attention_problem(q, k, v, return_lse=return_lse, return_max=return_max, **options)
    return returned_bounds(problem, _bounds, q, k, v, out, return_lse=return_lse, return_max=return_max)


def attention_terms(q, k, v, **options) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What each source of error contributes to :func:`attention`: the bounds on out and lse that it has alone.

    Arguments are those of :func:`attention`. A term is a pair of float64 NumPy arrays of the shapes of out and lse,
    infinite where the bound is; to first order the terms sum to it. "score function" is what softcap, score_mod, bias
    and ALiBi err by themselves; it, "sink" and "dropout" are there where the options are.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 16, 8)).astype(np.float16)
    >>> terms = {name: out.max() for name, (out, lse) in attention_terms(q, k, v).items()}
    >>> max(terms, key=terms.get)
    'rounding of P'
    """
    problem = attention_problem(q, k, v, **options)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = Exact.of(problem, q, k, v)
        errors = with_score_function_apart(problem, exact, tiled_errors(problem, exact))
        bounded = [np.isfinite(bound) for bound in propagated(problem, exact, errors)[:2]]
        least = propagated(problem, exact, Errors())[:2]
        terms = {}
        for name, fields in terms_of(problem).items():
            alone = propagated(problem, exact, replace(Errors(), **{field: getattr(errors, field) for field in fields}))
            terms[name] = [x - y for x, y in zip(alone, least, strict=False)]
    terms["rounding of out"] = least
    shapes = [problem.out_shape, (*problem.lse_shape, 1)]
    for name, bounds in terms.items():
        out, lse = (
            np.broadcast_to(np.where(where, x, np.inf), shape)
            for where, x, shape in zip(bounded, bounds, shapes, strict=True)
        )
        terms[name] = out, lse[..., 0]
    return terms


def _bounds(problem: Problem, exact: Exact) -> tuple[np.ndarray, ...]:
    return propagated(problem, exact, tiled_errors(problem, exact))


def propagated(problem: Problem, exact: Exact, errors: Errors) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From the errors of the steps to those of out, lse and max; the latter two with a last axis of length 1."""
    element = Precision.of(problem.dtype)
    moved_by = weight_error(exact, errors.score + errors.score_function + errors.exponential + errors.split)
    upper_weights = exact.weights + moved_by
    sink = exact.sink_weight
    sink_moved_by = sink * np.expm1(np.minimum(errors.sink, 1))
    upper_sum = upper_weights.sum(axis=-1, keepdims=True) + sink + sink_moved_by
    sum_error = errors.row_sum * upper_sum + errors.flushed
    denominator = 1 - moved_by.sum(axis=-1, keepdims=True) - sink_moved_by - sum_error
    moved = (moved_by * exact.row_sum > ILL_CONDITIONED).any(axis=-1, keepdims=True)
    moved = moved | (sink_moved_by * exact.row_sum > ILL_CONDITIONED)
    unbounded = exact.sees_nonfinite | exact.may_overflow | moved | (denominator < 0.5)
    denominator = np.maximum(denominator, 0.5)

    magnitudes = np.abs(exact.values)
    out = np.abs(exact.out)
    # A rounding errs by u |x|, or by half the spacing of subnormals (and never by more than a weight flushed to 0).
    rounding_error = np.maximum(errors.rounding * upper_weights, np.minimum(upper_weights, errors.underflow))
    numerator = (
        _spread(moved_by, exact)
        + (1 + errors.accumulation) * ((exact.dropout * rounding_error) @ magnitudes)
        + errors.accumulation * ((exact.dropout * upper_weights) @ magnitudes)
        + (sink_moved_by + sum_error) * out
        + errors.flushed / (1 - problem.dropout_p)
    )
    core = numerator / denominator
    core += (errors.normalisation + errors.dropout) * (out + core)
    seen_values = (exact.dropout * exact.visible.astype(np.float64)) @ magnitudes
    overflows = seen_values * 2**problem.numerics.rescale_threshold >= largest(problem) / 4
    if problem.dtype in HALF_TYPES:
        overflows = overflows | (out + core >= element.overflow)
        core += np.maximum(element.unit * (out + core), element.underflow)
    core += U64 * out  # of the reference
    lse_bound = -np.log(denominator) + errors.logarithm + U64 * exact.lse
    above = np.where(exact.visible, exact.relative + exact.gap + errors.final_score, 0)
    max_bound = above.max(axis=-1, keepdims=True, initial=0) + errors.maximum + U64 * exact.key_max

    sees_keys, has_logits = exact.sees_keys, exact.has_logits
    bounds = (
        np.where(unbounded | overflows, np.inf, SLACK * core),
        *(np.where(unbounded, np.inf, SLACK * x) for x in (lse_bound, max_bound)),
    )
    return tuple(np.where(where, x, 0) for where, x in zip((sees_keys, has_logits, sees_keys), bounds, strict=True))


def weight_error(exact: Exact, error: np.ndarray) -> np.ndarray:
    """How far each weight moves when its exponent moves by ``error``."""
    small = exact.weights * np.expm1(np.minimum(error, 1))
    large = np.exp(np.minimum(exact.relative + error, 1)) / exact.row_sum - exact.weights
    return np.where(error < 1, small, large)


def _spread(moved_by: np.ndarray, exact: Exact) -> np.ndarray:
    """sum_j moved_by_j |z_j V_jc - O_c|, one column at a time: no (L, S, Dv) array."""
    columns = [
        (moved_by * np.abs(exact.dropout * exact.values[..., None, :, c] - exact.out[..., c, None])).sum(axis=-1)
        for c in range(exact.values.shape[-1])
    ]
    return np.stack(columns, axis=-1)


def returned_bounds(problem: Problem, bounds, q, k, v, out, *, return_lse: bool = False, return_max: bool = False):
    """The bounds that ``bounds`` makes of the exact values, as the call returns results."""
    with np.errstate(over="ignore", invalid="ignore"):
        bound, *per_query = bounds(problem, Exact.of(problem, q, k, v))
    wanted = [x for x, is_wanted in zip(per_query, (return_lse, return_max), strict=True) if is_wanted]
    return returned(problem, q, [claimed(bound), *(claimed(x[..., 0]) for x in wanted)], out)
