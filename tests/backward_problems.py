"""Problems of the backward: a forward problem, and what is given to and taken from the gradients."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from cupyflash import bounds, reference
from tests import checks, layouts, strategies

DOUT_FAMILIES = ["normal", "normal", "one", "one sign", "sparse", "small", "large"]


@dataclass(frozen=True)
class BackwardProblem:
    """Everything that determines one call of the backward; the forward is run first."""

    forward: strategies.Problem
    dout_values: str = "normal"
    with_dlse: bool = False
    dout_view: str = "plain"
    grad_views: tuple[str, str, str] = ("plain",) * 3
    strided_lse: bool = False

    @property
    def options(self):
        return self.forward.options

    def arguments(self, backend, arch="sm_80"):
        """Positional and keyword arguments of ``attention_backward``, between NaNs, but for ``grads_out``."""
        inputs, out = self.forward.inputs(), self.forward.empty_out()
        out, lse = backend.attention(*inputs, out=out, arch=arch, **self.options)
        rng = np.random.default_rng(self.forward.seed + 1)
        dout = layouts.laid_out(dout_family(self.dout_values, rng, out.shape).astype(out.dtype), self.dout_view)
        dlse = rng.standard_normal(lse.shape).astype(np.float32) if self.with_dlse else None
        if self.strided_lse:
            lse, dlse = (None if x is None else _strided(x) for x in (lse, dlse))
        return (dout, *inputs, out, lse), {"dlse": dlse, **self.options}

    def empty_grads(self):
        """Places for the gradients in their layouts, filled with NaN and between NaNs."""
        return tuple(
            layouts.laid_out(np.full(operand.shape, np.nan, operand.dtype), view)
            for operand, view in zip(self.forward.inputs(), self.grad_views, strict=True)
        )


def dout_family(name, rng, shape):
    dout = rng.standard_normal(shape)
    if name == "one":
        dout = np.ones(shape)
    elif name == "one sign":
        dout = np.abs(dout) + 0.5
    elif name == "sparse":
        dout = dout * (rng.random(shape) < 0.05)
    elif name == "small":
        dout = dout * 1e-6
    elif name == "large":
        dout = dout * 1000
    return dout


def _strided(x):
    """Every other query of an array of reversed rows, between NaNs."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), np.nan, x.dtype)
    view = wide[..., ::-1][..., 1::2]
    view[...] = x
    return view


@st.composite
def backward_problems(draw, **options):
    views = options.get("views", layouts.VIEWS)
    out_views = [view for view in views if view in layouts.OUT_VIEWS]
    return BackwardProblem(
        forward=draw(strategies.problems(**options)),
        dout_values=draw(st.sampled_from(DOUT_FAMILIES)),
        with_dlse=draw(st.booleans()),
        dout_view=draw(st.sampled_from(views)),
        grad_views=draw(st.tuples(*[st.sampled_from(out_views)] * 3)),
        strided_lse=draw(st.booleans()),
    )


def run_poisoned(backend, problem, arch="sm_80"):
    """Arguments and gradients of a call whose results held NaN before; nothing around them is written."""
    arguments, options = problem.arguments(backend, arch)
    grads_out = problem.empty_grads()
    before = [layouts.surroundings(x) for x in grads_out]
    gradients = backend.attention_backward(*arguments, grads_out=grads_out, arch=arch, **options)
    for name, given, target, bits in zip("qkv", gradients, grads_out, before, strict=True):
        assert given is target
        assert (layouts.surroundings(target) == bits).all(), f"memory around d{name} was written"
    return arguments, options, gradients


def assert_within_bounds(arguments, options, gradients):
    """Every element of the gradients is as close to the reference as its bound says, and as finite."""
    exact = reference.attention_backward(*arguments, **options)
    bound = bounds.attention_backward(*arguments, **options)
    for name, gradient, operand, values, allowed in zip(
        ("dq", "dk", "dv"), gradients, arguments[1:4], exact, bound, strict=True
    ):
        assert gradient.shape == operand.shape and gradient.dtype == operand.dtype
        checks.assert_close(name, gradient.astype(np.float64), values, allowed)
    return exact, bound


def plain(problem):
    """The same problem with contiguous arrays."""
    return replace(
        problem, forward=problem.forward.plain(), dout_view="plain", grad_views=("plain",) * 3, strided_lse=False
    )
