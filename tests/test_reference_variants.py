"""The reference with every option: against the definition in multiprecision, gradients against finite differences."""

import ml_dtypes
import mpmath
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import reference
from cupyflash._double_double import DoubleDouble
from cupyflash._problem import attention_problem
from cupyflash.dropout import dropout_mask
from cupyflash.reference.arrays import on_host, summed_to, wide
from cupyflash.reference.backward import exact_gradients
from cupyflash.reference.forward import exact_attention
from tests import attention_by_definition

INF, NAN = np.inf, np.nan
STEP = 2.0**-33
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
        "dropout_p": lambda: draw(st.sampled_from([0.2, 0.7])),
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


def exact_results(arrays, options):
    """out, lse and max before they are rounded."""
    problem = attention_problem(*arrays, **options)
    return exact_attention(problem, *wide(problem.dtype, *on_host(problem, *arrays)))


@settings(max_examples=150)
@given(problems())
def test_results_are_those_of_the_definition(problem):
    """Of float64 inputs to 95 bits and one rounding; of others to what float64 arithmetic leaves."""
    arrays, options = problem
    results = reference.attention(*arrays, return_lse=True, return_max=True, **options)
    unrounded = exact_results(arrays, options)
    if "dropout_p" in options:
        shape = (*arrays[0].shape[:3], arrays[1].shape[2])
        options["keep"] = dropout_mask(shape, options["dropout_p"], options.pop("seed"))
    expected = attention_by_definition.attention(*arrays, **options)
    is_wide = arrays[0].dtype == np.float64
    for result, before, right in zip(results, unrounded, expected, strict=True):
        assert result.dtype == np.float64 and result.shape == right.shape
        np.testing.assert_array_equal(result, np.asarray(before))
        np.testing.assert_array_equal(np.isfinite(result), np.isfinite(right.astype(float)))
        np.testing.assert_array_equal(result[~np.isfinite(result)], -INF)
        low = before.low if is_wide else np.zeros(result.shape)
        with mpmath.workprec(attention_by_definition.BITS):
            for index in zip(*np.nonzero(np.isfinite(result)), strict=True):
                error = mpmath.mpf(result[index]) + mpmath.mpf(low[index]) - right[index]
                assert abs(error) <= 2.0 ** (-95 if is_wide else -44) * (1 + abs(right[index]))


def moved(x, direction, steps):
    """x + steps * STEP * direction, exact for numbers of few bits; what is not finite stays."""
    return np.asarray(np.where(np.isfinite(x), x + steps * STEP * direction, x))


def total(x):
    return x.reshape(-1).sum(axis=0)


def objective(arrays, options, dout, dlse):
    """sum(dout * out) + sum(dlse * lse) over rows that have an lse, with 100 bits."""
    out, lse, _ = exact_results(arrays, options)
    return total(DoubleDouble(dout) * out) + total(np.where(lse == -INF, 0, dlse * lse))


@settings(max_examples=100)
@given(problems(), st.booleans(), st.integers(0, 2**32 - 1))
def test_gradients_are_finite_differences(problem, with_dlse, seed):
    """Along random directions, one for each operand; to some more bits than float64 has, before they are rounded."""
    arrays, options = problem
    arrays = [x.astype(np.float64) for x in arrays]
    operands = dict(zip("qkv", arrays, strict=True))
    for name in "bias", "alibi_slopes", "attn_sink":
        if name in options:
            operands[name] = options[name] = options[name].astype(np.float64)
    rng = np.random.default_rng(seed)
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    dlse_given = dlse if with_dlse else None
    gradients = reference.attention_backward(dout, *arrays, out, lse, dlse=dlse_given, **options)
    call = attention_problem(*arrays, **options)
    unrounded = exact_gradients(call, *wide(call.dtype, dout, *on_host(call, *arrays)), dlse_given)
    assert {name[1:] for name, x in vars(gradients).items() if x is not None} == operands.keys()
    for name, operand in operands.items():
        gradient, before = (getattr(x, f"d{name}") for x in (gradients, unrounded))
        before = summed_to(operand.shape, before)
        assert gradient.shape == operand.shape and gradient.dtype == np.float64
        np.testing.assert_array_equal(gradient, np.asarray(before))
        direction = rng.integers(-8, 9, operand.shape) / 8

        def along(steps, name=name, direction=direction):
            changed = {**operands, name: moved(operands[name], direction, steps)}
            three = [changed.pop(x) for x in "qkv"]
            return objective(three, {**options, **changed}, dout, dlse * with_dlse)

        difference = (along(1) - along(-1)) / (2 * STEP)
        error = abs(np.asarray(difference - total(before * direction)))
        assert error <= 2.0**-59 * (1 + np.abs(gradient).sum())
