"""Optional arguments: what each call refuses before anything is launched, and what it makes of what it takes."""

import math
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import Gradients, _launch, naive
from cupyflash._gradients import backward_problem
from cupyflash._problem import attention_problem
from tests.test_problem import fake_cupy

SHAPE = (2, 4, 5, 7)  # of the scores


@pytest.fixture(autouse=True)
def nothing_launched():
    with mock.patch.object(_launch, "run", side_effect=AssertionError("launched")):
        yield


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def qkv(dtype=np.float16):
    return zeros(2, 4, 5, 8, dtype=dtype), zeros(2, 2, 7, 8, dtype=dtype), zeros(2, 2, 7, 6, dtype=dtype)


def accepted(dtype=np.float16, **options):
    return attention_problem(*qkv(dtype), **options)


def foreign(array):
    return array.astype(array.dtype.newbyteorder())


def misaligned(*shape, dtype):
    size = np.dtype(dtype).itemsize
    return np.zeros(math.prod(shape) * size + 1, np.uint8)[1:].view(dtype).reshape(shape)


def read_only(array):
    array.flags.writeable = False
    return array


ARRAYS = {  # of each optional array, one that fits
    "mask": lambda: np.ones(SHAPE, bool),
    "bias": lambda: zeros(*SHAPE),
    "alibi_slopes": lambda: zeros(2, 4),
    "attn_sink": lambda: zeros(2, 4),
    "seqlens_q": lambda: np.array([5, 3]),
    "seqlens_k": lambda: np.array([7, 0]),
}
FLOATS = "bias", "alibi_slopes", "attn_sink"

