// Sums, from the tree that wastes most to one pass over device memory: what divergence, idle threads and barriers cost.

#define BLOCK 128
#define ALL_LANES 0xffffffffu

// Threads that add are every second, fourth, ... one: every warp stays busy, with fewer and fewer lanes.
extern "C" __global__ void interleaved(const float* x, float* sums, int n) {
  __shared__ float box[BLOCK];
  int t = threadIdx.x, i = blockIdx.x * BLOCK + t;
  box[t] = i < n ? x[i] : 0.0f;
  __syncthreads();
  for (int step = 1; step < BLOCK; step *= 2) {
    if (t % (2 * step) == 0) box[t] += box[t + step];
    __syncthreads();  // before others read these sums
  }
  if (t == 0) sums[blockIdx.x] = box[0];
}

// The first half adds the second: whole warps drop out.
extern "C" __global__ void sequential(const float* x, float* sums, int n) {
  __shared__ float box[BLOCK];
  int t = threadIdx.x, i = blockIdx.x * BLOCK + t;
  box[t] = i < n ? x[i] : 0.0f;
  for (int half = BLOCK / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) box[t] += box[t + half];
  }
  if (t == 0) sums[blockIdx.x] = box[0];
}

// Each thread adds two elements as it loads them: half as many blocks, no idle first step.
extern "C" __global__ void first_add_on_load(const float* x, float* sums, int n) {
  extern __shared__ float dynamic_box[];
  int t = threadIdx.x, i = blockIdx.x * BLOCK * 2 + t;
  float sum = i < n ? x[i] : 0.0f;
  if (i + BLOCK < n) sum += x[i + BLOCK];
  dynamic_box[t] = sum;
  for (int half = BLOCK / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) dynamic_box[t] += dynamic_box[t + half];
  }
  if (t == 0) sums[blockIdx.x] = dynamic_box[0];
}

// The last warp needs no barrier of the block, but one of its own between what it reads and what it writes.
__device__ void unrolled_warp(volatile float* box, int t) {
  float sum = box[t];
  sum += box[t + 32]; __syncwarp(); box[t] = sum; __syncwarp();
  sum += box[t + 16]; __syncwarp(); box[t] = sum; __syncwarp();
  sum += box[t + 8]; __syncwarp(); box[t] = sum; __syncwarp();
  sum += box[t + 4]; __syncwarp(); box[t] = sum; __syncwarp();
  sum += box[t + 2]; __syncwarp(); box[t] = sum; __syncwarp();
  sum += box[t + 1]; __syncwarp(); box[t] = sum;
}

template <int THREADS> __device__ void unrolled_sum(const float* x, float* sums, int n) {
  __shared__ float box[THREADS];
  int t = threadIdx.x;
  float sum = 0.0f;
  for (int i = blockIdx.x * THREADS * 2 + t; i < n; i += THREADS * 2 * gridDim.x)
    sum += x[i] + (i + THREADS < n ? x[i + THREADS] : 0.0f);
  box[t] = sum;
  __syncthreads();
  if (THREADS >= 256) { if (t < 128) box[t] += box[t + 128]; __syncthreads(); }
  if (THREADS >= 128) { if (t < 64) box[t] += box[t + 64]; __syncthreads(); }
  if (t < 32) unrolled_warp(box, t);
  if (t == 0) sums[blockIdx.x] = box[0];
}
extern "C" __global__ void unrolled_last_warp(const float* x, float* sums, int n) { unrolled_sum<BLOCK>(x, sums, n); }

// Registers instead of shared memory: a warp adds by shuffles, its first lane hands the sum on.
template <typename T> __device__ T warp_sum(T value) {
  #pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(ALL_LANES, value, offset);
  return value;
}
template <typename T> __device__ T block_sum(T value) {
  __shared__ T of_warp[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = warp_sum(value);
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();  // of_warp is complete
  if (warp == 0) value = warp_sum(lane < (blockDim.x + 31) / 32 ? of_warp[lane] : T(0));
  return value;
}
extern "C" __global__ void shuffles(const float* x, float* sums, int n) {
  float sum = 0.0f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// 16 bytes a load; the few elements behind the last whole float4 go to the first block.
extern "C" __global__ void vectorised(const float* __restrict__ x, double* total, int n) {
  const float4* quads = reinterpret_cast<const float4*>(x);
  double sum = 0.0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += gridDim.x * blockDim.x) {
    float4 q = __ldg(quads + i);
    sum += double(q.x) + double(q.y) + (double(q.z) + double(q.w));
  }
  if (blockIdx.x == 0 && threadIdx.x < n % 4) sum += x[n / 4 * 4 + threadIdx.x];
  sum = block_sum(sum);
  if (threadIdx.x == 0) atomicAdd(total, sum);
}

// Blocks add to one word, in whatever order they come.
extern "C" __global__ void multi_block(const int* x, unsigned long long* total, int* largest, int n) {
  int sum = 0, top = -2147483647 - 1;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    sum += x[i];
    top = max(top, x[i]);
  }
  sum = __reduce_add_sync(ALL_LANES, sum);
  top = __reduce_max_sync(ALL_LANES, top);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(total, (unsigned long long)(long long)sum);
    atomicMax(largest, top);
  }
}

// Each block leaves its sum and takes a ticket; the one that draws the last adds all of them, in order.
__device__ unsigned tickets = 0;
extern "C" __global__ void last_block(const float* x, float* sums, float* total, int n) {
  __shared__ bool last;
  float sum = 0.0f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    __threadfence();  // the sum is there before the ticket is drawn
    last = atomicInc(&tickets, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    __threadfence();
    sum = 0.0f;
    for (int b = 0; b < gridDim.x; ++b) sum += sums[b];
    *total = sum;
  }
}

// The largest element and where it is: pairs through shuffles, the first one wins.
extern "C" __global__ void arg_max(const float* x, int* where, int columns) {
  const float* row = x + blockIdx.x * columns;
  float best = -__int_as_float(0x7f800000);
  int at = columns;
  for (int j = threadIdx.x; j < columns; j += 32)
    if (row[j] > best) { best = row[j]; at = j; }
  #pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    float value = __shfl_xor_sync(ALL_LANES, best, mask);
    int place = __shfl_xor_sync(ALL_LANES, at, mask);
    if (value > best || (value == best && place < at)) { best = value; at = place; }
  }
  if (threadIdx.x == 0) where[blockIdx.x] = at;
}
