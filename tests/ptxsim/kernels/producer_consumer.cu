// y = A x, a block of 64 rows to a thread block: one warp streams tiles of A into a ring in shared memory, two warps
// multiply. What tells them that a stage is filled, or free again, is a Channel: named barriers, mbarriers by tokens
// (CUDA C++ Programming Guide, asynchronous barriers), mbarriers by parity as Hopper's kernels have them, and these
// with copies that arrive by themselves.

#include <cuda_awbarrier_primitives.h>

constexpr int STAGES = 3, ROWS = 64, COLUMNS = 16, PRODUCERS = 32, CONSUMERS = ROWS, THREADS = PRODUCERS + CONSUMERS;

__device__ unsigned shared_address(const void* pointer) { return __cvta_generic_to_shared(pointer); }

struct NamedBarriers {
  static __device__ int ready(int stage) { return 1 + stage; }
  static __device__ int filled(int stage) { return 1 + STAGES + stage; }
  static __device__ void sync(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory"); }
  static __device__ void arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
  }

  __device__ void init() {}
  __device__ void consumer_start() {
    for (int stage = 0; stage < STAGES; stage++) arrive(ready(stage));
  }
  __device__ void producer_acquire(int stage, int) { sync(ready(stage)); }
  __device__ void copy(float4* to, const float4* from) { *to = *from; }
  __device__ void producer_commit(int stage) { arrive(filled(stage)); }
  __device__ void consumer_wait(int stage, int) { sync(filled(stage)); }
  __device__ void consumer_release(int stage) { arrive(ready(stage)); }
};

struct TokenMbarriers {
  __mbarrier_t ready[STAGES], filled[STAGES];
  static __device__ void arrive_and_wait(__mbarrier_t* barrier) {
    __mbarrier_token_t token = __mbarrier_arrive(barrier);
    while (!__mbarrier_test_wait(barrier, token)) {
    }
  }

  __device__ void init() {
    for (int stage = 0; stage < STAGES; stage++) {
      __mbarrier_init(&ready[stage], THREADS);
      __mbarrier_init(&filled[stage], THREADS);
    }
  }
  __device__ void consumer_start() {
    for (int stage = 0; stage < STAGES; stage++) (void)__mbarrier_arrive(&ready[stage]);
  }
  __device__ void producer_acquire(int stage, int) { arrive_and_wait(&ready[stage]); }
  __device__ void copy(float4* to, const float4* from) { *to = *from; }
  __device__ void producer_commit(int stage) { (void)__mbarrier_arrive(&filled[stage]); }
  __device__ void consumer_wait(int stage, int) { arrive_and_wait(&filled[stage]); }
  __device__ void consumer_release(int stage) { (void)__mbarrier_arrive(&ready[stage]); }
};

struct Parity {
  unsigned long long ready[STAGES], filled[STAGES];

  static __device__ void init(unsigned long long* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
  }
  static __device__ void arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
  }
  static __device__ void wait(unsigned long long* barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
        "@!done bra WAIT;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity), "n"(0x989680)
        : "memory");
  }

  __device__ void init_with(int producers) {
    for (int stage = 0; stage < STAGES; stage++) {
      init(&ready[stage], CONSUMERS / 32);
      init(&filled[stage], producers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ void consumer_start() {}
  __device__ void producer_acquire(int stage, int round) { wait(&ready[stage], round + 1 & 1); }  // at first it is free
  __device__ void consumer_wait(int stage, int round) { wait(&filled[stage], round & 1); }
  __device__ void consumer_release(int stage) {
    __syncwarp();  // of a warp one thread arrives for all
    if (threadIdx.x % 32 == 0) arrive(&ready[stage]);
  }
};

struct ParityMbarriers : Parity {
  __device__ void init() { init_with(1); }
  __device__ void copy(float4* to, const float4* from) { *to = *from; }
  __device__ void producer_commit(int stage) {
    __syncwarp();  // one producer arrives for all
    if (threadIdx.x % 32 == 0) arrive(&filled[stage]);
  }
};

struct AsynchronousCopies : Parity {
  __device__ void init() { init_with(PRODUCERS); }
  __device__ void copy(float4* to, const float4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)));
  }
  static __device__ void arrive_with_copies(unsigned long long* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
  }
  __device__ void producer_commit(int stage) { arrive_with_copies(&filled[stage]); }
};

template <class Channel>
__device__ void matrix_vector(const float* matrix, const float* x, float* y, int columns) {
  __shared__ float4 tile[STAGES][ROWS][COLUMNS / 4 + 1];  // the last one of a row is padding
  __shared__ Channel channel;
  if (threadIdx.x == 0) channel.init();
  __syncthreads();  // of the channel
  int tiles = columns / COLUMNS, row = threadIdx.x - PRODUCERS;
  matrix += (long long)blockIdx.x * ROWS * columns;
  if (threadIdx.x < PRODUCERS) {
    for (int i = 0; i < tiles; i++) {
      int stage = i % STAGES;
      channel.producer_acquire(stage, i / STAGES);
      for (int j = threadIdx.x; j < ROWS * COLUMNS / 4; j += PRODUCERS) {
        int r = j / (COLUMNS / 4), c = j % (COLUMNS / 4);
        channel.copy(&tile[stage][r][c], (const float4*)(matrix + (long long)r * columns + i * COLUMNS) + c);
      }
      channel.producer_commit(stage);
    }
  } else {
    float sum = 0;
    channel.consumer_start();
    for (int i = 0; i < tiles; i++) {
      int stage = i % STAGES;
      channel.consumer_wait(stage, i / STAGES);
      for (int c = 0; c < COLUMNS / 4; c++) {
        float4 a = tile[stage][row][c];
        const float* b = x + i * COLUMNS + 4 * c;
        sum += a.x * b[0] + a.y * b[1] + a.z * b[2] + a.w * b[3];
      }
      channel.consumer_release(stage);
    }
    y[blockIdx.x * ROWS + row] = sum;
  }
}

extern "C" __global__ void named_barriers(const float* matrix, const float* x, float* y, int columns) {
  matrix_vector<NamedBarriers>(matrix, x, y, columns);
}

extern "C" __global__ void tokens(const float* matrix, const float* x, float* y, int columns) {
  matrix_vector<TokenMbarriers>(matrix, x, y, columns);
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void parity(const float* matrix, const float* x, float* y, int columns) {
  matrix_vector<ParityMbarriers>(matrix, x, y, columns);
}

extern "C" __global__ void asynchronous_copies(const float* matrix, const float* x, float* y, int columns) {
  matrix_vector<AsynchronousCopies>(matrix, x, y, columns);
}
#endif
