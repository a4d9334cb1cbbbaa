"""Bounds on the error of each element of the gradients, from the same building blocks as the forward ones.

The backward rebuilds P from lse, P^ = P (1 + w), where |w| <= exp(e) - 1 and e collects the errors of the score, of
lse and of the exponential; it is not normalised again, so that lse's error enters. :mod:`cupyflash.bounds.gradients`
says what follows. E_delta holds what the given out, rounded to its dtype, moves rowsum(dout * out) by: in 16 bits up to
half of the bound on dS, and far more of one that does not know the given out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupyflash._arrays import FLOAT64
from cupyflash._gradients import Gradients, backward_problem, operands_of
from cupyflash._options import Align
from cupyflash._problem import Problem
from cupyflash.bounds.arithmetic import Arithmetic, claimed
from cupyflash.bounds.backward_steps import MAX_EXPONENT, StepErrors, naive_step_errors, tiled_errors
from cupyflash.bounds.gradients import gradient_bounds, num_terms
from cupyflash.bounds.pairs import Pairs
from cupyflash.bounds.scores import has_function
from cupyflash.reference.arrays import returned_gradients


def attention_backward(dout, q, k, v, out, lse, *, dlse=None, grads_out=None, **options) -> Gradients:
    """Largest error of each element of :func:`cupyflash.attention_backward`, against :mod:`cupyflash.reference`.

    Arguments, shapes and errors are those of :func:`cupyflash.attention_backward`; the bounds are float64 arrays of
    the gradients' shapes. The errors of the given out and lse count as they are. Where nothing is summed (a query that
    sees no key, a key that no query sees) the bound is 0.

    Examples
    --------
    >>> from cupyflash import attention_vjp, reference
    >>> dout, q, k, v = np.random.default_rng(0).standard_normal((4, 2, 16, 8)).astype(np.float16)
    >>> (out, lse), pullback = attention_vjp(q, k, v, return_lse=True)
    >>> exact = reference.attention_backward(dout, q, k, v, out, lse)
    >>> bounds = attention_backward(dout, q, k, v, out, lse)
    >>> all((abs(x - y) <= bound).all() for x, y, bound in zip(pullback(dout), exact, bounds))
    True
    """
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, gradient_dtype=FLOAT64, **options
    )
    return _returned(problem, tiled_errors, (dout, q, k, v, out, lse, dlse), grads_out)


def attention_backward_terms(dout, q, k, v, out, lse, *, dlse=None, **options) -> dict[str, Gradients]:
    """What each source of error contributes to :func:`attention_backward`: the bounds that it has alone.

    Arguments are those of :func:`attention_backward`. A term holds NumPy arrays of the gradients' shapes, infinite
    where the bound is; to first order the terms sum to it. "delta" holds the error of the given out. "score function"
    is what its derivative errs by; it, "dropout" and "sink" are there where the options are.

    Examples
    --------
    >>> from cupyflash import attention_vjp
    >>> dout, q, k, v = np.random.default_rng(0).standard_normal((4, 16, 8)).astype(np.float16)
    >>> (out, lse), _ = attention_vjp(q, k, v, return_lse=True)
    >>> terms = attention_backward_terms(dout, q, k, v, out, lse)
    >>> max(terms, key=lambda name: terms[name].dv.mean())
    'rounding of P'
    """
    problem, _ = backward_problem(dout, q, k, v, out, lse, dlse=dlse, gradient_dtype=FLOAT64, **options)
    operands = _operands(problem, q, k, v)
    counts = num_terms(problem, operands)
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = Pairs.of(problem, dout, q, k, v, out, lse, dlse)
        errors = tiled_errors(problem, pairs)
        none = StepErrors(
            weights=np.zeros_like(errors.weights),
            stored_weights=np.zeros_like(errors.weights),
            dweights=np.zeros_like(errors.dweights),
            delta=np.zeros_like(errors.delta),
            derivative=errors.derivative,
            derivative_error=0.0,
            dropout=0.0,
            sink=0.0,
            dscore_rounding=np.zeros_like,
            arithmetic=Arithmetic(0.0, 0.0),
            accumulation=lambda rows, batches: 0.0,
        )

        def alone(**fields) -> dict[str, np.ndarray]:
            return _given(gradient_bounds(problem, pairs, replace(none, **fields), operands, counts))

        least, bounds = alone(), _given(gradient_bounds(problem, pairs, errors, operands, counts))
        terms = {
            name: {gradient: x - least[gradient] for gradient, x in alone(**fields).items()}
            for name, fields in _sources(problem, pairs, errors).items()
        }
    terms["rounding of the result"] = least
    return {
        name: Gradients(
            **{gradient: np.where(np.isfinite(bounds[gradient]), x, np.inf) for gradient, x in term.items()}
        )
        for name, term in terms.items()
    }


def _sources(problem: Problem, pairs: Pairs, errors: StepErrors) -> dict[str, dict]:
    """Fields of the errors that each source has."""
    given_lse = pairs.forward.weights * np.expm1(np.minimum(pairs.lse_error, MAX_EXPONENT))
    sources = {
        "given lse": {"weights": given_lse, "stored_weights": given_lse},
        "scores and exponential": dict.fromkeys(("weights", "stored_weights"), errors.weights - given_lse),
        "rounding of P": {"stored_weights": errors.stored_weights - errors.weights},
        "dP": {"dweights": errors.dweights},
        "delta": {"delta": errors.delta},
        "rounding of dS": {"dscore_rounding": errors.dscore_rounding},
        "arithmetic": {"arithmetic": errors.arithmetic},
        "accumulation": {"accumulation": errors.accumulation},
    }
    if has_function(problem):
        sources["score function"] = {"derivative_error": errors.derivative_error}
    if problem.dropout_p:
        sources["dropout"] = {"dropout": errors.dropout}
    if "attn_sink" in problem.operands:
        sources["sink"] = {"sink": errors.sink}
    return sources


def attention_naive_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    grads_out=None,
) -> Gradients:
    """The same for :func:`cupyflash.naive.attention_backward`, which rounds S, P, dP and dS to the inputs' dtype.

    Examples
    --------
    >>> from cupyflash import naive, reference
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 9, 8)).astype(np.float16)
    >>> out, lse = naive.attention(q, k, v, return_lse=True)
    >>> found = naive.attention_backward(dout, q, k, v, out, lse)
    >>> exact = reference.attention_backward(dout, q, k, v, out, lse)
    >>> bound = attention_naive_backward(dout, q, k, v, out, lse)
    >>> [bool((abs(x - y) <= z).all()) for x, y, z in zip(found, exact, bound)]
    [True, True, True]
    """
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, softmax_scale=softmax_scale, causal=causal, align=align,
        grads_out=grads_out, gradient_dtype=FLOAT64,
    )  # fmt: skip
    return _returned(problem, naive_step_errors, (dout, q, k, v, out, lse, dlse), grads_out)


def _operands(problem: Problem, q, k, v) -> dict:
    """What has a gradient, by name."""
    return {gradient[1:]: operand for gradient, operand in operands_of(problem, q, k, v).items()}


def _given(gradients: Gradients) -> dict[str, np.ndarray]:
    return {name: x for name, x in vars(gradients).items() if x is not None}


def _returned(problem: Problem, kernel_errors, arrays, grads_out) -> Gradients:
    operands = _operands(problem, *arrays[1:4])
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = Pairs.of(problem, *arrays)
        errors, counts = kernel_errors(problem, pairs), num_terms(problem, operands)
        bounds = _given(gradient_bounds(problem, pairs, errors, operands, counts))
    return returned_gradients(operands, Gradients(**{name: claimed(x) for name, x in bounds.items()}), grads_out)
