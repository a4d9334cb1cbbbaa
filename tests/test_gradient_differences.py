"""Gradients in float64 against central differences of the forward, along a random direction.

With D(h) = (f(x + h d) - f(x - h d)) / (2 h) = f' + a h^2 + b h^4 + ..., one step of Richardson's extrapolation gives

    R(h) = (4 D(h) - D(2 h)) / 3 = f' - 4 b h^4 + ...,    R(h) - R(2 h) = 60 b h^4 + ...,

so that |R(h) - R(2 h)| is 15 times the truncation error, which leaves room for the terms that are dropped. An error e
of f moves R(h) by 1.5 e / h and R(2 h) by half of that. Where the sum of both is smallest is the step. Values and
directions are multiples of powers of two, so that x + h d is exact; e is the forward's bound, summed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

import cupyflash
from cupyflash import bounds, naive, reference

UNIT = 2.0**-53
STEPS = [2.0**-n for n in range(4, 11)]
CASES = {
    "values wider": (((5, 3), (7, 3), (7, 6)), {}),
    "values narrower": (((5, 17), (7, 17), (7, 2)), {"softmax_scale": 0.3}),
    "negative scale": (((9, 5), (6, 5), (6, 5)), {"softmax_scale": -0.7}),
    "nothing through lse": (((5, 8), (7, 8), (7, 8)), {}),
    "scale 0": (((4, 5), (6, 5), (6, 5)), {"softmax_scale": 0}),
    "one key": (((4, 5), (1, 5), (1, 5)), {}),
    "bottom-right": (((4, 8), (9, 8), (9, 8)), {"causal": True, "align": "bottom-right"}),
    "rows without keys": (((9, 8), (4, 8), (4, 8)), {"causal": True, "align": "bottom-right"}),
    "top-left": (((4, 8), (9, 8), (9, 8)), {"causal": True, "align": "top-left"}),
    "grouped heads": (((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 4)), {"causal": True, "align": "bottom-right"}),
    "broadcast keys": (((2, 4, 8), (5, 8), (1, 5, 6)), {}),
    "broadcast queries": (((4, 8), (2, 1, 5, 8), (2, 5, 8)), {"softmax_scale": -0.4}),
    "several tiles": (((70, 16), (90, 16), (90, 24)), {"causal": True, "align": "bottom-right"}),
}


@dataclass(frozen=True)
class Implementation:
    attention: Callable
    attention_backward: Callable
    attention_bound: Callable
    attention_backward_bound: Callable


IMPLEMENTATIONS = {
    "reference": Implementation(
        reference.attention, reference.attention_backward, bounds.attention, bounds.attention_backward
    ),
    "naive": Implementation(
        naive.attention, naive.attention_backward, bounds.attention_naive, bounds.attention_naive_backward
    ),
    "cupyflash": Implementation(
        cupyflash.attention, cupyflash.attention_backward, bounds.attention, bounds.attention_backward
    ),
}


def multiples(rng, shape, step, size=1.0):
    return np.rint(rng.standard_normal(shape) * size / step) * step


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gradients_are_derivatives(name, case):
    implementation = IMPLEMENTATIONS[name]
    shapes, options = CASES[case]
    rng = np.random.default_rng(len(case))
    operands = [multiples(rng, shape, 2.0**-20) for shape in shapes]
    out, lse = implementation.attention(*operands, return_lse=True, **options)
    dout = multiples(rng, out.shape, 2.0**-20)
    dlse = None if case == "nothing through lse" else multiples(rng, lse.shape, 2.0**-20)
    arguments, more = (dout, *operands, out, lse), {"dlse": dlse, **options}
    gradients = implementation.attention_backward(*arguments, **more)
    gradient_bounds = implementation.attention_backward_bound(*arguments, **more)

    directions = [multiples(rng, x.shape, 0.25, 0.5) for x in operands]
    losses, error = losses_beside(implementation, operands, directions, dout, dlse, options)
    for gradient, bound, direction, values in zip(gradients, gradient_bounds, directions, losses, strict=True):
        derivative, allowed = extrapolated(values, error)
        analytic = math.fsum((gradient * direction).ravel())
        magnitude = (np.abs(gradient) * np.abs(direction)).sum()
        allowed += (bound * np.abs(direction)).sum() + UNIT * magnitude
        assert allowed <= 1e-7 * (magnitude + np.abs(dout).sum()), "the differences say too little"
        assert abs(analytic - derivative) <= allowed


def losses_beside(implementation, operands, directions, dout, dlse, options):
    """f at x + h d and x - h d, (operand, step, sign), from one call; and what each may be off by."""
    shape = (len(operands), len(STEPS), 2)
    ndim = max(x.ndim for x in operands)
    moved = []
    for number, (x, direction) in enumerate(zip(operands, directions, strict=True)):
        many = np.broadcast_to(x, (*shape, *x.shape)).copy()
        for idx, step in enumerate(STEPS):
            many[number, idx] += step * np.stack([direction, -direction])
        moved.append(many.reshape(-1, *(1,) * (ndim - x.ndim), *x.shape))
    outs, lses = implementation.attention(*moved, return_lse=True, **options)
    out_bounds, lse_bounds = implementation.attention_bound(*moved, return_lse=True, **options)

    losses, errors = [], []
    for out, lse, out_bound, lse_bound in zip(outs, lses, out_bounds, lse_bounds, strict=True):
        terms, allowed = (dout * out).ravel(), (np.abs(dout) * out_bound).sum()
        if dlse is not None:
            sees_keys = lse != -np.inf
            terms = np.concatenate([terms, (dlse * lse)[sees_keys]])
            allowed += (np.abs(dlse) * lse_bound)[sees_keys].sum()
        losses.append(math.fsum(terms))
        errors.append(allowed + 2 * UNIT * np.abs(terms).sum())
    return np.reshape(losses, shape), max(errors)


def extrapolated(values, error):
    """The derivative and what it may be off by, from f at (step, sign)."""
    steps = np.array(STEPS)
    differences = (values[:, 0] - values[:, 1]) / (2 * steps)
    extrapolations = (4 * differences[1:] - differences[:-1]) / 3
    allowed = np.abs(extrapolations[1:] - extrapolations[:-1]) + 2 * error / steps[2:]
    best = allowed.argmin()
    return extrapolations[1:][best], allowed[best]
