// Primitives of CUB, as CuPy ships them, in kernels of one block.

#include <cub/block/block_histogram.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <cub/warp/warp_scan.cuh>

#define KERNEL extern "C" __global__ void
#define THREADS 64
#define ITEMS 4

// A sum and a maximum, with one storage for both.
template <cub::BlockReduceAlgorithm HOW> __device__ void reduce(const int* x, int* sum, int* largest) {
  using Reduce = cub::BlockReduce<int, THREADS, HOW>;
  __shared__ typename Reduce::TempStorage storage;
  int value = x[threadIdx.x], whole = Reduce(storage).Sum(value);
  __syncthreads();  // the storage is free
  int top = Reduce(storage).Reduce(value, cuda::maximum<>{});
  if (threadIdx.x == 0) {
    *sum = whole;
    *largest = top;
  }
}
KERNEL reduce_raking(const int* x, int* sum, int* largest) { reduce<cub::BLOCK_REDUCE_RAKING>(x, sum, largest); }
KERNEL reduce_warps(const int* x, int* sum, int* largest) { reduce<cub::BLOCK_REDUCE_WARP_REDUCTIONS>(x, sum, largest); }

// Several items a thread, loaded and stored in stripes that are turned into blocks through shared memory.
KERNEL scan(const int* x, int* before, int* total, int n) {
  using Load = cub::BlockLoad<int, THREADS, ITEMS, cub::BLOCK_LOAD_TRANSPOSE>;
  using Store = cub::BlockStore<int, THREADS, ITEMS, cub::BLOCK_STORE_WARP_TRANSPOSE>;
  using Scan = cub::BlockScan<int, THREADS>;
  __shared__ union {
    typename Load::TempStorage load;
    typename Store::TempStorage store;
    typename Scan::TempStorage scan;
  } storage;
  int items[ITEMS], sum;
  Load(storage.load).Load(x, items, n, 0);
  __syncthreads();  // from loading to adding
  Scan(storage.scan).ExclusiveSum(items, items, sum);
  __syncthreads();
  Store(storage.store).Store(before, items, n);
  if (threadIdx.x == 0) *total = sum;
}

// Keys with values; floats by the order of their bits.
template <typename Key> __device__ void sort(Key* keys, int* places) {
  using Sort = cub::BlockRadixSort<Key, THREADS, ITEMS, int>;
  __shared__ typename Sort::TempStorage storage;
  Key mine[ITEMS];
  int from[ITEMS];
  for (int i = 0; i < ITEMS; ++i) mine[i] = keys[from[i] = threadIdx.x * ITEMS + i];
  Sort(storage).SortBlockedToStriped(mine, from);
  cub::StoreDirectStriped<THREADS>(threadIdx.x, keys, mine);
  cub::StoreDirectStriped<THREADS>(threadIdx.x, places, from);
}
KERNEL sort_floats(float* keys, int* places) { sort(keys, places); }
KERNEL sort_shorts(unsigned short* keys, int* places) { sort(keys, places); }

template <int WIDTH> __device__ void warps(const double* x, double* sums, double* through) {
  using Reduce = cub::WarpReduce<double, WIDTH>;
  using Scan = cub::WarpScan<double, WIDTH>;
  __shared__ typename Reduce::TempStorage reduce[THREADS / WIDTH];
  __shared__ typename Scan::TempStorage scan[THREADS / WIDTH];
  int warp = threadIdx.x / WIDTH;
  double sum = Reduce(reduce[warp]).Sum(x[threadIdx.x]), until;
  Scan(scan[warp]).InclusiveSum(x[threadIdx.x], until);
  if (threadIdx.x % WIDTH == 0) sums[warp] = sum;
  through[threadIdx.x] = until;
}
KERNEL whole_warps(const double* x, double* sums, double* through) { warps<32>(x, sums, through); }
KERNEL quarter_warps(const double* x, double* sums, double* through) { warps<8>(x, sums, through); }

template <cub::BlockHistogramAlgorithm HOW> __device__ void histogram(const unsigned char* x, unsigned* counts) {
  using Histogram = cub::BlockHistogram<unsigned char, THREADS, ITEMS, 256, HOW>;
  __shared__ typename Histogram::TempStorage storage;
  __shared__ unsigned shared_counts[256];
  unsigned char items[ITEMS];
  cub::LoadDirectStriped<THREADS>(threadIdx.x, x, items);
  Histogram(storage).Histogram(items, shared_counts);
  __syncthreads();
  for (int b = threadIdx.x; b < 256; b += THREADS) counts[b] = shared_counts[b];
}
KERNEL histogram_by_sorting(const unsigned char* x, unsigned* counts) { histogram<cub::BLOCK_HISTO_SORT>(x, counts); }
KERNEL histogram_by_atomics(const unsigned char* x, unsigned* counts) { histogram<cub::BLOCK_HISTO_ATOMIC>(x, counts); }
