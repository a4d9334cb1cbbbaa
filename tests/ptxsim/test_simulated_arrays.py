"""Arrays of the simulated CuPy: the values that NumPy computes, and in everything else what CuPy's arrays are like."""

import copy
import pickle
import warnings

import cupy
import cupyx as installed_cupyx
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cupyflash import ptxsim
from cupyflash.ptxsim.testing import simulated_cupy
from cupyflash.ptxsim.testing.namespace import simulated_modules

cp, cupyx = simulated_cupy(), simulated_modules()["cupyx"]


def test_every_public_name_is_one_of_cupy():
    for ours, theirs in (
        (cp, cupy),
        (cp.linalg, cupy.linalg),
        (cp.fft, cupy.fft),
        (cp.random, cupy.random),
        (cp.testing, cupy.testing),
        (cp.cuda, cupy.cuda),
        (cp.cuda.runtime, cupy.cuda.runtime),
        (cp.cuda.stream, cupy.cuda.stream),
        (cp.cuda.compiler, cupy.cuda.compiler),
        (cp.cuda.Device, cupy.cuda.Device),
        (cp.cuda.Stream, cupy.cuda.Stream),
        (cp.cuda.Event, cupy.cuda.Event),
        (cp.ndarray, cupy.ndarray),
        (cupyx, installed_cupyx),
        (cp.RawKernel, cupy.RawKernel),
        (cp.RawModule, cupy.RawModule),
    ):
        names = [name for name in dir(ours) if not name.startswith("_")]
        assert names and [name for name in names if not hasattr(theirs, name)] == []


def test_what_is_not_there_says_so():
    for module, name in ((cp, "fuse"), (cp, "vectorize"), (cp.cuda, "Graph"), (cp.random, "XORWOW")):
        with pytest.raises(AttributeError, match=rf"{module.__name__}\.{name}: not simulated, though CuPy has it"):
            getattr(module, name)
    with pytest.raises(AttributeError, match=r"cupy\.insert: no such attribute"):  # NumPy has it
        cp.insert  # noqa: B018
    with pytest.raises(AttributeError, match=r"cupy\.ndarray\.cstruct: not simulated, though CuPy's has it"):
        cp.ones(3).cstruct  # noqa: B018
    with pytest.raises(AttributeError, match=r"cupy\.ndarray\.ctypes: no such attribute"):
        cp.ones(3).ctypes  # noqa: B018
    for thing, name in (
        (cp.exp, "at"),
        (cp.get_default_memory_pool(), "used_bytes"),
        (cp.cuda.Device(), "mem_info"),
        (cp.cuda.Event(), "ptr"),
        (cp.cuda.Stream.null, "ptr"),
        (cp.ones(3).data, "mem"),
        (cp.RawKernel("", ""), "kernel"),
        (cp.RawModule(), "options"),
    ):
        with pytest.raises(AttributeError, match=f"{type(thing).__name__}.{name}: not simulated"):
            getattr(thing, name)
    with pytest.raises(TypeError, match="insert"):
        np.insert(cp.ones(3), 0, 1)
    assert not hasattr(cp.ones(3), "__cuda_array_interface__")


@pytest.mark.parametrize(
    "mix",
    [
        lambda device, host: device + host,
        lambda device, host: host * device,
        lambda device, host: cp.maximum(device, host),
        lambda device, host: np.maximum(device, host),
        lambda device, host: cp.concatenate([device, host]),
        lambda device, host: device.dot(host),
        lambda device, host: device.__setitem__(slice(1, 3), host[1:3]),
        lambda device, host: device.__iadd__(host),
        lambda device, host: host.__setitem__(slice(None), device),
        lambda device, host: np.asarray(device),
        lambda device, host: cp.exp(host),
        lambda device, host: cp.add(device, 1, out=host),
        lambda device, host: np.add(host, 1, out=device),
        lambda device, host: np.testing.assert_array_equal(device, host),
    ],
)
def test_host_and_device_do_not_mix(mix):
    device, host = cp.arange(4.0), np.arange(4.0)
    with pytest.raises(TypeError):
        mix(device, host)
    assert (device.get() == np.arange(4)).all() and (host == np.arange(4)).all()


def test_what_crosses_is_copied():
    host = ptxsim.empty((2, 3))  # where device arrays begin, at a multiple of 256 bytes
    host[:] = np.arange(6).reshape(2, 3)
    device = cp.asarray(host)
    back, other = device.get(), cp.asnumpy(device)
    host[:] = -1
    back[:] = -2
    other[:] = -3
    assert device.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cp.array([np.arange(3), np.arange(3, 6)]).tolist() == cp.array([device[0], device[1]]).tolist()
    assert cp.asarray(device) is device and cp.array(device) is not device
    device.set(np.ones((2, 3)))
    assert (device == 1).all()
    with pytest.raises(ValueError, match=r"\(3,\)"):
        device.set(np.ones(3))
    assert device.get(out=other) is other and (other == 1).all()
    assert device[np.array([1, 0])].shape == (2, 3)  # as an index CuPy takes it


