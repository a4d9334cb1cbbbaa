"""Hypothesis strategies for attention problems: they draw structure and a seed, never floats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real

import numpy as np
from hypothesis import strategies as st

from cupyflash.testing import layouts
from cupyflash.testing.reproducible import Reproducible
from cupyflash.testing.values import FAMILIES, element_type, family, require_known
from cupyflash.testing.variant_strategies import variants_of
from cupyflash.testing.variants import ANYWHERE, NO_VARIANTS, Variants

DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Head dimensions are drawn in these compiled sizes, to keep the number of specialisations small.
COMPILED_HEAD_DIMS = [(16, 16), (64, 64), (32, 16), (16, 80), (64, 48), (128, 128), (144, 32), (256, 256)]
ALIGNMENTS = ["bottom-right", "top-left"]
SCALES = [None, None, None, None, None, 1.0, 0.05, 3.0, 0.0, -0.3, -2.0, 1e-37]


@dataclass(frozen=True, repr=False)
class AttentionProblem(Reproducible):
    """Everything that determines one call of attention; its arrays are made from the seed.

    ``leading_q`` and so on are the dimensions before (seqlen_q, head_dim), (seqlen_k, head_dim) and
    (seqlen_k, head_dim_v); ``values`` is one of FAMILIES or "integers", ``views`` names of VIEWS for q, k and v and of
    OUT_VIEWS for out. Other names, and dtypes but float16, bfloat16, float32 and float64, raise ValueError.

    >>> problem = AttentionProblem("bfloat16", (2, 4), (2, 2), (2, 2), seqlen_q=5, seqlen_k=9)
    >>> q, k, v = problem.inputs()
    >>> q.shape, v.shape, v.dtype
    ((2, 4, 5, 16), (2, 2, 9, 16), dtype(bfloat16))
    >>> problem
    AttentionProblem(dtype='bfloat16', leading_q=(2, 4), leading_k=(2, 2), leading_v=(2, 2), seqlen_q=5, seqlen_k=9)
    """

    dtype: str = "float16"
    leading_q: tuple[int, ...] = ()
    leading_k: tuple[int, ...] = ()
    leading_v: tuple[int, ...] = ()
    seqlen_q: int = 1
    seqlen_k: int = 1
    head_dim: int = 16
    head_dim_v: int = 16
    causal: bool = False
    align: str | int | None = None
    softmax_scale: float | None = None
    values: str = "normal"
    views: tuple[str, str, str, str] = ("plain",) * 4  # of q, k, v and out
    seed: int = 0
    variants: Variants = NO_VARIANTS

    def __post_init__(self):
        require_known("dtype", self.dtype, DTYPES)
        require_known("values", self.values, [*FAMILIES, "integers"])
        layouts.require_views("views", self.views, (layouts.VIEWS,) * 3 + (layouts.OUT_VIEWS,))

    @property
    def options(self):
        """Keyword arguments of ``attention``: softmax_scale, causal, align, and those of the variants."""
        always = {"softmax_scale": self.softmax_scale, "causal": self.causal, "align": self.align}
        return always | self.variants.options(self)

    @property
    def leading(self):
        """Leading dimensions of the result."""
        heads = np.broadcast_shapes(self.leading_k, self.leading_v)
        if self.group > 1:
            heads = (*heads[:-1], self.leading_q[-1])
        return np.broadcast_shapes(self.leading_q, heads)

    @property
    def group(self):
        """How many query heads share a key head; 1 where leading dimensions broadcast."""
        heads = np.broadcast_shapes(self.leading_k, self.leading_v)
        if len(self.leading_q) == 0 or len(heads) == 0 or self.leading_q[-1] <= 1 or heads[-1] <= 1:
            return 1
        return self.leading_q[-1] // heads[-1]

    @property
    def shift(self):
        """A causal query i sees keys j <= i + shift."""
        if self.align == "bottom-right":
            return self.seqlen_k - self.seqlen_q
        return self.align if isinstance(self.align, int) else 0

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
        result = np.full((*self.leading, self.seqlen_q, self.head_dim_v), np.nan, element_type(self.dtype))
        return layouts.laid_out(result, self.views[3])

    def plain(self):
        """The same problem with contiguous arrays."""
        return replace(self, views=("plain",) * 4, variants=self.variants.plain())

    def keeping(self, *names):
        """The same problem without any other variant."""
        variants = self.variants.keeping(names)
        return replace(self, variants=variants, align=self.align if self.causal or variants.need_align else None)

    def without(self, *names):
        """The same problem without these variants."""
        return self.keeping(*(name for name in self.variants.names if name not in names))

    def permutable(self, *names):
        """The same problem without a causal mask, and of the variants with masks, biases, the named ones and those that
        do not speak of positions.
        """
        return replace(self, causal=False).keeping(*ANYWHERE, "mask", "bias", *names)

    def unmasked(self):
        """The same problem without a causal mask, and without any other variant that speaks of positions."""
        return replace(self, causal=False).keeping(*ANYWHERE)

    def unbroadcast(self):
        """The same problem with the result's leading dimensions in every operand."""
        return replace(self, leading_q=self.leading, leading_k=self.leading, leading_v=self.leading)


