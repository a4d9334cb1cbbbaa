// Softmax of rows and its derivative.

#define ALL_LANES 0xffffffffu
#define INFINITY __int_as_float(0x7f800000)

struct Sum { static __device__ float of(float a, float b) { return a + b; } };
struct Largest { static __device__ float of(float a, float b) { return fmaxf(a, b); } };

template <typename Op> __device__ float of_warp(float value) {
  #pragma unroll
  for (int mask = 16; mask; mask >>= 1) value = Op::of(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}

// The same for all threads of a block, in a box that is used again.
template <typename Op> __device__ float of_block(float value, float neutral, float* box) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = of_warp<Op>(value);
  __syncthreads();  // the box has been read
  if (lane == 0) box[warp] = value;
  __syncthreads();
  return of_warp<Op>(lane < blockDim.x / 32 ? box[lane] : neutral);
}

// The definition: one pass for the maximum, one for the sum, one for the quotient. A block a row.
extern "C" __global__ void three_pass(const float* x, float* out, int n) {
  __shared__ float box[32];
  const float* row = x + (long long)blockIdx.x * n;
  float largest = -INFINITY, sum = 0.0f;
  for (int j = threadIdx.x; j < n; j += blockDim.x) largest = fmaxf(largest, row[j]);
  largest = of_block<Largest>(largest, -INFINITY, box);
  for (int j = threadIdx.x; j < n; j += blockDim.x) sum += expf(row[j] - largest);
  sum = of_block<Sum>(sum, 0.0f, box);
  for (int j = threadIdx.x; j < n; j += blockDim.x)
    out[(long long)blockIdx.x * n + j] = expf(row[j] - largest) / sum;
}

// Milakov and Gimelshein (2018): maximum and sum in one pass, the sum rescaled when the maximum grows. A warp a row.
extern "C" __global__ void online(const float* x, float* out, int n) {
  const float* row = x + (long long)blockIdx.x * n;
  float m = -INFINITY, l = 0.0f;
  for (int j = threadIdx.x; j < n; j += 32) {
    float previous = m;
    m = fmaxf(m, row[j]);
    l = l * expf(previous - m) + expf(row[j] - m);
  }
  #pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    float other_m = __shfl_xor_sync(ALL_LANES, m, mask), other_l = __shfl_xor_sync(ALL_LANES, l, mask);
    float both = fmaxf(m, other_m);
    l = l * expf(m - both) + other_l * expf(other_m - both);
    m = both;
  }
  for (int j = threadIdx.x; j < n; j += 32) out[(long long)blockIdx.x * n + j] = __expf(row[j] - m) / l;
}

// A row of at most 128 elements stays in the registers of a warp; blockDim.y rows a block.
extern "C" __global__ void warp_per_row(const float* __restrict__ x, float* __restrict__ out, int rows, int n) {
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  float element[4], largest = -INFINITY, sum = 0.0f;
  #pragma unroll
  for (int k = 0; k < 4; ++k) {
    int j = threadIdx.x + 32 * k;
    element[k] = j < n ? x[row * n + j] : -INFINITY;
    largest = fmaxf(largest, element[k]);
  }
  largest = of_warp<Largest>(largest);
  #pragma unroll
  for (int k = 0; k < 4; ++k) sum += element[k] = exp2f((element[k] - largest) * 1.44269504f);
  float factor = __frcp_rn(of_warp<Sum>(sum));
  #pragma unroll
  for (int k = 0; k < 4; ++k)
    if (threadIdx.x + 32 * k < n) out[row * n + threadIdx.x + 32 * k] = element[k] * factor;
}

// dx = p (dp - sum(p dp))
extern "C" __global__ void backward(const float* p, const float* dp, float* dx, int n) {
  __shared__ float box[32];
  long long first = (long long)blockIdx.x * n;
  float sum = 0.0f;
  for (int j = threadIdx.x; j < n; j += blockDim.x) sum = fmaf(p[first + j], dp[first + j], sum);
  sum = of_block<Sum>(sum, 0.0f, box);
  for (int j = threadIdx.x; j < n; j += blockDim.x) dx[first + j] = p[first + j] * (dp[first + j] - sum);
}
