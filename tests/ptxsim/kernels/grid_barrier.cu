// Barriers of the whole grid by hand: a scan in which every round reads what all blocks have written in the one before.

// A round of Hillis and Steele's scan: each element adds the one that lies `step` before it.
__device__ void add_earlier(const int* x, int* next, int n, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    next[i] = i < step ? x[i] : x[i] + x[i - step];
}

__device__ void swap(int*& a, int*& b) {
  int* other = a;
  a = b;
  b = other;
}

// A counter: block by block arrives, and looks until all have. It never goes back to zero.
__device__ void count_blocks(unsigned* arrived, unsigned all) {
  __syncthreads();  // the block has arrived
  if (threadIdx.x == 0) {
    __threadfence();  // its writes are there before the counter says so
    atomicAdd(arrived, 1u);
    while (*(volatile unsigned*)arrived < all)
      ;
    __threadfence();
  }
  __syncthreads();  // nobody goes on before
}

extern "C" __global__ void scan_counting(int* x, int* next, int n, unsigned* arrived) {
  for (int step = 1, round = 1; step < n; step *= 2, ++round) {
    add_earlier(x, next, n, step);
    count_blocks(arrived, round * gridDim.x);
    swap(x, next);
  }
}

// Flags: every block raises one of its own, and the first block answers when it sees them all.
__device__ void exchange_flags(volatile int* raised, volatile int* answered, int round) {
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int b = 1 + threadIdx.x; b < gridDim.x; b += blockDim.x)
      while (raised[b] < round)
        ;
    __threadfence();
    __syncthreads();
    for (int b = 1 + threadIdx.x; b < gridDim.x; b += blockDim.x) answered[b] = round;
  } else if (threadIdx.x == 0) {
    __threadfence();  // its writes are there before the flag is up
    raised[blockIdx.x] = round;
    while (answered[blockIdx.x] < round)
      ;
    __threadfence();
  }
  __syncthreads();
}

extern "C" __global__ void scan_flags(int* x, int* next, int n, int* flags) {
  for (int step = 1, round = 1; step < n; step *= 2, ++round) {
    add_earlier(x, next, n, step);
    exchange_flags(flags, flags + gridDim.x, round);
    swap(x, next);
  }
}
