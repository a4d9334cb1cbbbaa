// Prefix sums: of a block by steps, by a tree, by shuffles; of a grid in one pass.

#define BLOCK 128
#define ALL_LANES 0xffffffffu

// Hillis and Steele (1986): log2(n) steps of all threads, in two buffers that change places.
extern "C" __global__ void hillis_steele(const int* x, int* out, int n) {
  __shared__ int box[2][BLOCK];
  int t = threadIdx.x, from = 0;
  box[0][t] = t < n ? x[t] : 0;
  __syncthreads();
  for (int step = 1; step < BLOCK; step *= 2) {
    box[1 - from][t] = box[from][t] + (t >= step ? box[from][t - step] : 0);
    from = 1 - from;
    __syncthreads();  // the step is complete
  }
  if (t < n) out[t] = box[from][t];
}

// Blelloch (1990): a sweep up a tree and one down; two elements a thread, exclusive. A word of padding for each 32
// keeps the strides of the tree out of one bank.
__device__ int padded(int i) { return i + i / 32; }
extern "C" __global__ void blelloch(const int* x, int* out, int* total) {
  __shared__ int box[2 * BLOCK + 2 * BLOCK / 32];
  int t = threadIdx.x, distance = 1;
  box[padded(t)] = x[t];
  box[padded(t + BLOCK)] = x[t + BLOCK];
  for (int pairs = BLOCK; pairs > 0; pairs /= 2, distance *= 2) {
    __syncthreads();
    if (t < pairs) box[padded(distance * (2 * t + 2) - 1)] += box[padded(distance * (2 * t + 1) - 1)];
  }
  if (t == 0) {
    *total = box[padded(2 * BLOCK - 1)];
    box[padded(2 * BLOCK - 1)] = 0;
  }
  for (int pairs = 1; pairs <= BLOCK; pairs *= 2) {
    distance /= 2;
    __syncthreads();
    if (t < pairs) {
      int left = padded(distance * (2 * t + 1) - 1), right = padded(distance * (2 * t + 2) - 1), kept = box[left];
      box[left] = box[right];
      box[right] += kept;
    }
  }
  __syncthreads();
  out[t] = box[padded(t)];
  out[t + BLOCK] = box[padded(t + BLOCK)];
}

// A warp by shuffles, the warps' totals by the first of them.
__device__ unsigned scan_of_warp(unsigned v, int lane) {
  #pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    unsigned w = __shfl_up_sync(ALL_LANES, v, d);
    if (lane >= d) v += w;
  }
  return v;
}
__device__ unsigned scan_of_block(unsigned v) {
  __shared__ unsigned totals[32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  v = scan_of_warp(v, lane);
  if (lane == 31) totals[warp] = v;
  __syncthreads();
  if (warp == 0) totals[lane] = scan_of_warp(lane < blockDim.x / 32 ? totals[lane] : 0, lane);
  __syncthreads();
  return v + (warp ? totals[warp - 1] : 0);
}
extern "C" __global__ void warp_shuffles(const unsigned* x, unsigned* out, int n) {
  int i = threadIdx.x;
  unsigned v = scan_of_block(i < n ? x[i] : 0);
  if (i < n) out[i] = v;
}

// Merrill and Garland (2016), decoupled look-back: a tile publishes its own sum at once, adds up those of the tiles
// before it until one of them knows its whole prefix, and then publishes its own prefix. Tiles are numbered in the
// order in which blocks start, so that nobody waits for a block that does not run yet.
enum : unsigned { NOTHING, SUM, PREFIX };
__device__ void publish(volatile unsigned long long* state, unsigned kind, unsigned value) {
  *state = (unsigned long long)kind << 32 | value;  // one store, so that kind and value belong together
}
extern "C" __global__ void look_back(const unsigned* x, unsigned* out, volatile unsigned long long* states,
                                     unsigned* started, int n) {
  __shared__ int shared_tile;
  __shared__ unsigned shared_before;
  if (threadIdx.x == 0) shared_tile = atomicAdd(started, 1u);
  __syncthreads();
  int tile = shared_tile, i = tile * blockDim.x + threadIdx.x;
  unsigned inclusive = scan_of_block(i < n ? x[i] : 0);
  if (threadIdx.x == blockDim.x - 1) publish(states + tile, tile ? SUM : PREFIX, inclusive);
  if (threadIdx.x < 32) {
    unsigned before = 0;
    for (int last = tile - 1; last >= 0; last -= 32) {
      int other = last - threadIdx.x;
      unsigned long long state;
      do {
        state = other >= 0 ? states[other] : (unsigned long long)PREFIX << 32;
      } while (__any_sync(ALL_LANES, state >> 32 == NOTHING));
      unsigned known = __ballot_sync(ALL_LANES, state >> 32 == PREFIX);
      unsigned value = !known || threadIdx.x < __ffs(known) ? (unsigned)state : 0;  // up to the nearest prefix
      before += __reduce_add_sync(ALL_LANES, value);
      if (known) break;
    }
    if (threadIdx.x == 0) shared_before = before;
  }
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1 && tile) publish(states + tile, PREFIX, shared_before + inclusive);
  if (i < n) out[i] = shared_before + inclusive;
}

// Sums that begin anew where a flag is set.
extern "C" __global__ void segmented(const int* x, const unsigned char* heads, int* out, int n) {
  int i = blockIdx.x * 32 + threadIdx.x, lane = threadIdx.x;
  int v = i < n ? x[i] : 0;
  unsigned begins = __ballot_sync(ALL_LANES, i < n && heads[i]) | 1u;
  int head = 31 - __clz(begins & (ALL_LANES >> (31 - lane)));  // the nearest one at or before this lane
  #pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int w = __shfl_up_sync(ALL_LANES, v, d);
    if (lane - d >= head) v += w;
  }
  if (i < n) out[i] = v;
}
