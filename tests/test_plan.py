"""Calls that look alike share a plan, all others do not, and a call gives the same whoever was called before."""

import gc
import threading
import weakref
from unittest import mock

import cupy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import cupyflash
from cupyflash import BlockMask, Gradients, Numerics, _launch, _plan, ptxsim, testing
from tests.forgetting import nothing_remembered
from tests.test_cupy_path import described, on_gpu, recorded_gpu


@pytest.fixture
def gpu():
    with recorded_gpu() as recorder:
        yield recorder


def array(*shape, dtype=np.float16, offset=0):
    """A cupy.ndarray whose address is ``offset`` bytes beyond a multiple of 256."""
    memory = np.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize + 512, np.uint8)
    start = -memory.ctypes.data % 256 + offset
    return on_gpu(np.ndarray(shape, dtype, memory, start))


def forward(**changes):
    """Arguments of a call with most options."""
    return {
        "q": array(2, 4, 5, 64),
        "k": array(2, 2, 7, 64),
        "v": array(2, 2, 7, 32),
        "softmax_scale": 0.5,
        "causal": True,
        "align": "bottom-right",
        "mask": array(5, 7, dtype=np.bool_),
        "bias": array(4, 5, 7, dtype=np.float32),
        "alibi_slopes": array(4, dtype=np.float32),
        "attn_sink": array(4, dtype=np.float32),
        "dropout_p": 0.5,
        "seed": 7,
        "score_mod": "score * t[i]",
        "aux": {"t": array(5, dtype=np.float32)},
        **changes,
    }


def backward(**changes):
    """Arguments of a backward call."""
    lse = array(2, 4, 5, dtype=np.float32)
    options = {name: x for name, x in forward().items() if name not in ("score_mod", "aux", "dropout_p", "seed")}
    return {"dout": array(2, 4, 5, 32), "out": array(2, 4, 5, 32), "lse": lse, **options, **changes}


def launched(gpu, call, arguments):
    """What a call launches, each address by the name of its array."""
    gpu.launches.clear()
    call(**arguments)
    named = dict(arguments) | (arguments.get("aux") or {})
    if isinstance(mask := arguments.get("mask_mod"), BlockMask):
        named |= {**mask.aux, "bits": mask.bits}
    targets = arguments.get("grads_out", ())
    named |= vars(targets) if isinstance(targets, Gradients) else dict(zip(("dq", "dk", "dv"), targets, strict=False))
    addresses = {name: x.data.ptr for name, x in named.items() if isinstance(x, cupy.ndarray)}
    return described(gpu.launches, addresses)