def seqlens(max_seqlen=200):
    """Lengths from 0, often few or beside a multiple of a tile; one of about twenty is 0."""
    beside = [n + d for n in (16, 32, 64, 128, 192) for d in (-1, 0, 1)] + [1, 2, 8]
    beside = [n for n in beside if n <= max_seqlen]
    few = st.integers(1, min(16, max_seqlen))
    return st.integers(1, max_seqlen) | few | st.sampled_from(beside + [0] * math.ceil(len(beside) / 5))


@st.composite
def head_dims(draw):
    """True sizes within one of the compiled ones: often multiples of 8, or the smallest of them, which may be 1."""
    compiled = draw(st.sampled_from([*COMPILED_HEAD_DIMS, (144, 32)]))  # a third of them more than 128
    return tuple(n - draw(st.sampled_from([0, 0, 0, 8, 15]) | st.integers(0, 15)) for n in compiled)


@st.composite
def leading_dims(draw, max_count=8):
    """Leading dimensions of q, k, v: batch dimensions that may be 1 or missing, and heads that may be grouped.

    The result's have at most about ``max_count`` elements.
    """
    num_dims = draw(st.sampled_from([0, 2, 1, 2, 3, 2, 3, 2]))
    if num_dims == 0:
        return (), (), ()
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 2]))
    group = draw(st.sampled_from([1, 2, 3, 2, 1])) if num_dims > 1 else 1
    sizes = [*(draw(_batch_sizes([1, 2, 3, 2])) for _ in range(num_dims - 1)), num_kv_heads, group]
    while math.prod(sizes) > max_count:
        largest = max(range(len(sizes)), key=lambda i: (sizes[i], i))  # of equal ones the last: batches stay above 1
        sizes[largest] -= 1
    *batch, num_kv_heads, group = sizes
    leading_q, leading_k = (*batch, num_kv_heads * group), (*batch, num_kv_heads)
    leading_v = leading_k
    if draw(st.booleans()):
        leading_k, leading_v = (_broadcast(draw, leading_k) for _ in range(2))
        if draw(st.booleans()) and group == 1:
            leading_q = _broadcast(draw, leading_q)
    # A single dimension on every side is not one of heads, and plain broadcasting holds.
    if max(len(leading_q), len(leading_k), len(leading_v)) < 2:
        return leading_q, leading_q[:0], leading_q[:0]
    return leading_q, leading_k, leading_v


@st.composite
def same_heads(draw, num_dims, *, grouped=True, empty=True):
    """Leading dimensions of q, k, v, always ``num_dims`` of them: batch dimensions that are equal, and heads, of q
    several to one of k and v where they are ``grouped``.

    >>> from hypothesis import find
    >>> find(same_heads(2), lambda leading: leading[0] != leading[1])
    ((1, 2), (1, 1), (1, 1))
    """
    if num_dims == 0:
        return (), (), ()
    sizes = _batch_sizes([1, 2, 3]) if empty else st.sampled_from([1, 2, 3])
    batch = tuple(draw(sizes) for _ in range(num_dims - 1))
    num_kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 1, 2, 3])) if grouped and num_dims > 1 else 1
    leading_k = (*batch, num_kv_heads)
    return (*batch, num_kv_heads * group), leading_k, leading_k


