// Groups of threads by CUDA's own header: tiles, lanes that happen to be together, and what groups do collectively.

#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;

// Tiles of 16 lanes: a sum, and the rank of the tile.
extern "C" __global__ void reduce(const int* x, int* sums, float* largest) {
  __shared__ int box[128];
  auto block = cg::this_thread_block();
  auto tile = cg::tiled_partition<16>(block);
  int i = block.thread_rank();
  box[i] = x[i];
  block.sync();
  int value = box[(i + 64) % 128];
  sums[i] = cg::reduce(tile, value, cg::plus<int>()) + 1000 * tile.meta_group_rank();
  largest[i] = cg::reduce(tile, float(value), cg::greater<float>());
}

// A tree in each tile, with its own shuffles and its own barrier.
template <int SIZE> __device__ void tree(const float* x, float* sums) {
  __shared__ float box[128];
  auto tile = cg::tiled_partition<SIZE>(cg::this_thread_block());
  float* mine = box + threadIdx.x / SIZE * SIZE;
  int rank = tile.thread_rank();
  mine[rank] = x[threadIdx.x];
  tile.sync();  // the tile is complete
  float sum = mine[SIZE - 1 - rank];
  for (int step = SIZE / 2; step; step /= 2) sum += tile.shfl_down(sum, step);
  if (rank == 0) sums[threadIdx.x / SIZE] = sum;
}
extern "C" __global__ void trees_of_32(const float* x, float* sums) { tree<32>(x, sums); }
extern "C" __global__ void trees_of_4(const float* x, float* sums) { tree<4>(x, sums); }

// Lanes that take a branch together share one atomic: a filter that keeps its places dense.
extern "C" __global__ void filter(const int* x, int* kept, int* count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n || x[i] <= 0) return;
  auto together = cg::coalesced_threads();
  int base = 0;
  if (together.thread_rank() == 0) base = atomicAdd(count, (int)together.size());
  base = together.shfl(base, 0);
  kept[base + together.thread_rank()] = x[i];
}

// Lanes with one label are a group: its sum, by its first lane.
extern "C" __global__ void labelled(const int* labels, const int* x, int* sums) {
  auto tile = cg::tiled_partition<32>(cg::this_thread_block());
  auto same = cg::labeled_partition(tile, labels[threadIdx.x]);
  int sum = cg::reduce(same, x[threadIdx.x], cg::plus<int>());
  if (same.thread_rank() == 0) atomicAdd(sums + labels[threadIdx.x], sum);
}

extern "C" __global__ void scan(const int* x, int* before, int* through) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  before[threadIdx.x] = cg::exclusive_scan(tile, x[threadIdx.x]);
  through[threadIdx.x] = cg::inclusive_scan(tile, x[threadIdx.x], cg::bit_xor<int>());
}

// A copy that the block makes together while it could do something else.
extern "C" __global__ void copy(const int* x, int* turned) {
  __shared__ __align__(16) int box[128];
  auto block = cg::this_thread_block();
  cg::memcpy_async(block, box, x, sizeof box);
  cg::wait(block);  // all of it has come
  turned[threadIdx.x] = box[127 - threadIdx.x];
}

// Tiles of several warps meet through shared memory that belongs to the system.
extern "C" __global__ void tiles_of_64(const int* x, int* sums) {
  __shared__ cg::block_tile_memory<128> memory;
  extern __shared__ int dynamic[];
  dynamic[threadIdx.x] = x[threadIdx.x];
  auto block = cg::this_thread_block(memory);
  auto tile = cg::tiled_partition<64>(block);
  block.sync();
  sums[threadIdx.x] = cg::reduce(tile, dynamic[threadIdx.x ^ 1], cg::plus<int>());
}
