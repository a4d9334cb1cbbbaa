"""Counters of kernels that textbooks use to explain them, with the numbers that the textbooks give."""

import numpy as np
import pytest

from .launching import poisoned, zeros
from .test_profile import profiled

TRANSPOSE = """
extern "C" __global__ void transpose(const float* x, float* out, int n) {
  __shared__ float tile[32][32 + PADDING];
  int row = blockIdx.y * 32, column = blockIdx.x * 32;
  for (int i = threadIdx.y; i < 32; i += 8) tile[i][threadIdx.x] = x[(row + i) * n + column + threadIdx.x];
  __syncthreads();
  for (int i = threadIdx.y; i < 32; i += 8) out[(column + i) * n + row + threadIdx.x] = tile[threadIdx.x][i];
}"""


def test_transpose_without_shared_memory():
    """Reads are coalesced, each write of a warp goes to 32 sectors."""
    source = """
    extern "C" __global__ void transpose(const float* x, float* out, int n) {
      int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
      out[column * n + row] = x[row * n + column];
    }"""
    x, out = zeros(64 * 64), zeros(64 * 64)
    kernel = profiled(source, (2, 8), (32, 8), x, out, np.int32(64))
    requests = 64 * 64 // 32
    assert (kernel.global_load_requests, kernel.global_store_requests) == (requests, requests)
    assert (kernel.global_load_sectors, kernel.global_store_sectors) == (4 * requests, 32 * requests)
    assert (kernel.global_load_efficiency, kernel.global_store_efficiency) == (1, 1 / 8)
    assert kernel.compulsory_bytes == 2 * 64 * 64 * 4


@pytest.mark.parametrize("padding, conflicts", [(0, 32), (1, 1)])
def test_transpose_through_a_tile(padding, conflicts):
    """Both directions coalesced; columns of an unpadded tile lie in one bank."""
    x, out = zeros(64 * 64), zeros(64 * 64)
    source = TRANSPOSE.replace("PADDING", str(padding))
    kernel = profiled(source, (2, 2), (32, 8), x, out, np.int32(64))
    requests = 64 * 64 // 32
    assert kernel.global_load_efficiency == kernel.global_store_efficiency == 1
    assert kernel.shared_requests == kernel.shared_ideal_wavefronts == 2 * requests
    assert kernel.shared_wavefronts == requests * (1 + conflicts)
    assert kernel.barriers == 4
    store, load = (next(line for line in kernel.lines if word in line.text) for word in ("tile[i][", "= tile["))
    assert (store.shared_efficiency, load.shared_efficiency) == (1, 1 / conflicts)
    assert (store.global_load_requests, load.global_load_requests) == (requests, 0)


REDUCE = """
extern "C" __global__ void reduce(const float* x, float* out) {
  __shared__ float sum[256];
  int t = threadIdx.x;
  sum[t] = x[blockIdx.x * 256 + t];
  __syncthreads();
  STEPS
  if (t == 0) out[blockIdx.x] = sum[0];
}"""
INTERLEAVED = """for (int d = 1; d < 256; d *= 2) {
    if (t % (2 * d) == 0) sum[t] += sum[t + d];
    __syncthreads();
  }"""
CONTIGUOUS = """for (int d = 128; d > 0; d /= 2) {
    if (t < d) sum[t] += sum[t + d];
    __syncthreads();
  }"""


@pytest.mark.parametrize(
    "steps, divergent",
    [
        (INTERLEAVED, 5 * 8 + 4 + 2 + 1),  # all eight warps until the stride is a warp, then those with a thread in it
        (CONTIGUOUS, 5),  # the first warp, from 16 threads on
    ],
)
def test_branches_of_a_reduction(steps, divergent):
    blocks = 3
    kernel = profiled(REDUCE.replace("STEPS", steps), blocks, 256, zeros(256 * blocks), poisoned(blocks, np.float32))
    line = next(line for line in kernel.lines if "sum[t] +=" in line.text)
    assert (line.branches, line.divergent_branches) == (8 * 8 * blocks, divergent * blocks)
    assert line.branch_efficiency == 1 - divergent / 64
    assert kernel.divergent_branches == (divergent + 1) * blocks  # and the last line
    assert kernel.barriers == 9 * blocks


