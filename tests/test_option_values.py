"""What is made of optional arguments: windows, numbers, lengths, layouts, choices."""

import math
from unittest import mock

import cupy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import Numerics, _lengths
from cupyflash._problem import attention_problem
from tests.test_options import accepted, zeros


@pytest.mark.parametrize(
    ("options", "window", "causal_shift"),
    [
        ({}, (None, None), 0),
        ({"window_size": (None, None)}, (None, None), 0),
        ({"window_size": (None, None), "causal": True, "align": "top-left"}, (None, 0), 0),
        ({"window_size": [np.int8(1), 2], "align": "top-left"}, (1, 2), 2),
        ({"window_size": (1, 2), "align": "bottom-right"}, (1, 2), 4),
        ({"window_size": (0, 3), "causal": True, "align": "bottom-right"}, (0, 0), 2),
        # A side that no key is beyond is open. Query 4 is 4 to the right of key 0, or 6; key 6 is 6 from query 0, or 4.
        ({"window_size": (4, 6), "align": "top-left"}, (4, 6), 6),
        ({"window_size": (5, 7), "align": "top-left"}, (None, None), 0),
        ({"window_size": (6, 4), "align": "bottom-right"}, (6, 4), 6),
        ({"window_size": (7, 5), "align": "bottom-right"}, (None, None), 2),
        ({"window_size": (2**40, 2**70), "align": "top-left"}, (None, None), 0),
    ],
)
def test_windows(options, window, causal_shift):
    problem = accepted(**options)
    assert problem.window == window and problem.causal == (window[1] is not None)
    assert problem.causal_shift == causal_shift


@given(
    seqlens=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    window=st.tuples(*[st.none() | st.integers(0, 8)] * 2),
    align=st.sampled_from(["bottom-right", "top-left"]),
    causal=st.booleans(),
)
def test_an_open_side_hides_nothing(seqlens, window, align, causal):
    """The same pairs are seen with the window as it is given and as it is kept."""
    problem = attention_problem(
        zeros(seqlens[0], 8), *[zeros(seqlens[1], 8)] * 2, window_size=window, align=align, causal=causal
    )
    position = np.arange(seqlens[1]) - np.arange(seqlens[0])[:, None] - problem.shift

    def seen(left, right):
        return (position >= (-math.inf if left is None else -left)) & (
            position <= (math.inf if right is None else right)
        )

    left, right = window
    right = min(math.inf if right is None else right, 0) if causal else right
    assert (seen(*problem.window) == seen(left, right)).all()
    if problem.causal:
        assert problem.window[1] + problem.shift == problem.causal_shift <= seqlens[1]  # no overflow


def test_align_is_needed_only_where_it_matters():
    x = zeros(5, 8)
    attention_problem(x, x, x, window_size=(1, 1), causal=True, alibi_slopes=zeros())
    accepted(window_size=(None, None), seqlens_q=np.array([1, 2]), mask=np.ones(7, bool))
    for options in {"causal": True}, {"window_size": (1, None)}, {"alibi_slopes": zeros()}:
        with pytest.raises(ValueError, match=r"align: .* with seqlens_q or seqlens_k needs"):
            attention_problem(x, x, x, seqlens_k=np.array(5), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"causal": True}, r"sees keys j <= i - 3: .*sees keys j <= i\)"),
        ({"window_size": (1, None)}, r"sees keys around i - 3: .*sees keys around i\)"),
        ({"alibi_slopes": np.zeros((), np.float16)}, r"is at distance \|i - 3 - j\| of key j: .*\|i - j\|"),
    ],
)
def test_what_alignments_would_mean_is_said(options, said):
    with pytest.raises(ValueError, match=rf"^align: .* \(query i {said}.* and a whole number"):
        attention_problem(zeros(8, 4), zeros(5, 4), zeros(5, 4), **options)


