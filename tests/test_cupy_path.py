"""What a GPU is given equals what the simulator is given: drawn problems on real cupy.ndarrays over no memory."""

import contextlib
import dataclasses
from unittest import mock

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

import cupyflash
from cupyflash import ptxsim, testing
from tests.forgetting import nothing_remembered

ARCH = "sm_90"


class Recorder:
    """In place of RawModule: what is compiled, and what is launched with which argument bytes."""

    def __init__(self):
        self.compiled, self.launches = [], []

    def RawModule(self, *, code, options):
        self.compiled.append((code, options))
        recorder = self

        class Kernel:
            max_dynamic_shared_size_bytes = 0

            def __init__(self, name):
                self.name = name

            def __call__(self, grid, block, args, *, shared_mem=0):
                recorder.launches.append((code, options, self.name, grid, block, args, shared_mem))

        class Module:
            get_function = staticmethod(Kernel)

        return Module()


@contextlib.contextmanager
def recorded_simulator():
    recorder = Recorder()
    with (
        mock.patch.object(ptxsim, "RawModule", recorder.RawModule),
        nothing_remembered(),
        ptxsim.settings(arch=ARCH),
    ):
        yield recorder


@contextlib.contextmanager
def recorded_gpu():
    """CuPy as on a machine with one sm_90 GPU, as far as launches go."""

    class Device(contextlib.nullcontext):
        compute_capability = ARCH.removeprefix("sm_")

    recorder = Recorder()
    with (
        mock.patch.object(cupy.cuda, "Device", Device),
        mock.patch.object(cupy, "RawModule", recorder.RawModule),
        mock.patch.object(cupy, "empty", allocated),
        mock.patch.object(cupy, "zeros", allocated),
        nothing_remembered(),
    ):
        yield recorder


class _Addresses:
    """Addresses that nothing lies at, as aligned as CuPy's own allocations."""

    next = 0x7F0000000000


def allocated(shape, dtype):
    """In place of cupy.empty and cupy.zeros."""
    memory = cupy.cuda.UnownedMemory(_Addresses.next, 1 << 40, None, 0)
    _Addresses.next += 1 << 32
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


def on_gpu(array):
    """A cupy.ndarray with the array's strides, at an address that is as aligned as the array's."""
    middle = 1 << 31  # strides may be negative
    _Addresses.next += 1 << 33
    memory = cupy.cuda.UnownedMemory(_Addresses.next, 1 << 40, None, 0)
    start = cupy.cuda.MemoryPointer(memory, middle + array.ctypes.data % 256)
    return cupy.ndarray(array.shape, array.dtype, memptr=start, strides=array.strides)


def pointer_fields(dtype, path=()):
    """Paths of the 64-bit addresses in a parameter structure."""
    for name, (field, *_) in dtype.fields.items():
        if field.fields:
            yield from pointer_fields(field, (*path, name))
        elif field == np.uint64:
            yield (*path, name)


def without_pointers(params, arrays):
    """The argument's bytes with 0 for each address, and what each address points to."""
    params, targets = np.array(params), []
    starts = {start: name for name, start in arrays.items()}
    for *path, last in pointer_fields(params.dtype):
        place = params
        for name in path:
            place = place[name]
        address = int(place[last])
        targets.append(starts.get(address, "null" if address == 0 else "made by cupyflash"))
        place[last] = 0
    return params.tobytes(), targets


def described(launches, arrays):
    return [
        (code, options, name, grid, block, shared_mem, [without_pointers(argument, arrays) for argument in args])
        for code, options, name, grid, block, args, shared_mem in launches
    ]


@pytest.mark.parametrize("function", [cupyflash.attention, cupyflash.naive.attention], ids=["tiled", "standard"])
@pytest.mark.parametrize("given_out", [False, True])
@settings(max_examples=40)
@given(problem=testing.attention_problems())
def test_gpu_and_simulator_are_given_the_same(function, given_out, problem):
    inputs, out = problem.inputs(), problem.empty_out()
    options = {"return_lse": bool(problem.seed % 2), **problem.options}
    with recorded_simulator() as simulator:
        function(*inputs, out=out if given_out else None, **options)
    gpu_inputs, gpu_out = [on_gpu(x) for x in inputs], on_gpu(out)
    with recorded_gpu() as gpu:
        result = function(*gpu_inputs, out=gpu_out if given_out else None, **options)
    if given_out:
        assert (result[0] if options["return_lse"] else result) is gpu_out

    arrays = {name: x.ctypes.data for name, x in zip(("q", "k", "v", "out"), (*inputs, out), strict=True)}
    gpu_arrays = {name: x.data.ptr for name, x in zip(("q", "k", "v", "out"), (*gpu_inputs, gpu_out), strict=True)}
    assert described(gpu.launches, gpu_arrays) == described(simulator.launches, arrays)
    assert gpu.compiled == simulator.compiled


@settings(max_examples=30)
@given(problem=testing.attention_problems(), other=testing.attention_problems())
def test_a_second_call_of_the_same_kind_compiles_nothing(problem, other):
    """Neither with other lengths, batch and strides, nor with values that differ."""
    other = dataclasses.replace(
        other,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        align="top-left" if problem.causal else None,
        softmax_scale=problem.softmax_scale,
    )
    with recorded_gpu() as gpu:
        for each in problem, other:
            cupyflash.attention(*map(on_gpu, each.inputs()), out=on_gpu(each.empty_out()), **each.options)
    codes = [code for code, _ in gpu.compiled]
    assert len(set(codes)) == len(codes)
    # One for heads apart, and one that tells the rows of stacked heads apart.
    assert len({"#define STACKED 1" in code for code in codes if "flash_fwd(" in code}) == sum(
        "flash_fwd(" in code for code in codes
    )
    assert sum("strided_copy(" in code for code in codes) <= 1
