// Barriers and pipelines of NVIDIA's C++ standard library: arrivals apart from waits, copies that arrive, a ring that
// one warp fills for another.

#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/std/utility>

using Barrier = cuda::barrier<cuda::thread_scope_block>;
constexpr int BLOCK = 64, STAGES = 3, TILE = 32;

// x <- average of both neighbours, on a ring of as many points as threads. Between its arrival and its wait a thread
// adds up its own point.
extern "C" __global__ void diffusion(const float* x, float* out, float* sums, int steps) {
  __shared__ float points[2][BLOCK];
  __shared__ Barrier written;
  int t = threadIdx.x, i = blockIdx.x * BLOCK + t;
  if (t == 0) init(&written, BLOCK);
  __syncthreads();
  float value = x[i], sum = 0;
  for (int step = 0; step < steps; step++) {
    points[step % 2][t] = value;
    Barrier::arrival_token token = written.arrive();
    sum += value;
    written.wait(cuda::std::move(token));  // for all points
    value = 0.5f * (points[step % 2][(t + 1) % BLOCK] + points[step % 2][(t + BLOCK - 1) % BLOCK]);
  }
  out[i] = value;
  sums[i] = sum;
}

// A warp copies tiles, another one adds each to its sums: the roles of a pipeline that is partitioned.
extern "C" __global__ void roles(const int* x, int* sums, int tiles) {
  __shared__ int ring[STAGES][TILE];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES> state;
  int t = threadIdx.x % 32;
  bool produces = threadIdx.x < 32;
  cuda::pipeline_role role = produces ? cuda::pipeline_role::producer : cuda::pipeline_role::consumer;
  auto pipeline = cuda::make_pipeline(cooperative_groups::this_thread_block(), &state, role);
  x += (long long)blockIdx.x * tiles * TILE;
  int sum = 0;
  for (int i = 0; i < tiles; i++) {
    int* tile = ring[i % STAGES];
    if (produces) {
      pipeline.producer_acquire();
      cuda::memcpy_async(&tile[t], &x[i * TILE + t], sizeof(int), pipeline);
      pipeline.producer_commit();
    } else {
      pipeline.consumer_wait();
      sum += tile[31 - t];
      pipeline.consumer_release();
    }
  }
  if (!produces) sums[blockIdx.x * TILE + t] = sum;
}

// The rows of a matrix, copied by all threads of a block, which arrive when their part is there.
extern "C" __global__ void reversed(const int4* x, int4* out, int rows) {
  __shared__ int4 row[BLOCK];
  __shared__ Barrier copied;
  auto block = cooperative_groups::this_thread_block();
  if (threadIdx.x == 0) init(&copied, BLOCK);
  block.sync();
  for (int i = 0; i < rows; i++, x += BLOCK, out += BLOCK) {
    cuda::memcpy_async(block, row, x, sizeof(row), copied);
    copied.arrive_and_wait();
    out[threadIdx.x] = row[BLOCK - 1 - threadIdx.x];
    block.sync();  // before the next copy
  }
}
