"""Gradients of bias, alibi_slopes and attn_sink: within their bounds, 0 where nothing is seen, in any layout."""

import numpy as np
import pytest

import cupyflash
from cupyflash import Gradients, bounds, ptxsim, reference
from cupyflash._arrays import BFLOAT16
from cupyflash.testing import assert_same_bits

BATCH, HEADS, QUERIES, KEYS = 2, 4, 70, 90  # two tiles of queries and of keys in every kernel
SHAPE = (BATCH, HEADS, QUERIES, KEYS)
NAMES = ("dbias", "dalibi_slopes", "dattn_sink")
HALVES = (np.dtype(np.float16), BFLOAT16)
ALL_TYPES = (*HALVES, np.dtype(np.float32), np.dtype(np.float64))
OPERAND_TYPES = [
    (np.float16, np.float16),
    (np.float16, np.float64),
    (BFLOAT16, BFLOAT16),
    (np.float32, np.float64),
    (np.float64, np.float32),
]
TWO = [np.float16, np.float32]
RIGHT = {"align": "bottom-right"}


class Call:
    """Random arrays of a call with these options, and its exact results rounded to the dtype."""

    def __init__(self, dtype, *, leading=((BATCH, HEADS), (BATCH, 2)), lengths=(QUERIES, KEYS), dlse=True, **options):
        rng = np.random.default_rng(3)
        dtype = np.dtype(dtype)
        head_dim, head_dim_v = 24, 16
        shapes = [(lengths[0], head_dim), (lengths[1], head_dim), (lengths[1], head_dim_v)]
        q, k, v = (rng.standard_normal((*leading[i > 0], *shape)).astype(dtype) for i, shape in enumerate(shapes))
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
        lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
        self.arguments = {
            "dout": rng.standard_normal(out.shape).astype(dtype),
            **{"q": q, "k": k, "v": v, "out": out.astype(dtype), "lse": lse},
            "dlse": rng.standard_normal(lse.shape).astype(lse.dtype) if dlse else None,
            **options,
        }

    def computed(self, arch="sm_80", **changes):
        with ptxsim.settings(arch=arch):
            return cupyflash.attention_backward(**{**self.arguments, **changes})

    def assert_within_bounds(self, gradients):
        exact = reference.attention_backward(**self.arguments)
        bound = bounds.attention_backward(**self.arguments)
        for name in NAMES:
            result, expected, most = (getattr(x, name) for x in (gradients, exact, bound))
            if expected is None:
                assert result is None
                continue
            operand = self.arguments[name[1:]]
            assert result.shape == operand.shape and result.dtype == operand.dtype
            error = np.abs(result.astype(np.float64) - expected)
            assert (error <= most).all(), (name, float(np.nanmax(error / np.maximum(most, 1e-300))))
            scale = np.abs(expected).max(initial=0)
            assert np.median(most) <= 0.2 * max(scale, 0.1), f"{name}: a bound that says nothing"


def normal(*shape, dtype=np.float32, seed=0, scale=1.0):
    return np.asarray(np.random.default_rng(seed).normal(0, scale, shape), dtype)


FORMS = [
    SHAPE,
    (HEADS, QUERIES, KEYS),
    (BATCH, 1, QUERIES, KEYS),
    (QUERIES, KEYS),
    (BATCH, HEADS, 1, KEYS),
    (KEYS,),
    (1, HEADS, QUERIES, 1),
    (QUERIES, 1),
    (BATCH, HEADS, 1, 1),
    (),
]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(np.dtype(np.float16), shape) for shape in FORMS]
    + [(np.dtype(np.float32), shape) for shape in FORMS[3::2]]
    + [pytest.param(dtype, shape, marks=pytest.mark.deep) for dtype in ALL_TYPES[1::2] for shape in FORMS[3::2]],
    ids=str,
)
def test_a_bias_of_any_shape(dtype, shape):
    call = Call(dtype, bias=normal(*shape, dtype=dtype))
    call.assert_within_bounds(call.computed())


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_other_architectures(arch):
    call = Call(np.float16, bias=normal(HEADS, QUERIES, KEYS), **CASES["causal"])
    call.assert_within_bounds(call.computed(arch))


@pytest.mark.parametrize(
    ("dtype", "operand"),
    [(a, b) for a, b in OPERAND_TYPES if a in ALL_TYPES],
    ids=str,
)
def test_dtypes_of_operands(dtype, operand):
    slopes, sinks = np.array([0.1, 0.3, 0.0, -0.02]), np.array([0.5, 3.0, -np.inf, -1.0])
    call = Call(
        dtype,
        bias=normal(BATCH, 1, 1, KEYS, dtype=operand),
        alibi_slopes=slopes.astype(operand),
        attn_sink=sinks.astype(operand),
        **RIGHT,
    )
    gradients = call.computed()
    call.assert_within_bounds(gradients)
    assert gradients.dattn_sink[2] == 0


