// Layer norm: y = (x - mean) rstd * scale + shift over rows, and its derivatives.

#include <cuda_fp16.h>
#define ALL_LANES 0xffffffffu

__device__ float warp_sum(float value) {
  #pragma unroll
  for (int mask = 16; mask; mask >>= 1) value += __shfl_xor_sync(ALL_LANES, value, mask);
  return value;
}

// Two passes over a row in registers and shared memory, a block a row. Keeps mean and rstd for the derivative.
extern "C" __global__ void forward(const float* x, const float* scale, const float* shift, float* y, float* mean_out,
                                   float* rstd_out, int n, float epsilon) {
  extern __shared__ float row[];  // n elements, then one of each warp
  float* of_warp = row + n;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  auto block_sum = [&](float value) {
    value = warp_sum(value);
    if (lane == 0) of_warp[warp] = value;
    __syncthreads();
    value = warp_sum(lane < warps ? of_warp[lane] : 0.0f);
    __syncthreads();  // of_warp has been read
    return value;
  };
  float sum = 0.0f, squares = 0.0f;
  for (int j = threadIdx.x; j < n; j += blockDim.x) sum += row[j] = x[blockIdx.x * n + j];
  float mean = block_sum(sum) / n;
  for (int j = threadIdx.x; j < n; j += blockDim.x) squares += (row[j] - mean) * (row[j] - mean);
  float rstd = rsqrtf(block_sum(squares) / n + epsilon);
  for (int j = threadIdx.x; j < n; j += blockDim.x)
    y[blockIdx.x * n + j] = (row[j] - mean) * rstd * scale[j] + shift[j];
  if (threadIdx.x == 0) {
    mean_out[blockIdx.x] = mean;
    rstd_out[blockIdx.x] = rstd;
  }
}

// Welford (1962): mean and variance in one pass, merged across a warp (Chan et al. 1979); __half in and out.
extern "C" __global__ void running_moments(const __half* x, const float* scale, __half* y, int n, float epsilon) {
  const __half* row = x + blockIdx.x * n;
  float mean = 0.0f, m2 = 0.0f, count = 0.0f;
  for (int j = threadIdx.x; j < n; j += 32) {
    float v = __half2float(row[j]), d = v - mean;
    count += 1.0f;
    mean += d / count;
    m2 += d * (v - mean);
  }
  for (int mask = 1; mask < 32; mask *= 2) {
    float other_mean = __shfl_xor_sync(ALL_LANES, mean, mask), other_m2 = __shfl_xor_sync(ALL_LANES, m2, mask);
    float other_count = __shfl_xor_sync(ALL_LANES, count, mask), all = count + other_count, d = other_mean - mean;
    if (all > 0.0f) {
      m2 += other_m2 + d * d * count * other_count / all;
      mean += d * other_count / all;
    }
    count = all;
  }
  float factor = rsqrtf(m2 / n + epsilon);
  for (int j = threadIdx.x; j < n; j += 32)
    y[blockIdx.x * n + j] = __float2half((__half2float(row[j]) - mean) * factor * scale[j]);
}

// dx = rstd (g - mean(g) - z mean(g z)) with z = (x - mean) rstd, g = dy scale. A warp a row.
extern "C" __global__ void backward_x(const float* x, const float* scale, const float* dy, const float* means,
                                      const float* rstds, float* dx, int rows, int n) {
  int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (i >= rows) return;
  float mean = means[i], rstd = rstds[i], sum = 0.0f, weighted = 0.0f;
  for (int j = lane; j < n; j += 32) {
    float g = dy[i * n + j] * scale[j];
    sum += g;
    weighted += g * (x[i * n + j] - mean) * rstd;
  }
  sum = warp_sum(sum) / n;
  weighted = warp_sum(weighted) / n;
  for (int j = lane; j < n; j += 32)
    dx[i * n + j] = rstd * (dy[i * n + j] * scale[j] - sum - (x[i * n + j] - mean) * rstd * weighted);
}

// dscale = sum over rows of dy z, dshift of dy: 32 columns a block, its rows of threads added by a tree.
extern "C" __global__ void backward_parameters(const float* x, const float* dy, const float* means, const float* rstds,
                                               float* dscale, float* dshift, int rows, int n) {
  __shared__ float2 box[8][32];
  int j = blockIdx.x * 32 + threadIdx.x;
  float2 sum = make_float2(0.0f, 0.0f);
  if (j < n)
    for (int i = threadIdx.y; i < rows; i += 8) {
      sum.x += dy[i * n + j] * (x[i * n + j] - means[i]) * rstds[i];
      sum.y += dy[i * n + j];
    }
  box[threadIdx.y][threadIdx.x] = sum;
  for (int half = 4; half; half /= 2) {
    __syncthreads();  // of the step before
    if (threadIdx.y < half) {
      float2 other = box[threadIdx.y + half][threadIdx.x];
      sum.x += other.x;
      sum.y += other.y;
      box[threadIdx.y][threadIdx.x] = sum;
    }
  }
  if (threadIdx.y == 0 && j < n) {
    dscale[j] = sum.x;
    dshift[j] = sum.y;
  }
}