def test_numbers_are_kept_as_python_has_them():
    problem = accepted(
        softcap=np.float32(30), dropout_p=np.float16(0.5), seed=np.uint64(2**64 - 1), split_size=np.int16(256)
    )
    kept = problem.softcap, problem.dropout_p, problem.seed, problem.split_size
    assert kept == (30.0, 0.5, 2**64 - 1, 256) and [type(x) for x in kept] == [float, float, int, int]
    origin = accepted(origin=[np.int64(1), 2, np.uint8(3), 4]).origin
    assert origin == (1, 2, 3, 4) and {type(x) for x in origin} == {int}
    assert accepted(dropout_p=0, seed=None).seed == 0 and accepted(seed=5).seed == 5
    assert accepted(numerics=Numerics(exp="poly3")).numerics.exp == "poly3" and accepted().numerics == Numerics()
    assert accepted(np.float64, softcap=1e300).softcap == 1e300


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_are_copied(dtype):
    lengths = np.array([3, 5], dtype)
    problem = accepted(seqlens_q=lengths, seqlens_k=np.array(7, dtype))
    lengths[:] = 0
    kept = problem.operands["seqlens_q"]
    assert kept.dtype == np.int32 and kept.tolist() == [3, 5] and problem.operands["seqlens_k"].shape == ()
    assert problem.layouts["seqlens_q"].batch_strides == (1, 0, 0)  # (2, num_kv_heads, group)
    assert problem.layouts["seqlens_k"].batch_strides == (0, 0, 0)


def element(array, strides, index):
    """As a kernel finds it: so many elements from the first."""
    memory = array
    while memory.base is not None:
        memory = memory.base
    first = (array.ctypes.data - memory.ctypes.data) // array.itemsize
    return memory.ravel()[first + sum(stride * i for stride, i in zip(strides, index, strict=True))]


@st.composite
def broadcast_of(draw, target):
    """An array that broadcasts to a shape: dimensions left out, of length 1, reversed, stepped or transposed."""
    shape = [draw(st.sampled_from([size, 1])) for size in target[draw(st.integers(0, len(target))) :]]
    order = draw(st.permutations(range(len(shape))))
    memory = np.arange(math.prod(shape) * 3 ** len(shape), dtype=np.float32)
    array = memory.reshape([3 * shape[axis] for axis in order]).transpose(np.argsort(order).tolist())
    steps = [draw(st.sampled_from([1, 2, 3, -1, -3])) for _ in shape]
    array = array[(..., *(slice(None, None, step) for step in steps))]
    return array[(..., *(slice(size) for size in shape))]


@given(data=st.data(), leading=st.sampled_from([(), (3,), (2, 4), (1, 2, 4), (2, 0)]), grouped=st.booleans())
def test_layouts_address_what_is_broadcast(data, leading, grouped):
    num_kv_heads = 2 if grouped and len(leading) > 1 else 1
    q, k = zeros(*leading, 3, 8), zeros(*leading[:-1], num_kv_heads, 4, 8)
    bias = data.draw(broadcast_of((*leading, 3, 4)))
    sinks = data.draw(broadcast_of(leading))
    problem = attention_problem(q, k, k, bias=bias, attn_sink=sinks)
    assert problem.leading_shape == (leading or (1,)), (leading, problem.leading_shape)
    wide_bias = np.broadcast_to(bias, (*problem.leading_shape, 3, 4))
    wide_sinks = np.broadcast_to(sinks, problem.leading_shape)
    for number, index in enumerate(np.ndindex(*problem.batch_shape)):
        head = np.unravel_index(number, problem.leading_shape)
        layout = problem.layouts["attn_sink"]
        assert element(sinks, layout.batch_strides, index) == wide_sinks[head]
        assert (layout.row_stride, layout.column_stride) == (0, 0)
        layout = problem.layouts["bias"]
        strides = (*layout.batch_strides, layout.row_stride, layout.column_stride)
        for i, j in np.ndindex(3, 4):
            assert element(bias, strides, (*index, i, j)) == wide_bias[(*head, i, j)]


