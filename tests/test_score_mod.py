"""Users' expressions: score_mod and mask_mod, the number type that they see, and what is said of faulty ones."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention, attention_backward, attention_vjp, ptxsim, reference
from cupyflash._options import checked_aux
from cupyflash._problem import attention_problem
from cupyflash._score_mod import evaluate, evaluate_mask, evaluate_with_error
from cupyflash.testing import assertions

SHAPES = (2, 4, 21, 16), (2, 2, 33, 16), (2, 2, 33, 16)
PAIRS = (2, 4, 21, 33)


def inputs(dtype=np.float16):
    rng = np.random.default_rng(5)
    return [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]


def problem_of(dtype=np.float32, **options):
    return attention_problem(*inputs(dtype), **options)


def check(*, backward=False, dtype=np.float16, **options):
    """The forward, and on demand the backward, is within its bounds, none of which is infinite."""
    q, k, v = inputs(dtype)
    out, lse = attention(q, k, v, return_lse=True, **options)
    _, bound = assertions.assert_attention_within_bound(out, lse, q, k, v, **options)
    assert np.isfinite(bound).all()
    if backward:
        dout = np.random.default_rng(6).standard_normal(out.shape).astype(out.dtype)
        gradients = attention_backward(dout, q, k, v, out, lse, **options)
        assertions.assert_gradients_within_bound(gradients, dout, q, k, v, out, lse, **options)
    return out


RELATIVE = np.random.default_rng(7).standard_normal(60)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], ml_dtypes.bfloat16)


# Each of these options is an expression, too; expressions are wrong where the reference of the option says so.


@pytest.mark.parametrize(
    ("expressions", "options"),
    [
        ({"score_mod": "20 * tanh(score / 20)"}, {"softcap": 20.0}),
        (
            {"score_mod": "score + table[i - j + 32]", "aux": {"table": RELATIVE}},
            {"bias": RELATIVE[np.arange(21)[:, None] - np.arange(33) + 32]},
        ),
        (
            {"score_mod": "score - slopes[h] * abs(i + S - L - j)", "aux": {"slopes": SLOPES}},
            {"alibi_slopes": SLOPES.astype(np.float32), "align": "bottom-right"},
        ),
        ({"mask_mod": "j <= i + S - L"}, {"causal": True, "align": "bottom-right"}),
    ],
)
def test_an_option_as_an_expression(expressions, options):
    q, k, v = inputs()
    out, lse = attention(q, k, v, return_lse=True, **expressions)
    assertions.assert_attention_within_bound(out, lse, q, k, v, **options)
    dout = np.ones_like(out)
    gradients = attention_backward(dout, q, k, v, out, lse, **expressions)
    expected = reference.attention_backward(dout, q, k, v, out, lse, **options)
    for gradient, exact in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient.astype(float), exact, rtol=0.02, atol=0.02)


def test_every_name_in_both_directions_with_other_options():
    check(
        backward=True,
        score_mod="j % 3 == b ? -INFINITY : (score > 0 ? score : 0.1f * score) * (1 + h) / (L + S) + up[i] - down[j]",
        mask_mod="allowed[j] and not (i == 3)",
        aux={
            "up": np.random.default_rng(8).standard_normal(21).astype(np.float16),
            "down": np.random.default_rng(9).integers(-3, 3, 33).astype(np.int8),
            "allowed": np.arange(33) % 5 != 1,
        },
        causal=True,
        align="bottom-right",
        softcap=5.0,
        seqlens_k=np.array([33, 20]),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_without_tensor_cores(dtype):
    check(backward=True, dtype=dtype, score_mod="score > 0 ? tanh(score) : 0.1 * score * exp(score)", mask_mod="i != j")


def test_lengths_are_those_of_the_batch_and_not_of_a_split():
    lengths = {"seqlens_q": np.array([21, 7]), "seqlens_k": np.array([33, 12])}
    check(score_mod="score * (L - i) / S", **lengths)
    q, k, v = inputs()
    k, v = (np.tile(x, (1, 1, 6, 1)) for x in (k, v))
    whole, parts = (
        attention(q, k, v, score_mod="score * S / 99.0f", mask_mod="j > S - 180", split_size=size)
        for size in (None, 128)
    )
    np.testing.assert_allclose(whole.astype(float), parts, atol=2e-3)


def test_what_a_result_of_minus_infinity_removes_reaches_nothing():
    """NaN in keys, values and aux, and an infinite bias at removed pairs."""
    q, k, v = inputs()
    k[..., ::2, :], v[..., ::2, :] = np.nan, np.inf
    bias = np.where(np.arange(33) % 2, 0, np.inf).astype(np.float32)
    out, lse = attention(q, k, v, score_mod="j % 2 ? score : -INFINITY", bias=bias, return_lse=True)
    k, v = (np.nan_to_num(x, nan=1, posinf=1) for x in (k, v))
    expected, expected_lse = attention(q, k, v, mask_mod="j % 2", return_lse=True)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(out.astype(float), expected, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


@pytest.mark.parametrize("name", ["q", "params", "tile", "shared", "BIAS", "MASK", "Compute", "Differentiable", "aux"])
def test_an_array_may_have_any_name(name):
    """Names of variables, types and constants of the kernels."""
    q, k, v = inputs()
    table = np.random.default_rng(4).standard_normal((21, 33)).astype(np.float32)
    bias = np.zeros((1, 1), np.float32)
    options = {"score_mod": f"score + {name}[i * 33 + j] + x[0]", "aux": {name: table, "x": np.ones(1, np.float16)}}
    value, derivative = evaluate(attention_problem(q, k, v, **options), np.zeros(PAIRS))
    np.testing.assert_array_equal(value, np.broadcast_to(table.astype(float) + 1, PAIRS))
    assert (derivative == 1).all()
    if name in ("params", "MASK"):
        found = attention(q, k, v, bias=bias, mask=np.ones((1, 1), bool), **options)
        np.testing.assert_allclose(found.astype(float), attention(q, k, v, bias=table), atol=2e-3)


@pytest.mark.parametrize("dtype", "?bBhHiIqQefd")
def test_arrays_of_every_type(dtype):
    table = np.array([0, 1, 100, 3]).astype(dtype)
    value, _ = evaluate(problem_of(score_mod="score + x[j % 4]", aux={"x": table}), np.zeros(PAIRS))
    np.testing.assert_array_equal(value, np.broadcast_to(table.astype(float)[np.arange(33) % 4], PAIRS))


# The number type


OPERATIONS = {
    "+score - 2": lambda x: x - 2,
    "2.5 - score": lambda x: 2.5 - x,
    "-score + 1u": lambda x: 1 - x,
    "0.1 * score * 3": lambda x: 0.1 * x * 3,
    "score * score + score": lambda x: x * x + x,
    "score / 7": lambda x: x / 7,
    "3 / (score * score + 1)": lambda x: 3 / (x * x + 1),
    "(score + 1) / (2 + score * score)": lambda x: (x + 1) / (2 + x * x),
    "score > 0 ? score : 0.1f * score": lambda x: np.where(x > 0, x, np.float32(0.1).astype(float) * x),
    "score >= 1 ? 1 : score": lambda x: np.minimum(x, 1),
    "isnan(score) or score == 5 ? 0 : score": lambda x: x,
    "score < -1 && score <= -2 ? score : 2 * score": lambda x: np.where(x <= -2, x, 2 * x),
    "abs(score) + fabs(score - 1)": lambda x: abs(x) + abs(x - 1),
    "min(score, 0.3) + fmin(score, -score)": lambda x: np.minimum(x, 0.3) + np.minimum(x, -x),
    "max(score, 0.3) + fmax(2, score)": lambda x: np.maximum(x, 0.3) + np.maximum(2, x),
    "exp(score / 2)": lambda x: np.exp(x / 2),
    "log(score * score + 0.5)": lambda x: np.log(x * x + 0.5),
    "sqrt(score * score + 1)": lambda x: np.sqrt(x * x + 1),
    "tanh(score)": np.tanh,
    "sin(score) - cos(2 * score)": lambda x: np.sin(x) - np.cos(2 * x),
    "pow(score, 3) + pow(fabs(score) + 0.1, 1.5f)": lambda x: x**3 + (abs(x) + 0.1) ** 1.5,
    "pow(score, 0) + pow(score, 1)": lambda x: 1 + x,
}


@pytest.fixture(scope="module")
def scores():
    drawn = np.random.default_rng(3).standard_normal(PAIRS) * 2
    return np.where(abs(drawn % 0.1) < 1e-3, 0.55, drawn)  # away from all corners


@pytest.mark.parametrize("expression", OPERATIONS)
def test_values_and_derivatives(expression, scores):
    function = OPERATIONS[expression]
    value, derivative = evaluate(problem_of(score_mod=expression), scores)
    np.testing.assert_allclose(value, function(scores), rtol=1e-15, atol=4e-15)
    step = 1e-5
    difference = (function(scores + step) - function(scores - step)) / (2 * step)
    np.testing.assert_allclose(derivative, difference, rtol=1e-6, atol=1e-6)


def test_the_derivative_of_tanh_does_not_cancel():
    scores = np.broadcast_to(np.linspace(-18, 18, 33), PAIRS)
    _, derivative = evaluate(problem_of(score_mod="tanh(score)"), scores)
    np.testing.assert_allclose(derivative, 1 / np.cosh(scores) ** 2, rtol=2e-15)


def test_a_constant_does_not_make_nan_of_an_infinite_score():
    scores = np.full(PAIRS, np.inf)
    value, derivative = evaluate(problem_of(score_mod="2 * score / 4 + 1"), scores)
    assert (value == np.inf).all() and (derivative == 0.5).all()


def test_a_double_constant_is_rounded_to_the_kernels_type():
    """0.1 * score is a product of floats: the same bits as with 0.1f, and no float64 instruction."""
    q, k, v = inputs()
    with ptxsim.profile() as double:
        out = attention(q, k, v, score_mod="0.1 * score")
    with ptxsim.profile() as single:
        np.testing.assert_array_equal(out, attention(q, k, v, score_mod="0.1f * score"))
    assert double.kernels[0].instructions == single.kernels[0].instructions


# Errors


@pytest.mark.parametrize("expression", OPERATIONS)
def test_float32_arithmetic_is_within_the_running_error(expression, scores):
    """The same operations in NumPy's float32 from scores that err, against value and derivative in float64."""
    moved = scores * (1 + 1e-6)
    narrow = moved.astype(np.float32)
    allowed = abs(scores - narrow)
    problem = problem_of(score_mod=expression)
    value, derivative, value_error, derivative_error = evaluate_with_error(problem, scores, allowed)
    assert (abs(OPERATIONS[expression](narrow).astype(float) - value) <= value_error).all()
    assert (abs(evaluate(problem, narrow)[1] - derivative) <= derivative_error).all()
    # and a bound that says something
    assert value_error.max() < 1e-2 and derivative_error.max() < 1e-2


