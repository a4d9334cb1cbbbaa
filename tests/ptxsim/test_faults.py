"""Accesses outside mapped memory, misaligned or forbidden stop the launch and say who did it and on what line."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import launch, poisoned


def marked_line(source):
    """The 1-based line that carries the comment '// fault'."""
    return next(k for k, line in enumerate(source.splitlines(), 1) if "// fault" in line)


def fault(source, *args, grid=1, block=32, error=None, **options):
    """Launch, expect a fault, and return its message after checking that it names kernel and source line."""
    with pytest.raises(error or ptxsim.MemoryFault) as caught:
        launch(source, grid, block, *args, **options)
    assert isinstance(caught.value, ptxsim.SimulationError)
    message = str(caught.value)
    name = source.split("void ")[1].split("(")[0]
    assert name in message, message
    assert str(marked_line(source)) in message, message
    return message


READ = """
extern "C" __global__ void peek(const float* x, float* out, long long shift) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = x[i + shift];  // fault
}"""


@pytest.mark.parametrize("shift, thread, block", [(1, 31, 1), (-1, 0, 0), (2**40, 0, 0), (-(2**40), 0, 0), (40, 24, 0)])
def test_reads_out_of_bounds(shift, thread, block):
    """One element past either end, and far away: the message names the first thread and block that did it."""
    x, out = np.ones(64, np.float32), poisoned(64, np.float32)
    message = fault(READ, x, out, np.int64(shift), grid=2)
    assert "thread" in message and "block" in message
    digits = "".join(ch if ch.isdigit() else " " for ch in message).split()
    assert str(thread) in digits and str(block) in digits, message


def test_threads_and_blocks_are_named_by_their_coordinates():
    source = """
    extern "C" __global__ void cube(int* out) {
      bool bad = blockIdx.x == 3 && blockIdx.y == 2 && blockIdx.z == 1
              && threadIdx.x == 4 && threadIdx.y == 5 && threadIdx.z == 2;
      out[bad ? 1000 : 0] = 1;  // fault
    }"""
    message = fault(source, np.zeros(1, np.int32), grid=(7, 5, 2), block=(6, 7, 3))
    assert "(4, 5, 2)" in message and "(3, 2, 1)" in message, message


def test_writes_out_of_bounds_leave_the_neighbours_alone():
    source = """
    extern "C" __global__ void poke(int* out, int shift) {
      out[threadIdx.x + shift] = 7;  // fault
    }"""
    whole = np.zeros(128, np.int32)
    for shift in (-1, 1):
        fault(source, whole[32:64], np.int32(shift))
        assert not whole[:32].any() and not whole[64:].any()


def test_between_two_arrays_there_is_nothing():
    """Two slices of one allocation are mapped; the gap between them is not."""
    whole = np.arange(96, dtype=np.float32)
    source = """
    extern "C" __global__ void gap(const float* low, const float* high, float* out, int k) {
      out[threadIdx.x] = low[threadIdx.x] + high[threadIdx.x] + low[k];  // fault
    }"""
    low, high, out = whole[:32], whole[64:], poisoned(32, np.float32)
    launch(source, 1, 32, low, high, out, np.int32(64 + 5))
    np.testing.assert_array_equal(out, low + high + whole[69])
    for k in (32, 63):
        fault(source, low, high, out, np.int32(k))


def test_an_array_that_was_not_passed_is_not_mapped():
    source = """
    extern "C" __global__ void hidden(const long long* address, float* out) {
      out[threadIdx.x] = ((const float*)*address)[threadIdx.x];  // fault
    }"""
    x, out = np.arange(32, dtype=np.float32), poisoned(32, np.float32)
    address = np.array([x.ctypes.data])
    with ptxsim.device_memory(x):
        launch(source, 1, 32, address, out)
    np.testing.assert_array_equal(out, x)
    fault(source, address, out)


def test_null_pointers():
    source = """
    extern "C" __global__ void null(const int* x, int* out) {
      if (threadIdx.x == 9) out[0] = *x;  // fault
    }"""
    message = fault(source, None, poisoned(1, np.int32))
    assert "9" in message


@pytest.mark.parametrize("bytes_, c_type", [(2, "short"), (4, "int"), (8, "double"), (16, "uint4")])
@pytest.mark.parametrize("offset", [1, -1])
def test_misaligned_accesses(bytes_, c_type, offset):
    source = f"""
    extern "C" __global__ void crooked(const char* x, {c_type}* out, int shift) {{
      out[0] = *(const {c_type}*)(x + shift);  // fault
    }}"""
    storage = np.zeros(80, np.uint8)
    x, out = storage[-storage.ctypes.data % 16 :][:64], np.zeros(32, np.uint8)
    out = out[-out.ctypes.data % 16 :][:16]
    launch(source, 1, 1, x, out, np.int32(16))
    message = fault(source, x, out, np.int32(16 + offset), block=1)
    assert "align" in message.lower()


def test_writes_to_read_only_arrays():
    source = """
    extern "C" __global__ void stamp(int* out) { out[threadIdx.x] = 1;  // fault
    }"""
    out = np.zeros(32, np.int32)
    out.flags.writeable = False
    message = fault(source, out)
    assert "in a read-only array, args[0][0]; " in message
    assert not out.any()


@pytest.mark.parametrize("given", [0, 64])
def test_too_little_dynamic_shared_memory(given):
    """A kernel that has none is not told of it."""
    source = """
    extern "C" __global__ void fill(int* out) {
      __shared__ int fixed[16];
      extern __shared__ int box[];
      fixed[threadIdx.x % 16] = 1;
      box[threadIdx.x] = fixed[0];  // fault
      out[threadIdx.x] = box[31 - threadIdx.x];
    }"""
    out = poisoned(32, np.int32)
    launch(source, 1, 32, out, shared_mem=128)
    assert f"outside its {64 + given} bytes (shared_mem={given}); " in fault(source, out, shared_mem=given)
    fixed = source.replace("extern __shared__ int box[]", "__shared__ int box[16]")
    assert "outside its 128 bytes; " in fault(fixed, out)


def test_atomics_and_copies_are_checked_too():
    atomic = """
    extern "C" __global__ void count(int* x) {
      atomicAdd(x + threadIdx.x, 1);  // fault
    }"""
    fault(atomic, np.zeros(31, np.int32))
    copy = """
    extern "C" __global__ void fetch(const uint4* x, uint4* out) {
      __shared__ uint4 tile[32];
      unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + threadIdx.x));  // fault
      asm volatile("cp.async.wait_all;" ::: "memory");
      out[threadIdx.x] = tile[threadIdx.x];
    }"""
    fault(copy, np.zeros((31, 4), np.uint32), poisoned((32, 4), np.uint32))


SHARED = """
extern __shared__ int dynamic[];
extern "C" __global__ void shared(int* out, int k) {
  __shared__ int fixed[16];
  fixed[threadIdx.x & 15] = threadIdx.x;
  dynamic[threadIdx.x & 3] = 1;
  __syncthreads();
  out[threadIdx.x] = dynamic[k];  // fault
}"""


def test_shared_memory_out_of_bounds():
    out = poisoned(32, np.int32)
    launch(SHARED, 1, 32, out, np.int32(3), shared_mem=16)
    assert (out == 1).all()
    for k in (4, 100000, -1000000):
        fault(SHARED, out, np.int32(k), shared_mem=16)
    static = """
    extern "C" __global__ void fixed(int* out, int k) {
      __shared__ int tile[16];
      tile[threadIdx.x & 15] = 2;
      __syncthreads();
      out[threadIdx.x] = tile[k];  // fault
    }"""
    launch(static, 1, 32, out, np.int32(15))
    for k in (16, -1):
        fault(static, out, np.int32(k))


def test_local_memory_out_of_bounds():
    source = """
    extern "C" __global__ void stack(int* out, int k) {
      int own[8];
      for (int j = 0; j < 8; ++j) own[(j * 3) & 7] = j + threadIdx.x;
      out[threadIdx.x] = own[k];  // fault
    }"""
    out = poisoned(32, np.int32)
    launch(source, 1, 32, out, np.int32(7))
    np.testing.assert_array_equal(out, np.arange(32) + 5)
    for k in (8, -1, 1 << 20):
        fault(source, out, np.int32(k))


def test_ldmatrix_rows_must_be_aligned_and_inside():
    source = """
    extern "C" __global__ void rows(unsigned* out, int shift) {
      __shared__ __align__(16) unsigned tile[128];
      tile[threadIdx.x] = 0;
      __syncthreads();
      unsigned row = (unsigned)__cvta_generic_to_shared(tile + 4 * threadIdx.x) + shift, v;
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(v) : "r"(row) : "memory");  // fault
      out[threadIdx.x] = v;
    }"""
    out = poisoned(32, np.uint32)
    for shift in (4, 8, 1 << 16):
        fault(source, out, np.int32(shift))


def test_a_fault_in_a_predicated_off_lane_is_none():
    source = """
    extern "C" __global__ void tail(const float* x, float* out, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) out[i] = x[i] * 2;
    }"""
    x, out = np.arange(37, dtype=np.float32), poisoned(37, np.float32)
    launch(source, 2, 32, x, out, np.int32(37))
    np.testing.assert_array_equal(out, 2 * x)


def test_the_machine_works_again_after_a_fault():
    x, out = np.ones(64, np.float32), poisoned(64, np.float32)
    fault(READ, x, out, np.int64(1), grid=2)
    launch(READ, 2, 32, x, out, np.int64(0))
    assert (out == 1).all()


def test_lines_follow_line_directives():
    """A kernel put together from several files reports the file and line its `#line` says."""
    source = """
#line 700 "kernels/tile.cuh"
__device__ float get(const float* x, int i) { return x[i]; }
#line 20 "kernels/peek.cu"
extern "C" __global__ void peek(const float* x, float* out) {
  out[threadIdx.x] = get(x, threadIdx.x + 1);
}"""
    with pytest.raises(ptxsim.MemoryFault, match=r"tile\.cuh.*700|700.*tile\.cuh"):
        launch(source, 1, 32, np.ones(32, np.float32), poisoned(32, np.float32))