FORWARD_CHANGES = {
    "length": lambda: {"q": array(2, 4, 6, 64), "mask": None, "bias": None},
    "heads": lambda: {"k": array(2, 4, 7, 64), "v": array(2, 4, 7, 32)},
    "dtype": lambda: {name: array(*shape, dtype=ml_dtypes.bfloat16) for name, shape in SHAPES.items()},
    "strides of q": lambda: {"q": array(2, 5, 4, 64).swapaxes(1, 2)},
    "strides of k": lambda: {"k": array(2, 2, 7, 72)[..., :64]},
    "strides of v": lambda: {"v": array(2, 2, 7, 32)[..., ::-1, :]},
    "alignment of q": lambda: {"q": array(2, 4, 5, 64, offset=8)},
    "alignment of k": lambda: {"k": array(2, 2, 7, 64, offset=8)},
    "alignment of v": lambda: {"v": array(2, 2, 7, 32, offset=8)},
    "out": lambda: {"out": array(2, 4, 5, 32)},
    "strides of out": lambda: {"out": array(2, 5, 4, 32).swapaxes(1, 2)},
    "alignment of out": lambda: {"out": array(2, 4, 5, 32, offset=2)},
    "one array for two": lambda: dict.fromkeys(("k", "v"), array(2, 2, 7, 64)),
    "scale": lambda: {"softmax_scale": 0.25},
    "no scale": lambda: {"softmax_scale": None},
    "scale 0": lambda: {"softmax_scale": 0.0},
    "scale -0": lambda: {"softmax_scale": -0.0},
    "mask": lambda: {"mask": None},
    "shape of mask": lambda: {"mask": array(2, 1, 5, 7, dtype=np.bool_)},
    "strides of mask": lambda: {"mask": array(7, 5, dtype=np.bool_).T},
    "dtype of bias": lambda: {"bias": array(4, 5, 7)},
    "strides of bias": lambda: {"bias": array(4, 5, 7, dtype=np.float32)[:, ::-1]},
    "slopes": lambda: {"alibi_slopes": array(dtype=np.float32)},
    "sink": lambda: {"attn_sink": array(4, dtype=np.float64)},
    "causal": lambda: {"causal": False},
    "align": lambda: {"align": "top-left"},
    "window": lambda: {"window_size": (3, 0)},
    "other window": lambda: {"window_size": (2, 0)},
    "softcap": lambda: {"softcap": 3.0},
    "dropout": lambda: {"dropout_p": 0.25},
    "seed": lambda: {"seed": 8},
    "origin": lambda: {"origin": (0, 0, 1, 0)},
    "expression": lambda: {"score_mod": "score + t[i]"},
    "mask_mod": lambda: {"mask_mod": "i != j"},
    "dtype of aux": lambda: {"aux": {"t": array(5, dtype=np.float64)}},
    "more aux": lambda: {"aux": {"t": array(5, dtype=np.float32), "u": array(1)}},
    "order of aux": lambda: {"aux": {"u": array(1), "t": array(5, dtype=np.float32)}},
    "split_size": lambda: {"split_size": 128},
    "numerics": lambda: {"numerics": Numerics(exp="poly3")},
    "tile": lambda: {"numerics": Numerics(tile=(64, 32))},
    "return_lse": lambda: {"return_lse": True},
    "return_max": lambda: {"return_max": True},
}
SHAPES = {"q": (2, 4, 5, 64), "k": (2, 2, 7, 64), "v": (2, 2, 7, 32)}
BACKWARD_CHANGES = {
    "alignment of dout": lambda: {"dout": array(2, 4, 5, 32, offset=4)},
    "strides of out": lambda: {"out": array(2, 5, 4, 32).swapaxes(1, 2)},
    "strides of lse": lambda: {"lse": array(4, 2, 5, dtype=np.float32).swapaxes(0, 1)},
    "dlse": lambda: {"dlse": array(2, 4, 5, dtype=np.float32)},
    "dk": lambda: {"grads_out": (None, array(2, 2, 7, 64), None)},
    "alignment of dk": lambda: {"grads_out": (None, array(2, 2, 7, 64, offset=2), None)},
    "dv": lambda: {"grads_out": [None, None, array(2, 2, 7, 32)]},
    "dbias": lambda: {"grads_out": Gradients(dbias=array(4, 5, 7, dtype=np.float32))},
    "shape of bias": lambda: {"bias": array(1, 7, dtype=np.float32)},
    "scale": lambda: {"softmax_scale": -0.5},
    "no sink": lambda: {"attn_sink": None},
}
CHANGES = [(cupyflash.attention, forward, change) for change in FORWARD_CHANGES.items()]
CHANGES += [(cupyflash.attention_backward, backward, change) for change in BACKWARD_CHANGES.items()]


@pytest.mark.parametrize(("call", "base", "change"), CHANGES, ids=[change[0] for *_, change in CHANGES])
def test_whatever_decides_what_is_launched_asks_for_another_plan(gpu, call, base, change):
    before = launched(gpu, call, base())
    changed = base(**change[1]())
    remembering = launched(gpu, call, changed)
    assert len(_plan.plans.values) == 2
    assert launched(gpu, call, base()) == before and launched(gpu, call, changed) == remembering
    assert len(_plan.plans.values) == 2
    with nothing_remembered():
        assert launched(gpu, call, changed) == remembering != before


T, U = array(5, dtype=np.float32), array(5, dtype=np.float32)