def test_a_division_by_a_constant_may_be_a_product_with_its_reciprocal():
    """So NVRTC 13.5 compiles it for sm_100 and later: up to 1.5 units of roundoff where a division has one."""
    scores = np.linspace(1, 2, np.prod(PAIRS)).astype(np.float32).reshape(PAIRS)
    problem = problem_of(score_mod="score / 1007.0f")
    value, _, error, _ = evaluate_with_error(problem, scores, np.zeros(PAIRS))
    product = (scores * np.float32(1 / 1007)).astype(float)
    assert (abs(product - value) <= error).all()
    assert (abs(product - value) > 2.0**-24 * abs(value)).any()


def test_a_comparison_within_the_error_covers_both_ways():
    scores = np.broadcast_to(np.where(np.arange(33) % 2, 1e-8, 1.0), PAIRS)
    problem = problem_of(score_mod="score > 0 ? score + 1 : 0.25 * score")
    _, _, value_error, derivative_error = evaluate_with_error(problem, scores, np.full(PAIRS, 1e-6))
    close = np.broadcast_to(np.arange(33) % 2 == 1, PAIRS)
    assert (value_error[close] >= 1).all() and (value_error[close] < 1.001).all()
    assert (derivative_error[close] >= 0.75).all() and (derivative_error[close] < 0.76).all()
    assert (value_error[~close] < 1e-5).all() and (derivative_error[~close] < 1e-5).all()
    exact = evaluate_with_error(problem, np.zeros(PAIRS), np.zeros(PAIRS))
    assert (exact[2] < 1e-30).all()


