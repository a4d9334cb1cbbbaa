"""Hypothesis strategies of variants: any combination of the options that are asked for."""

from collections.abc import Collection

from hypothesis import strategies as st

from cupyflash.testing import layouts, operands
from cupyflash.testing.expressions import MASK_EXPRESSIONS, SCORE_EXPRESSIONS
from cupyflash.testing.variants import VARIANTS, Lengths, Operand, Variants

#: 0 and 1, beside the tiles' sizes, and beyond all lengths.
WINDOW_SIDES = [None, 0, 1, 15, 16, 63, 64, 65, 127, 128, 10**9]


def _operands(families, forms, types=("inputs",)):
    return st.builds(
        Operand,
        st.sampled_from(families),
        st.sampled_from(list(forms)),
        st.sampled_from(types),
        st.sampled_from(layouts.VIEWS),
    )


_LENGTH_TYPES = ["int32", "int64"]
_SIDE = st.sampled_from(WINDOW_SIDES) | st.integers(0, 200)
_LENGTHS = st.builds(
    Lengths,
    st.sampled_from(operands.LENGTH_FAMILIES),
    st.sampled_from([True, False]),
    st.sampled_from(_LENGTH_TYPES),
)
_STRATEGIES = {
    "window_size": st.tuples(_SIDE, _SIDE),
    "softcap": st.sampled_from([2.0, 0.1, 30.0, 1e9]),
    "mask": _operands(operands.MASK_FAMILIES, operands.PAIR_FORMS),
    "bias": _operands(operands.BIAS_FAMILIES, operands.PAIR_FORMS, operands.OPERAND_TYPES),
    "alibi_slopes": _operands(operands.SLOPE_FAMILIES, operands.HEAD_FORMS, operands.OPERAND_TYPES),
    "attn_sink": _operands(operands.SINK_FAMILIES, operands.HEAD_FORMS, operands.OPERAND_TYPES),
    "seqlens_q": _LENGTHS,
    "seqlens_k": _LENGTHS,
    "dropout_p": st.sampled_from([0.5, 0.1, 0.9, 0.9999]),
    "score_mod": st.sampled_from(list(SCORE_EXPRESSIONS)),
    "mask_mod": st.sampled_from(list(MASK_EXPRESSIONS)),
    "split_size": st.sampled_from([128, 256]),
    "origin": st.sampled_from([(1, 0, 0, 0), (0, 3, 64, 64), (2, 1, 9, 7), (0, 0, 4000, 3997)]),
}


def variants_of(names):
    """Strategy of :class:`Variants` with any of the named options, or none; TypeError or ValueError for other names."""
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"variants: names of options, such as [{names!r}], not {names!r}")
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variants: {name!r} is none of {', '.join(VARIANTS)}")
    return _variants([name for name in VARIANTS if name in names])


@st.composite
def _variants(draw, names):
    quarters = draw(st.integers(0, 3)) if names else 0  # of the options, roughly: few and many of them together
    chosen = {}
    for name in names:
        if quarters and draw(st.integers(0, 3)) > 3 - quarters:
            chosen[name] = draw(_STRATEGIES[name])
    return Variants(**chosen)