@pytest.mark.parametrize(
    ("option", "one", "other"),
    [
        ("softmax_scale", 0.0, -0.0),
        ("softmax_scale", np.float32(0), np.float32(-0.0)),
        ("seed", 2**63, 2**63 + 1),
        ("aux", {"t": T, "u": U}, {"u": U, "t": T}),
    ],
)
def test_values_that_python_calls_equal_or_nearly_so_are_told_apart(gpu, option, one, other):
    arguments = forward()
    launches = [launched(gpu, cupyflash.attention, arguments | {option: value}) for value in (one, other)]
    assert launches[0] != launches[1]
    with nothing_remembered():
        assert launched(gpu, cupyflash.attention, arguments | {option: other}) == launches[1]


def test_other_arrays_that_look_the_same_share_a_plan(gpu):
    """And the second is given its own, also where an array of the first was two arguments."""
    x, y, z = (array(2, 4, 64) for _ in range(3))
    launched(gpu, cupyflash.attention, {"q": x, "k": x, "v": x, "out": y})
    ((*_, [(_, targets)]),) = launched(gpu, cupyflash.attention, {"q": x, "k": y, "v": z, "out": array(2, 4, 64)})
    assert targets[:4] == ["q", "k", "v", "out"] and len(_plan.plans.values) == 1


@settings(max_examples=25)
@given(problem=testing.attention_problems(), other=testing.attention_problems())
def test_calls_by_turns(problem, other):
    """What a GPU is given is the same with every plan and with none, whatever was called before."""
    arguments = [
        {**dict(zip("qkv", map(on_gpu, each.inputs()), strict=True)), "out": on_gpu(each.empty_out()), **each.options}
        for each in (problem, other)
    ]
    with recorded_gpu() as gpu:
        by_turns = [launched(gpu, cupyflash.attention, each) for each in (*arguments, *arguments)]
        for each, *found in zip(arguments, by_turns[:2], by_turns[2:], strict=True):
            with nothing_remembered():
                assert found == [launched(gpu, cupyflash.attention, each)] * 2


def numpy_call(length=5, dtype=np.float16, **options):
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((1, 2, n, 10)).astype(dtype) for n in (length, 140, 140))
    return (q, k, v), {"bias": rng.standard_normal((length, 1)).astype(np.float32), **options}


@pytest.mark.parametrize("split_size", [None, 128])
def test_what_memory_held_before_does_not_matter(split_size):
    """Calls that copy operands, and compute in parts: the second finds other values in its temporary arrays."""

    def called(fill):
        class Filling(_launch.Simulator):
            def __init__(self):
                super().__init__()
                self.empty = lambda shape, dtype: np.full(shape, fill, dtype)

        with mock.patch.object(_launch, "Simulator", Filling):
            inputs, options = numpy_call()
            out, lse = cupyflash.attention(*inputs, return_lse=True, split_size=split_size, **options)
            gradients = cupyflash.attention_backward(np.ones_like(out), *inputs, out, lse, **options)
        return [out, lse, *vars(gradients).values()]

    with nothing_remembered():
        for first, second in zip(called(np.nan), called(7), strict=True):
            if first is not None:
                testing.assert_same_bits(first, second)


def test_threads():
    """Calls of two kinds in all threads at once give what they give alone."""
    calls = [numpy_call(length) for length in (3, 5)]
    alone = [cupyflash.attention(*inputs, **options) for inputs, options in calls]
    found = []

    def work(start):
        for turn in range(start, start + 4):
            inputs, options = calls[turn % 2]
            found.append((turn % 2, cupyflash.attention(*inputs, **options)))

    with nothing_remembered():
        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 16
    for which, out in found:
        testing.assert_same_bits(out, alone[which])