# Each: the options, the error, and what it says of argument, value and what is allowed.
REFUSALS = [
    ({"causal": 1}, TypeError, "causal: expected True or False, not 1"),
    ({"return_max": "yes"}, TypeError, "return_max: expected True or False, not 'yes'"),
    # window_size and align
    ({"window_size": 3}, TypeError, r"window_size: expected \(left, right\) or None, not 3"),
    ({"window_size": (1, 2, 3)}, TypeError, r"window_size: expected \(left, right\) or None, not \(1, 2, 3\)"),
    (
        {"window_size": np.array([1, 2])},
        TypeError,
        r"window_size: expected \(left, right\) or None, not numpy.ndarray of shape",
    ),
    ({"window_size": (-1, 0)}, ValueError, r"window_size: -1 in \(-1, 0\) is negative; None is an open side"),
    ({"window_size": (None, -1)}, ValueError, r"window_size: -1 in \(None, -1\) is negative; None is an open side"),
    ({"window_size": (1.0, 2)}, TypeError, r"window_size: expected whole numbers or None .* not \(1\.0, 2\)"),
    ({"window_size": (True, 2)}, TypeError, r"window_size: expected whole numbers or None .* not \(True, 2\)"),
    ({"window_size": (np.True_, 2)}, TypeError, r"window_size: expected whole numbers or None"),
    ({"align": "right"}, ValueError, "align: 'right' is not one of 'bottom-right', 'top-left', a whole number"),
    ({"window_size": (1, None)}, ValueError, r"align: a window with seqlen_q 5 and seqlen_k 7 needs .*around i \+ 2"),
    ({"causal": True}, ValueError, r"align: a causal mask with seqlen_q 5 and seqlen_k 7 needs .* i \+ 2.*'top-left'"),
    ({"alibi_slopes": zeros(4)}, ValueError, r"align: ALiBi with seqlen_q 5 and seqlen_k 7 needs .*\|i \+ 2 - j\|"),
    # softcap
    ({"softcap": 0}, ValueError, r"softcap: 0 is not between 1\.18e-38 and 8\.51e\+37, where float32"),
    ({"softcap": -5.0}, ValueError, r"softcap: -5\.0 is not between .*; None is no cap"),
    ({"softcap": 1e38}, ValueError, r"softcap: 1e\+38 is not between"),
    ({"softcap": math.inf}, ValueError, "softcap: inf is not finite"),
    ({"softcap": math.nan}, ValueError, "softcap: nan is not finite"),
    ({"softcap": "30"}, TypeError, "softcap: expected a positive number or None, not '30'"),
    ({"softcap": True}, TypeError, "softcap: expected a positive number or None, not True"),
    ({"softcap": np.ones(1)}, TypeError, "softcap: expected a positive number or None, not numpy.ndarray of shape"),
    # dropout
    ({"dropout_p": 0.1}, ValueError, r"seed: None, but dropout_p is 0\.1; expected a whole number from 0 to 2\*\*64"),
    ({"dropout_p": 1.0, "seed": 0}, ValueError, r"dropout_p: 1\.0 is not at least 0 and, rounded .* less than 1"),
    ({"dropout_p": 1 - 2.0**-34, "seed": 0}, ValueError, "dropout_p: 0.99999.* is not at least 0 and, rounded"),
    ({"dropout_p": -0.1, "seed": 0}, ValueError, r"dropout_p: -0\.1 is not at least 0"),
    ({"dropout_p": math.nan, "seed": 0}, ValueError, "dropout_p: nan is not finite"),
    ({"dropout_p": None}, TypeError, "dropout_p: expected a number from 0 to less than 1, not None"),
    ({"dropout_p": False}, TypeError, "dropout_p: expected a number from 0 to less than 1, not False"),
    ({"seed": -1}, ValueError, r"seed: -1 is not between 0 and 2\*\*64 - 1"),
    ({"seed": 2**64}, ValueError, r"seed: 18446744073709551616 is not between 0 and 2\*\*64 - 1"),
    ({"seed": 1.0}, TypeError, r"seed: expected a whole number from 0 to 2\*\*64 - 1, not 1\.0"),
    ({"seed": True}, TypeError, r"seed: expected a whole number .* not True"),
    (
        {"causal": True},
        ValueError,
        r"align: .*seqlen_q 5 and seqlen_k 7 .*query i sees keys j <= i \+ 2: .* a whole num",
    ),
    # origin
    ({"origin": 3}, TypeError, r"origin: expected \(batch, head, query, key\), not 3"),
    ({"origin": (0, 0, 1)}, TypeError, r"origin: expected \(batch, head, query, key\), not \(0, 0, 1\)"),
    ({"origin": (0, 0, 1, 2.0)}, TypeError, r"origin: expected whole numbers, not \(0, 0, 1, 2\.0\)"),
    ({"origin": (0, True, 1, 2)}, TypeError, r"origin: expected whole numbers, not \(0, True, 1, 2\)"),
    ({"origin": (0, 0, -1, 0)}, ValueError, r"origin: -1 in \(0, 0, -1, 0\) is not between 0 and 2147483642"),
    ({"origin": (0, 0, 0, 2**31)}, ValueError, r"origin: 2147483648 in .* is not between 0 and 2147483640"),
    # expressions
    (
        {"score_mod": lambda score: score},
        TypeError,
        r"score_mod: expected a C\+\+ expression as a str, or None, not <f",
    ),
    ({"mask_mod": True}, TypeError, r"mask_mod: expected a C\+\+ expression as a str, a BlockMask or None, not True"),
    ({"score_mod": " "}, ValueError, r"score_mod: ' ' is not a C\+\+ expression in ASCII characters"),
    ({"mask_mod": "i ≥ j"}, ValueError, r"mask_mod: 'i ≥ j' is not a C\+\+ expression in ASCII characters"),
    ({"mask_mod": "i\0"}, ValueError, r"mask_mod: .* is not a C\+\+ expression in ASCII characters"),
    ({"aux": {"x": zeros(3)}}, ValueError, r"aux: \['x'\] given, but neither score_mod nor mask_mod"),
    ({"aux": [zeros(3)], "mask_mod": "i"}, TypeError, "aux: expected a mapping of names to arrays, or None, not list"),
    ({"aux": {"x y": zeros(3)}, "mask_mod": "i"}, ValueError, "aux: 'x y' is not a name in ASCII letters"),
    ({"aux": {"ä": zeros(3)}, "mask_mod": "i"}, ValueError, "aux: 'ä' is not a name in ASCII letters"),
    ({"aux": {3: zeros(3)}, "mask_mod": "i"}, ValueError, "aux: 3 is not a name in ASCII letters"),
    ({"aux": {"S": zeros(3)}, "mask_mod": "i"}, ValueError, "aux: 'S' is one of score, b, h, i, j, L, S, which mean"),
    ({"aux": {"x": 1.0}, "score_mod": "score"}, TypeError, r"aux\['x'\]: expected a numpy.ndarray .* not float"),
    ({"aux": {"x": zeros(3, dtype=complex)}, "mask_mod": "i"}, TypeError, r"aux\['x'\]: dtype <c16 is not bool, an i"),
    ({"aux": {"x": foreign(zeros(3))}, "mask_mod": "i"}, TypeError, r"aux\['x'\]: dtype >f2 is not bool, an integer"),
    ({"aux": {"x": zeros(3, dtype=ml_dtypes.float8_e5m2)}, "mask_mod": "i"}, TypeError, r"aux\['x'\]: dtype <f1 is"),
    ({"aux": {"x": zeros(4, 4).T[1:]}, "mask_mod": "i"}, ValueError, r"aux\['x'\]: is not C-contiguous.* \(3, 4\)"),
    ({"aux": {"x": misaligned(3, dtype=float)}, "mask_mod": "i"}, ValueError, r"aux\['x'\]: its elements do not lie"),
    # split_size, numerics
    ({"split_size": 100}, ValueError, "split_size: 100 is not a positive multiple of 128"),
    ({"split_size": 0}, ValueError, "split_size: 0 is not a positive multiple of 128"),
    ({"split_size": -128}, ValueError, "split_size: -128 is not a positive multiple of 128"),
    ({"split_size": 128.0}, TypeError, r"split_size: expected a positive multiple of 128 or None, not 128\.0"),
    ({"split_size": True}, TypeError, "split_size: expected a positive multiple of 128 or None, not True"),
    ({"numerics": "fast"}, TypeError, "numerics: expected a cupyflash.Numerics or None, not 'fast'"),
    ({"numerics": {"exp": "poly3"}}, TypeError, "numerics: expected a cupyflash.Numerics or None, not {"),
    # dtypes and shapes of arrays
    ({"mask": zeros(*SHAPE)}, TypeError, r"mask: dtype float16, expected bool \(True = attend\)"),
    ({"mask": zeros(*SHAPE, dtype=np.uint8)}, TypeError, "mask: dtype uint8, expected bool"),
    ({"mask": np.ones((3, 7), bool)}, ValueError, r"mask: shape \(3, 7\) does not broadcast to \(2, 4, 5, 7\)"),
    ({"mask": np.ones((3, 1, 1, 5, 7), bool)}, ValueError, r"mask: shape \(3, 1, 1, 5, 7\) does not broadcast to \(2"),
    ({"mask": np.ones((1, *SHAPE), bool)}, ValueError, r"mask: shape \(1, 2, 4, 5, 7\) does not broadcast to \(2"),
    ({"mask": np.ones((2, 2, 5, 7), bool)}, ValueError, r"mask: shape \(2, 2, 5, 7\) does not broadcast"),
    ({"bias": zeros(5, 0)}, ValueError, r"bias: shape \(5, 0\) does not broadcast to \(2, 4, 5, 7\)"),
    ({"alibi_slopes": zeros(2, 4, 1)}, ValueError, "align: ALiBi"),
    ({"alibi_slopes": zeros(3), "align": "top-left"}, ValueError, r"alibi_slopes: shape \(3,\) .* to \(2, 4\)"),
    ({"attn_sink": zeros(2)}, ValueError, r"attn_sink: shape \(2,\) does not broadcast to \(2, 4\)"),
    ({"seqlens_q": np.array([1, 2, 3])}, ValueError, r"seqlens_q: shape \(3,\) does not broadcast to \(2,\)"),
    ({"seqlens_k": np.ones((2, 4), int)}, ValueError, r"seqlens_k: shape \(2, 4\) does not broadcast to \(2,\)"),
    # lengths
    ({"seqlens_q": np.array([1.0, 2.0])}, TypeError, "seqlens_q: dtype <f8, expected int32 or int64"),
    ({"seqlens_k": np.array([1, 2], np.uint32)}, TypeError, "seqlens_k: dtype <u4, expected int32 or int64"),
    ({"seqlens_q": np.array([1, 6])}, ValueError, "seqlens_q: 6 at index 1 is not between 0 and 5"),
    ({"seqlens_k": np.array([-1, 6])}, ValueError, "seqlens_k: -1 at index 0 is not between 0 and 7"),
    ({"seqlens_k": np.array(2**32 + 1)}, ValueError, r"seqlens_k: 4294967297 at index \(\) is not between 0 and 7"),
    ({"seqlens_q": np.array([5, 5]), "causal": True}, ValueError, "align: a causal mask with seqlens_q or seqlens_k"),
    ({"block": 3}, TypeError, "block.*"),
]


