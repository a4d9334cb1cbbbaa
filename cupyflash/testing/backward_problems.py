"""Problems of the backward: a forward problem, and what is given to and taken from the gradients."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from cupyflash.testing import layouts
from cupyflash.testing.problems import SCALES, AttentionProblem, attention_problems, unlike_each_other
from cupyflash.testing.reproducible import Reproducible
from cupyflash.testing.values import DOUT_FAMILIES, FAMILIES, dout_family, element_type, require_known


@dataclass(frozen=True, repr=False)
class AttentionBackwardProblem(Reproducible):
    """Everything that determines one call of the backward, whose forward is run first.

    ``dout_values`` is one of DOUT_FAMILIES, and views are names: of VIEWS for dout, and of OUT_VIEWS for dq, dk and dv
    as they are given out; others raise ValueError. ``strided_lse``: lse and dlse are views, too.

    >>> problem = AttentionBackwardProblem(AttentionProblem(seqlen_q=3, seqlen_k=5), with_dlse=True)
    >>> dout, dlse = problem.cotangents()
    >>> dout.shape, dlse.shape, dlse.dtype
    ((3, 16), (3,), dtype('float32'))
    """

    forward: AttentionProblem
    dout_values: str = "normal"
    with_dlse: bool = False
    dout_view: str = "plain"
    grad_views: tuple[str, str, str] = ("plain",) * 3
    strided_lse: bool = False

    def __post_init__(self):
        if not isinstance(self.forward, AttentionProblem):
            raise TypeError(f"forward: an AttentionProblem, not {self.forward!r}")
        require_known("dout_values", self.dout_values, DOUT_FAMILIES)
        require_known("dout_view", self.dout_view, layouts.VIEWS)
        layouts.require_views("grad_views", self.grad_views, (layouts.OUT_VIEWS,) * 3)

    @property
    def options(self):
        return self.forward.options

    def cotangents(self):
        """dout in its layout, and dlse, float32 or float64, or None."""
        forward, rng = self.forward, np.random.default_rng(self.forward.seed + 1)
        shape, dtype = (*forward.leading, forward.seqlen_q, forward.head_dim_v), element_type(forward.dtype)
        dout = layouts.laid_out(dout_family(self.dout_values, rng, shape).astype(dtype), self.dout_view)
        lse_dtype = np.float64 if dtype == np.float64 else np.float32
        return dout, rng.standard_normal(shape[:-1]).astype(lse_dtype) if self.with_dlse else None

    def arguments(self, attention, **more_options):
        """Positional and keyword arguments of ``attention_backward``, between NaNs, but for ``grads_out``.

        ``attention`` computes the out and lse that are given to it.
        """
        inputs = self.forward.inputs()
        out, lse = attention(*inputs, return_lse=True, **self.options, **more_options)
        out = layouts.laid_out(out, self.forward.views[3])
        dout, dlse = self.cotangents()
        if self.strided_lse:
            lse, dlse = (None if x is None else _strided(x) for x in (lse, dlse))
        return (dout, *inputs, out, lse), {"dlse": dlse, **self.options}

    def plain(self):
        """The same problem with contiguous arrays."""
        return replace(
            self, forward=self.forward.plain(), dout_view="plain", grad_views=("plain",) * 3, strided_lse=False
        )

    def empty_grads(self):
        """Places for the gradients in their layouts, filled with NaN and between NaNs."""
        return tuple(
            layouts.laid_out(np.full(operand.shape, np.nan, operand.dtype), view)
            for operand, view in zip(self.forward.inputs(), self.grad_views, strict=True)
        )


def _strided(x):
    """Every other query of an array of reversed rows, between NaNs."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), np.nan, x.dtype)
    view = wide[..., ::-1][..., 1::2]
    view[...] = x
    return view


def attention_backward_problems(
    dtypes=("float16", "bfloat16"), families=FAMILIES, scales=SCALES, views=layouts.VIEWS, **strategies
):
    """Whole problems of the backward; arguments are those of :func:`attention_problems`.

    >>> from hypothesis import find
    >>> find(attention_backward_problems(["float32"]), lambda problem: problem.with_dlse)
    AttentionBackwardProblem(forward=AttentionProblem(dtype='float32'), with_dlse=True)
    """
    forward = attention_problems(dtypes, families, scales, views, **strategies)
    out_views = [view for view in views if view in layouts.OUT_VIEWS]
    problems = st.builds(
        AttentionBackwardProblem,
        forward=forward,
        dout_values=st.sampled_from(DOUT_FAMILIES),
        with_dlse=st.booleans(),
        dout_view=st.sampled_from(views),
        grad_views=st.tuples(*[st.sampled_from(out_views)] * 3),
        strided_lse=st.booleans(),
    )
    return unlike_each_other(problems)