def test_no_bound_where_there_is_none():
    scores, error = np.full(PAIRS, 1e-3), np.full(PAIRS, 1e-2)
    for expression in "1 / score", "log(score)", "sqrt(score)", "pow(score, -1)", "exp(score * 1e6)":
        assert np.isinf(evaluate_with_error(problem_of(score_mod=expression), scores, error)[2]).all(), expression


def test_a_constant_is_rounded_once():
    error = evaluate_with_error(problem_of(score_mod="score + x[0]", aux={"x": np.array([0.1])}), np.zeros(PAIRS), 0.0)[
        2
    ]
    assert (error >= abs(np.float32(0.1) - 0.1)).all()
    wide = problem_of(np.float64, score_mod="score + 0.1")
    assert evaluate_with_error(wide, np.zeros(PAIRS), 0.0)[2].max() < 1e-16


def test_minus_infinity_is_exact():
    problem = problem_of(score_mod="j % 2 ? -INFINITY : score - INFINITY * (i > 3)")
    scores = np.ones(PAIRS)
    value, _, value_error, derivative_error = evaluate_with_error(problem, scores, np.full(PAIRS, 1e-6))
    removed = value == -np.inf
    assert removed.any() and (value_error[removed] == 0).all() and (derivative_error[removed] == 0).all()


