"""Packed batches: what is refused before anything is launched, where sequences lie, and rows that belong to none."""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from cupyflash import Gradients, _launch, _plan
from cupyflash._problem import varlen_problem
from tests.test_option_values import DeviceArray
from tests.test_options import foreign, misaligned
from tests.test_problem import fake_cupy

OFFSETS_Q, OFFSETS_K = np.array([0, 3, 3, 9]), np.array([0, 5, 7, 11], np.int32)


@pytest.fixture(autouse=True)
def nothing_launched():
    with mock.patch.object(_launch, "run", side_effect=AssertionError("launched")):
        yield


def arguments(dtype=np.float16, **changes):
    """Of a call that is right, but for the changes."""
    arrays = {
        "q": np.zeros((10, 6, 8), dtype),
        "k": np.zeros((12, 3, 8), dtype),
        "v": np.zeros((12, 3, 4), dtype),
        "cu_seqlens_q": OFFSETS_Q,
        "cu_seqlens_k": OFFSETS_K,
    }
    return {**arrays, **changes}


def results(dtype=np.float16):
    rows = np.float64 if dtype == np.float64 else np.float32
    return {"dout": np.ones((10, 6, 4), dtype), "out": np.ones((10, 6, 4), dtype), "lse": np.ones((6, 10), rows)}


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