NAIVE_SGEMM = """
extern "C" __global__ void sgemm(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.FIRST * 32 + threadIdx.FIRST, j = blockIdx.SECOND * 32 + threadIdx.SECOND;
  float sum = 0;
  for (int k = 0; k < n; ++k)
    sum += a[i * n + k] * b[k * n + j];
  c[i * n + j] = sum;
}"""
TILED_SGEMM = """
extern "C" __global__ void sgemm(const float* a, const float* b, float* c, int n) {
  __shared__ float a_tile[32][32], b_tile[32][32];
  int x = threadIdx.x, y = threadIdx.y, i = blockIdx.y * 32 + y, j = blockIdx.x * 32 + x;
  float sum = 0;
  for (int tile = 0; tile < n; tile += 32) {
    a_tile[y][x] = a[i * n + tile + x];
    b_tile[y][x] = b[(tile + y) * n + j];
    __syncthreads();
    for (int k = 0; k < 32; ++k) sum += a_tile[y][k] * b_tile[k][x];
    __syncthreads();
  }
  c[i * n + j] = sum;
}"""


def sgemm(source, n):
    rng = np.random.default_rng(n)
    a, b, c = (zeros(n * n) for _ in range(3))
    a[:], b[:] = rng.integers(-9, 9, (2, n * n))
    kernel = profiled(source, (n // 32, n // 32), (32, 32), a, b, c, np.int32(n))
    np.testing.assert_array_equal(c.reshape(n, n), a.reshape(n, n) @ b.reshape(n, n))
    return kernel


@pytest.mark.parametrize("first, second, sectors", [("x", "y", (32, 1, 32)), ("y", "x", (1, 4, 4))])
def test_naive_sgemm(first, second, sectors):
    """Lanes along a column read 32 sectors of A and one of B; along a row, one sector of A and 4 of B."""
    n = 64
    kernel = sgemm(NAIVE_SGEMM.replace("FIRST", first).replace("SECOND", second), n)
    warps = n * n // 32
    assert kernel.global_load_requests == 2 * n * warps
    assert kernel.global_load_sectors == n * warps * (sectors[0] + sectors[1])
    assert kernel.global_store_sectors == warps * sectors[2]
    assert kernel.global_load_bytes == 2 * n * n * n * 4
    assert kernel.distinct_load_sectors == 2 * n * n // 8
    # Each of the blocks reads 32 rows of A and 32 columns of B.
    assert kernel.block_load_sectors == (n // 32) ** 2 * 2 * 32 * n // 8
    assert kernel.flops == {"f32": 2 * n**3}


def test_tiled_sgemm():
    """Each element is loaded n / 32 times, in whole sectors, and tiles are read without conflicts."""
    n = 64
    kernel = sgemm(TILED_SGEMM, n)
    warps, tiles = n * n // 32, n // 32
    assert kernel.global_load_sectors == 2 * tiles * warps * 4 == kernel.block_load_sectors
    assert kernel.global_load_efficiency == kernel.shared_efficiency == kernel.branch_efficiency == 1
    assert kernel.barriers == tiles**2 * tiles * 2
    assert kernel.flops == {"f32": 2 * n**3}


HISTOGRAM = """
extern "C" __global__ void histogram(const int* bin, int* count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(count + bin[i], 1);
}"""


@pytest.mark.parametrize(
    "bins, passes, sectors",
    [(1, 32, 1), (4, 8, 1), (32, 1, 4), (256, 1, 4)],
)
def test_atomics_of_a_histogram(bins, passes, sectors):
    """Lanes that have one bin take turns."""
    values, count = zeros(320, np.int32), zeros(256, np.int32)
    values[:] = np.arange(320) % bins
    kernel = profiled(HISTOGRAM, 5, 64, values, count, np.int32(320))
    assert (kernel.atomics, kernel.atomic_lanes, kernel.atomic_passes) == (10, 320, 10 * passes)
    assert kernel.global_atomic_sectors == 10 * sectors
    assert kernel.distinct_atomic_sectors == -(-bins // 8)
    assert (kernel.global_store_requests, kernel.distinct_store_sectors) == (0, 0)
    assert kernel.compulsory_bytes == 320 * 4 + 32 * -(-bins // 8)


def test_atomics_in_shared_memory_are_not_wavefronts():
    source = """
    extern "C" __global__ void histogram(const int* bin, int* count) {
      __shared__ int own[32];
      own[threadIdx.x] = 0;
      __syncwarp();
      atomicAdd(own + bin[threadIdx.x], 1);
      __syncwarp();
      atomicAdd(count + threadIdx.x, own[threadIdx.x]);
    }"""
    values, count = zeros(32, np.int32), zeros(32, np.int32)
    values[:] = np.arange(32) // 2
    kernel = profiled(source, 3, 32, values, count)
    assert count.tolist() == [6] * 16 + [0] * 16
    assert (kernel.atomics, kernel.atomic_lanes, kernel.atomic_passes) == (6, 192, 3 * (2 + 1))
    assert (kernel.global_atomic_sectors, kernel.shared_wavefronts) == (12, 6)


@pytest.mark.parametrize("type_, size", [("float", 4), ("float2", 8), ("float4", 16)])
def test_vector_loads(type_, size):
    """Wider accesses move as much with fewer requests."""
    source = f"""
    extern "C" __global__ void copy(const {type_}* x, {type_}* out) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      out[i] = x[i];
    }}"""
    kernel = profiled(source, 1024 // size, 32, zeros(8192), zeros(8192))
    assert kernel.global_load_requests == kernel.global_store_requests == 1024 // size
    assert kernel.global_load_sectors == kernel.global_load_ideal_sectors == 1024
    assert kernel.global_load_bytes == kernel.global_store_bytes == 2**15


def test_a_broadcast_is_one_sector():
    """32 lanes ask for 128 bytes, of which 4 are distinct: nothing is wasted."""
    source = 'extern "C" __global__ void all(const float* x, float* out) { out[threadIdx.x] = x[blockIdx.x]; }'
    kernel = profiled(source, 4, 32, zeros(4), zeros(32))
    assert (kernel.global_load_bytes, kernel.global_load_sectors, kernel.global_load_efficiency) == (512, 4, 1)
    assert (kernel.distinct_load_sectors, kernel.block_load_sectors) == (1, 4)


@pytest.mark.parametrize("shift, sectors", [(0, 4), (1, 5), (8, 4)])
def test_misaligned_rows(shift, sectors):
    source = (
        'extern "C" __global__ void copy(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x + SHIFT]; }'
    )
    kernel = profiled(source.replace("SHIFT", str(shift)), 1, 32, zeros(64), zeros(32))
    assert (kernel.global_load_sectors, kernel.global_load_ideal_sectors) == (sectors, 4)


@pytest.mark.parametrize("swizzle, wavefronts", [("0", 32), ("(row & 7)", 4)])
def test_ldmatrix_of_a_tile_with_rows_of_128_bytes(swizzle, wavefronts):
    """Eight rows of a matrix lie in the same banks, unless the place of 16 bytes in a row depends on the row."""
    source = """
    extern "C" __global__ void fragment(unsigned* out) {
      __shared__ __align__(128) char tile[32 * 128];
      int row = threadIdx.x;
      unsigned a, b, c, d;
      unsigned at = (unsigned)__cvta_generic_to_shared(tile) + row * 128 + (3 ^ SWIZZLE) * 16;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
      out[threadIdx.x] = a + b + c + d;
    }"""
    kernel = profiled(source.replace("SWIZZLE", swizzle), 2, 32, zeros(32, np.uint32))
    assert (kernel.shared_wavefronts, kernel.shared_ideal_wavefronts) == (2 * wavefronts, 8)
    assert kernel.opcodes["ldmatrix.x4"] == 2


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_with_fewer_matrices_reads_fewer_rows(count):
    """Addresses of the other lanes do not count: here they are all in one bank."""
    source = """
    extern "C" __global__ void fragment(unsigned* out) {
      __shared__ __align__(128) char tile[32 * 128];
      int row = threadIdx.x;
      unsigned a, b, at = (unsigned)__cvta_generic_to_shared(tile) + (row < 8 * COUNT ? row * 16 : row * 128);
      asm volatile(LOAD : "=r"(a), "=r"(b) : "r"(at) : "memory");
      out[threadIdx.x] = a + b;
    }"""
    registers = "{%0}" if count == 1 else "{%0, %1}"
    load = f'"mov.b32 %1, 0; ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {registers}, [%2];"'
    kernel = profiled(source.replace("COUNT", str(count)).replace("LOAD", load), 1, 32, zeros(32, np.uint32))
    assert (kernel.shared_wavefronts, kernel.shared_ideal_wavefronts) == (count, count)


def test_zeros_of_asynchronous_copies_are_not_loaded():
    source = """
    extern "C" __global__ void fetch(const uint4* x, unsigned* out, int n) {
      __shared__ uint4 tile[64];
      unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
      int bytes = threadIdx.x < n ? 16 : threadIdx.x == n ? 4 : 0;
      x += threadIdx.x;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(x), "r"(bytes) : "memory");
      asm volatile("cp.async.wait_all;" ::: "memory");
      out[threadIdx.x] = tile[threadIdx.x].x;
    }"""
    kernel = profiled(source, 1, 64, zeros(256, np.uint32), zeros(64, np.uint32), np.int32(20))
    assert (kernel.global_load_requests, kernel.global_load_bytes, kernel.global_load_sectors) == (1, 20 * 16 + 4, 11)
    assert kernel.opcodes["cp.async"] == 2
    line = next(line for line in kernel.lines if "cp.async.cg" in line.text)
    assert (line.shared_wavefronts, line.shared_ideal_wavefronts) == (8, 8)


def test_local_arrays():
    """An array that is indexed by a variable lives in local memory: 8 stores and one load of each thread."""
    source = """
    extern "C" __global__ void pick(const int* x, int* out) {
      volatile int own[8];
      for (int k = 0; k < 8; ++k) own[k] = k * threadIdx.x;
      out[threadIdx.x] = own[x[threadIdx.x]];
    }"""
    kernel = profiled(source, 3, 40, zeros(40, np.int32), zeros(40, np.int32))
    assert kernel.local_store_bytes == 3 * 40 * 8 * 4
    assert kernel.local_load_bytes == 3 * 40 * 4
    assert kernel.local_requests == 3 * 2 * 9
    assert kernel.global_store_bytes == 3 * 40 * 4 and kernel.shared_requests == 0


def test_parameters_of_calls_are_not_local_memory():
    source = """
    __device__ __noinline__ int square(int x) { return x * x; }
    extern "C" __global__ void squares(int* out) { out[threadIdx.x] = square(out[threadIdx.x]); }"""
    kernel = profiled(source, 1, 32, zeros(32, np.int32))
    assert (kernel.local_requests, kernel.local_load_bytes, kernel.local_store_bytes) == (0, 0, 0)
    assert kernel.global_load_bytes == 128


@pytest.mark.parametrize("block, warps", [(32, 1), (33, 2), (48, 2), (1, 1)])
def test_lanes_of_a_block_that_is_no_multiple_of_a_warp(block, warps):
    source = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = 1; }'
    kernel = profiled(source, 3, block, zeros(64, np.int32))
    assert kernel.active_lane_efficiency == block / (32 * warps)
    assert kernel.global_store_bytes == 3 * 4 * block


def test_lanes_that_a_branch_leaves():
    """Half of the lanes execute the line, the line after it all of them."""
    source = """
    extern "C" __global__ void half(int* out) {
      int t = threadIdx.x;
      if (t % 2)
        atomicAdd(out, 5);
      out[t + 1] = 7;
    }"""
    kernel = profiled(source, 2, 64, zeros(65, np.int32))
    add, store = (next(line for line in kernel.lines if word in line.text) for word in ("atomicAdd", "out[t + 1]"))
    assert (add.active_lane_efficiency, store.active_lane_efficiency) == (0.5, 1)
    assert (add.atomic_lanes, add.atomic_passes) == (64, 64)
    assert kernel.branch_efficiency == 0
