"""Bounds for packed sequences: those of each sequence as a call of its own, put together.

What sequences share is summed over them. A gradient of it errs by the sum of the sequences' bounds, in which each sum
is taken to have the roundings that the whole has.
"""

from __future__ import annotations

import numpy as np

from cupyflash import reference
from cupyflash._arrays import FLOAT64
from cupyflash._gradients import NAMES, Gradients, checked_targets, without_results
from cupyflash._problem import varlen_problem
from cupyflash.bounds.arithmetic import Precision, claimed
from cupyflash.bounds.backward_steps import tiled_errors as backward_errors
from cupyflash.bounds.exact import Exact
from cupyflash.bounds.forward import propagated
from cupyflash.bounds.gradients import gradient_bounds, num_terms
from cupyflash.bounds.pairs import Pairs
from cupyflash.bounds.steps import tiled_errors
from cupyflash.reference.arrays import float64_on_host, placed, returned
from cupyflash.reference.varlen import heads_first, packed_operands, sequences


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse: bool = False, return_max: bool = False, out=None, **options
):
    """What :func:`cupyflash.bounds.attention` is, for :func:`cupyflash.attention_varlen`. Slack rows are exact.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 9, 2, 8)).astype(np.float16)
    >>> bound = attention_varlen(q, k, v, np.array([0, 1, 7]), np.array([0, 1, 7]))
    >>> bound.shape, bool((bound[:7] > 0).all()), bool((bound[7:] == 0).all())
    ((9, 2, 8), True, True)
    """
    problem = varlen_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, return_max=return_max, **options
    )
    total_q, num_heads, head_dim_v = problem.out_shape
    result, (lse, row_max) = np.zeros((num_heads, total_q, head_dim_v)), np.zeros((2, num_heads, total_q))
    for sequence in sequences(problem, q, k, v):
        alone = sequence.problem
        with np.errstate(over="ignore", invalid="ignore"):
            exact = Exact.of(alone, *(sequence.arrays[name] for name in "qkv"))
            bound, *per_query = propagated(alone, exact, tiled_errors(alone, exact))
        for target, part in zip((result, lse, row_max), (bound, *(x[..., 0] for x in per_query)), strict=True):
            target[:, sequence.queries] = claimed(part)[0]
    return returned(problem, q, [result.swapaxes(0, 1), *[lse] * return_lse, *[row_max] * return_max], out)


def attention_varlen_backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *, dlse=None, grads_out=None, **options
) -> Gradients:
    """What :func:`cupyflash.bounds.attention_backward` is, for :func:`cupyflash.attention_varlen_backward`.

    Examples
    --------
    >>> import cupyflash
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 9, 2, 8)).astype(np.float16)
    >>> offsets = np.array([0, 1, 7])
    >>> out, lse = cupyflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True)
    >>> dq, dk, dv = attention_varlen_backward(dout, q, k, v, out, lse, offsets, offsets)
    >>> dq.shape, bool((dv[:7] > 0).all()), bool((dv[7:] == 0).all())
    ((9, 2, 8), True, True)
    """
    problem = varlen_problem(q, k, v, cu_seqlens_q, cu_seqlens_k, **without_results(options))
    targets = checked_targets(problem, dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, gradient_dtype=FLOAT64)
    operands = {name: x for name, x in packed_operands(problem, q, k, v).items() if f"d{name}" in NAMES}
    totals = {name: np.zeros(x.shape) for name, x in operands.items()}
    counts = num_terms(problem, operands)
    host_dout, host_out, host_lse = float64_on_host(heads_first(dout), heads_first(out), lse[None])
    host_dlse = None if dlse is None else float64_on_host(dlse[None])[0]
    for sequence in sequences(problem, q, k, v):
        rows, alone = sequence.queries, sequence.problem
        with np.errstate(over="ignore", invalid="ignore"):
            pairs = Pairs.of(
                alone,
                host_dout[:, :, rows],
                *(sequence.arrays[name] for name in "qkv"),
                host_out[:, :, rows],
                host_lse[..., rows],
                None if host_dlse is None else host_dlse[..., rows],
            )
            parts = {name: sequence.arrays[name] for name in operands}
            bounds = gradient_bounds(alone, pairs, backward_errors(alone, pairs), parts, counts)
        for name, total in totals.items():
            total[sequence.parts[name]] += claimed(getattr(bounds, f"d{name}"))

    exact = reference.attention_varlen_backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, dlse=dlse, **options
    )
    results = {f"d{name}": total for name, total in totals.items()}
    results |= {name: results[name][0].swapaxes(0, 1) for name in ("dq", "dk", "dv")}
    for name, bound in results.items():
        dtype = problem.dtype if name in ("dq", "dk", "dv") else operands[name[1:]].dtype
        (values,) = float64_on_host(getattr(exact, name))
        with np.errstate(invalid="ignore"):
            overflows = (bound > 0) & (np.abs(values) + bound >= Precision.of(dtype).overflow)
        results[name] = np.where(overflows, np.inf, bound)
    arrays = placed(q, list(results.values()), [getattr(targets, name) for name in results])
    return Gradients(**dict(zip(results, arrays, strict=True)))
