"""The reference with every option: against the definition in multiprecision, gradients against finite differences."""

import ml_dtypes
import mpmath
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import reference
from cupyflash._problem import attention_problem
from cupyflash.dropout import dropout_mask
from cupyflash.reference.arrays import on_host, wide
from cupyflash.reference.forward import exact_attention
from tests import attention_by_definition

INF, NAN = np.inf, np.nan
STEP = 2.0**-30
#: Shapes of a bias or mask, by letter: batch, heads, queries, keys, 1.
PAIR_SHAPES = ["", "S", "L1", "LS", "H11", "HLS", "B1L1", "BH1S", "1HLS", "B11S", "BHLS"]
HEAD_SHAPES = ["", "H", "B1", "BH", "1H"]
BATCH_SHAPES = ["", "B", "1"]


@st.composite
def problems(draw):
    """q, k, v with 4 dimensions, and options; the numbers have few bits, so that steps away from them are exact."""
    sizes = {
        "B": draw(st.integers(1, 2)), "H": draw(st.sampled_from([1, 2, 4])), "L": draw(st.integers(1, 3)),
        "S": draw(st.integers(0, 4)), "1": 1,
    }  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.float64, np.float64, np.float32, np.float16, ml_dtypes.bfloat16]))
    num_kv_heads = draw(st.sampled_from([n for n in (1, 2) if sizes["H"] % n == 0]))

    def array(letters, dtype=np.float64):
        x = rng.standard_normal([sizes[letter] for letter in letters])
        return np.asarray(np.round(x * 2**20) / 2**20, dtype)

    def chosen(shapes):
        return draw(st.sampled_from(shapes))

    q = array("BHL1").repeat(2, axis=-1).astype(dtype) * dtype(draw(st.sampled_from([1, 3])))
    q[..., 1] += array("BHL", dtype)
    k, v = (x[:, :num_kv_heads] for x in (array("BHS1").repeat(2, axis=-1), array("BHS1")))
    k[..., 1] *= 0.5
    k, v = k.astype(dtype), v.astype(dtype)
    wider = [np.float64, np.float32, dtype]
    options = {}
    given_options = {
        "softmax_scale": lambda: draw(st.sampled_from([1.0, -0.5, 0.0])),
        "causal": lambda: True,
        "window_size": lambda: (draw(st.sampled_from([None, 0, 1])), draw(st.sampled_from([None, 0, 2]))),
        "mask": lambda: np.asarray(array(chosen(PAIR_SHAPES)) > -0.3),
        "bias": lambda: array(chosen(PAIR_SHAPES), draw(st.sampled_from(wider))),
        "softcap": lambda: draw(st.sampled_from([0.5, 3.0, 1e6])),
        "alibi_slopes": lambda: array(chosen(HEAD_SHAPES), draw(st.sampled_from(wider))),
        "attn_sink": lambda: array(chosen(HEAD_SHAPES), draw(st.sampled_from(wider))),
        "dropout_p": lambda: draw(st.sampled_from([0.1, 0.5])),
        "seqlens_q": lambda: np.asarray(rng.integers(0, sizes["L"] + 1, [sizes[x] for x in chosen(BATCH_SHAPES)])),
        "seqlens_k": lambda: np.asarray(rng.integers(0, sizes["S"] + 1, [sizes[x] for x in chosen(BATCH_SHAPES)])),
    }
    for name in draw(st.sets(st.sampled_from(sorted(given_options)))):
        options[name] = given_options[name]()
    if "bias" in options and draw(st.booleans()):
        options["bias"] = np.where(rng.random(options["bias"].shape) < 0.3, -INF, options["bias"])
    if "attn_sink" in options and draw(st.booleans()):
        options["attn_sink"] = np.where(rng.random(options["attn_sink"].shape) < 0.3, -INF, options["attn_sink"])
    if "dropout_p" in options:
        options["seed"] = draw(st.integers(0, 2**64 - 1))
    options["align"] = draw(st.sampled_from(["top-left", "bottom-right"]))
    return (q, k, v), options


@settings(max_examples=150)
@given(problems())
def test_results_are_those_of_the_definition(problem):
    (q, k, v), options = problem
    results = reference.attention(q, k, v, return_lse=True, return_max=True, **options)
    if "dropout_p" in options:
        options["keep"] = dropout_mask((*q.shape[:3], k.shape[2]), options["dropout_p"], options.pop("seed"))
    expected = attention_by_definition.attention(q, k, v, **options)
    # float64 inputs: one rounding; others: float64 arithmetic, in which an error of a score is one of its weight.
    allowed = 2.0**-52 if q.dtype == np.float64 else 2.0**-44
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == np.float64
        right_numbers = right.astype(float)
        np.testing.assert_array_equal(np.isfinite(result), np.isfinite(right_numbers))
        np.testing.assert_array_equal(result[~np.isfinite(result)], -INF)
        with mpmath.workprec(attention_by_definition.BITS):
            for x, y in zip(result[np.isfinite(result)], right[np.isfinite(result)], strict=True):
                assert abs(mpmath.mpf(x) - y) <= allowed * (abs(y) if q.dtype == np.float64 else 1 + abs(y))


def moved(x, direction, steps):
    """x + steps * STEP * direction, exact for numbers of few bits; what is not finite stays."""
    return np.asarray(np.where(np.isfinite(x), x + steps * STEP * direction, x))


def objective(arrays, options, dout, dlse):
    """sum(dout * out) + sum(dlse * lse) over rows that have an lse, with 100 bits."""
    q, k, v = arrays
    problem = attention_problem(q, k, v, **options)
    out, lse, _ = exact_attention(problem, *wide(problem.dtype, *on_host(problem, q, k, v)))
    (dout,) = wide(problem.dtype, dout)
    return (dout * out).reshape(-1).sum(axis=0) + np.where(lse == -INF, 0, dlse * lse).reshape(-1).sum(axis=0)


@settings(max_examples=100)
@given(problems(), st.booleans(), st.integers(0, 2**32 - 1))
def test_gradients_are_finite_differences(problem, with_dlse, seed):
    """Of steps along random directions, one for each operand, each from float64 arrays."""
    arrays, options = problem
    arrays = [x.astype(np.float64) for x in arrays]
    operands = {"q": arrays[0], "k": arrays[1], "v": arrays[2]}
    for name in "bias", "alibi_slopes", "attn_sink":
        if name in options:
            operands[name] = options[name] = options[name].astype(np.float64)
    rng = np.random.default_rng(seed)
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape) * with_dlse
    gradients = reference.attention_backward(dout, *arrays, out, lse, dlse=dlse if with_dlse else None, **options)
    for name in ("bias", "alibi_slopes", "attn_sink"):
        assert (getattr(gradients, f"d{name}") is None) == (name not in options)
    for name, operand in operands.items():
        gradient = getattr(gradients, f"d{name}")
        assert gradient.shape == operand.shape and gradient.dtype == np.float64
        direction = rng.integers(-8, 9, operand.shape) / 8

        def along(steps, name=name, direction=direction):
            changed = {**operands, name: moved(operands[name], direction, steps)}
            three = [changed.pop(x) for x in "qkv"]
            return objective(three, {**options, **changed}, dout, dlse)

        difference = float(np.asarray((along(1) - along(-1)) / (2 * STEP)))
        expected = (gradient * direction).sum()
        np.testing.assert_allclose(difference, expected, rtol=1e-13, atol=1e-14 * (1 + np.abs(gradient).sum()))