def _batch_sizes(sizes):
    """One of them, and rarely 0: little can be wrong with an empty result."""
    return st.sampled_from(sizes * (60 // len(sizes)) + [0])


def _broadcast(draw, dims):
    dims = tuple(1 if draw(st.integers(0, 4)) == 0 else n for n in dims)
    return dims[draw(st.sampled_from([0, 0, 0, 1, len(dims)])) :]


_LEADING_DIMS, _SEQLENS, _HEAD_DIMS, _BOOLEANS = leading_dims(), seqlens(), head_dims(), st.booleans()


def attention_problems(
    dtypes=("float16", "bfloat16"),
    families=FAMILIES,
    scales=SCALES,
    views=layouts.VIEWS,
    *,
    alignments=ALIGNMENTS,
    leading_dims=_LEADING_DIMS,
    seqlens=_SEQLENS,
    head_dims=_HEAD_DIMS,
    causal=_BOOLEANS,
    variants=(),
):
    """Whole problems; they shrink towards one plain query and key of the first dtype.

    The first five are sequences to choose from, the next four strategies: of leading dimensions (of q, of k, of v), of
    a length, of (head_dim, head_dim_v), and of whether keys are masked causally. ``alignments`` may have whole numbers
    beside the two names: the key that query 0 is at.
    ``variants`` names the options, some of VARIANTS, of which a problem may have any: none unless asked for, as
    functions that are tested rarely know them all. TypeError or ValueError names an argument that is none of these.

    >>> from hypothesis import find
    >>> find(attention_problems(["float32"]), lambda problem: problem.seqlen_q < problem.seqlen_k)
    AttentionProblem(dtype='float32', seqlen_k=2)
    >>> find(attention_problems(variants=["bias"]), lambda problem: problem.variants.names)
    AttentionProblem(variants=Variants(bias=Operand(values='normal')))
    """
    choices = {"dtypes": dtypes, "families": families, "scales": scales, "views": views, "alignments": alignments}
    known = {"dtypes": DTYPES, "families": [*FAMILIES, "integers"], "views": layouts.VIEWS, "alignments": ALIGNMENTS}
    strategies = {"leading_dims": leading_dims, "seqlens": seqlens, "head_dims": head_dims, "causal": causal}
    for name, value in choices.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"{name}: a sequence to choose from, such as [{value!r}], not {value!r}")
        if not value:
            raise ValueError(f"{name}: nothing to choose from")
        for x in value:
            if name == "alignments" and isinstance(x, Integral) and not isinstance(x, bool):
                continue
            if name in known:
                require_known(name, x, known[name])
            elif x is not None and (isinstance(x, bool) or not isinstance(x, Real) or not math.isfinite(x)):
                raise TypeError(f"{name}: None or a finite number, not {x!r}")
    if not set(views) & set(layouts.OUT_VIEWS):
        raise ValueError(f"views: one of {', '.join(map(repr, layouts.OUT_VIEWS))} too, for out, not {views!r} alone")
    for name, value in strategies.items():
        if not isinstance(value, st.SearchStrategy):
            raise TypeError(f"{name}: a strategy, such as st.just({value!r}), not {value!r}")
    return unlike_each_other(_problems(**choices, **strategies, variants=variants_of(variants)))


def unlike_each_other(problems):
    """The same problems, each drawn independently.

    Hypothesis makes most examples out of the one before, copying one drawn value over another. Of 200 problems, about
    40 would be independent, and whether a size is among them at all would depend on the seed. Within a collection of
    unique elements it copies nothing (since 6.170.1).
    """
    return st.lists(problems, min_size=1, max_size=1, unique_by=id).map(lambda one: one[0])


def _are_sizes(value, least=0):
    return isinstance(value, tuple | list) and all(isinstance(n, Integral) and n >= least for n in value)


def _are_leading_dims(value):
    if not isinstance(value, tuple | list) or len(value) != 3 or not all(map(_are_sizes, value)):
        return False
    try:
        _ = AttentionProblem("float16", *value).leading
    except ValueError:
        return False
    return True


_RIGHT = {
    "leading_dims": ("a strategy of sizes of q, of k and of v, which broadcast or group heads", _are_leading_dims),
    "seqlens": ("a strategy of lengths, 0 or more", lambda x: _are_sizes((x,))),
    "head_dims": (
        "a strategy of pairs (head_dim, head_dim_v), 1 or more",
        lambda x: _are_sizes(x, 1) and len(x) == 2,
    ),
}


def _right(strategy, drawn):
    """What a strategy has drawn; ValueError that names it, if it is of another kind."""
    expected, is_right = _RIGHT[strategy]
    if not is_right(drawn):
        raise ValueError(f"{strategy}: {expected}; it drew {drawn!r}")
    return drawn


@st.composite
def _problems(draw, dtypes, families, scales, views, alignments, leading_dims, seqlens, head_dims, causal, variants):
    is_causal = draw(causal)
    drawn_variants = draw(variants)
    leading_q, leading_k, leading_v = _right("leading_dims", draw(leading_dims))
    head_dim, head_dim_v = _right("head_dims", draw(head_dims))
    out_views = [view for view in views if view in layouts.OUT_VIEWS]
    seqlen_q = _right("seqlens", draw(seqlens))
    if seqlen_q == 0 and draw(st.sampled_from([False, True, True, True])):
        # More problems without keys than without queries, where nothing can be wrong.
        seqlen_q = _right("seqlens", draw(seqlens))
    seqlen_k = _right("seqlens", draw(seqlens))
    seqlen_k = draw(st.sampled_from([seqlen_k] * 7 + [seqlen_q]))
    return AttentionProblem(
        dtype=draw(st.sampled_from(dtypes)),
        leading_q=leading_q,
        leading_k=leading_k,
        leading_v=leading_v,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=is_causal,
        align=draw(st.sampled_from(alignments)) if is_causal or drawn_variants.need_align else None,
        softmax_scale=draw(st.sampled_from(scales)),
        values=draw(st.sampled_from(families)),
        views=draw(st.tuples(*map(st.sampled_from, (views, views, views, out_views)))),
        seed=draw(st.integers(0, 2**32 - 1)),
        variants=drawn_variants,
    )