@pytest.mark.parametrize("shape", [(HEADS,), (BATCH, HEADS), (BATCH, 1), ()])
@pytest.mark.parametrize("dtype", TWO)
def test_slopes_and_sinks_of_any_shape(dtype, shape):
    call = Call(dtype, alibi_slopes=normal(*shape, scale=0.1), attn_sink=normal(*shape, seed=1), **RIGHT)
    call.assert_within_bounds(call.computed())


CASES = {
    "causal": {"causal": True, **RIGHT},
    "window": {"window_size": (20, 5), "align": "top-left"},
    "mask": {"mask": np.random.default_rng(1).random((BATCH, 1, QUERIES, KEYS)) < 0.5, "softcap": 1.5, **RIGHT},
    "dropout": {"dropout_p": 0.3, "seed": 7, **RIGHT},
    "lengths": {"seqlens_q": np.array([70, 13]), "seqlens_k": np.array([40, 90]), **RIGHT},
    "expressions": {"score_mod": "score * (1 + 0.1f * h)", "mask_mod": "(i + 2 * j) % 3 != b", **RIGHT},
    "some": {"seqlens_k": np.array([66, 0]), "window_size": (30, None), "softcap": 2.0, **RIGHT},
}


@pytest.mark.parametrize(
    ("dtype", "case"),
    [(np.float16, case) for case in list(CASES)[::2]]
    + [pytest.param(np.float16, case, marks=pytest.mark.deep) for case in list(CASES)[1::2]]
    + [(np.float32, "some")],
)
def test_with_other_options(dtype, case):
    options = dict(CASES[case], alibi_slopes=np.linspace(0.2, 0.0, HEADS), attn_sink=normal(BATCH, 1))
    shape = [(QUERIES, KEYS), (HEADS, 1, KEYS), (BATCH, 1, QUERIES, 1)][list(CASES).index(case) % 3]
    call = Call(dtype, bias=normal(*shape), dlse=case != "mask", **options)
    call.assert_within_bounds(call.computed())


@pytest.mark.parametrize("dtype", TWO)
def test_removed_pairs_get_0_and_add_nothing(dtype):
    """Bit for bit, whatever they hold: behind lengths, masks, a window and a bias of -inf."""
    mask = np.random.default_rng(2).random(SHAPE) < 0.7
    mask[..., 8] = False  # a key that nobody sees
    bias = normal(*SHAPE)
    bias[..., 5, :] = -np.inf  # a query that sees its sink alone
    options = {
        "seqlens_q": np.array([60, 13]), "seqlens_k": np.array([40, 66]), "window_size": (30, 20), **RIGHT,
        "mask": mask, "attn_sink": normal(HEADS), "alibi_slopes": normal(HEADS) / 8,
    }  # fmt: skip
    call = Call(dtype, bias=bias, **options)
    clean = call.computed()
    call.assert_within_bounds(clean)
    exact = reference.attention_backward(**call.arguments).dbias
    assert (clean.dbias[exact == 0] == 0).all() and (exact == 0).sum() > SHAPE[-1]

    spoilt = {name: call.arguments[name].copy() for name in ("dout", "q", "k", "v", "bias")}
    for name in "k", "v":
        spoilt[name][..., 8, :] = np.nan
        spoilt[name][0, :, 40:] = spoilt[name][1, :, 66:] = np.nan
    for name in "dout", "q":
        spoilt[name][..., 5, :] = np.nan
        spoilt[name][0, :, 60:] = spoilt[name][1, :, 13:] = np.nan
    spoilt["bias"][~mask] = np.nan
    result = call.computed(**spoilt)
    for name in NAMES:
        assert_same_bits(getattr(result, name), getattr(clean, name))


@pytest.mark.parametrize("dtype", TWO)
def test_what_a_seen_pair_holds_arrives(dtype):
    call = Call(dtype, bias=normal(QUERIES, KEYS), **CASES["causal"])
    spoilt = call.arguments["v"].copy()
    spoilt[1, 0, 75, 3] = np.nan
    gradient = call.computed(v=spoilt).dbias
    seen = np.arange(QUERIES)[:, None] + KEYS - QUERIES >= np.arange(KEYS)
    assert np.array_equal(np.isnan(gradient[:, 75]), seen[:, 75]) and not np.isnan(gradient[~seen]).any()


@pytest.mark.parametrize("dtype", TWO)
def test_scores_can_be_shifted(dtype):
    """A number that is added to all scores of a query, its sink among them, moves lse by as much, and nothing else."""
    call = Call(dtype, bias=normal(*SHAPE), attn_sink=normal(BATCH, HEADS), **RIGHT)
    gradients, bound = call.computed(), bounds.attention_backward(**call.arguments)
    sums = gradients.dbias.sum(axis=(-1, -2), dtype=np.float64) + gradients.dattn_sink
    error = np.abs(sums - call.arguments["dlse"].sum(axis=-1, dtype=np.float64))
    assert (error <= bound.dbias.sum(axis=(-1, -2)) + bound.dattn_sink).all()

    call = Call(dtype, bias=normal(*SHAPE), dlse=False, **CASES["causal"])
    gradients, bound = call.computed(), bounds.attention_backward(**call.arguments)
    assert (np.abs(gradients.dbias.sum(axis=-1, dtype=np.float64)) <= bound.dbias.sum(axis=-1)).all()


