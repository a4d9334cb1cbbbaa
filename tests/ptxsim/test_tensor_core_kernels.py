"""Accumulators of mma.sync between products: packed into operands, scaled, kept, against NumPy."""

import numpy as np
import pytest

from .launching import SCHEDULES, launch, poisoned, schedule_name
from .test_tensor_core import a_position, b_position, pack, unpack_accumulator

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