@given(data=st.data(), leading=st.lists(st.integers(0, 3), max_size=3).map(tuple))
def test_an_array_is_taken_if_it_broadcasts(data, leading):
    target = (*leading, 3, 4)
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=6)))
    try:
        fits = np.broadcast_shapes(shape, target) == target
    except ValueError:
        fits = False
    q, k = zeros(*leading, 3, 8), zeros(*leading, 4, 8)
    if fits:
        assert attention_problem(q, k, k, mask=np.ones(shape, bool)).out_shape == (*leading, 3, 8)
    else:
        with pytest.raises(ValueError, match=r"mask: shape .* does not broadcast to"):
            attention_problem(q, k, k, mask=np.ones(shape, bool))


class DeviceArray:
    """Integers on a GPU, which counts what is copied from it."""

    reads = 0
    device = mock.MagicMock()

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape, self.ndim, self.size = self.array.shape, self.array.ndim, self.array.size

    def __len__(self):
        return len(self.array)

    def astype(self, dtype):
        return DeviceArray(self.array.astype(dtype))

    def ravel(self):
        return DeviceArray(self.array.ravel())

    def get(self):
        DeviceArray.reads += 1
        return self.array


def test_a_gpu_is_read_once(monkeypatch):
    monkeypatch.setattr(cupy, "concatenate", lambda arrays: DeviceArray(np.concatenate([x.array for x in arrays])))
    monkeypatch.setattr(DeviceArray, "reads", 0)
    given = np.arange(6, dtype=np.int32).reshape(2, 3), np.array(7), np.zeros((0, 2), np.int32), np.array([8, 9])
    read = _lengths.on_host("cupy", *map(DeviceArray, given))
    assert DeviceArray.reads == 1
    for a, b in zip(given, read, strict=True):
        np.testing.assert_array_equal(a, b)
    assert _lengths.on_host("cupy") == [] and DeviceArray.reads == 1


# Numerics


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"p_dtype": "float16"}, ValueError, "p_dtype: 'float16' is not one of 'input', 'float32'"),
        ({"p_dtype": None}, ValueError, "p_dtype: None is not one of"),
        ({"exp": "exp2"}, ValueError, "exp: 'exp2' is not one of 'ex2.approx', 'poly3', 'poly5', 'accurate'"),
        ({"exp": np.array(["poly3"])}, ValueError, r"exp: numpy.ndarray of shape \(1,\), dtype <U5 is not one of"),
        ({"rescale_threshold": 4}, ValueError, r"rescale_threshold: 4 is not one of 0\.0, 8\.0"),
        ({"rescale_threshold": True}, TypeError, "rescale_threshold: expected 0 or 8, not True"),
        ({"rescale_threshold": None}, TypeError, "rescale_threshold: expected 0 or 8, not None"),
        ({"accumulate": "three-level"}, ValueError, "accumulate: 'three-level' is not one of None, 'one-level', 'two"),
        ({"tile": 64}, TypeError, r"tile: expected \(block_m, block_n\) or None, not 64"),
        ({"tile": (64, 64, 64)}, TypeError, r"tile: expected \(block_m, block_n\) or None, not \(64, 64, 64\)"),
        ({"tile": (64, 64.0)}, TypeError, r"tile: expected \(block_m, block_n\), both whole numbers"),
        ({"tile": (64, 12)}, ValueError, r"tile: 12 in \(64, 12\) is not a positive multiple of 8"),
        ({"tile": (0, 64)}, ValueError, r"tile: 0 in \(0, 64\) is not a positive multiple of 8"),
    ],
)
def test_choices_that_there_are_not(fields, error, match):
    with pytest.raises(error, match=f"^{match}"):
        Numerics(**fields)


def test_choices_can_be_compared_and_be_keys():
    assert Numerics(tile=[64, np.int64(32)], rescale_threshold=8) == Numerics(tile=(64, 32), rescale_threshold=8.0)
    assert len({Numerics(), Numerics(exp="ex2.approx"), Numerics(exp="poly3")}) == 2
