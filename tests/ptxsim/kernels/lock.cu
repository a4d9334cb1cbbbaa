// Critical sections of threads and of blocks: who has the lock puts something on a list.

__device__ void put(int* list, int* count, int item) {
  list[*count] = item;
  *count += 1;
}

// Every thread spins by itself. What it does under the lock stands inside the loop, so that the lanes of a warp that
// wait do not keep the one that has the lock from going on, on GPUs older than Volta.
extern "C" __global__ void of_threads(int* lock, int* list, int* count) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      __threadfence();
      put(list, count, blockIdx.x * blockDim.x + threadIdx.x);
      __threadfence();  // before the lock is given back
      atomicExch(lock, 0);
      done = true;
    }
  }
}

// The same as it may stand since Volta, whose lanes go on one by one.
extern "C" __global__ void acquire_then_release(int* lock, int* list, int* count) {
  while (atomicCAS(lock, 0, 1) != 0) __nanosleep(20);
  __threadfence();
  put(list, count, blockIdx.x * blockDim.x + threadIdx.x);
  __threadfence();
  atomicExch(lock, 0);
}

// One thread takes the lock for its block, and all of its threads work under it.
extern "C" __global__ void of_blocks(int* lock, int* sums, int n) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
  }
  __syncthreads();  // the block has the lock
  for (int i = threadIdx.x; i < n; i += blockDim.x) sums[i] += blockIdx.x + i;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(lock, 0);
}

// Tickets: served in the order in which they were drawn.
extern "C" __global__ void by_tickets(unsigned* next, volatile unsigned* serving, int* list, int* count, unsigned* drawn) {
  unsigned ticket = atomicAdd(next, 1u);
  while (*serving != ticket) {}
  __threadfence();
  put(list, count, blockIdx.x * blockDim.x + threadIdx.x);
  drawn[blockIdx.x * blockDim.x + threadIdx.x] = ticket;
  __threadfence();
  *serving = ticket + 1;
}

// A queue of many writers without a lock: the head of a linked list, exchanged by compare-and-swap.
extern "C" __global__ void linked_list(int* head, int* next) {
  int mine = blockIdx.x * blockDim.x + threadIdx.x, seen = atomicAdd(head, 0);
  while (true) {
    next[mine] = seen;
    __threadfence();
    int found = atomicCAS(head, seen, mine);
    if (found == seen) return;
    seen = found;
  }
}
