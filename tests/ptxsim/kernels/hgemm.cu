// D = A B on tensor cores, A (m, k), B (k, 64) row-major and of 16 bits, D of float32; k a multiple of 8.
// KIND is f16 or bf16.

typedef unsigned u32;

__device__ void mma(float* d, const u32* a, const u32* b) {
#define MMA(kind)                                                                                                  \
  "mma.sync.aligned.m16n8k16.row.col.f32." #kind "." #kind ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "   \
  "{%0, %1, %2, %3};"
#define MMA_OF(kind) MMA(kind)
  asm volatile(MMA_OF(KIND) : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// One warp for 16 x 8 results, fragments element by element from device memory; m and k multiples of 16.
extern "C" __global__ void from_device_memory(const unsigned short* a, const unsigned short* b, float* d, int m,
                                              int k) {
  int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2, row = blockIdx.x * 16 + g, column = blockIdx.y * 8 + g;
  float sum[4] = {};
  for (int start = 0; start < k; start += 16) {
    u32 fa[4], fb[2];
    for (int r = 0; r < 4; ++r) {
      const unsigned short* p = a + (row + r % 2 * 8) * k + start + t + r / 2 * 8;
      fa[r] = p[0] | (u32)p[1] << 16;
    }
    for (int r = 0; r < 2; ++r) {
      const unsigned short* p = b + (start + t + r * 8) * 64 + column;
      fb[r] = p[0] | (u32)p[64] << 16;
    }
    mma(sum, fa, fb);
  }
  for (int r = 0; r < 4; ++r) d[(row + r / 2 * 8) * 64 + blockIdx.y * 8 + t + r % 2] = sum[r];
}

// Where the 16 bytes `chunk` of a row of a tile are, by tile layout.
template <int CHUNKS> struct Plain {
  static const int STRIDE = CHUNKS;
  static __device__ int at(int row, int chunk) { return row * CHUNKS + chunk; }
};
template <int CHUNKS> struct Padded {
  static const int STRIDE = CHUNKS + 1;
  static __device__ int at(int row, int chunk) { return row * (CHUNKS + 1) + chunk; }
};
template <int CHUNKS> struct Swizzled {  // eight rows, read at once by ldmatrix, lie in eight different bank quartets
  static const int STRIDE = CHUNKS;
  static __device__ int at(int row, int chunk) { return row * CHUNKS + (chunk ^ (row * CHUNKS / 8) % CHUNKS); }
};

__device__ void copy16(u32 to, const void* from, int bytes) {  // what is missing of 16 bytes is zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// 64 x 64 results for four warps, each 16 rows of them; k in steps of 32, of which STAGES - 1 are on their way.
template <template <int> class Layout, int STAGES>
__global__ void pipelined(const unsigned short* a, const unsigned short* b, float* d, int m, int k) {
  typedef Layout<4> A;
  typedef Layout<8> B;
  __shared__ uint4 a_tile[STAGES][64 * A::STRIDE], b_tile[STAGES][32 * B::STRIDE];
  int t = threadIdx.x, warp = t / 32, lane = t % 32, first_row = blockIdx.x * 64, steps = (k + 31) / 32;
  auto fetch = [&](int step) {
    int start = step * 32, stage = step % STAGES;
    u32 to = (u32)__cvta_generic_to_shared(a_tile[stage]);
    for (int c = t; c < 64 * 4; c += 128) {
      int row = c / 4, chunk = c % 4;
      bool inside = first_row + row < m && start + chunk * 8 < k;
      const unsigned short* from = a + (long long)(first_row + row) * k + start + chunk * 8;
      copy16(to + A::at(row, chunk) * 16, inside ? from : a, inside ? 16 : 0);
    }
    to = (u32)__cvta_generic_to_shared(b_tile[stage]);
    for (int c = t; c < 32 * 8; c += 128) {
      int row = c / 8, chunk = c % 8;
      bool inside = start + row < k;
      copy16(to + B::at(row, chunk) * 16, inside ? b + (start + row) * 64 + chunk * 8 : b, inside ? 16 : 0);
    }
  };
  float sum[8][4] = {};
  for (int step = 0; step < STAGES - 1; ++step) {
    if (step < steps) fetch(step);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();  // this step has come, and the stage of the one before is free
    if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
    asm volatile("cp.async.commit_group;" ::: "memory");
    u32 a_from = (u32)__cvta_generic_to_shared(a_tile[step % STAGES]);
    u32 b_from = (u32)__cvta_generic_to_shared(b_tile[step % STAGES]);
    for (int half = 0; half < 2; ++half) {
      u32 fa[4], fb[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3])
                   : "r"(a_from + A::at(warp * 16 + lane % 16, half * 2 + lane / 16) * 16) : "memory");
      for (int n = 0; n < 8; n += 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fb[0]), "=r"(fb[1]), "=r"(fb[2]), "=r"(fb[3])
                     : "r"(b_from + B::at(half * 16 + lane % 16, n + lane / 16) * 16) : "memory");
        mma(sum[n], fa, fb);
        mma(sum[n + 1], fa, fb + 2);
      }
    }
  }
  for (int n = 0; n < 8; ++n)
    for (int half = 0; half < 2; ++half) {
      int row = first_row + warp * 16 + half * 8 + lane / 4;
      float2* to = (float2*)(d + row * 64 + n * 8 + lane % 4 * 2);
      if (row < m) *to = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
    }
}