def test_a_plan_keeps_no_array_alive():
    inputs, options = numpy_call()
    with nothing_remembered(), mock.patch.object(_launch.Simulator, "launch", lambda *_: None):
        out, lse = cupyflash.attention(*inputs, return_lse=True, **options)
        dout = np.ones_like(out)
        gradients = cupyflash.attention_backward(dout, *inputs, out, lse, **options)
        assert len(_plan.plans.values) == 2
        kept = [weakref.ref(x) for x in (*inputs, options["bias"], out, lse, dout, *gradients, gradients.dbias)]
        del inputs, options, out, lse, dout, gradients
        gc.collect()
        assert [reference() for reference in kept] == [None] * len(kept)
        assert all(plan.constants == () for plan in _plan.plans.values.values())


def test_a_block_mask_is_known_by_its_looks(gpu):
    """Its expression, block size and shapes; bits and arrays are those of each call's own."""
    q, k, v = (array(2, 3, 200, 64) for _ in range(3))

    def block_mask(mask_mod="t[j] < i", dtype=np.int32, shape=(1, 1, 2, 1), block_size=128):
        aux = {"t": array(200, dtype=dtype)}
        return BlockMask(mask_mod, aux, 200, 200, block_size, array(*shape, dtype=np.uint32))

    def called(mask):
        return launched(gpu, cupyflash.attention, {"q": q, "k": k, "v": v, "mask_mod": mask})

    same = called(block_mask())
    ((*_, [(_, targets)]),) = same
    assert {"bits", "t"} <= set(targets)
    assert called(block_mask()) == same and len(_plan.plans.values) == 1
    others = [
        block_mask("t[j] > i"), block_mask(dtype=np.int64), block_mask(shape=(2, 1, 2, 1)), block_mask(block_size=256)
    ]  # fmt: skip
    for number, other in enumerate(others, start=2):
        assert called(other) != same and len(_plan.plans.values) == number
    mask = block_mask()
    bits = cupy.ndarray((2, 3, 200, 64), np.float16, mask.bits.data)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out: overlaps mask_mod in memory"):
            cupyflash.attention(q, k, v, mask_mod=mask, out=bits)
        with pytest.raises(ValueError, match="aux: 't' is an array of the BlockMask already"):
            cupyflash.attention(q, k, v, mask_mod=mask, aux={"t": array(200, dtype=np.int32)})
        cupyflash.attention(q, k, v, mask_mod=mask, out=array(2, 3, 200, 64))
        cupyflash.attention(q, k, v, mask_mod=mask, aux={"t": mask.aux["t"]})


class Scale(float):
    """A number that may mean something else tomorrow."""


@pytest.mark.parametrize(
    "arguments",
    [
        {"seqlens_k": np.array([3, 4])},
        {"softmax_scale": Scale(0.5)},
        {"q": np.zeros((2, 4, 5, 8), np.float16).view(np.memmap)},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_cannot_be_known_by_its_looks_is_planned_each_time(arguments):
    x = np.zeros((2, 4, 5, 8), np.float16)
    with nothing_remembered(), mock.patch.object(_launch.Simulator, "launch"):
        cupyflash.attention(**{"q": x, "k": x, "v": x} | arguments)
        assert not _plan.plans.values


def test_architectures_of_the_simulator_have_plans_of_their_own():
    x = np.zeros((2, 200), np.float16)
    constants = []
    with nothing_remembered():
        for arch in "sm_75", "sm_90", "sm_75":
            with (
                ptxsim.settings(arch=arch),
                mock.patch.object(
                    _launch.Simulator, "launch", lambda _, launch: constants.append(launch.config.defines)
                ),
            ):
                cupyflash.attention(x, x, x)
        assert len(_plan.plans.values) == 2
    assert constants[0] == constants[2] != constants[1]


# What is refused is refused again


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0}),
        ({"causal": False}, {"causal": 0.0}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"split_size": 128}, {"split_size": 128.0}),
        ({"split_size": 128}, {"split_size": np.float64(128)}),
        ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"seed": 1}, {"seed": True}),
        ({"seed": 1}, {"seed": 1.0}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"align": "top-left"}, {"align": b"top-left"}),
        ({}, {"k": "numpy"}),
        ({}, {"k": "device 1"}),
        ({}, {"v": "unaligned"}),
        ({}, {"nonsense": None}),
    ],
)
def test_what_equals_a_right_value_and_is_none_is_refused(gpu, right, wrong):
    q, k, v = (array(2, 4, 64) for _ in range(3))
    memory = cupy.cuda.UnownedMemory(1 << 40, 1 << 20, None, 1)
    others = {
        "numpy": np.zeros((2, 4, 64), np.float16),
        "device 1": cupy.ndarray((2, 4, 64), np.float16, cupy.cuda.MemoryPointer(memory, 0)),
        "unaligned": array(2, 4, 64, offset=1),
    }
    wrong = {name: others.get(x, x) if isinstance(x, str) else x for name, x in wrong.items()}
    cupyflash.attention(q, k, v, **right)
    messages = []
    for _ in range(2):
        gpu.launches.clear()
        with pytest.raises((TypeError, ValueError)) as error:
            cupyflash.attention(**{"q": q, "k": k, "v": v} | right | wrong)
        messages.append(str(error.value))
        assert not gpu.launches
    with nothing_remembered(), pytest.raises(error.type) as first:
        cupyflash.attention(**{"q": q, "k": k, "v": v} | right | wrong)
    assert messages == [str(first.value)] * 2