arrays = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int32, np.uint8, np.complex64, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4),
)
FUNCTIONS = [
    lambda xp, x: x * x + x,
    lambda xp, x: xp.where(x != 0, x, 1),
    lambda xp, x: x.sum(axis=-1, keepdims=True) if x.ndim else x.sum(),
    lambda xp, x: xp.stack([x, x[::-1] if x.ndim else x]),
    lambda xp, x: x.T.ravel(),
    lambda xp, x: x.astype(xp.float64 if x.dtype.kind != "c" else xp.complex128).mean(),
    lambda xp, x: xp.isfinite(x).any(),
    lambda xp, x: xp.broadcast_to(x, (2, *x.shape)),
    lambda xp, x: xp.unique(x.reshape(-1)),
    lambda xp, x: x.argmax(),
    lambda xp, x: xp.zeros_like(x, dtype=xp.float16, order="F"),
    lambda xp, x: x.reshape(-1)[x.reshape(-1) == x.reshape(-1)[0]],
]


@settings(max_examples=60)
@given(arrays, st.sampled_from(FUNCTIONS))
def test_values_are_those_of_numpy(x, function):
    with np.errstate(all="ignore"):
        expected = np.asarray(function(np, x))
    found = function(cp, cp.asarray(x))
    assert isinstance(found, cp.ndarray)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found.get(), expected)
    memory = found.data - (found.data.ptr - found.data._memory.ctypes.data)
    assert memory.ptr % 256 == 0  # as of every allocation on a GPU


def test_elements_and_sums_are_arrays():
    x = cp.arange(6).reshape(2, 3)
    element, row = x[1, 2], x[0]
    assert isinstance(element, cp.ndarray) and element.shape == () and int(element) == 5 == element.item()
    element += 2
    row[...] = 9
    assert x.tolist() == [[9, 9, 9], [3, 4, 7]]
    assert [v.shape for v in x] == [(3,), (3,)] and len(x) == 2
    assert isinstance(x.max(), cp.ndarray) and float(cp.linalg.norm(cp.array([3.0, 4.0]))) == 5
    assert list(range(3))[cp.array(1)] == 1 and f"{x.max():d}" == "9"
    x.diagonal()[...] = 1  # views can be written, as CuPy's can
    cp.broadcast_to(x[1, 2], (3,))[0] = 6
    assert x.tolist() == [[1, 9, 9], [3, 1, 6]]
    x.shape = (3, 2)
    assert x.shape == (3, 2) and repr(x[2]) == "array([1, 6])"


def test_outputs_are_the_objects_that_are_given():
    x, y = cp.arange(3), cp.zeros(3, int)
    same = x
    x += 1
    assert x is same and x.tolist() == [1, 2, 3]
    assert cp.add(x, x, out=y) is y and np.negative(x, out=y) is y and y.tolist() == [-1, -2, -3]
    assert x.cumsum(out=y) is y and y.tolist() == [1, 3, 6]


def test_copies():
    x = cp.arange(3)
    for y in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.copy()):
        y[0] = 7
        assert isinstance(y, cp.ndarray) and y.tolist() == [7, 1, 2] and x.tolist() == [0, 1, 2]