def test_nan_is_a_constant_like_infinity():
    q, k, v = inputs()
    out, lse = attention(q, k, v, score_mod="i == 3 && j == 5 ? NAN : score", mask_mod="NAN != NAN", return_lse=True)
    expected = np.arange(21) == 3
    np.testing.assert_array_equal(np.isnan(lse), np.broadcast_to(expected, lse.shape))
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), np.isnan(lse))
    for expression in "i == 3 ? NAN : score", "i == 3 ? score * NAN : score":
        value, _, error, _ = evaluate_with_error(problem_of(score_mod=expression), np.ones(PAIRS), 0.0)
        np.testing.assert_array_equal(np.isnan(value), np.broadcast_to(expected[:, None], PAIRS))
        assert np.isfinite(error[..., :3, :]).all()


def test_masks_by_themselves():
    problem = problem_of(mask_mod="i >= j && b == 1 && h < 3", seqlens_q=np.array([21, 5]))
    b, h, i, j = np.ogrid[:2, :4, :21, :33]
    np.testing.assert_array_equal(evaluate_mask(problem), (i >= j) & (b == 1) & (h < 3) & (i < np.where(b, 5, 21)))


# Faulty expressions


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "score * nothing",
            r"score_mod: 'score \* nothing' is not.*\n.*\(1\): error: identifier \"nothing\" is undef.*\n.*\n +\^",
        ),
        ("score +\n  table", r"\(1\): error: no operator \"\+\" matches"),
        ("score *\n  nothing", r"\(2\): error: identifier \"nothing\" is undefined"),
        ("expf(score)", r"no suitable conversion function from .* to \"float\" exists"),
        ("float(score)", "score is not a plain number: as one it would lose its derivative"),
        ("(int)score", "score is not a plain number"),
        ("score ? 1 : 2", "score is not a plain number"),
        ("score && true ? 1 : 2", "score is not a plain number"),
        ("score.value", "inaccessible"),
        ("float x = score", "error: expected"),
        ("score; return 3", "error: expected"),
        ("(score", "error: expected"),
        ("score =", "error: expected an expression"),
        ("pow(score, score)", "no instance of overloaded function"),
    ],
)
def test_an_expression_that_does_not_compile(expression, message):
    q, k, v = inputs()
    out = np.full((2, 4, 21, 16), 3, np.float16)
    with pytest.raises(ValueError, match=message) as caught:
        attention(q, k[..., ::-1], v, score_mod=expression, aux={"table": np.zeros(3)}, out=out)
    assert repr(expression) in str(caught.value) and "note #" not in str(caught.value)
    assert (out == 3).all()


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1); } int x = (1", r"'\)' in .* closes nothing"),
        ("[i}", "'}' in .* closes nothing"),
        ("score /* ( */ )", r"'\)' in .* closes nothing"),
        ("score\n#define L 3", "'#' in .* is not a part of an expression"),
        ("score %> int x <%", "'%>' in"),
        ('score + "x"[0]', "'\"' in"),
        ("score \\", r"'\\\\' in"),
    ],
)
def test_what_would_not_be_one_expression(expression, message):
    with pytest.raises(ValueError, match=rf"score_mod: {message}"):
        problem_of(score_mod=expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("score + rel[i, j]", r"'rel\[i, j\]': arrays of aux are flat, as in C: rel\[i \* n \+ j\]$"),
        ("score + rel [h, min(i, j), j] * 2", r"'rel\[h, min\(i, j\), j\]': arrays"),
        ("score + rel[rel[0, 1]]", r"'rel\[0, 1\]'"),
        ("score + (rel)[i /* , */ , j]", r"'\[i   , j\]'"),
    ],
)
def test_a_comma_in_a_subscript(expression, message):
    """It would be C's operator, and rel[i, j] rel[j]."""
    with pytest.raises(ValueError, match=f"score_mod: {message}"):
        problem_of(score_mod=expression, aux={"rel": np.zeros(99, np.int32)})


