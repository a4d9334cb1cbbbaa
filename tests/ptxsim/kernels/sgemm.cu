// C = A B in float32, A (m, k), B (k, n), all row-major: from one result a thread to tiles that are fetched ahead.

// Neighbouring threads have neighbouring rows: a warp's loads of A are k elements apart.
extern "C" __global__ void naive(const float* a, const float* b, float* c, int m, int n, int k) {
  int row = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int j = 0; j < k; ++j) sum += a[row * k + j] * b[j * n + column];
  c[row * n + column] = sum;
}

// Neighbouring threads have neighbouring columns: A is one word for all, B and C are whole sectors.
extern "C" __global__ void coalesced(const float* a, const float* b, float* c, int m, int n, int k) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int j = 0; j < k; ++j) sum += a[row * k + j] * b[j * n + column];
  c[row * n + column] = sum;
}

// Each element of A and B is loaded once a tile; edges are zeros.
#define TILE 16
extern "C" __global__ void shared_tile(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE + 1];
  int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
  float sum = 0.0f;
  for (int start = 0; start < k; start += TILE) {
    a_tile[threadIdx.y][threadIdx.x] = row < m && start + threadIdx.x < k ? a[row * k + start + threadIdx.x] : 0;
    b_tile[threadIdx.y][threadIdx.x] =
        column < n && start + threadIdx.y < k ? b[(start + threadIdx.y) * n + column] : 0;
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < TILE; ++j) sum += a_tile[threadIdx.y][j] * b_tile[j][threadIdx.x];
    __syncthreads();  // the tile has been used
  }
  if (row < m && column < n) c[row * n + column] = sum;
}

// Tiles of 32 x 32 from here on; m and n are multiples of that, k of 8 (16 in the last kernel).
#define SIDE 32

// Four results in a column for each of 256 threads: one load of B serves four.
extern "C" __global__ void __launch_bounds__(256)
column_of_results(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_tile[SIDE][8], b_tile[8][SIDE];
  int t = threadIdx.x, column = t % SIDE, row = t / SIDE * 4;
  a += blockIdx.y * SIDE * k;
  b += blockIdx.x * SIDE;
  float sum[4] = {};
  for (int start = 0; start < k; start += 8) {
    a_tile[t / 8][t % 8] = a[t / 8 * k + start + t % 8];
    b_tile[t / SIDE][column] = b[(start + t / SIDE) * n + column];
    __syncthreads();
    for (int j = 0; j < 8; ++j) {
      float right = b_tile[j][column];
      for (int r = 0; r < 4; ++r) sum[r] += a_tile[row + r][j] * right;
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r) c[(blockIdx.y * SIDE + row + r) * n + blockIdx.x * SIDE + column] = sum[r];
}

// 4 x 4 results for each of 64 threads: eight loads for 16 products.
extern "C" __global__ void __launch_bounds__(64)
square_of_results(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_tile[SIDE * 8], b_tile[8 * SIDE];
  int t = threadIdx.x, row = t / 8 * 4, column = t % 8 * 4;
  a += blockIdx.y * SIDE * k;
  b += blockIdx.x * SIDE;
  c += blockIdx.y * SIDE * n + blockIdx.x * SIDE;
  float sum[4][4] = {}, left[4], right[4];
  for (int start = 0; start < k; start += 8) {
    for (int i = t; i < SIDE * 8; i += 64) {
      a_tile[i] = a[i / 8 * k + start + i % 8];
      b_tile[i] = b[(start + i / SIDE) * n + i % SIDE];
    }
    __syncthreads();
    for (int j = 0; j < 8; ++j) {
      for (int r = 0; r < 4; ++r) left[r] = a_tile[(row + r) * 8 + j];
      for (int s = 0; s < 4; ++s) right[s] = b_tile[j * SIDE + column + s];
      for (int r = 0; r < 4; ++r)
        for (int s = 0; s < 4; ++s) sum[r][s] += left[r] * right[s];
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r)
    for (int s = 0; s < 4; ++s) c[(row + r) * n + column + s] = sum[r][s];
}

// The same by 16 bytes: A turned on its way into shared memory, both operands read as float4.
extern "C" __global__ void __launch_bounds__(64)
vectorised(const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ c, int m, int n, int k) {
  __shared__ float left[8][SIDE + 4], right[8][SIDE];
  int t = threadIdx.x, row = t / 8 * 4, column = t % 8 * 4;
  __align__(16) float sum[4][4] = {};
  for (int start = 0; start < k; start += 8) {
    float4 x = a[((blockIdx.y * SIDE + t / 2) * k + start) / 4 + t % 2];
    left[t % 2 * 4][t / 2] = x.x;
    left[t % 2 * 4 + 1][t / 2] = x.y;
    left[t % 2 * 4 + 2][t / 2] = x.z;
    left[t % 2 * 4 + 3][t / 2] = x.w;
    *(float4*)&right[t / 8][column] = b[((start + t / 8) * n + blockIdx.x * SIDE + column) / 4];
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      float p[4], q[4];
      *(float4*)p = *(float4*)&left[j][row];
      *(float4*)q = *(float4*)&right[j][column];
      #pragma unroll
      for (int r = 0; r < 4; ++r)
        #pragma unroll
        for (int s = 0; s < 4; ++s) sum[r][s] += p[r] * q[s];
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r)
    c[((blockIdx.y * SIDE + row + r) * n + blockIdx.x * SIDE + column) / 4] = *(float4*)sum[r];
}

// While one pair of tiles is multiplied, cp.async brings the next.
__device__ void copy16(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}
extern "C" __global__ void __launch_bounds__(64)
double_buffered(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ __align__(16) float a_tile[2][SIDE][16 + 4], b_tile[2][16][SIDE];
  int t = threadIdx.x, row = t / 8 * 4, column = t % 8 * 4;
  a += blockIdx.y * SIDE * k;
  b += blockIdx.x * SIDE;
  c += blockIdx.y * SIDE * n + blockIdx.x * SIDE;
  auto fetch = [&](int buffer, int start) {
    for (int i = t; i < SIDE * 4; i += 64) {
      copy16(&a_tile[buffer][i / 4][i % 4 * 4], a + i / 4 * k + start + i % 4 * 4);
      copy16(&b_tile[buffer][i / 8][i % 8 * 4], b + (start + i / 8) * n + i % 8 * 4);
    }
    asm volatile("cp.async.commit_group;");
  };
  __align__(16) float sum[4][4] = {};
  fetch(0, 0);
  for (int start = 0, buffer = 0; start < k; start += 16, buffer ^= 1) {
    if (start + 16 < k) {
      fetch(buffer ^ 1, start + 16);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < 16; ++j) {
      float4 right = *(const float4*)&b_tile[buffer][j][column];
      #pragma unroll
      for (int r = 0; r < 4; ++r) {
        float left = a_tile[buffer][row + r][j];
        sum[r][0] += left * right.x;
        sum[r][1] += left * right.y;
        sum[r][2] += left * right.z;
        sum[r][3] += left * right.w;
      }
    }
    __syncthreads();  // before the next fetch overwrites this buffer
  }
  for (int r = 0; r < 4; ++r) *(float4*)&c[(row + r) * n + column] = *(float4*)sum[r];
}