def test_dtypes():
    for values in (["a"], [None], np.array(["2026-01-01"], "M8[D]")):
        with pytest.raises(ValueError, match="Unsupported dtype"):
            cp.asarray(values)
    assert cp.ones(2, ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    assert cp.float32 is np.float32 and cp.dtype is np.dtype


def test_no_warning_where_cupy_gives_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (cp.zeros(2) / cp.zeros(2) != 0).all() and cp.isinf(cp.log(cp.zeros(2))).all()


@pytest.mark.parametrize("order", ["C", "F"])
def test_new_arrays_are_uninitialised(order):
    kernel = cp.RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
    with ptxsim.sanitize() as report:
        for x in (cp.zeros((4, 8), cp.float32, order), cp.ones_like(cp.empty((4, 8), cp.float32, order))):
            kernel((1,), (32,), (x,))
    assert not report
    for x in (
        cp.empty((4, 8), cp.float32, order),
        cp.empty_like(cp.ones((4, 8), cp.float32, order)),
        cp.ndarray((4, 8), cp.float32, order=order),
        cp.ndarray((4, 8), cp.float32, cp.cuda.alloc(128), order=order),
    ):
        assert x.flags[f"{order}_CONTIGUOUS"]
        with ptxsim.sanitize() as report:
            kernel((1,), (32,), (x,))
        assert [finding.kind for finding in report.findings] == ["uninitialised global memory"]


def test_pointers():
    x = cp.arange(6, dtype=cp.int16)
    assert (x.data + 4).ptr == x[2:].data.ptr == int(x[2:].data) == (x[4:].data - 4).ptr
    view = cp.ndarray((2, 2), cp.int16, x.data + 2, strides=(4, 2))
    view[...] *= 10
    assert x.tolist() == [0, 10, 20, 30, 40, 5]
    with pytest.raises((TypeError, ValueError), match="buffer"):
        cp.ndarray(6, cp.int16, x.data + 2)
    assert x[::-1].data.ptr == x.data.ptr + 10


def test_random_numbers():
    for draw in (
        lambda: cp.random.rand(3, 4, dtype=cp.float32),
        lambda: cp.random.RandomState(5).normal(size=(3, 4), dtype=cp.float32),
        lambda: cp.random.default_rng(5).random((3, 4), dtype=cp.float32),
        lambda: cp.random.randint(0, 5, (3, 4)).astype(cp.float32),
    ):
        cp.random.seed(5)
        first = draw()
        cp.random.seed(5)
        second = draw()
        assert first.shape == (3, 4) and first.dtype == cp.float32 and (first == second).all()
        assert len(cp.unique(first)) > 3
    assert isinstance(cp.random.random(), cp.ndarray)
    x = cp.arange(10)
    cp.random.shuffle(x)
    assert sorted(x.tolist()) == list(range(10))


def test_random_methods_are_those_of_cupy():
    ours = cp.random.default_rng()
    for name in {*dir(cupy.random.Generator), *dir(np.random.Generator)}:
        theirs = hasattr(cupy.random.Generator, name) and hasattr(np.random.Generator, name)
        assert name.startswith("_") or hasattr(ours, name) == theirs, name


def test_scattered():
    for add, x in (cp.add.at, cp.zeros(3)), (cupyx.scatter_add, cp.zeros(3, cp.int32)):
        add(x, cp.array([0, 2, 2]), cp.array([1, 2, 3], dtype=cp.int8))
        assert x.tolist() == [1, 0, 5]
    cupyx.scatter_max(x, [0, 0, 1], cp.array([4, 3, -1]))
    cupyx.scatter_min(x, (slice(1, 3),), 2)
    assert x.tolist() == [4, 0, 2]
    with pytest.raises(TypeError, match="add: int64, must be one of int32"):
        cp.add.at(cp.zeros(3, int), 0, 1)  # there is no atomicAdd of it
    with pytest.raises(TypeError, match=r"must be cupy\.ndarray"):
        cp.add.at(np.zeros(3), 0, 1)


def test_methods_of_universal_functions():
    x = cp.arange(1, 4)
    assert cp.add.reduce(x).tolist() == 6 and cp.multiply.accumulate(x).tolist() == [1, 2, 6]
    assert cp.subtract.outer(x, x[:2]).tolist() == [[0, -1], [1, 0], [2, 1]]
    with pytest.raises(AttributeError, match="reduce: not simulated"):
        cp.maximum.reduce(x)  # nor does CuPy's reduce
    assert cupyx.rsqrt(cp.array([4.0, 16.0])).tolist() == [0.5, 0.25]


def test_concatenation():
    x = cp.arange(2)
    assert isinstance(cp.r_[x, 5], cp.ndarray) and cp.r_[x, 5, [7]].tolist() == [0, 1, 5, 7]
    assert cp.c_[x, x].tolist() == [[0, 0], [1, 1]]
    for refused in slice(0, 2), "r":
        with pytest.raises(NotImplementedError):
            cp.r_[refused, x]


def test_memoize():
    calls = []
    kept = cp.memoize(for_each_device=True)(calls.append)
    kept(1), kept(1), kept(2)
    assert calls == [1, 2]


def test_assertions_of_both():
    x = cp.arange(3.0)
    cp.testing.assert_array_equal(x, np.arange(3))
    cp.testing.assert_allclose(np.arange(3), x + 1e-9, atol=1e-8)
    with pytest.raises(AssertionError):
        cp.testing.assert_allclose(x, x + 1)


def test_the_device():
    with ptxsim.settings(arch="sm_90"), cp.cuda.Device(0) as device:
        assert device == cp.ones(2).device and device.compute_capability == "90"
        assert cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"] == 132
        assert device.attributes["MaxSharedMemoryPerBlockOptin"] == 227 * 1024
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="device 1"):
        cp.cuda.Device(1)
    with cp.cuda.Stream(non_blocking=True) as stream:
        event = stream.record()
    stream.wait_event(event)
    event.synchronize()
    cp.cuda.Device().synchronize()
    cp.cuda.runtime.deviceSynchronize()
    cp.get_default_memory_pool().free_all_blocks()
    assert stream.done and cp.cuda.get_current_stream() is cp.cuda.Stream.null and cp.is_available()
    with pytest.raises(NotImplementedError, match="how long"):
        cp.cuda.get_elapsed_time(event, event)
    assert cp.get_array_module(cp.ones(2)) is cp and cp.get_array_module(np.ones(2), 3) is np
