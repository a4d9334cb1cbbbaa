// Barriers of the whole grid by cooperative groups: one launch, in which blocks read what all others have written.

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

// Jacobi's method for u'' = f between fixed ends.
extern "C" __global__ void jacobi(const float* f, float* u, float* next, int n, int sweeps) {
  cg::grid_group grid = cg::this_grid();
  for (int k = 0; k < sweeps; ++k) {
    for (int i = grid.thread_rank(); i < n; i += grid.num_threads())
      next[i] = i == 0 || i == n - 1 ? u[i] : 0.5f * (u[i - 1] + u[i + 1] - f[i]);
    grid.sync();  // after each sweep
    float* other = u;
    u = next;
    next = other;
  }
}

// x minus the mean of all of it: a sum over a two-dimensional grid in the middle of a kernel.
extern "C" __global__ void subtract_mean(const float* x, float* sums, float* out, int columns) {
  __shared__ float box[64];
  cg::grid_group grid = cg::this_grid();
  int t = threadIdx.x, row = blockIdx.y, column = blockIdx.x * 64 + t;
  float own = column < columns ? x[row * columns + column] : 0.0f;
  box[t] = own;
  for (int half = 32; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) box[t] += box[t + half];
  }
  if (t == 0) sums[grid.block_rank()] = box[0];
  grid.sync();
  float total = 0.0f;
  for (int b = 0; b < grid.num_blocks(); ++b) total += sums[b];
  if (column < columns) out[row * columns + column] = own - total / (columns * gridDim.y);
}