@pytest.mark.parametrize(("options", "error", "match"), REFUSALS)
def test_refusals(options, error, match):
    with pytest.raises(error, match=f"^{match}"):
        attention_problem(*qkv(), **options)
    with pytest.raises(error, match=match):
        cupyflash.attention(*qkv(), **options)


def results():
    return zeros(2, 4, 5, 6), *qkv(), zeros(2, 4, 5, 6), zeros(2, 4, 5, dtype=np.float32)


@pytest.mark.parametrize(("options", "error", "match"), REFUSALS)
def test_a_backward_call_refuses_the_same(options, error, match):
    if "return_max" in options:
        match = "return_max: 'yes' is for the forward; a backward call returns gradients"
    with pytest.raises(error, match=f"^{match}"):
        cupyflash.attention_backward(*results(), **options)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ARRAYS)
def test_things_that_are_not_arrays(name):
    def refused(value, match):
        with pytest.raises(TypeError, match=f"{name}: {match}"):
            accepted(align="top-left", **{name: value})

    right = ARRAYS[name]()
    refused(right.tolist(), "expected a numpy.ndarray or a cupy.ndarray, not list")
    refused(1, "expected .* not int")
    refused(np.ma.masked_array(right), "numpy.ma.* is not supported; use a plain numpy.ndarray")
    refused(np.matrix(right.reshape(-1, right.shape[-1])), ".*matrix is not supported")
    refused(fake_cupy(*right.shape, dtype=right.dtype), "cupy array, but q is a numpy array; one call takes one kind")


