"""Options in the float32 and float64 kernels: every element within its bound, and nothing that is removed matters."""

import numpy as np
import pytest

import cupyflash
from cupyflash import ptxsim, reference, testing
from cupyflash.testing import AttentionProblem as Problem
from cupyflash.testing import Lengths, Operand, Variants

ONE = ((), (), ())
GROUPED = ((1, 2), (1, 1), (1, 1))
QUERIES_SHARED = ((1, 1), (2, 1), (2, 1))
CAUSAL = {"causal": True, "align": "bottom-right"}
EACH_BATCH = Variants(seqlens_q=Lengths("some 0"), seqlens_k=Lengths("random"))
ALONE = {
    "window": dict(variants=Variants(window_size=(20, 5)), align="bottom-right"),
    "left edge": dict(variants=Variants(window_size=(7, None)), align="top-left"),
    "softcap": dict(variants=Variants(softcap=1.5)),
    "mask": dict(variants=Variants(mask=Operand("random")), leading=GROUPED),
    "bias": dict(variants=Variants(bias=Operand("some -inf", "queries", "float32")), leading=GROUPED),
    "alibi": dict(variants=Variants(alibi_slopes=Operand("geometric", "heads")), leading=GROUPED, align="bottom-right"),
    "sink": dict(variants=Variants(attn_sink=Operand("normal", "heads"), mask=Operand("empty rows")), leading=GROUPED),
    "lengths": dict(variants=EACH_BATCH, leading=QUERIES_SHARED),
    "dropout": dict(variants=Variants(dropout_p=0.3), leading=GROUPED),
    "expressions": dict(variants=Variants(score_mod="distance", mask_mod="checkered")),
}
ALL = Variants(
    window_size=(40, None),
    softcap=2.0,
    mask=Operand("random", "pairs of batches"),
    bias=Operand("some -inf", "pairs", "float64"),
    alibi_slopes=Operand("geometric", "number"),
    attn_sink=Operand("normal", "all", "float64"),
    seqlens_q=Lengths("random"),
    seqlens_k=Lengths("random"),
    dropout_p=0.25,
)


def problem_of(dtype, leading=ONE, **options):
    """More than one tile of queries and of keys."""
    return Problem(dtype, *leading, 70, 90, 12, 9, seed=1, **options)


def check(problem, arch="sm_80", spoil=lambda arrays: None):
    """Results and their bounds, by name; ``spoil`` changes dout, q, k and v in place."""
    options, rng = problem.options, np.random.default_rng(problem.seed)
    q, k, v = (np.array(x) for x in problem.inputs())
    dout = rng.standard_normal((*problem.leading, problem.seqlen_q, problem.head_dim_v)).astype(q.dtype)
    dlse = rng.standard_normal(dout.shape[:-1]).astype(q.dtype)
    spoil((dout, q, k, v))
    with ptxsim.settings(arch=arch):
        out, lse, row_max = cupyflash.attention(q, k, v, return_lse=True, return_max=True, **options)
        gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    _, bound = testing.assert_attention_within_bound(out, lse, q, k, v, row_max=row_max, **options)
    _, bounds = testing.assert_gradients_within_bound(gradients, dout, q, k, v, out, lse, dlse=dlse, **options)
    names = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dattn_sink")
    given = {name: getattr(gradients, name) for name in names if getattr(gradients, name) is not None}
    return {"out": (out, bound), **{name: (x, getattr(bounds, name)) for name, x in given.items()}}


@pytest.mark.parametrize("name", ALONE)
def test_an_option_alone(name):
    """In float32 and float64 in turn; the combination below has all in both."""
    dtype = ("float32", "float64")[list(ALONE).index(name) % 2]
    for what, (_, bound) in check(problem_of(dtype, **ALONE[name])).items():
        assert np.isfinite(bound).all(), what


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [
        ("float32", "sm_75"),
        ("float64", "sm_80"),
        pytest.param("float32", "sm_80", marks=pytest.mark.deep),
        pytest.param("float64", "sm_75", marks=pytest.mark.deep),
    ],
)
def test_all_options(dtype, arch):
    leading = GROUPED if arch == "sm_80" else QUERIES_SHARED
    check(problem_of(dtype, leading, **CAUSAL, variants=ALL), arch)


