"""Calls whose results are views between NaNs, of which nothing else is written."""

import numpy as np

from cupyflash import testing
from cupyflash.testing import surroundings


def into_views(backend, problem, **more_options):
    """The backend's attention, but each out is the problem's view and held NaN before; nothing around it is written."""

    def fn(q, k, v, **options):
        out = problem.empty_out()
        before = surroundings(out)
        given, *others = backend.attention(q, k, v, out=out, **options, **more_options)
        assert given is out
        assert (surroundings(out) == before).all(), "memory around out was written"
        return out, *others

    return fn


def attention(backend, problem, **more_options):
    """Inputs and results of such a call."""
    inputs = problem.inputs()
    return inputs, *into_views(backend, problem, **more_options)(*inputs, **problem.options)


def attention_backward(backend, problem, arch="sm_80"):
    """Arguments and gradients of a call whose results held NaN before; nothing around them is written."""
    arguments, options = problem.arguments(into_views(backend, problem.forward, arch=arch))
    grads_out = problem.empty_grads()
    before = [surroundings(x) for x in grads_out]
    gradients = backend.attention_backward(*arguments, grads_out=grads_out, arch=arch, **options)
    for name, given, target, bits in zip("qkv", gradients, grads_out, before, strict=True):
        assert given is target
        assert (surroundings(target) == bits).all(), f"memory around d{name} was written"
    return arguments, options, gradients


def assert_a_non_finite_value_changes_only_what_sees_it(backend, problem, places):
    """Values put into dout, q, k and v: gradients for which a bound is claimed keep their bits."""
    arguments, options, clean = attention_backward(backend, problem)
    spoilt = testing.with_values(dict(zip(("dout", "q", "k", "v"), arguments, strict=False)), places)
    spoilt += backend.attention(*spoilt[1:], **problem.options)
    gradients = backend.attention_backward(*spoilt, grads_out=problem.empty_grads(), **options)
    _, bound = testing.assert_gradients_within_bound(gradients, *spoilt, **options)
    for gradient, before, allowed in zip(gradients, clean, bound, strict=True):
        testing.assert_same_bits(gradient[np.isfinite(allowed)], before[np.isfinite(allowed)])