REFUSALS = [
    # q, k, v
    ({"q": zeros(10, 8)}, ValueError, r"q: needs 3 dimensions \(total, heads, head_dim\), but has shape \(10, 8\)"),
    ({"v": zeros(1, 12, 3, 4)}, ValueError, r"v: needs 3 dimensions .* \(1, 12, 3, 4\)"),
    ({"k": zeros(12, 4, 8)}, ValueError, r"v: 3 heads, but k has 4; q \(10, 6, 8\), k \(12, 4, 8\), v \(12, 3, 4\)"),
    ({"k": zeros(11, 3, 8)}, ValueError, r"v: 12 rows, but k has 11; q \(10, 6, 8\), k \(11, 3, 8\)"),
    ({"q": zeros(10, 7, 8)}, ValueError, "k: 3 heads, but q's 7 are not a multiple of them; q "),
    ({"q": zeros(10, 1, 8)}, ValueError, "k: 3 heads, but q's 1 are not a multiple of them"),
    ({"k": zeros(12, 0, 8), "v": zeros(12, 0, 4)}, ValueError, "k: 0 heads, but q's 6 are not a multiple of them"),
    ({"k": zeros(12, 3, 7)}, ValueError, "k: head_dim 7, but q has 8; q "),
    ({"v": zeros(12, 3, 257)}, ValueError, "v: head_dim_v 257 is not between 1 and 256; q "),
    ({"k": zeros(12, 3, 8, dtype=np.float32)}, TypeError, "k: dtype float32, but q has float16"),
    ({"q": [[[1.0]]]}, TypeError, "q: expected a numpy.ndarray or a cupy.ndarray, not list"),
    ({"v": fake_cupy(12, 3, 4)}, TypeError, "v: cupy array, but q is a numpy array"),
    ({"k": misaligned(12, 3, 8, dtype=np.float16)}, ValueError, "k: its elements do not lie at multiples of their 2"),
    # offsets
    ({"cu_seqlens_q": [0, 3, 3, 9]}, TypeError, "cu_seqlens_q: expected a numpy.ndarray .* not list"),
    ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k: expected a numpy.ndarray .* not NoneType"),
    ({"cu_seqlens_k": fake_cupy(4, dtype=np.int32)}, TypeError, "cu_seqlens_k: cupy array, but q is a numpy array"),
    ({"cu_seqlens_q": OFFSETS_Q.astype(float)}, TypeError, "cu_seqlens_q: dtype <f8, expected int32 or int64"),
    ({"cu_seqlens_q": OFFSETS_Q.astype(np.uint32)}, TypeError, "cu_seqlens_q: dtype <u4, expected int32 or int64"),
    ({"cu_seqlens_k": foreign(OFFSETS_K)}, TypeError, "cu_seqlens_k: dtype >i4, expected int32 or int64"),
    ({"cu_seqlens_k": misaligned(4, dtype=np.int64)}, ValueError, "cu_seqlens_k: its elements do not lie at multipl"),
    ({"cu_seqlens_q": OFFSETS_Q[None]}, ValueError, r"cu_seqlens_q: shape \(1, 4\), expected \(number of sequences"),
    ({"cu_seqlens_q": OFFSETS_Q[:0]}, ValueError, r"cu_seqlens_q: shape \(0,\), expected \(number of sequences \+ 1"),
    ({"cu_seqlens_q": np.array(0)}, ValueError, r"cu_seqlens_q: shape \(\), expected"),
    ({"cu_seqlens_k": OFFSETS_K[:3]}, ValueError, "cu_seqlens_k: 3 offsets, but cu_seqlens_q has 4"),
    ({"cu_seqlens_q": OFFSETS_Q + 1}, ValueError, "cu_seqlens_q: starts at 1, expected 0"),
    ({"cu_seqlens_q": np.array([0, 5, 4, 9])}, ValueError, "cu_seqlens_q: 5 at index 1 and then 4; offsets must not"),
    ({"cu_seqlens_q": np.array([0, 5, 9, 11])}, ValueError, "cu_seqlens_q: 11 at index 3 is not between 0 and 10"),
    ({"cu_seqlens_k": np.array([0, 13, 9, 9])}, ValueError, "cu_seqlens_k: 13 at index 1 is not between 0 and 12"),
    ({"cu_seqlens_q": np.array([0, -1, 9, 9])}, ValueError, "cu_seqlens_q: -1 at index 1 is not between 0 and 10"),
    # differences that wrap around
    ({"cu_seqlens_k": np.array([0, 2**63 - 1, -5, 3])}, ValueError, "cu_seqlens_k: 9223372036854775807 at index 1"),
    ({"cu_seqlens_k": np.array([0, 2**32, 7, 7])}, ValueError, "cu_seqlens_k: 4294967296 at index 1 is not between"),
    # options
    ({"seqlens_q": np.array([1])}, TypeError, "seqlens_q: is for padded batches; cu_seqlens_q has the lengths"),
    ({"seqlens_k": None}, TypeError, "seqlens_k: is for padded batches; cu_seqlens_k has the lengths"),
    ({"window": (1, 1)}, TypeError, "window: is not an option of attention; those are softmax_scale, causal"),
    ({"causal": True}, ValueError, "align: a causal mask with cu_seqlens_q and cu_seqlens_k that differ needs one of"),
    ({"window_size": (3, None)}, ValueError, "align: a window with cu_seqlens_q and cu_seqlens_k that differ needs"),
    ({"alibi_slopes": zeros(6)}, ValueError, "align: ALiBi with cu_seqlens_q and cu_seqlens_k that differ needs"),
    ({"dropout_p": 0.5}, ValueError, "seed: None, but dropout_p is 0.5"),
    # of (num_seqs, num_heads) and the longest sequences
    ({"mask": np.ones((10, 12), bool)}, ValueError, r"mask: shape \(10, 12\) does not broadcast to \(3, 6, 6, 5\)"),
    ({"bias": zeros(2, 6, 6, 5)}, ValueError, r"bias: shape \(2, 6, 6, 5\) does not broadcast to \(3, 6, 6, 5\)"),
    ({"attn_sink": zeros(6, 1)}, ValueError, r"attn_sink: shape \(6, 1\) does not broadcast to \(3, 6\)"),
]


@pytest.mark.parametrize(("changes", "error", "match"), REFUSALS)
def test_refusals(changes, error, match):
    with pytest.raises(error, match=f"^{match}"):
        cupyflash.attention_varlen(**arguments(**changes))
    with pytest.raises(error, match=f"^{match}"):
        cupyflash.attention_varlen_backward(**results(), **arguments(**changes))


