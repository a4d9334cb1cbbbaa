"""Headers that CuPy gives its kernels: cooperative groups, CUB, libcu++ and its own, plain and under the sanitizer."""

import contextlib

import numpy as np
import pytest
from cupy._core.core import assemble_cupy_compiler_options

from cupyflash import ptxsim

from .launching import launch, poisoned

NUMBERS = np.arange(128, dtype=np.int32)


@pytest.fixture(params=[False, True], ids=["plain", "sanitized"])
def checked(request):
    """Launches run plainly, or under the sanitizer, which must stay silent."""
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(ptxsim.sanitize()) if request.param else None
        stack.enter_context(ptxsim.settings(schedule="random", seed=1))
        yield
        assert not report, str(report)


def test_headers_are_looked_for_where_cupy_does():
    def directories(options):
        return [option for option in options if option.startswith("-I")]

    with pytest.raises(ptxsim.CompileError) as log:
        ptxsim.compile_ptx("broken", ("-I/mine", "-DX"))
    assert directories(log.value.options) == directories(assemble_cupy_compiler_options(("-I/mine", "-DX")))


def test_the_package_of_missing_headers_is_named():
    with pytest.raises(ptxsim.CompileError, match="pip install nvidia-cuda-crt"):
        ptxsim.compile_ptx('#include "crt/missing.h"')
    with pytest.raises(ptxsim.CompileError) as other:
        ptxsim.compile_ptx('#include "missing.h"')
    assert "pip" not in str(other.value)


def test_headers_of_packages_are_found_in_any_layout(tmp_path, monkeypatch):
    """Those of CUDA 13 share a folder; those of CUDA 12 have one for each package."""
    for file in ("cuda_runtime/include/cuda_fp16.h", "cuda_nvcc/include/crt/mma.h", "cublas/include/cublas.h"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(ptxsim.compile, "_package", lambda name: [tmp_path] if name == "nvidia" else [])
    found = {path.parent.name for path in ptxsim.compile._include_directories()[2]}
    assert found == {"cuda_runtime", "cuda_nvcc"}


GROUPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
extern "C" __global__ void groups(const int* x, int* sums, float* largest) {
  __shared__ int s[128];
  auto block = cg::this_thread_block();
  auto tile = cg::tiled_partition<16>(block);
  int i = block.thread_rank();
  s[i] = x[i];
  block.sync();
  int value = s[(i + 64) % 128];
  sums[i] = cg::reduce(tile, value, cg::plus<int>()) + 1000 * tile.meta_group_rank();
  largest[i] = cg::reduce(tile, float(value), cg::greater<float>());
}"""


def test_cooperative_groups(checked):
    sums, largest = poisoned(128, np.int32), poisoned(128, np.float32)
    launch(GROUPS, 1, 128, NUMBERS, sums, largest)
    tiles = np.roll(NUMBERS, -64).reshape(8, 16)
    np.testing.assert_array_equal(sums, np.repeat(tiles.sum(1) + 1000 * np.arange(8), 16))
    np.testing.assert_array_equal(largest, np.repeat(tiles.max(1), 16))


COPY = """
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
namespace cg = cooperative_groups;
extern "C" __global__ void turn(const int* x, int* y) {
  __shared__ __align__(16) int s[128];
  auto block = cg::this_thread_block();
  cg::memcpy_async(block, s, x, sizeof s);
  cg::wait(block);
  y[threadIdx.x] = s[127 - threadIdx.x];
}"""


def test_asynchronous_copies_of_cooperative_groups(checked):
    turned = poisoned(128, np.int32)
    launch(COPY, 1, 128, NUMBERS, turned)
    np.testing.assert_array_equal(turned, NUMBERS[::-1])


CUB = """
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
using Reduce = cub::BlockReduce<int, 128>;
using Scan = cub::BlockScan<int, 128>;
extern "C" __global__ void cub_sums(const int* x, int* before, int* sum) {
  __shared__ Reduce::TempStorage reduce;
  __shared__ Scan::TempStorage scan;
  int value = x[threadIdx.x], mine;
  int whole = Reduce(reduce).Sum(value);
  __syncthreads();
  int largest = Reduce(reduce).Reduce(value, cuda::maximum<>{});
  Scan(scan).ExclusiveSum(value, mine);
  before[threadIdx.x] = mine;
  if (threadIdx.x == 0) *sum = whole + 1000000 * largest;
}"""


def test_cub(checked):
    before, whole = poisoned(128, np.int32), poisoned(1, np.int32)
    launch(CUB, 1, 128, NUMBERS, before, whole)
    np.testing.assert_array_equal(before, np.cumsum(NUMBERS) - NUMBERS)
    assert whole[0] == NUMBERS.sum() + 1000000 * NUMBERS.max()


def test_storage_of_cub_that_is_used_again_too_early_is_a_race():
    with ptxsim.sanitize() as report:
        launch(CUB.replace("  __syncthreads();\n", ""), 1, 128, NUMBERS, poisoned(128, np.int32), poisoned(1, np.int32))
    assert {finding.kind for finding in report.findings} == {"shared race"}


ATOMICS = """
#include <cuda/atomic>
#include <cuda/std/complex>
#include <cuda/std/limits>
extern "C" __global__ void messages(int* sum, int* message, int* flag, float* out) {
  cuda::atomic_ref<int, cuda::thread_scope_device>(*sum).fetch_add(threadIdx.x, cuda::memory_order_relaxed);
  cuda::atomic_ref<int, cuda::thread_scope_device> raised(*flag);
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    message[0] = 5;
    raised.store(1, cuda::memory_order_release);
  } else {
    while (!raised.load(cuda::memory_order_acquire));
    message[1] = message[0];
    cuda::std::complex<float> z(1, 2);
    z *= z;
    out[0] = z.real();
    out[1] = z.imag();
    out[2] = cuda::std::numeric_limits<float>::max();
  }
}"""


def test_libcudacxx(checked):
    whole, message, flag, out = np.zeros(1, np.int32), np.zeros(2, np.int32), np.zeros(1, np.int32), np.zeros(3, "f4")
    launch(ATOMICS, 2, 64, whole, message, flag, out)
    assert whole[0] == 2 * sum(range(64)) and message.tolist() == [5, 5]
    np.testing.assert_array_equal(out, np.array([-3, 4, np.finfo(np.float32).max], np.float32))


def test_headers_of_cupy(checked):
    source = """
    #include <cupy/complex.cuh>
    #include <cupy/carray.cuh>
    extern "C" __global__ void square(complex<float>* z) { z[threadIdx.x] *= z[threadIdx.x]; }"""
    z = np.arange(32, dtype=np.complex64) * (1 + 2j)
    expected = z * z
    launch(source, 1, 32, z)
    np.testing.assert_array_equal(z, expected)