@pytest.mark.parametrize("name", ["return_lse", "return_max"])
def test_a_backward_call_refuses_the_forwards_options_always(gpu, name):
    arguments = backward()
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{name}: False is for the forward"):
            cupyflash.attention_backward(**arguments, **{name: False})
        cupyflash.attention_backward(**arguments)


def test_a_list_that_holds_itself_is_refused(gpu):
    window = [0]
    window.append(window)
    with pytest.raises(TypeError, match=r"^window_size: expected whole numbers"):
        cupyflash.attention(**forward(window_size=window))


def refuses(match, call, *arguments, **options):
    """The call, which looks like one that was right."""
    known = len(_plan.plans.values)
    with pytest.raises(ValueError, match=match), mock.patch.object(_launch, "run", side_effect=AssertionError):
        call(*arguments, **options)
    assert len(_plan.plans.values) == known > 0


def test_a_result_may_overlap_an_input_in_a_later_call(gpu):
    q, k, v, out, spare = (array(2, 4, 64) for _ in range(5))
    t = array(2 * 4 * 64)
    options = {"score_mod": "score + t[i]", "mask": array(4, 4, dtype=np.bool_)}
    cupyflash.attention(q, k, v, aux={"t": t}, out=out, **options)
    for name, x in ("q", q), ("k", k), ("v", v), (r"aux\['t'\]", t.reshape(2, 4, 64)):
        refuses(f"^out: overlaps {name} in memory", cupyflash.attention, q, k, v, aux={"t": t}, out=x, **options)
    cupyflash.attention(q, k, v, aux={"t": t}, out=spare, **options)


def test_gradients_may_overlap_in_a_later_call(gpu):
    dout, q, k, v, out, dq, dk, dv = (array(2, 4, 64) for _ in range(8))
    lse = array(2, 4, dtype=np.float32)
    call = cupyflash.attention_backward
    call(dout, q, k, v, out, lse, grads_out=(dq, dk, dv))
    for match, grads_out in (
        ("^dq: overlaps dout", (dout, dk, dv)),
        ("^dk: overlaps dq", (dq, dq, dv)),
        ("^dv: overlaps dk", (dq, dk, dk)),
        ("^dv: overlaps out", (dq, dk, out)),
    ):
        refuses(match, call, dout, q, k, v, out, lse, grads_out=grads_out)
    call(dout, q, k, v, out, lse, grads_out=(dv, dq, dk))


def test_a_result_may_be_read_only_in_a_later_call():
    x, out = np.zeros((2, 4, 8), np.float16), np.zeros((2, 4, 8), np.float16)
    with nothing_remembered():
        cupyflash.attention(x, x, x, out=out)
        out.flags.writeable = False
        refuses("^out: is read-only", cupyflash.attention, x, x, x, out=out)
