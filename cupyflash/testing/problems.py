"""Hypothesis strategies for attention problems: they draw structure and a seed, never floats."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from hypothesis import strategies as st

from cupyflash.testing import layouts
from cupyflash.testing.values import FAMILIES, element_type, family

#: Head dimensions are drawn in these compiled sizes, to keep the number of specialisations small.
COMPILED_HEAD_DIMS = [(16, 16), (64, 64), (32, 16), (16, 80), (64, 48), (128, 128), (144, 32), (256, 256)]
SCALES = [None, None, None, 1.0, 0.05, 3.0, 0.0, -0.3, -2.0, 1e-37]


class Reproducible:
    """A dataclass whose ``repr`` names what differs from the defaults, and makes it again when evaluated."""

    def __repr__(self):
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


@dataclass(frozen=True, repr=False)
class AttentionProblem(Reproducible):
    """Everything that determines one call; its arrays are made from the seed."""

    dtype: str = "float16"
    leading_q: tuple[int, ...] = ()
    leading_k: tuple[int, ...] = ()
    leading_v: tuple[int, ...] = ()
    seqlen_q: int = 1
    seqlen_k: int = 1
    head_dim: int = 16
    head_dim_v: int = 16
    causal: bool = False
    align: str | None = None
    softmax_scale: float | None = None
    values: str = "normal"
    views: tuple[str, str, str, str] = ("plain",) * 4  # of q, k, v and out
    seed: int = 0

    @property
    def options(self):
        """Keyword arguments of ``attention``."""
        return {"softmax_scale": self.softmax_scale, "causal": self.causal, "align": self.align}

    def inputs(self):
        """q, k, v in their layouts, between NaNs."""
        rng = np.random.default_rng(self.seed)
        shapes = (
            (*self.leading_q, self.seqlen_q, self.head_dim),
            (*self.leading_k, self.seqlen_k, self.head_dim),
            (*self.leading_v, self.seqlen_k, self.head_dim_v),
        )
        dtype = element_type(self.dtype)
        with np.errstate(over="ignore"):
            values = [x.astype(dtype) for x in family(self.values, rng, shapes, dtype)]
        return tuple(layouts.laid_out(x, view) for x, view in zip(values, self.views, strict=False))

    def empty_out(self):
        """A place for the result in its layout, filled with NaN and between NaNs."""
        heads = np.broadcast_shapes(self.leading_k, self.leading_v)
        if len(self.leading_q) > 0 and len(heads) > 0 and heads[-1] > 1 and self.leading_q[-1] > 1:
            heads = (*heads[:-1], self.leading_q[-1])
        leading = np.broadcast_shapes(self.leading_q, heads)
        result = np.full((*leading, self.seqlen_q, self.head_dim_v), np.nan, element_type(self.dtype))
        return layouts.laid_out(result, self.views[3])

    def plain(self):
        """The same problem with contiguous arrays."""
        return replace(self, views=("plain",) * 4)


def seqlens():
    """0 to 200, often beside a multiple of a tile."""
    beside = [n + d for n in (16, 32, 64, 128, 192) for d in (-1, 0, 1)]
    return st.integers(1, 200) | st.sampled_from(beside) | st.sampled_from([0, 1, 2, 8])


@st.composite
def head_dims(draw):
    """True sizes within one of the compiled ones, most often multiples of 8."""
    compiled = draw(st.sampled_from(COMPILED_HEAD_DIMS))
    return tuple(n - draw(st.sampled_from([0, 0, 0, 8]) | st.integers(0, 15)) for n in compiled)


@st.composite
def leading_dims(draw, max_count=8):
    """Leading dimensions of q, k, v: batch dimensions that may be 1 or missing, and heads that may be grouped."""
    num_dims = draw(st.integers(0, 3))
    if num_dims == 0:
        return (), (), ()
    num_kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 1, 2, 3])) if num_dims > 1 else 1
    batch = tuple(draw(st.sampled_from([1, 2, 2, 3, 0])) for _ in range(num_dims - 1))
    while math.prod(batch) * num_kv_heads * group > max_count:
        batch = tuple(1 if n == max(batch) else n for n in batch) if max(batch) > 1 else batch
        group, num_kv_heads = (1, num_kv_heads) if group > 1 else (1, min(num_kv_heads, max_count))
    full_kv = (*batch, num_kv_heads)
    leading_q = (*batch, num_kv_heads * group)
    leading_k, leading_v = (_broadcast(draw, full_kv) for _ in range(2))
    if draw(st.booleans()) and group == 1:
        leading_q = _broadcast(draw, leading_q)
    # A single dimension on every side is not one of heads, and plain broadcasting holds.
    if max(len(leading_q), len(leading_k), len(leading_v)) < 2:
        return leading_q, leading_q[:0], leading_q[:0]
    return leading_q, leading_k, leading_v


def _broadcast(draw, dims):
    dims = tuple(1 if draw(st.integers(0, 4)) == 0 else n for n in dims)
    return dims[draw(st.sampled_from([0, 0, 0, 1, len(dims)])) :]


@st.composite
def attention_problems(draw, dtypes=("float16", "bfloat16"), families=FAMILIES, scales=SCALES, views=layouts.VIEWS):
    """Whole problems; they shrink towards one plain query and key of float16."""
    causal = draw(st.booleans())
    leading_q, leading_k, leading_v = draw(leading_dims())
    head_dim, head_dim_v = draw(head_dims())
    return AttentionProblem(
        dtype=draw(st.sampled_from(dtypes)),
        leading_q=leading_q,
        leading_k=leading_k,
        leading_v=leading_v,
        seqlen_q=draw(seqlens()),
        seqlen_k=draw(seqlens()),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        align=draw(st.sampled_from(["bottom-right", "top-left"])) if causal else None,
        softmax_scale=draw(st.sampled_from(scales)),
        values=draw(st.sampled_from(families)),
        views=draw(st.tuples(*map(st.sampled_from, (views, views, views, layouts.OUT_VIEWS)))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
