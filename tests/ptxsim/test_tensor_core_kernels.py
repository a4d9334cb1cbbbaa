"""A matrix product as tensor-core kernels do it: cp.async, two buffers, swizzled ldmatrix, mma.sync, against NumPy."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, schedule_name
from .test_tensor_core import a_position, b_position, pack, unpack_accumulator

# One warp per 16 rows, all 64 columns; A (m, k) row-major, B (k, 64) row-major read with .trans, k in steps of 32.
SOURCE = """
typedef unsigned u32;
__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void copy16(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
// Chunk `c` (16 bytes) of row `r` of a tile of 128-byte rows, its chunks permuted by the row.
__device__ int swizzled(int r, int c) { return r * 128 + ((c ^ (r & 7)) * 16); }

extern "C" __global__ void matmul(const unsigned short* a, const unsigned short* b, float* d, int m, int k) {
  __shared__ __align__(128) char a_tile[2][64 * 128], b_tile[2][32 * 128];
  int t = threadIdx.x, warp = t / 32, lane = t % 32, first_row = blockIdx.x * 64;
  float sum[8][4] = {};
  auto fetch = [&](int buffer, int start) {
    for (int c = t; c < 64 * 4; c += 128) {
      int row = c / 4, chunk = c % 4, left = (k - start - chunk * 8) * 2;
      bool inside = first_row + row < m && left > 0;
      copy16(shared_address(a_tile[buffer]) + swizzled(row, chunk),
             a + (inside ? (long long)(first_row + row) * k + start + chunk * 8 : 0), inside ? min(left, 16) : 0);
    }
    for (int c = t; c < 32 * 8; c += 128) {
      int row = c / 8, chunk = c % 8;
      bool inside = start + row < k;
      copy16(shared_address(b_tile[buffer]) + swizzled(row, chunk),
             b + (inside ? (long long)(start + row) * 64 + chunk * 8 : 0), inside ? 16 : 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  fetch(0, 0);
  for (int start = 0, buffer = 0; start < k; start += 32, buffer ^= 1) {
    if (start + 32 < k) fetch(buffer ^ 1, start + 32);
    else asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    for (int step = 0; step < 2; ++step) {
      u32 fa[4];
      u32 from = shared_address(a_tile[buffer]) + swizzled(warp * 16 + lane % 16, step * 2 + lane / 16);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3]) : "r"(from) : "memory");
      for (int n = 0; n < 8; ++n) {
        u32 fb[2];
        from = shared_address(b_tile[buffer]) + swizzled(step * 16 + lane % 16, n);
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
            : "=r"(fb[0]), "=r"(fb[1]) : "r"(from) : "memory");
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};" : "+f"(sum[n][0]), "+f"(sum[n][1]), "+f"(sum[n][2]), "+f"(sum[n][3])
            : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
      }
    }
    __syncthreads();
  }
  for (int n = 0; n < 8; ++n)
    for (int half = 0; half < 2; ++half) {
      int row = first_row + warp * 16 + half * 8 + lane / 4;
      if (row < m) {
        d[row * 64 + n * 8 + lane % 4 * 2] = sum[n][2 * half];
        d[row * 64 + n * 8 + lane % 4 * 2 + 1] = sum[n][2 * half + 1];
      }
    }
}"""


def problem(m, k, dtype):
    """16-byte aligned operands of the kernel, and what the product must be close to."""
    rng = np.random.default_rng(m + k)
    a, b = (rng.normal(size=s).astype(dtype) for s in ((m, k), (k, 64)))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    return a, b, wide_a @ wide_b, (k + 2) * 2.0**-23 * (abs(wide_a) @ abs(wide_b))


@pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
@pytest.mark.parametrize("kind, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("m, k", [(64, 32), (128, 128), (70, 72)])
def test_pipelined_matmul(m, k, kind, dtype, settings):
    a, b, expected, bound = problem(m, k, dtype)
    out = poisoned((m, 64), np.float32)
    launch(SOURCE.replace("KIND", kind), -(-m // 64), 128, a, b, out, np.int32(m), np.int32(k), **settings)
    assert (abs(out - expected) <= bound).all()


MISSING = {
    "the barrier after the wait": (
        'wait_group 1;" ::: "memory");\n    __syncthreads();',
        'wait_group 1;" ::: "memory");',
    ),
    "the barrier before the next fetch": ("    }\n    __syncthreads();\n  }", "    }\n  }"),
    "the wait": ('    asm volatile("cp.async.wait_group 1;" ::: "memory");\n', ""),
    "the swizzle of B": ("swizzled(step * 16 + lane % 16, n)", "(step * 16 + lane % 16) * 128 + n * 16"),
    ".trans": (".x2.trans.shared", ".x2.shared"),
    "the order of B": ('"r"(fb[0]), "r"(fb[1]))', '"r"(fb[1]), "r"(fb[0]))'),
}


@pytest.mark.parametrize("what", MISSING)
def test_faults_planted_in_the_kernel_show(what):
    """Each edit breaks the product under the random schedule, for one of a few seeds at most."""
    before, after = MISSING[what]
    source = SOURCE.replace("KIND", "f16")
    assert source.count(before) == 1
    a, b, expected, bound = problem(128, 128, np.float16)
    for seed in range(6):
        out = poisoned((128, 64), np.float32)
        sizes = (np.int32(128), np.int32(128))
        launch(source.replace(before, after), 2, 128, a, b, out, *sizes, schedule="random", seed=seed)
        if not (abs(out - expected) <= bound).all():
            return
    pytest.fail("the product is right without " + what)


def test_counters_of_the_kernel():
    """Flops are those of the product; wavefronts are those of the layout, counted phase by phase.

    A step of 32 fills 32 phases of A and 32 of B and reads 4 + 16 by ldmatrix for each warp and 16 of k. All are free
    of conflicts but A's fill: its tile uses half of each 128-byte row, so that the two rows of a phase collide.
    """
    a, b, _, _ = problem(128, 128, np.float16)
    with ptxsim.profile() as profile:
        out = poisoned((128, 64), np.float32)
        launch(SOURCE.replace("KIND", "f16"), 2, 128, a, b, out, np.int32(128), np.int32(128))
    (kernel,) = profile.kernels
    assert kernel.mma_flops == 2 * 128 * 64 * 128
    assert kernel.global_load_bytes == 2 * (128 * 128 + 2 * 128 * 64)
    assert kernel.global_store_bytes == 4 * 128 * 64
    steps = 2 * 4
    assert kernel.shared_ideal_wavefronts == steps * (32 + 32 + 4 * 2 * (4 + 16))
    assert kernel.shared_wavefronts == kernel.shared_ideal_wavefronts + steps * 32


FRAGMENTS = """
#define MMA(d, a, b, c) asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, " \
    "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
    : "=f"((d)[0]), "=f"((d)[1]), "=f"((d)[2]), "=f"((d)[3]) : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), \
      "r"((b)[0]), "r"((b)[1]), "f"((c)[0]), "f"((c)[1]), "f"((c)[2]), "f"((c)[3]))