def test_commas_elsewhere():
    expression = "score + x[min(i, 2)] + [i, h] { return [i, h] { return i + h; }(); }()"
    value, _ = evaluate(problem_of(score_mod=expression, aux={"x": np.arange(3.0)}), np.zeros(PAIRS))
    _, h, i, _ = np.ogrid[:2, :4, :21, :33]
    np.testing.assert_array_equal(value, np.broadcast_to(np.minimum(i, 2) + i + h, PAIRS))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_two_subscripts(dtype):
    with pytest.raises(ValueError, match=r"arrays of aux are flat, as in C: rel\[i \* n \+ j\]$"):
        attention(*inputs(), score_mod="score + rel[i][j]", aux={"rel": np.zeros((21, 33), dtype)})


def test_a_comment_and_a_lambda_are_parts_of_an_expression():
    expression = "score + [&] { int sum = 0; for (int n = 0; n < i; ++n) sum += n; return sum; }()  // triangular"
    value, _ = evaluate(problem_of(score_mod=expression), np.zeros(PAIRS))
    i = np.arange(21)[:, None]
    np.testing.assert_array_equal(value, np.broadcast_to(i * (i - 1) / 2, PAIRS))


def test_a_mask_has_no_score():
    with pytest.raises(ValueError, match=r'mask_mod: .*\n.*identifier "score" is undefined'):
        attention(*inputs(), mask_mod="score > 0")


def test_a_name_that_is_no_variable_in_cuda():
    with pytest.raises(ValueError, match="aux: 'int' cannot be the name of a variable in CUDA C"):
        attention(*inputs(), score_mod="score", aux={"a": np.zeros(1), "int": np.zeros(1)})


def test_aux_gets_no_gradient():
    q, k, v = inputs()
    out, pullback = attention_vjp(q, k, v, score_mod="score + x[0]", aux={"x": np.ones(1)})
    gradients = pullback(np.ones_like(out))
    assert not [name for name in vars(gradients) if "aux" in name]
    with pytest.raises(TypeError):
        attention_backward(out, q, k, v, out, out, score_mod="score + x[0]", aux={"x": np.ones(1)}, daux={})


def test_constant_arrays_are_taken_as_they_are():
    table = np.ones(3)
    assert checked_aux({"x": table}, inputs()[0], "numpy", with_expression=True)["x"] is table