def test_results_that_do_not_fit():
    for name, out, match in (
        ("shape", zeros(10, 6, 8), r"out: shape \(10, 6, 8\), expected \(10, 6, 4\)"),
        ("dtype", zeros(10, 6, 4, dtype=np.float32), "out: dtype <f4, expected float16"),
        ("kind", fake_cupy(10, 6, 4), "out: cupy array, but q is a numpy array"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            cupyflash.attention_varlen(**arguments(), out=out)
        with pytest.raises((TypeError, ValueError), match=match):
            cupyflash.attention_varlen_backward(**results() | {"out": out}, **arguments()), name
    with pytest.raises(ValueError, match=r"lse: shape \(10, 6\), expected \(6, 10\)"):
        cupyflash.attention_varlen_backward(**results() | {"lse": zeros(10, 6, dtype=np.float32)}, **arguments())
    with pytest.raises(ValueError, match=r"dlse: shape \(10, 6\), expected \(6, 10\)"):
        cupyflash.attention_varlen_backward(**results(), **arguments(), dlse=zeros(10, 6, dtype=np.float32))
    with pytest.raises(TypeError, match="return_lse: True is for the forward"):
        cupyflash.attention_varlen_backward(**results(), **arguments(), return_lse=True)
    with pytest.raises(ValueError, match=r"dk: shape \(10, 6, 8\), expected \(12, 3, 8\)"):
        cupyflash.attention_varlen_backward(**results(), **arguments(), grads_out=(None, zeros(10, 6, 8), None))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_results_that_overlap_the_offsets(name):
    memory = np.zeros(1 << 10, np.uint8)
    offsets = memory[:32].view(np.int64)
    offsets[:] = arguments()[name]
    out, dv = memory[30:510].view(np.float16).reshape(10, 6, 4), memory[30:318].view(np.float16).reshape(12, 3, 4)
    changed = arguments(**{name: offsets})
    with pytest.raises(ValueError, match=f"out: overlaps {name} in memory"):
        cupyflash.attention_varlen(**changed, out=out)
    with pytest.raises(ValueError, match=f"dv: overlaps {name} in memory"):
        cupyflash.attention_varlen_backward(**results(), **changed, grads_out=Gradients(dv=dv))


# What is made of what is taken


def test_shapes():
    problem = varlen_problem(**arguments(np.float64))
    assert problem.leading_shape == (3, 6) and problem.batch_shape == (3, 3, 2) and problem.grouped_heads == (3, 2)
    assert (problem.seqlen_q, problem.seqlen_k) == (6, 5) and problem.out_shape == (10, 6, 4)
    assert problem.lse_shape == (6, 10) and problem.lse_dtype == np.float64 and problem.num_batches == 18
    packed = problem.packed
    assert packed.offsets_q.dtype == packed.offsets_k.dtype == np.int32
    assert packed.offsets_q.tolist() == OFFSETS_Q.tolist() and packed.offsets_k.tolist() == OFFSETS_K.tolist()
    assert (packed.num_seqs, packed.total_q, packed.total_k, packed.used_q, packed.used_k) == (3, 10, 12, 9, 11)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 3), (3, 3), (4, 1), (1, 1), (0, 0)])
def test_layouts_address_the_rows_of_a_sequence(num_heads, num_kv_heads):
    """Every other row and column of larger arrays, heads and columns swapped in memory."""
    q = np.arange(20.0 * 16 * num_heads).reshape(20, 16, num_heads)[::2, ::2].swapaxes(1, 2)
    k = np.arange(24.0 * 16 * num_kv_heads).reshape(24, 16, num_kv_heads)[::2, ::2].swapaxes(1, 2)
    lse = np.arange(10.0 * num_heads).reshape(num_heads, 10)
    problem = varlen_problem(q, k, k, OFFSETS_Q, OFFSETS_K)
    offsets_q, offsets_k = problem.packed.offsets_q, problem.packed.offsets_k
    for number, index in enumerate(np.ndindex(*problem.batch_shape)):
        sequence, head = np.unravel_index(number, problem.leading_shape)
        kv_head = head // (num_heads // num_kv_heads)
        for array, layout, offset, own_head, row, column in (
            (q, problem.q, offsets_q[sequence], head, 2, 7),
            (k, problem.k, offsets_k[sequence], kv_head, 1, 5),
            (k, problem.layout(k, shared_heads=True), offsets_k[sequence], kv_head, 0, 0),
            (lse.T[..., None], problem.row_values_layout(lse), offsets_q[sequence], head, 2, 0),
        ):
            memory = array if array.base is None else array.base.ravel()
            place = sum(stride * i for stride, i in zip(layout.batch_strides, index, strict=True))
            place += (offset + row) * layout.row_stride + column * layout.column_stride
            assert memory[place] == array[offset + row, own_head, column]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5),
    slack=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    equal=st.booleans(),
)
def test_any_sequences(lengths, slack, equal):
    if equal:
        lengths = [(n, n) for n, _ in lengths]
    offsets = [np.cumsum([0, *(pair[side] for pair in lengths)]) for side in (0, 1)]
    total_q, total_k = (x[-1] + more for x, more in zip(offsets, slack, strict=True))
    q, k = zeros(total_q, 2, 8), zeros(total_k, 2, 8)
    problem = varlen_problem(q, k, k, *offsets, causal=True, align="bottom-right", bias=zeros())
    assert problem.leading_shape == (len(lengths), 2) and problem.out_shape == (total_q, 2, 8)
    longest = (problem.seqlen_q, problem.seqlen_k)
    assert longest == tuple(max((pair[side] for pair in lengths), default=0) for side in (0, 1))
    if all(a == b for a, b in lengths):
        varlen_problem(q, k, k, *offsets, causal=True)
    else:
        with pytest.raises(ValueError, match="align: a causal mask"):
            varlen_problem(q, k, k, *offsets, causal=True)


