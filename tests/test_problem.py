"""Arguments -> problem: shapes, strides, heads, and every refusal."""

import fractions
import math
import types

import cupy
import ml_dtypes
import numpy as np
import pytest

from cupyflash import _arrays
from cupyflash._layouts import merge_batch_dims
from cupyflash._plan import signature
from cupyflash._problem import attention_problem


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def fake_cupy(*shape, dtype=np.float16, device_id=0, address=0x7F0000000000):
    """A real cupy.ndarray over memory that does not exist: there need be no GPU."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 34, None, device_id)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


def qkv(shape_q=(2, 3, 4, 8), shape_k=(2, 3, 5, 8), shape_v=(2, 3, 5, 6), dtype=np.float16):
    return zeros(*shape_q, dtype=dtype), zeros(*shape_k, dtype=dtype), zeros(*shape_v, dtype=dtype)


# Shapes and layouts


def test_sizes_and_scale():
    problem = attention_problem(*qkv())
    assert (problem.seqlen_q, problem.seqlen_k, problem.head_dim, problem.head_dim_v) == (4, 5, 8, 6)
    assert problem.leading_shape == problem.batch_shape == (2, 3) and problem.num_batches == 6
    assert problem.out_shape == (2, 3, 4, 6) and problem.lse_shape == (2, 3, 4)
    assert problem.softmax_scale == 1 / math.sqrt(8) and problem.kind == "numpy" and not problem.causal


@pytest.mark.parametrize(
    ("leading_q", "leading_k", "leading_v", "leading", "batch"),
    [
        ((), (), (), (), ()),
        ((3,), (), (), (3,), (3,)),
        ((3,), (1,), (3,), (3,), (3,)),
        ((2, 3), (3,), (2, 1), (2, 3), (2, 3)),
        ((4, 1, 3), (2, 1), (1,), (4, 2, 3), (4, 2, 3)),
        ((2, 6), (2, 3), (2, 3), (2, 6), (2, 3, 2)),
        ((2, 6), (3,), (2, 3), (2, 6), (2, 3, 2)),
        ((2, 6), (2, 1), (2, 3), (2, 6), (2, 3, 2)),
        ((2, 6), (2, 1), (2, 1), (2, 6), (2, 6)),
        ((2, 1), (2, 6), (2, 6), (2, 6), (2, 6)),
        ((6,), (5, 3), (3,), (5, 6), (5, 3, 2)),
        ((2, 0), (2, 3), (2, 3), (2, 0), (2, 3, 0)),
        ((0, 6), (1, 2), (2,), (0, 6), (0, 2, 3)),
    ],
)
def test_leading_dimensions(leading_q, leading_k, leading_v, leading, batch):
    problem = attention_problem(zeros(*leading_q, 4, 8), zeros(*leading_k, 5, 8), zeros(*leading_v, 5, 8))
    assert problem.leading_shape == leading and problem.batch_shape == batch


def element(array, strides, index):
    return array.ravel()[sum(stride * i for stride, i in zip(strides, index, strict=True))]


@pytest.mark.parametrize(
    ("leading_q", "leading_k"), [((2, 6), (2, 3)), ((2, 6), (1, 6)), ((1, 6), (2, 2)), ((3,), ()), ((4, 2, 3), (2, 1))]
)
def test_layouts_address_the_broadcast_elements(leading_q, leading_k):
    q = np.arange(math.prod(leading_q) * 4 * 8, dtype=np.float64).reshape(*leading_q, 4, 8)
    k = np.arange(math.prod(leading_k) * 5 * 8, dtype=np.float64).reshape(*leading_k, 5, 8)
    problem = attention_problem(q, k, k)
    wide_q = np.broadcast_to(q, (*problem.leading_shape, 4, 8))
    if problem.grouped_heads:
        k_heads = np.repeat(k, problem.grouped_heads[1], axis=-3)
    else:
        k_heads = k
    wide_k = np.broadcast_to(k_heads, (*problem.leading_shape, 5, 8))
    for number, index in enumerate(np.ndindex(*problem.batch_shape)):
        leading = np.unravel_index(number, problem.leading_shape)
        for array, layout, wide in (q, problem.q, wide_q), (k, problem.k, wide_k):
            strides = (*layout.batch_strides, layout.row_stride, layout.column_stride)
            assert element(array, strides, (*index, 3, 7)) == wide[(*leading, 3, 7)]


def test_strides_of_views():
    q = zeros(4, 9, 20)[::-2, 1:6, 18:2:-2]
    layout = attention_problem(q, zeros(3, 8), zeros(3, 8)).q
    assert (layout.batch_strides, layout.row_stride, layout.column_stride) == ((-360,), 20, -2)


@pytest.mark.parametrize(
    ("shape", "strides", "merged"),
    [
        ((), (), ((), ((), ()))),
        ((1, 1), ((5, 5), (7, 7)), ((), ((), ()))),
        ((2, 3), ((3, 1), (30, 10)), ((6,), ((1,), (10,)))),
        ((2, 3), ((3, 1), (0, 10)), ((2, 3), ((3, 1), (0, 10)))),
        ((2, 3), ((0, 0), (30, 10)), ((6,), ((0,), (10,)))),
        ((2, 1, 3, 4), ((-12, 99, -4, -1), (12, 0, 4, 1)), ((24,), ((-1,), (1,)))),
        ((2, 3, 4), ((12, 4, 1), (4, 8, 1)), ((2, 3, 4), ((12, 4, 1), (4, 8, 1)))),
        ((0, 3), ((3, 1), (3, 1)), ((0,), ((1,), (1,)))),
    ],
)
def test_merging(shape, strides, merged):
    assert merge_batch_dims(shape, *(strides or ((), ()))) == merged


def test_nine_dimensions_that_do_not_merge_are_refused():
    strides = tuple(3 ** (9 - axis) for axis in range(9))
    with pytest.raises(ValueError, match=r"9 leading dimensions remain.*at most 8"):
        merge_batch_dims((2,) * 9, strides)
    assert len(merge_batch_dims((2,) * 8, strides[:8])[0]) == 8


@pytest.mark.parametrize(("align", "shift"), [("bottom-right", 1), ("top-left", 0)])
def test_causal_shift(align, shift):
    problem = attention_problem(*qkv(), causal=True, align=align)
    assert problem.causal and problem.causal_shift == shift


@pytest.mark.parametrize(
    ("align", "window_size", "window"),
    [
        (-2, (1, 6), (1, 6)),  # key 4 is 6 to the right of where query 0 is
        (-2, (2, 7), (None, None)),
        (3, (6, 1), (6, 1)),  # key 0 is 6 to the left of where query 3 is
        (3, (7, 2), (None, None)),
        (100, (0, 0), (0, 0)),
    ],
)
def test_a_side_that_no_key_is_beyond_is_open(align, window_size, window):
    assert attention_problem(*qkv(), window_size=window_size, align=align).window == window


def test_causal_needs_no_alignment_for_equal_lengths():
    assert attention_problem(*qkv((4, 8), (4, 8), (4, 6)), causal=np.True_).causal


@pytest.mark.parametrize("scale", [0, -1.5, 3, np.float32(0.25), np.float16(-0.5), fractions.Fraction(1, 3), 2.0**127])
def test_any_normal_scale_is_taken(scale):
    assert attention_problem(*qkv(), softmax_scale=scale).softmax_scale == float(scale)


# Refusals


def refuses(error, match, q, k, v, **options):
    with pytest.raises(error, match=match):
        attention_problem(q, k, v, **options)


def test_shapes_that_do_not_fit():
    q, k, v = qkv()
    refuses(ValueError, r"k: head_dim 7, but q has 8; q \(2, 3, 4, 8\), k \(2, 3, 5, 7\)", q, k[..., :7], v)
    refuses(ValueError, r"v: seqlen_k 4, but k has 5; q ", q, k, v[..., :4, :])
    refuses(ValueError, r"q: needs at least 2 dimensions .* \(8,\)", zeros(8), k, v)
    refuses(ValueError, r"v: needs at least 2 dimensions .* \(\)", q, k, zeros())
    refuses(ValueError, r"v: leading dimensions \(4, 3\) do not broadcast with k's \(2, 3\)", q, k, zeros(4, 3, 5, 6))
    refuses(
        ValueError, r"k: leading dimensions \(5, 3\) do not broadcast with q's \(2, 3\)", q, k[:1].repeat(5, 0), v[:1]
    )
    refuses(
        ValueError, r"k: leading dimensions \(2,\) do not broadcast with q's \(4,\)", *qkv((4, 1, 8), (2, 1, 8), (1, 8))
    )
    refuses(ValueError, r"k: 3 heads, but q's 4 are not a multiple of them", *qkv((2, 4, 1, 8)))
    refuses(ValueError, r"k: 6 heads, but q's 3 are not a multiple of them", *qkv((3, 1, 8), (2, 6, 5, 8), (6, 5, 8)))
    refuses(ValueError, r"k: leading dimensions \(0,\) do not broadcast", *qkv((2, 4, 1, 8), (0, 5, 8), (5, 8)))


@pytest.mark.parametrize("size", [0, 257])
def test_head_dimensions_out_of_range(size):
    refuses(ValueError, f"q: head_dim {size} is not between 1 and 256", zeros(4, size), zeros(5, size), zeros(5, 8))
    refuses(ValueError, f"v: head_dim_v {size} is not between 1 and 256", zeros(4, 8), zeros(5, 8), zeros(5, size))


def test_lengths_of_2_31():
    long = np.broadcast_to(np.float16(0), (2**31, 8))
    refuses(ValueError, "q: length 2147483648 is more than 2147483647", long, zeros(5, 8), zeros(5, 8))
    refuses(ValueError, "k: length 2147483648 is more than 2147483647", zeros(5, 8), long, long)
    assert attention_problem(long[1:], long[1:], long[1:]).seqlen_q == 2**31 - 1


class Tensor:
    __cuda_array_interface__ = None


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_things_that_are_not_arrays(name):
    def refused(value, match):
        arguments = dict(zip("qkv", qkv(), strict=True))
        with pytest.raises(TypeError, match=f"{name}: {match}"):
            attention_problem(**{**arguments, name: value})

    refused([[1.0]], "expected a numpy.ndarray or a cupy.ndarray, not list")
    refused(1.0, "expected .* not float")
    refused(np.float16(1), "expected .* not numpy.float16")
    refused(np.ma.masked_array(zeros(2, 8)), "numpy.ma.* is not supported; use a plain numpy.ndarray")
    refused(np.matrix(zeros(2, 8)), ".*matrix is not supported")
    refused(Tensor(), r".*Tensor is not supported; use cupy.from_dlpack\(x\)")


def test_mixed_kinds_and_devices():
    q, k, v = (fake_cupy(4, 8) for _ in range(3))
    refuses(TypeError, "k: numpy array, but q is a cupy array", q, zeros(4, 8), v)
    refuses(TypeError, "v: cupy array, but q is a numpy array", zeros(4, 8), zeros(4, 8), v)
    refuses(ValueError, "v: on device 1, but q is on device 0", q, k, fake_cupy(4, 8, device_id=1))
    refuses(TypeError, "out: numpy array, but q is a cupy array", q, k, v, out=zeros(4, 8))
    assert attention_problem(q, k, v).kind == "cupy"


def test_dtypes():
    q, k, v = qkv()
    refuses(TypeError, "k: dtype float32, but q has float16", q, k.astype(np.float32), v)
    refuses(TypeError, "q: dtype int32 is not one of float16, bfloat16, float32, float64$", q.astype(np.int32), k, v)
    refuses(TypeError, "v: dtype complex64", q, k, v.astype(np.complex64))
    refuses(TypeError, "q: dtype >f2 has foreign byte order", q.astype(">f2"), k, v)
    for dtype in np.float16, ml_dtypes.bfloat16, np.float32, np.float64:
        assert attention_problem(*qkv(dtype=dtype)).dtype == dtype


def test_elements_between_addresses():
    odd = np.zeros(2 * 8 * 5 + 1, np.uint8)[1:].view(np.float16).reshape(5, 8)
    refuses(
        ValueError, r"k: its elements do not lie at multiples of their 2 bytes; use k.copy\(\)", zeros(4, 8), odd, odd
    )
    records = np.zeros((5, 8), np.dtype([("a", np.uint8), ("x", np.float16)]))["x"]
    refuses(ValueError, "v: its elements do not lie", zeros(4, 8), zeros(5, 8), records)


def test_strides_that_are_never_stepped_do_not_matter():
    one_row = np.ndarray((1, 8), np.float16, bytearray(100), strides=(3, 2))
    empty = np.ndarray((0, 8), np.float16, bytearray(101), offset=1)
    assert attention_problem(one_row, empty, empty).seqlen_k == 0


def test_a_dtype_without_bytes():
    refuses(TypeError, "q: dtype .* is not one of float16", np.empty((4, 8), np.dtype([])), *qkv()[1:])


@pytest.mark.parametrize("flag", ["causal", "return_lse"])
@pytest.mark.parametrize("value", [1, None, "yes", np.array([True, False])])
def test_flags_are_bools(flag, value):
    refuses(TypeError, f"{flag}: expected True or False", *qkv(), **{flag: value})


def test_alignment():
    refuses(ValueError, "align: 'left' is not one of", *qkv(), align="left")
    refuses(ValueError, "align: numpy.ndarray of shape", *qkv(), causal=True, align=np.array(["top-left", "top-left"]))
    message = r"seqlen_q 4 and seqlen_k 5.*'bottom-right' \(query i sees keys j <= i \+ 1.*'top-left' .*j <= i\)"
    refuses(ValueError, message, *qkv(), causal=True)
    refuses(ValueError, "align: True is not one of", *qkv(), align=True)
    refuses(ValueError, "align: 0.0 is not one of", *qkv(), align=0.0)
    refuses(ValueError, "align: -2147483648 is not between -2147483647 and 2147483647", *qkv(), align=-(2**31))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, np.float32("inf"), 10**400])
def test_scales_that_are_not_finite(scale):
    refuses(ValueError, "softmax_scale: .* is not finite", *qkv(), softmax_scale=scale)


@pytest.mark.parametrize("scale", [1e-39, -(2.0**-127), 3e38, -1e300, 5e-324])
def test_scales_that_float32_cannot_hold(scale):
    refuses(ValueError, "softmax_scale: .* is neither 0 nor", *qkv(), softmax_scale=scale)


@pytest.mark.parametrize("scale", [1e-300, -1e300, np.finfo(np.float64).tiny])
def test_scales_that_only_float64_holds(scale):
    assert attention_problem(*qkv(dtype=np.float64), softmax_scale=scale).softmax_scale == scale
    refuses(ValueError, "where float32 holds it and", *qkv(dtype=np.float32), softmax_scale=scale)


@pytest.mark.parametrize("scale", [1.7e308, -5e-324])
def test_scales_that_float64_cannot_hold(scale):
    refuses(ValueError, "where float64 holds it and", *qkv(dtype=np.float64), softmax_scale=scale)


@pytest.mark.parametrize("scale", [True, np.True_, "1", 1j, np.ones(1), [0.5]])
def test_scales_that_are_not_real_numbers(scale):
    refuses(TypeError, "softmax_scale: expected a real number", *qkv(), softmax_scale=scale)


def test_out_that_does_not_fit():
    arguments = qkv()
    refuses(ValueError, r"out: shape \(2, 3, 4, 8\), expected \(2, 3, 4, 6\)", *arguments, out=zeros(2, 3, 4, 8))
    refuses(ValueError, "out: shape", *arguments, out=zeros(1, 3, 4, 6))
    refuses(TypeError, "out: dtype <f4, expected float16", *arguments, out=zeros(2, 3, 4, 6, dtype=np.float32))
    refuses(TypeError, "out: dtype >f2, expected float16", *arguments, out=zeros(2, 3, 4, 6).astype(">f2"))
    refuses(TypeError, "out: dtype bfloat16", *arguments, out=zeros(2, 3, 4, 6, dtype=ml_dtypes.bfloat16))
    read_only = zeros(2, 3, 4, 6)
    read_only.flags.writeable = False
    refuses(ValueError, "out: is read-only", *arguments, out=read_only)


def test_out_that_overlaps_itself():
    arguments = qkv((4, 8), (5, 8), (5, 8))
    for strides in ((0, 2), (2, 2), (16, 0), (14, 2)):
        out = np.lib.stride_tricks.as_strided(zeros(200), (4, 8), strides)
        refuses(ValueError, "out: elements overlap each other", *arguments, out=out)
    for out in zeros(8, 4).T, zeros(9, 20)[::-2, ::2][:4, :8], zeros(4, 8)[::-1, ::-1]:
        attention_problem(*arguments, out=out)


def test_out_that_overlaps_an_input():
    memory = zeros(3, 4, 8)
    q, k, v = memory
    for name, out in ("q", q), ("k", k), ("v", v[::-1]):
        refuses(ValueError, f"out: overlaps {name} in memory", q, k, v, out=out)
    interleaved = zeros(4, 2, 8)
    attention_problem(interleaved[:, 0], k, v, out=interleaved[:, 1])
    halves = zeros(4, 16)
    attention_problem(halves[:, ::2], k, v, out=halves[:, 1::2])


def test_out_of_fake_cupy_arrays_overlaps_by_address():
    q, k, v = (fake_cupy(4, 8, address=0x7F0000000000 + 64 * i) for i in range(3))
    refuses(ValueError, "out: overlaps v in memory", q, k, v, out=fake_cupy(4, 8, address=0x7F0000000000 + 190))
    attention_problem(q, k, v, out=fake_cupy(4, 8, address=0x7F0000000000 + 192))


@pytest.mark.parametrize("module", [None, types.ModuleType("cupy")], ids=["none", "while a thread imports it"])
def test_numpy_arrays_need_no_cupy(monkeypatch, module):
    monkeypatch.setitem(_arrays.sys.modules, "cupy", module)
    q, k, v = qkv()
    assert attention_problem(q, k, v).kind == "numpy"
    assert signature("forward", {"q": q, "k": k, "v": v}, {}) is not None
