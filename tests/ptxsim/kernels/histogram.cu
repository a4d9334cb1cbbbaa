// Histograms of bytes: fewer and fewer atomics that meet at one address.

#define BINS 256
#define ALL_LANES 0xffffffffu

extern "C" __global__ void global_atomics(const unsigned char* x, unsigned* counts, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&counts[x[i]], 1u);
}

// One histogram a block in shared memory; four bytes a load, and what is left of the last four.
extern "C" __global__ void privatised(const unsigned char* x, unsigned* counts, int n) {
  __shared__ unsigned mine[BINS];
  for (int b = threadIdx.x; b < BINS; b += blockDim.x) mine[b] = 0;
  __syncthreads();  // all counts are zero
  const uchar4* quads = reinterpret_cast<const uchar4*>(x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += gridDim.x * blockDim.x) {
    uchar4 q = quads[i];
    atomicAdd(&mine[q.x], 1u);
    atomicAdd(&mine[q.y], 1u);
    atomicAdd(&mine[q.z], 1u);
    atomicAdd(&mine[q.w], 1u);
  }
  if (blockIdx.x == 0 && threadIdx.x < n % 4) atomicAdd(&mine[x[n / 4 * 4 + threadIdx.x]], 1u);
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += blockDim.x)
    if (mine[b]) atomicAdd(&counts[b], mine[b]);
}

// Lanes that hold the same byte find each other; the first of them adds for all.
extern "C" __global__ void warp_aggregated(const unsigned char* x, unsigned* counts, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned there = __ballot_sync(ALL_LANES, i < n);
  if (i >= n) return;
  unsigned same = __match_any_sync(there, (unsigned)x[i]);
  if (threadIdx.x % 32 == __ffs(same) - 1) atomicAdd(&counts[x[i]], __popc(same));
}

// One histogram a warp, of 16-bit counts that share a word; two such counts are added at once.
extern "C" __global__ void packed_counts(const unsigned char* x, unsigned* counts, int n) {
  extern __shared__ unsigned warps[][BINS / 2];
  unsigned* mine = warps[threadIdx.x / 32];
  for (int b = threadIdx.x % 32; b < BINS / 2; b += 32) mine[b] = 0;
  __syncwarp();
  for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&mine[x[i] / 2], 1u << 16 * (x[i] % 2));
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += blockDim.x) {
    unsigned sum = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += warps[w][b / 2] >> 16 * (b % 2) & 0xffff;
    counts[b] = sum;
  }
}

// Whose word it is decides a vote by match.all: a warp of equal bytes costs one atomic, any other 32.
extern "C" __global__ void equal_warps(const unsigned char* x, unsigned* counts) {
  int value = x[blockIdx.x * 32 + threadIdx.x], all;
  __match_all_sync(ALL_LANES, value, &all);
  if (!all) atomicAdd(&counts[value], 1u);
  else if (threadIdx.x == 0) atomicAdd(&counts[value], 32u);
}
