"""What cannot be launched or run is refused with the name, the value, and what would be right."""

import ctypes
import sys

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import launch, module, poisoned

FILL = """
extern "C" __global__ void fill(float* out, float x, int n) {
  if ((int)threadIdx.x < n) out[threadIdx.x] = x;
}"""


def call(args, grid=(1,), block=(32,), shared_mem=0, source=FILL, **settings):
    kernel = module(source).get_function(source.split("void ")[1].split("(")[0])
    with ptxsim.settings(**settings):
        kernel(grid, block, args, shared_mem=shared_mem)


def test_the_right_call_works():
    out = poisoned(32, np.float32)
    call((out, np.float32(2), np.int32(32)))
    assert (out == 2).all()


@pytest.mark.parametrize("drop", [1, 2, 3])
def test_too_few_arguments(drop):
    arguments = (poisoned(32, np.float32), np.float32(2), np.int32(32))
    with pytest.raises((TypeError, ValueError), match=r"3"):
        call(arguments[:-drop])


def test_too_many_arguments():
    with pytest.raises((TypeError, ValueError), match=r"4"):
        call((poisoned(32, np.float32), np.float32(2), np.int32(32), np.int32(1)))


@pytest.mark.parametrize(
    "position, value",
    [
        (1, 2.0),
        (1, 2),
        (1, np.float64(2)),
        (2, 2**32),
        (2, -(2**31) - 1),
        (2, np.int16(32)),
        (2, None),
        (0, np.int32(0)),
    ],
)
def test_arguments_of_the_wrong_size(position, value):
    """A Python float is a double and a Python int 64 bits: a 4-byte parameter would read its low half."""
    arguments = [poisoned(32, np.float32), np.float32(2), np.int32(32)]
    arguments[position] = value
    with pytest.raises((TypeError, ValueError), match=r"bytes"):
        call(tuple(arguments))
    assert np.isnan(arguments[0]).all() if position else True


@pytest.mark.parametrize("value", ["2", [1.0], (1,), {"x": 1}, 2 + 3j, object(), b"ab", ctypes.c_float(2)])
def test_arguments_of_a_type_that_has_no_meaning(value):
    with pytest.raises(TypeError):
        call((poisoned(32, np.float32), value, np.int32(32)))


@pytest.mark.skipif(sys.byteorder == "big", reason="the other order is foreign")
def test_values_in_a_foreign_byte_order():
    source = """
    struct Pair { int a, b; };
    extern "C" __global__ void foreign(int* out, Pair pair) { out[0] = pair.a; }"""
    pair = np.zeros((), [("a", "i4"), ("b", "i4")])[()]
    for swapped in (np.zeros(1, ">i4"), np.zeros(1, [("a", ">i4")])):
        with pytest.raises(TypeError, match=r"args\[0\].*byte order"):
            call((swapped, pair), source=source)
        with pytest.raises(TypeError, match=r"device_memory.*byte order"), ptxsim.device_memory(swapped):
            pass
    with pytest.raises(TypeError, match=r"args\[1\].*byte order"):
        call((np.zeros(1, np.int32), np.zeros((), [("a", ">i4"), ("b", ">i4")])[()]), source=source)


def test_python_objects_are_no_device_memory():
    """A kernel would write numbers over pointers, and Python would follow them."""
    for objects in (np.zeros(3, object), np.zeros(3, [("a", "f4"), ("b", object)])):
        with pytest.raises(TypeError, match=r"args\[0\]: dtype .* holds Python objects"):
            call((objects, np.float32(2), np.int32(3)))
        with pytest.raises(TypeError, match=r"device_memory: .*objects"), ptxsim.device_memory(objects):
            pass


def test_unknown_globals_list_the_known_ones():
    source = """
    __device__ int counter = 40;
    __constant__ int fixed = 3;
    extern "C" __global__ void both(int* out) { out[0] = counter + fixed; }"""
    assert module(source).get_global("counter").view(np.int32) == 40
    with pytest.raises(ValueError, match=r"'c'.*counter, fixed"):
        module(source).get_global("c")
    with pytest.raises(ValueError, match=r"'c'.*none"):
        module(FILL).get_global("c")


def test_structs_of_the_wrong_size():
    source = """
    struct Params { long long a, b; };
    extern "C" __global__ void structs(int* out, Params p) { out[0] = (int)(p.a + p.b); }"""
    good = np.zeros((), [("a", "i8"), ("b", "i8")])
    call((poisoned(1, np.int32), good[()]), source=source)
    for bad in (np.zeros((), [("a", "i8"), ("b", "i4")]), np.zeros((), [("a", "i8"), ("b", "i8"), ("c", "i1")])):
        for value in (bad[()], bad):
            with pytest.raises(TypeError, match=r"args\[1\]: .* bytes, structs takes 16"):
                call((poisoned(1, np.int32), value), source=source)


ARGUMENTS = (np.zeros(4096, np.float32), np.float32(1), np.int32(1))


def test_unknown_kernel_names_list_the_known_ones():
    with pytest.raises(Exception, match=r"'fil'.*fill"):
        launch(FILL, 1, 32, *ARGUMENTS, name="fil")


def test_functions_that_are_no_kernels_yet():
    """What a function of C++ needs, and what a template does."""
    loaded = ptxsim.RawModule(
        code="""__global__ void fill(int* x) { *x = 1; }
    template <typename T> __global__ void copy(T* x, const T* y) { *x = *y; }"""
    )
    with pytest.raises(ValueError, match=r"""; a C\+\+ function needs extern "C" or name_expressions=\('fill',\)$"""):
        loaded.get_function("fill")
    with pytest.raises(ValueError, match=r"; a template needs its arguments: name_expressions=\('copy<float>',\)$"):
        loaded.get_function("copy")