__device__ unsigned pack(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// D = relu(A B) B + relu(A B) with the product rounded to float16 in registers; then, but for one warp, the even rows
// are halved and A B is added twice.
extern "C" __global__ void chain(const unsigned* a, const unsigned* b, float* out, int skip) {
  int t = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned fa[4], fb[2], p[4];
  for (int r = 0; r < 4; ++r) fa[r] = a[(warp * 32 + t) * 4 + r];
  for (int r = 0; r < 2; ++r) fb[r] = b[(warp * 32 + t) * 2 + r];
  float zero[4] = {}, s[4], o[4], old[4];
  MMA(s, fa, fb, zero);
  for (int r = 0; r < 4; ++r) s[r] = fmaxf(s[r], 0.0f);
  p[0] = p[2] = pack(s[0], s[1]);
  p[1] = p[3] = pack(s[2], s[3]);
  MMA(o, p, fb, s);
  for (int r = 0; r < 4; ++r) old[r] = o[r];
  if (warp != skip) {
    for (int r = 0; r < 4; ++r) o[r] *= t / 4 % 2 ? 1.0f : 0.5f;
    MMA(o, fa, fb, o);
    MMA(o, fa, fb, o);
  }
  for (int r = 0; r < 4; ++r) out[(warp * 32 + t) * 8 + r] = o[r];
  for (int r = 0; r < 4; ++r) out[(warp * 32 + t) * 8 + 4 + r] = old[r];
}"""


@pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
def test_accumulators_between_products(settings):
    """Results are used, packed into operands, kept, scaled and fed back; one warp goes another way."""
    rng = np.random.default_rng(8)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((4, 16, 16), (4, 16, 8)))
    out = poisoned((4, 32, 8), np.float32)
    words = [pack(x, *how).view(np.uint32) for x, how in ((a, (a_position, 4)), (b, (b_position, 2)))]
    launch(FRAGMENTS, 1, 128, *words, out, np.int32(2), **settings)
    # Small integers: every step is exact in float32, and the packed sums in float16.
    product = a.astype(float) @ b
    relu = np.maximum(product, 0)
    first = np.concatenate([relu, relu], 2) @ b + relu
    even_rows = np.where(np.arange(16) % 8 % 2, 1.0, 0.5)[:, None]
    last = first * even_rows + 2 * product
    last[2] = first[2]
    np.testing.assert_array_equal(unpack_accumulator(out[:, :, 4:]), first)
    np.testing.assert_array_equal(unpack_accumulator(out[:, :, :4]), last)
