// Transposed matrices: both directions coalesced, by a tile in shared memory whose columns do not lie in one bank.

#define TILE 32
#define ROWS 8  // of threads: each moves TILE / ROWS elements

// Reads whole sectors, writes one element of each of 32.
extern "C" __global__ void naive(const float* x, float* out, int rows, int columns) {
  int column = blockIdx.x * TILE + threadIdx.x;
  for (int y = threadIdx.y; y < TILE; y += ROWS) {
    int row = blockIdx.y * TILE + y;
    if (row < rows && column < columns) out[column * rows + row] = x[row * columns + column];
  }
}

// The element at (y, x) of a tile; of all layouts, only this function differs.
struct Plain { static __device__ int at(int y, int x) { return y * TILE + x; } };
struct Padded { static __device__ int at(int y, int x) { return y * (TILE + 1) + x; } };
struct Swizzled { static __device__ int at(int y, int x) { return y * TILE + (x ^ y); } };

template <typename T, typename Layout>
__device__ void through_a_tile(const T* __restrict__ x, T* __restrict__ out, int rows, int columns) {
  __shared__ T tile[TILE * (TILE + 1)];
  int row = blockIdx.y * TILE, column = blockIdx.x * TILE + threadIdx.x;
  #pragma unroll
  for (int y = threadIdx.y; y < TILE; y += ROWS)
    if (row + y < rows && column < columns) tile[Layout::at(y, threadIdx.x)] = x[(row + y) * columns + column];
  __syncthreads();
  column = blockIdx.x * TILE;
  row += threadIdx.x;
  #pragma unroll
  for (int y = threadIdx.y; y < TILE; y += ROWS)
    if (row < rows && column + y < columns) out[(column + y) * rows + row] = tile[Layout::at(threadIdx.x, y)];
}

#define TRANSPOSE(name, T, Layout)                                                              \
  extern "C" __global__ void name(const T* x, T* out, int rows, int columns) {                 \
    through_a_tile<T, Layout>(x, out, rows, columns);                                           \
  }
TRANSPOSE(conflicts, float, Plain)
TRANSPOSE(padded, float, Padded)
TRANSPOSE(swizzled, float, Swizzled)
TRANSPOSE(padded_double, double, Padded)

// Registers only: movmatrix turns an 8 x 8 matrix of 16-bit elements, two in each lane, that a warp holds.
extern "C" __global__ void matrices_of_a_warp(const unsigned* x, unsigned* out) {
  int i = blockIdx.x * 32 + threadIdx.x;
  unsigned turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(x[i]));
  out[i] = turned;
}

// Four 32-bit elements in each of four lanes change places by shuffles.
extern "C" __global__ void quads_of_lanes(const int4* x, int4* out) {
  int lane = threadIdx.x % 4;
  int4 q = x[threadIdx.x];
  int mine[4] = {q.x, q.y, q.z, q.w}, turned[4];
  #pragma unroll
  for (int step = 0; step < 4; ++step) {
    int give = lane ^ step, value = 0;
    #pragma unroll
    for (int k = 0; k < 4; ++k) value = k == give ? mine[k] : value;
    value = __shfl_xor_sync(0xffffffffu, value, step, 4);
    #pragma unroll
    for (int k = 0; k < 4; ++k) turned[k] = k == give ? value : turned[k];
  }
  out[threadIdx.x] = make_int4(turned[0], turned[1], turned[2], turned[3]);
}