@pytest.mark.parametrize("dtype", TWO)
def test_any_strides(dtype):
    bias, sinks = normal(BATCH, 1, QUERIES, KEYS), normal(BATCH, HEADS)
    call = Call(dtype, bias=bias, attn_sink=sinks, alibi_slopes=sinks / 8, **RIGHT)
    packed = call.computed()
    memory = np.full((KEYS, 3, BATCH, 1, QUERIES), 7, np.float32)
    target = memory[::-1, 1].transpose(1, 2, 3, 0)
    sink_target = np.zeros((HEADS, BATCH), np.float32)[::-1].T
    views = {"bias": bias.swapaxes(-1, -2).copy().swapaxes(-1, -2), "attn_sink": sinks.copy(order="F")}
    result = call.computed(grads_out=Gradients(dbias=target, dattn_sink=sink_target), **views)
    assert result.dbias is target and result.dattn_sink is sink_target
    for name in NAMES:
        assert_same_bits(np.ascontiguousarray(getattr(result, name)), getattr(packed, name))
    assert (memory[:, ::2] == 7).all()


def test_a_view_with_stride_0_is_a_full_array():
    row = normal(KEYS)
    call = Call(np.float16, bias=np.broadcast_to(row, (HEADS, QUERIES, KEYS)), attn_sink=np.broadcast_to(row[0], 4))
    gradients = call.computed()
    call.assert_within_bounds(gradients)
    assert len({x.tobytes() for x in gradients.dbias[0]}) > 1


@pytest.mark.parametrize("dtype", TWO)
def test_the_same_bits_alone_and_each_time(dtype):
    options = {"attn_sink": normal(BATCH, HEADS), "alibi_slopes": normal(BATCH, HEADS) / 8, **CASES["causal"]}
    forms = SHAPE, (BATCH, HEADS, 1, KEYS), (BATCH, HEADS, QUERIES, 1)
    for bias in (normal(*shape) for shape in (forms if dtype == np.float16 else forms[1:2])):
        call = Call(dtype, bias=bias, **options)
        together, again = call.computed(), call.computed()
        alone = call.computed(**{name: x[1:] for name, x in call.arguments.items() if isinstance(x, np.ndarray)})
        for name in NAMES:
            assert_same_bits(getattr(again, name), getattr(together, name))
            assert_same_bits(getattr(alone, name), getattr(together, name)[1:])


@pytest.mark.parametrize("dtype", TWO)
@pytest.mark.parametrize(("lengths", "batch"), [((0, 20), 2), ((20, 0), 2), ((20, 20), 0)])
def test_no_pairs(dtype, lengths, batch):
    """Nothing is summed, and every element is written."""
    for shape in (lengths[1],), (lengths[0], 1), ():
        call = Call(
            dtype, leading=((batch, 2), (batch, 2)), lengths=lengths, bias=normal(*shape), attn_sink=normal(2),
            alibi_slopes=normal(2), dlse=False, **RIGHT,
        )  # fmt: skip
        targets = Gradients(**{name: np.full_like(call.arguments[name[1:]], np.nan) for name in NAMES})
        gradients = call.computed(grads_out=targets)
        for name in NAMES:
            assert (getattr(gradients, name) == 0).all(), name


@pytest.mark.parametrize("dtype", [TWO[0], pytest.param(TWO[1], marks=pytest.mark.deep)])
def test_sanitized(dtype):
    options = {**CASES["lengths"], **CASES["dropout"], "mask": CASES["mask"]["mask"], "attn_sink": normal(BATCH, 1)}
    for shape in [SHAPE, ()] if dtype == np.float16 else [(BATCH, 1, 1, KEYS)]:
        call = Call(dtype, bias=normal(*shape), alibi_slopes=normal(HEADS) / 8, **options)
        with ptxsim.sanitize() as report:
            call.computed()
        assert not report, str(report)


@pytest.mark.parametrize("shape", [(3, HEADS, QUERIES, KEYS), (3, 1, 1, KEYS), (QUERIES, 1), ()])
def test_packed_sequences(shape):
    """A bias is indexed by positions in a sequence; the second one has no query, and rows follow the last."""
    rng = np.random.default_rng(4)
    offsets = np.array([0, 70, 70, 100]), np.array([0, 50, 70, 160])
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in ((103, HEADS, 16), (161, 2, 16), (161, 2, 16)))
    options = {
        "bias": normal(*shape), "alibi_slopes": normal(HEADS, scale=0.1), "attn_sink": normal(3, 1), "causal": True,
        **RIGHT,
    }  # fmt: skip
    out, lse = reference.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
    arguments = (normal(*out.shape, dtype=np.float16), q, k, v, out.astype(np.float16), lse.astype(np.float32))
    gradients, exact, bound = (
        module.attention_varlen_backward(*arguments, *offsets, **options) for module in (cupyflash, reference, bounds)
    )
    for name in NAMES:
        result, expected, most = (getattr(x, name) for x in (gradients, exact, bound))
        assert (np.abs(result.astype(np.float64) - expected) <= most).all(), name
        assert np.abs(expected).max() > 0