@pytest.mark.parametrize("name", [*ARRAYS, "aux"])
def test_arrays_of_another_kind_or_device(name):
    right = ARRAYS.get(name, ARRAYS["bias"])()
    q, k, v = (fake_cupy(*x.shape, address=0x7F0000000000 + i * 2**20) for i, x in enumerate(qkv()))

    def call(array):
        options = {"aux": {"x": array}, "mask_mod": "i"} if name == "aux" else {name: array}
        attention_problem(q, k, v, align="top-left", **options)

    label = r"aux\['x'\]" if name == "aux" else name
    with pytest.raises(TypeError, match=f"{label}: numpy array, but q is a cupy array; one call takes one kind"):
        call(right)
    with pytest.raises(ValueError, match=f"{label}: on device 1, but q is on device 0"):
        call(fake_cupy(*right.shape, dtype=right.dtype, device_id=1))
    if not name.startswith("seqlens"):  # those would be read
        call(fake_cupy(*right.shape, dtype=right.dtype))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_of_float_arrays(name, dtype):
    """The inputs' own, float32 and float64."""
    right = ARRAYS[name]()
    for other in np.float16, ml_dtypes.bfloat16, np.float32, np.float64:
        options = {"align": "top-left", name: right.astype(other)}
        if other in (dtype, np.float32, np.float64):
            assert accepted(dtype, **options).operands[name].dtype == other
        else:
            allowed = ", ".join(dict.fromkeys(str(np.dtype(d)) for d in (dtype, np.float32, np.float64)))
            with pytest.raises(TypeError, match=f"{name}: dtype {np.dtype(other)} is not one of {allowed}$"):
                accepted(dtype, **options)
    for other in np.int32, np.complex64, np.dtype([]), "U3":
        with pytest.raises(TypeError, match=f"{name}: dtype .* is not one of"):
            accepted(dtype, align="top-left", **{name: np.empty(right.shape, other)})


@pytest.mark.parametrize("name", [*FLOATS, "seqlens_q", "seqlens_k"])
def test_foreign_byte_order_and_elements_between_addresses(name):
    right = ARRAYS[name]()
    match = "foreign byte order" if name in FLOATS else "expected int32 or int64"
    with pytest.raises(TypeError, match=f"{name}: dtype >.*{match}"):
        accepted(align="top-left", **{name: foreign(right)})
    with pytest.raises(ValueError, match=f"{name}: its elements do not lie at multiples of their {right.itemsize} by"):
        accepted(align="top-left", **{name: misaligned(*right.shape, dtype=right.dtype)})