def test_sequences_of_other_lengths_need_align_though_the_longest_agree():
    q = zeros(8, 2, 8)
    with pytest.raises(ValueError, match="align: a causal mask with cu_seqlens_q and cu_seqlens_k that differ"):
        varlen_problem(q, q, q, np.array([0, 5, 8]), np.array([0, 3, 8]), causal=True)
    varlen_problem(q, q, q, np.array([0, 5, 8]), np.array([0, 5, 8]), causal=True, alibi_slopes=zeros(2, 2))


def test_offsets_are_copied_and_read_once(monkeypatch):
    offsets = OFFSETS_Q.copy()
    problem = varlen_problem(**arguments(cu_seqlens_q=offsets))
    offsets[:] = 0
    assert problem.packed.offsets_q.tolist() == OFFSETS_Q.tolist()

    monkeypatch.setattr("cupy.concatenate", lambda arrays: DeviceArray(np.concatenate([x.array for x in arrays])))
    monkeypatch.setattr(DeviceArray, "reads", 0)
    monkeypatch.setattr("cupyflash._lengths.check_integers", lambda *_: None)
    inputs = {name: fake_cupy(*arguments()[name].shape) for name in "qkv"}
    inputs |= {"cu_seqlens_q": DeviceArray(OFFSETS_Q), "cu_seqlens_k": DeviceArray(OFFSETS_K)}
    assert varlen_problem(**inputs).packed.offsets_k.tolist() == OFFSETS_K.tolist() and DeviceArray.reads == 1


# Rows after the last sequence


def filled(shape, dtype, value):
    """An array in which nothing but what is asked for may be written."""
    return np.full(shape, value, dtype)


@pytest.mark.parametrize("more", [(), ("return_lse",), ("return_max",), ("return_lse", "return_max")])
def test_rows_of_no_sequence_in_results(more):
    out = filled((10, 6, 4), np.float16, 5)
    per_query = [filled((6, 10), np.float32, 5) for _ in more]
    returned = {"out": out, **dict(zip(more, per_query, strict=True))}
    with mock.patch.object(_plan.Call, "run", return_value=returned):
        results = cupyflash.attention_varlen(**arguments(), **dict.fromkeys(more, True))
    for result, array in zip(results if more else (results,), returned.values(), strict=True):
        assert result is array
    assert (out[:9] == 5).all() and (out[9:] == 0).all()
    for values in per_query:
        assert (values[:, :9] == 5).all() and (values[:, 9:] == -math.inf).all()


def test_rows_of_no_sequence_in_gradients():
    made = Gradients(*(filled(arguments()[name].shape, np.float16, 5) for name in "qkv"), dbias=filled(5, float, 5))
    with mock.patch.object(_plan.Call, "run", return_value=vars(made)):
        gradients = cupyflash.attention_varlen_backward(**results(), **arguments())
    assert vars(gradients) == vars(made)
    for gradient, used in zip(made, (9, 11, 11), strict=True):
        assert (gradient[:used] == 5).all() and (gradient[used:] == 0).all()
    assert (made.dbias == 5).all()