HIDING = {
    "window": dict(variants=Variants(window_size=(20, 5)), align="bottom-right"),
    "mask": dict(variants=Variants(mask=Operand("random"), softcap=3.0)),
    "bias": dict(variants=Variants(bias=Operand("some -inf"))),
    "mask_mod": dict(variants=Variants(mask_mod="causal", dropout_p=0.2)),
    "lengths": dict(variants=EACH_BATCH, leading=QUERIES_SHARED),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_value_that_is_not_finite_changes_only_what_sees_it(name):
    """Where a bound is claimed, results keep their bits; one is claimed somewhere, and somewhere none."""
    dtype, value = (("float32", np.inf), ("float64", np.nan))[list(HIDING).index(name) % 2]
    problem = problem_of(dtype, **HIDING[name])
    clean = check(problem)
    for spoilt_arrays, results in ((0, 1), ("dq", "dk", "dv")), ((2, 3), ("out", "dq")):

        def spoil(arrays, spoilt_arrays=spoilt_arrays):
            for position in spoilt_arrays:
                arrays[position][..., 3 + position, 2] = value

        spoilt = check(problem, spoil=spoil)
        for what in results:
            (result, bound), (before, _) = spoilt[what], clean[what]
            claimed = np.isfinite(bound)
            assert claimed.any() and not claimed.all(), what
            testing.assert_same_bits(result[claimed], before[claimed], name=what)


def test_what_lies_behind_lengths_is_not_read():
    """Bit for bit the results of the lengths alone, and zeros behind them."""
    rng, dtype = np.random.default_rng(2), np.float32
    lengths_q, lengths_k = (70, 3, 0), (66, 90, 7)
    q, dout = (np.full((3, 2, 70, 8), np.nan, dtype) for _ in range(2))
    k, v = (np.full((3, 1, 90, 8), np.nan, dtype) for _ in range(2))
    for batch, (num_q, num_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for array, rows in (q, num_q), (dout, num_q), (k, num_k), (v, num_k):
            array[batch, :, :rows] = rng.standard_normal(array[batch, :, :rows].shape)
    options = {**CAUSAL, "softcap": 2.0, "attn_sink": np.array([0.5, -1], dtype)}
    lengths = {"seqlens_q": np.array(lengths_q), "seqlens_k": np.array(lengths_k)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options, **lengths)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options, **lengths)
    dsinks = np.zeros(2)
    for batch, (num_q, num_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        arrays = [x[batch : batch + 1, :, :rows] for x, rows in ((q, num_q), (k, num_k), (v, num_k), (dout, num_q))]
        own = cupyflash.attention(*arrays[:3], return_lse=True, **options)
        dq, dk, dv = own_gradients = cupyflash.attention_backward(arrays[3], *arrays[:3], *own, **options)
        for result, expected, rows, behind in (
            (out, own[0], num_q, 0),
            (lse, own[1], num_q, -np.inf),
            (gradients.dq, dq, num_q, 0),
            (gradients.dk, dk, num_k, 0),
            (gradients.dv, dv, num_k, 0),
        ):
            testing.assert_same_bits(result[batch : batch + 1, :, :rows], expected)
            assert (result[batch, :, rows:] == behind).all()
        dsinks += own_gradients.dattn_sink
    np.testing.assert_allclose(gradients.dattn_sink, dsinks, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_finite_bias_is_data_however_large(dtype):
    """The most negative number beside q . k: equal scores, none of them removed."""
    q, k = np.ones((2, 4), dtype), np.zeros((3, 4), dtype)
    v = np.array([[1.0], [2.0], [6.0]], dtype)
    bias = np.full((2, 3), np.finfo(dtype).min, dtype)
    bias[1, 0] = -np.inf
    out, row_max = cupyflash.attention(q, k, v, bias=bias, return_max=True)
    np.testing.assert_allclose(out, [[3], [4]], rtol=4 * np.finfo(dtype).eps)
    assert (row_max == np.finfo(dtype).min).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_weight_is_at_most_1_whatever_lse_has_lost(dtype):
    """Scores of which lse keeps no digit behind the point, and loses one more: gradients are right all the same."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 5, 8)).astype(dtype)
    bias = np.linspace(-3, -2, 25, dtype=dtype).reshape(5, 5) * dtype(1e30)
    out, lse = cupyflash.attention(q, k, v, bias=bias, return_lse=True)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, np.nextafter(lse, dtype(-np.inf)), bias=bias)
    exact = reference.attention_backward(dout, q, k, v, out, lse, bias=bias)
    for name in "dq", "dk", "dv", "dbias":
        np.testing.assert_allclose(getattr(gradients, name), getattr(exact, name), atol=1e-4)


NO_QUERY_FIRST = Variants(seqlens_q=Lengths("some 0"))
KEYS_SHARED = ((3, 1), (1, 1), (3, 1))


@pytest.mark.parametrize(
    "leading, variants", [(QUERIES_SHARED, ALL), (QUERIES_SHARED, EACH_BATCH), (KEYS_SHARED, NO_QUERY_FIRST)]
)
def test_no_findings(leading, variants):
    """Batches that one block sums, some of them without a query or a key."""
    problem = problem_of("float32", leading, **CAUSAL, variants=variants)
    with ptxsim.sanitize() as report:
        check(problem)
    assert not report, str(report)
