// softmax(scale Q K^T) V of one head and its derivatives, head_dim 64: by definition, and in tiles on tensor cores.
// With `causal`, query i sees the keys up to i + keys - queries.

#include <cuda_bf16.h>

#define ALL_LANES 0xffffffffu
#define INFINITY __int_as_float(0x7f800000)
#define D 64

typedef unsigned u32;
typedef __nv_bfloat16 bf16;

__device__ float warp_sum(float value) {
  #pragma unroll
  for (int mask = 16; mask; mask >>= 1) value += __shfl_xor_sync(ALL_LANES, value, mask);
  return value;
}

// A warp for each query, two elements of the head in each lane; one key after the other.
extern "C" __global__ void warp_per_query(const float2* q, const float2* k, const float2* v, float2* out, float* lse,
                                          int queries, int keys, float scale, int causal) {
  int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (i >= queries) return;
  int visible = causal ? i + keys - queries + 1 : keys;
  float2 mine = q[i * 32 + lane], sum = make_float2(0.0f, 0.0f);
  float m = -INFINITY, l = 0.0f;
  for (int j = 0; j < visible; ++j) {
    float2 key = k[j * 32 + lane], value = v[j * 32 + lane];
    float s = scale * warp_sum(mine.x * key.x + mine.y * key.y);
    float larger = fmaxf(m, s), old = __expf(m - larger), p = __expf(s - larger);
    l = l * old + p;
    sum = make_float2(sum.x * old + p * value.x, sum.y * old + p * value.y);
    m = larger;
  }
  out[i * 32 + lane] = make_float2(sum.x / l, sum.y / l);
  if (lane == 0) lse[i] = m + __logf(l);
}

// The derivative in the same way; what belongs to keys is added by atomics.
extern "C" __global__ void warp_per_query_backward(const float2* q, const float2* k, const float2* v, const float2* out,
                                                   const float2* dout, const float* lse, float2* dq, float* dk,
                                                   float* dv, int queries, int keys, float scale, int causal) {
  int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (i >= queries) return;
  int visible = causal ? i + keys - queries + 1 : keys;
  float2 mine = q[i * 32 + lane], g = dout[i * 32 + lane], o = out[i * 32 + lane], sum = make_float2(0.0f, 0.0f);
  float delta = warp_sum(g.x * o.x + g.y * o.y), row_lse = lse[i];
  for (int j = 0; j < visible; ++j) {
    float2 key = k[j * 32 + lane], value = v[j * 32 + lane];
    float p = __expf(scale * warp_sum(mine.x * key.x + mine.y * key.y) - row_lse);
    float ds = scale * p * (warp_sum(g.x * value.x + g.y * value.y) - delta);
    sum = make_float2(sum.x + ds * key.x, sum.y + ds * key.y);
    atomicAdd(dk + j * D + 2 * lane, ds * mine.x);
    atomicAdd(dk + j * D + 2 * lane + 1, ds * mine.y);
    atomicAdd(dv + j * D + 2 * lane, p * g.x);
    atomicAdd(dv + j * D + 2 * lane + 1, p * g.y);
  }
  dq[i * 32 + lane] = sum;
}

// Tiles of rows of 64 bfloat16, eight chunks of 16 bytes that are permuted by the row.
__device__ u32 chunk_at(u32 tile, int row, int chunk) { return tile + row * 128 + (chunk ^ row % 8) * 16; }

