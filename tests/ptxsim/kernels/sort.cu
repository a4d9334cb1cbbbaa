// Sorts of one block: a network, and counting by digits.

#define ALL_LANES 0xffffffffu
#define INFINITY __int_as_float(0x7f800000)

// Batcher (1968): bitonic, by exchanges of pairs at fixed distances; infinities fill the block up.
extern "C" __global__ void bitonic(float* x, int n) {
  __shared__ float box[128];
  int t = threadIdx.x;
  box[t] = t < n ? x[t] : INFINITY;
  for (int size = 2; size <= 128; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      int other = t ^ step;
      float mine = box[t], theirs = box[other];
      bool ascending = (t & size) == 0;
      __syncthreads();  // both have been read
      box[t] = (t < other) == ascending ? fminf(mine, theirs) : fmaxf(mine, theirs);
    }
  if (t < n) x[t] = box[t];
}

// The same for the lanes of a warp, by shuffles, with the places that the keys came from.
extern "C" __global__ void bitonic_by_shuffles(const unsigned* keys, int* places) {
  int lane = threadIdx.x;
  unsigned long long pair = (unsigned long long)keys[blockIdx.x * 32 + lane] << 32 | lane;
  #pragma unroll
  for (int size = 2; size <= 32; size *= 2)
    #pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      unsigned long long other = __shfl_xor_sync(ALL_LANES, pair, step);
      bool lower = (lane & step) == 0, ascending = (lane & size) == 0;
      pair = (pair < other) == (lower == ascending) ? pair : other;
    }
  places[blockIdx.x * 32 + lane] = (int)pair;
}

// Least significant digit first, 4 bits a pass: lanes with one digit find each other, then all counts are summed in
// the order of digits and warps, so that equal digits keep their order.
#define WARPS 4
#define DIGITS 16
extern "C" __global__ void radix(unsigned* keys, int* places, int n) {
  __shared__ unsigned counts[DIGITS * WARPS], of_half[2], box[32 * WARPS];
  __shared__ int place_box[32 * WARPS];
  int t = threadIdx.x, lane = t % 32, warp = t / 32, place = t;
  unsigned key = t < n ? keys[t] : ~0u, lower;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
  for (int shift = 0; shift < 32; shift += 4) {
    unsigned digit = key >> shift & 15;
    if (t < DIGITS * WARPS) counts[t] = 0;
    __syncthreads();
    unsigned same = __match_any_sync(ALL_LANES, digit), before = __popc(same & lower);
    if (before == 0) counts[digit * WARPS + warp] = __popc(same);
    __syncthreads();
    unsigned count = 0, sum = 0;
    if (t < DIGITS * WARPS) {
      sum = count = counts[t];
      for (int d = 1; d < 32; d *= 2) {
        unsigned value = __shfl_up_sync(ALL_LANES, sum, d);
        if (lane >= d) sum += value;
      }
      if (lane == 31) of_half[warp] = sum;
    }
    __syncthreads();
    if (t < DIGITS * WARPS) counts[t] = sum - count + (warp ? of_half[0] : 0);
    __syncthreads();  // all counts are places
    unsigned to = counts[digit * WARPS + warp] + before;
    box[to] = key;
    place_box[to] = place;
    __syncthreads();
    key = box[t];
    place = place_box[t];
  }
  if (t < n) {
    keys[t] = key;
    places[t] = place;
  }
}

// Keys of a byte: counted in shared memory, and every key put where an atomic says.
extern "C" __global__ void counting(const unsigned char* keys, unsigned char* sorted, int n) {
  __shared__ unsigned counts[256], starts[256];
  int t = threadIdx.x;
  counts[t] = 0;
  __syncthreads();
  for (int i = t; i < n; i += 256) atomicAdd(&counts[keys[i]], 1u);
  __syncthreads();
  if (t == 0) {
    unsigned sum = 0;
    for (int k = 0; k < 256; ++k) {
      starts[k] = sum;
      sum += counts[k];
    }
  }
  __syncthreads();
  for (int i = t; i < n; i += 256) {
    unsigned at = atomicAdd(&starts[keys[i]], 1u);
    assert(at < n);
    sorted[at] = keys[i];
  }
}

// Merge path (Green, McColl, Bader 2012): each thread finds by bisection where its part of two sorted lists begins.
extern "C" __global__ void merge(const int* a, const int* b, int* out, int na, int nb, int each) {
  int first = min((blockIdx.x * blockDim.x + threadIdx.x) * each, na + nb), last = min(first + each, na + nb);
  int low = max(0, first - nb), high = min(first, na);
  while (low < high) {
    int middle = (low + high) / 2;
    if (a[middle] <= b[first - 1 - middle]) low = middle + 1;
    else high = middle;
  }
  for (int i = low, j = first - low; i + j < last;) {
    bool from_a = j >= nb || (i < na && a[i] <= b[j]);
    int at = i + j;
    out[at] = from_a ? a[i++] : b[j++];
  }
}