@pytest.mark.parametrize(
    "grid, block",
    [
        ((1,), (1025,)),
        ((1,), (32, 33)),
        ((1,), (1, 1, 65)),
        ((1,), (0,)),
        ((0,), (32,)),
        ((1, 65536), (1,)),
        ((1, 1, 65536), (1,)),
        ((2**31,), (1,)),
        ((-1,), (32,)),
        ((1, 1, 1, 1), (32,)),
        ((1,), (32, 1, 1, 1)),
        ((1,), (-32,)),
    ],
)
def test_launches_outside_the_limits(grid, block):
    with pytest.raises(ValueError, match=r"grid|block"):
        call(ARGUMENTS, grid=grid, block=block)


@pytest.mark.parametrize(
    "target, limit", [("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_90", 227), ("sm_120", 99)]
)
def test_shared_memory_limits(target, limit):
    """Static and dynamic shared memory together may fill what a block of the architecture can have, no more."""
    source = """
    extern __shared__ int dynamic[];
    extern "C" __global__ void big(int* out) {
      __shared__ int fixed[256];
      fixed[threadIdx.x] = dynamic[0] = 1;
      __syncthreads();
      out[threadIdx.x] = fixed[31 - threadIdx.x];
    }"""
    out = poisoned(32, np.int32)
    largest = (limit - 1) * 1024
    with ptxsim.settings(arch=target):
        kernel = ptxsim.RawKernel(source, "big")
        for size in 47 * 1024 + 4, largest:
            with pytest.raises(ValueError, match=r"at most 48128 until its max_dynamic_shared_size_bytes is set"):
                kernel((1,), (32,), (out,), shared_mem=size)
        kernel((1,), (32,), (out,), shared_mem=47 * 1024)
        assert (out == 1).all()
        with pytest.raises(ValueError, match=rf"max_dynamic_shared_size_bytes: {limit * 1024 + 4} bytes with the"):
            kernel.max_dynamic_shared_size_bytes = largest + 4
        kernel.max_dynamic_shared_size_bytes = largest
        out[:] = 0
        kernel.module.get_function("big")((1,), (32,), (out,), shared_mem=largest)
        assert (out == 1).all()
        with pytest.raises(ValueError, match=r"shared_mem"):
            kernel((1,), (32,), (out,), shared_mem=largest + 4)


def test_compile_errors_carry_the_log():
    source = 'extern "C" __global__ void broken(int* out) {\n  out[0] = undefined_name;\n}'
    out = poisoned(1, np.int32)
    with pytest.raises(Exception, match=r"undefined_name") as error:
        launch(source, 1, 1, out)
    assert "(2)" in str(error.value) or "line 2" in str(error.value), str(error.value)


def test_unsupported_instructions_are_listed_before_anything_runs():
    """Every one with its PTX text and its CUDA line, not only the first that would be met."""
    source = """
    extern "C" __global__ void exotic(unsigned* out) {
      unsigned a = threadIdx.x, b;
      out[0] = 0;
      asm volatile("vadd.u32.u32.u32 %0, %1, %1;" : "=r"(b) : "r"(a));  // first
      out[0] = b;
      if (a > 1000) asm volatile("pmevent 3;");  // second
    }"""
    out = poisoned(1, np.uint32)
    before = out.copy()
    with pytest.raises(NotImplementedError) as error:
        launch(source, 1, 32, out)
    message = str(error.value)
    lines = source.splitlines()
    for text, mark in (("vadd.u32.u32.u32", "// first"), ("pmevent", "// second")):
        number = next(k for k, line in enumerate(lines, 1) if mark in line)
        assert text in message and str(number) in message, message
    np.testing.assert_array_equal(out, before)


def test_a_trap_stops_the_launch():
    source = """
    extern "C" __global__ void trapped(int* out, int bad) {
      if (threadIdx.x == bad) asm volatile("trap;");  // here
      out[threadIdx.x] = 1;
    }"""
    launch(source, 1, 32, poisoned(32, np.int32), np.int32(99))
    with pytest.raises(ptxsim.SimulationError, match=r"trap"):
        launch(source, 1, 32, poisoned(32, np.int32), np.int32(7))


def test_instructions_that_an_architecture_lacks_are_refused():
    """cp.async does not exist on sm_75: a GPU's assembler would not take it either."""
    source = """
    extern "C" __global__ void early(const int4* x) {
      __shared__ int4 tile;
      unsigned to = (unsigned)__cvta_generic_to_shared(&tile);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x));
    }"""
    launch(source, 1, 1, np.zeros((1, 4), np.int32))
    with pytest.raises(NotImplementedError, match=r"cp\.async"):
        launch(source, 1, 1, np.zeros((1, 4), np.int32), arch="sm_75")


@pytest.mark.parametrize(
    "choice",
    [
        {"arch": "sm_70"},
        {"arch": "80"},
        {"mma": "fp31"},
        {"schedule": "sideways"},
        {"speed": "fast"},
        {"seed": "a"},
        {"seed": -1},
        {"seed": 1.5},
    ],
)
def test_settings_that_do_not_exist(choice):
    with pytest.raises((ValueError, TypeError), match=next(iter(choice))):
        with ptxsim.settings(**choice):
            pass