@pytest.mark.parametrize("name", [*ARRAYS, "aux"])
def test_results_that_overlap_an_option(name):
    """Neither out nor a gradient may lie over what is still to be read."""
    right = ARRAYS.get(name, ARRAYS["bias"])()
    memory = np.zeros(1 << 12, np.uint8)
    shared = memory[: right.nbytes].view(right.dtype).reshape(right.shape)
    label = r"aux\['x'\]" if name == "aux" else name
    options = {"aux": {"x": shared}, "mask_mod": "i"} if name == "aux" else {name: shared}
    options["align"] = "top-left"
    for first, overlaps in (right.nbytes - 2, True), ((right.nbytes + 15) // 16 * 16, False):
        out = memory[first : first + 480].view(np.float16).reshape(2, 4, 5, 6)
        dk = memory[first : first + 448].view(np.float16).reshape(2, 2, 7, 8)
        if overlaps:
            with pytest.raises(ValueError, match=f"^out: overlaps {label} in memory"):
                accepted(out=out, **options)
            with pytest.raises(ValueError, match=f"^dk: overlaps {label} in memory"):
                backward_problem(*results(), grads_out=(None, dk, None), **options)
        else:
            accepted(out=out, **options)
            backward_problem(*results(), grads_out=(None, dk, None), **options)


# Gradients of options


def test_gradients_of_options_are_written_where_they_are_asked_for():
    bias, slopes = zeros(7, dtype=np.float32), zeros(4)
    options = {"bias": bias, "alibi_slopes": slopes, "align": "top-left"}
    given = Gradients(dv=zeros(2, 2, 7, 6), dbias=zeros(7, dtype=np.float32))
    _, targets = backward_problem(*results(), grads_out=given, **options)
    assert targets is given and list(targets) == [None, None, given.dv]

    def refused(error, match, **gradients):
        with pytest.raises(error, match=match):
            backward_problem(*results(), grads_out=Gradients(**gradients), **options)

    refused(TypeError, "dbias: dtype <f2, expected float32", dbias=zeros(7))
    refused(ValueError, r"dbias: shape \(1, 7\), expected \(7,\)", dbias=zeros(1, 7, dtype=np.float32))
    refused(ValueError, r"dalibi_slopes: shape \(2, 4\), expected \(4,\)", dalibi_slopes=zeros(2, 4))
    refused(ValueError, "dattn_sink: an array in grads_out, but the call has no attn_sink", dattn_sink=zeros(4))
    refused(ValueError, "dbias: overlaps bias in memory", dbias=bias)
    refused(ValueError, "dalibi_slopes: is read-only", dalibi_slopes=read_only(zeros(4)))
    shared = zeros(7, dtype=np.float32)
    refused(ValueError, "dalibi_slopes: overlaps dbias in memory", dbias=shared, dalibi_slopes=shared[:2].view("f2"))


def test_what_says_what_a_forward_call_returns_is_no_option_of_a_backward_call():
    for name in "return_lse", "return_max":
        with pytest.raises(TypeError, match=f"{name}: True is for the forward"):
            backward_problem(*results(), **{name: True})
    with pytest.raises(TypeError, match="out: attention_vjp makes the array"):
        cupyflash.attention_vjp(*qkv(), out=zeros(2, 4, 5, 6))
    with pytest.raises(TypeError, match="window: is not an option of attention; those are softmax_scale, causal, wind"):
        backward_problem(*results(), window=(1, 1))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mask_mod", ".* a BlockMask or None, .*; use mask= for an array"),
        ("score_mod", ".*; bias= adds an array to the scores"),
        *((name, "") for name in ("causal", "align", "window_size", "softcap", "softmax_scale", "dropout_p", "seed")),
        ("origin", ""),
        *((name, "") for name in ("split_size", "numerics", "return_lse")),
    ],
)
def test_an_array_that_is_not_expected_is_not_printed(name, hint):
    before, _, after = hint.partition(" None, ")
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {before}") as caught:
        cupyflash.attention(*qkv(), **{name: np.ones((5, 6))})
    said = str(caught.value)
    assert "numpy.ndarray of shape (5, 6), dtype float64" in said and "1." not in said
    assert said.endswith(after.removeprefix(".*")) and len(said.splitlines()) == 1


def test_naive_takes_three_options():
    for name, value in ("window_size", (1, 1)), ("mask", np.ones(7, bool)), ("dropout_p", 0.0), ("numerics", None):
        with pytest.raises(TypeError, match=f"'{name}'"):
            naive.attention(*qkv(), **{name: value})
        with pytest.raises(TypeError, match=f"'{name}'"):
            naive.attention_backward(*results(), **{name: value})