__device__ void fetch(u32 tile, const bf16* from, int first, int count, int rows) {  // beyond the last row: zeros
  for (int c = threadIdx.x; c < count * 8; c += blockDim.x) {
    int row = c / 8, bytes = first + row < rows ? 16 : 0;
    const bf16* source = from + (bytes ? (first + row) * D + c % 8 * 8 : 0);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(chunk_at(tile, row, c % 8)), "l"(source),
                 "r"(bytes) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
  __syncthreads();
}

// 16 rows by 16 columns, as the left operand.
__device__ void load_a(u32* a, u32 tile, int row, int chunk) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(chunk_at(tile, row + threadIdx.x % 16, chunk + threadIdx.x % 32 / 16)) : "memory");
}
// The transposed of 16 rows by 16 columns, as two right operands of eight columns each.
__device__ void load_b_transposed(u32* b, u32 tile, int row, int chunk) {
  int lane = threadIdx.x % 32;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(chunk_at(tile, row + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2)) : "memory");
}
__device__ void load_b(u32* b, u32 tile, int row, int chunk) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(chunk_at(tile, row + threadIdx.x % 16, chunk + threadIdx.x % 32 / 16)) : "memory");
}
__device__ void mma(float* d, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ u32 pack(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *(u32*)&pair;
}
// Accumulators of 16 x 16 results as the left operand of the next product.
__device__ void as_operand(u32* a, const float (*s)[4]) {
  a[0] = pack(s[0][0], s[0][1]);
  a[1] = pack(s[0][2], s[0][3]);
  a[2] = pack(s[1][0], s[1][1]);
  a[3] = pack(s[1][2], s[1][3]);
}

// Dao (2023): 64 queries for four warps, the keys in tiles; K of the next tile comes while this one is used.
template <int KEYS>
__global__ void __launch_bounds__(128) tiled(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse,
                                             int queries, int keys, float scale, int causal) {
  __shared__ __align__(128) char box[(64 + 2 * KEYS) * 128];
  u32 q_tile = (u32)__cvta_generic_to_shared(box), k_tile = q_tile + 64 * 128, v_tile = k_tile + KEYS * 128;
  int first_row = blockIdx.x * 64, row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  int last = causal ? min(keys, min(first_row + 64, queries) + keys - queries) : keys;
  fetch(q_tile, q, first_row, 64, queries);
  fetch(k_tile, k, 0, KEYS, keys);
  float o[8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
  for (int start = 0; start < last; start += KEYS) {
    __syncthreads();  // V has been read
    fetch(v_tile, v, start, KEYS, keys);
    wait<1>();
    float s[KEYS / 8][4] = {};
    for (int c = 0; c < 8; c += 2) {
      u32 a[4], b[4];
      load_a(a, q_tile, threadIdx.x / 32 * 16, c);
      for (int n = 0; n < KEYS / 8; n += 2) {
        load_b_transposed(b, k_tile, n * 8, c);
        mma(s[n], a, b);
        mma(s[n + 1], a, b + 2);
      }
    }
    __syncthreads();  // K has been read
    fetch(k_tile, k, start + KEYS, KEYS, keys);
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      int visible = causal ? min(keys, row + 8 * half + keys - queries + 1) : keys;
      float larger = m[half], sum = 0.0f;
      for (int n = 0; n < KEYS / 8; ++n)
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          int column = start + n * 8 + threadIdx.x % 4 * 2 + e % 2;
          s[n][e] = column < visible ? s[n][e] * scale * 1.44269504f : -INFINITY;
          larger = fmaxf(larger, s[n][e]);
        }
      larger = fmaxf(larger, __shfl_xor_sync(ALL_LANES, larger, 1));
      larger = fmaxf(larger, __shfl_xor_sync(ALL_LANES, larger, 2));
      float factor = exp2f(m[half] - larger);
      m[half] = larger;
      for (int n = 0; n < KEYS / 8; ++n)
        for (int e = 2 * half; e < 2 * half + 2; ++e) sum += s[n][e] = exp2f(s[n][e] - larger);
      l[half] = l[half] * factor + sum;
      for (int n = 0; n < 8; ++n) {
        o[n][2 * half] *= factor;
        o[n][2 * half + 1] *= factor;
      }
    }
    wait<1>();
    for (int j = 0; j < KEYS / 16; ++j) {
      u32 p[4], b[4];
      as_operand(p, s + 2 * j);
      for (int n = 0; n < 8; n += 2) {
        load_b(b, v_tile, j * 16, n);
        mma(o[n], p, b);
        mma(o[n + 1], p, b + 2);
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    l[half] += __shfl_xor_sync(ALL_LANES, l[half], 1);
    l[half] += __shfl_xor_sync(ALL_LANES, l[half], 2);
    int i = row + 8 * half;
    if (i >= queries) continue;
    for (int n = 0; n < 8; ++n)
      *(u32*)(out + i * D + n * 8 + threadIdx.x % 4 * 2) =
          pack(o[n][2 * half] / l[half], o[n][2 * half + 1] / l[half]);
    if (threadIdx.x % 4 == 0) lse[i] = m[half] * 0.69314718f + __logf(l[half]);
  }
}

// dK and dV: 16 keys for each warp, all queries in tiles of 16. S^T = K Q^T has the layout that dV = P^T dO needs.
template <int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
tiled_backward_keys(const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* lse, const float* delta,
                    float* dk, float* dv, int queries, int keys, float scale, int causal) {
  const int KEYS = WARPS * 16;
  __shared__ __align__(128) char box[(2 * KEYS + 2 * 16) * 128];
  u32 k_tile = (u32)__cvta_generic_to_shared(box), v_tile = k_tile + KEYS * 128;
  u32 q_tile = v_tile + KEYS * 128, g_tile = q_tile + 16 * 128;
  int of_warp = threadIdx.x / 32 * 16, key = blockIdx.x * KEYS + of_warp + threadIdx.x % 32 / 4;
  fetch(k_tile, k, blockIdx.x * KEYS, KEYS, keys);
  fetch(v_tile, v, blockIdx.x * KEYS, KEYS, keys);
  float dk_sum[8][4] = {}, dv_sum[8][4] = {};
  for (int start = 0; start < queries; start += 16) {
    fetch(q_tile, q, start, 16, queries);
    fetch(g_tile, dout, start, 16, queries);
    wait<0>();
    float p[2][4] = {}, dp[2][4] = {};
    u32 a[4], b[4];
    for (int c = 0; c < 8; c += 2) {
      load_a(a, k_tile, of_warp, c);
      load_b_transposed(b, q_tile, 0, c);
      mma(p[0], a, b);
      mma(p[1], a, b + 2);
      load_a(a, v_tile, of_warp, c);
      load_b_transposed(b, g_tile, 0, c);
      mma(dp[0], a, b);
      mma(dp[1], a, b + 2);
    }
    for (int n = 0; n < 2; ++n)
      for (int e = 0; e < 4; ++e) {
        int i = start + n * 8 + threadIdx.x % 4 * 2 + e % 2, j = key + e / 2 * 8;
        bool sees = i < queries && j < keys && (!causal || j <= i + keys - queries);
        p[n][e] = sees ? __expf(p[n][e] * scale - lse[i]) : 0.0f;
        dp[n][e] = sees ? scale * p[n][e] * (dp[n][e] - delta[i]) : 0.0f;
      }
    u32 weights[4], ds[4];
    as_operand(weights, p);
    as_operand(ds, dp);
    for (int n = 0; n < 8; n += 2) {
      load_b(b, g_tile, 0, n);
      mma(dv_sum[n], weights, b);
      mma(dv_sum[n + 1], weights, b + 2);
      load_b(b, q_tile, 0, n);
      mma(dk_sum[n], ds, b);
      mma(dk_sum[n + 1], ds, b + 2);
    }
    __syncthreads();  // Q and dO have been read
  }
  for (int n = 0; n < 8; ++n)
    for (int e = 0; e < 4; ++e) {
      int j = key + e / 2 * 8, at = j * D + n * 8 + threadIdx.x % 4 * 2 + e % 2;
      if (j >= keys) continue;
      dk[at] = dk_sum[n][e];
      dv[at] = dv_sum[n][e];
    }
}
