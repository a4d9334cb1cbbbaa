// Kernels that call functions in every way, for several compilers: see __main__.py.
#define noinline __device__ __noinline__

struct Item {
  double value;
  int path[3];
  char tag;
};

// Structures by value and back, an array of each call, a pointer to that of the caller.
noinline Item descend(Item item, int depth, const int* above) {
  int own[4];
  for (int i = 0; i < 4; ++i) own[i] = above[i] + depth * i;
  item.path[depth % 3] += own[depth & 3];
  if (depth == 0) return item;
  Item below = descend(item, depth - 1, own);
  below.value += item.value * own[(below.path[1] + depth) & 3];
  below.tag += item.tag;
  return below;
}

extern "C" __global__ void recursion(const double* x, double* out, int* paths) {
  int t = threadIdx.x, first[4] = {t, 2, 3, 4};
  Item item = descend(Item{x[t], {1, 2, 3}, 1}, t % 4, first);
  out[t] = item.value;
  for (int i = 0; i < 3; ++i) paths[4 * t + i] = item.path[i];
  paths[4 * t + 3] = item.tag;
}

struct Shape {
  __device__ virtual float area(float size) const = 0;
};
struct Square : Shape {
  __device__ float area(float size) const override { return size * size; }
};
struct Scaled : Shape {
  const Shape* shape;
  float factor;
  __device__ Scaled(const Shape* shape, float factor) : shape(shape), factor(factor) {}
  __device__ float area(float size) const override { return factor * shape->area(size); }
};
__device__ float twice(float x) { return 2 * x; }
__device__ float next(float x) { return x + 1; }
__device__ float (*const functions[])(float) = {twice, next};

extern "C" __global__ void pointers(const float* x, float* out) {
  Square square;
  Scaled scaled(&square, 3), again(&scaled, 5);
  const Shape* shapes[] = {&square, &scaled, &again};
  int t = threadIdx.x;
  out[t] = functions[t & 1](shapes[t % 3]->area(x[t]));
}

// A warp and a block meet inside functions.
noinline float warp_max(float value) {
  for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
noinline float block_max(float value, float* rows) {
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) rows[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(rows[threadIdx.x % (blockDim.x / 32)]);
}

extern "C" __global__ void reduction(const float* x, float* out, unsigned* votes) {
  __shared__ float rows[4];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float highest = block_max(x[i], rows);
  out[i] = x[i] - highest;
  votes[i] = __ballot_sync(~0u, x[i] == highest);
}

extern "C" __device__ int printf(const char*, ...);
noinline int visit(int node, int limit) {
  printf("%d of %d\n", node, limit);
  return node >= limit ? node : visit(2 * node, limit) + visit(2 * node + 1, limit);
}

extern "C" __global__ void prints(int* out, int limit) { *out = visit(1, limit); }

extern "C" __global__ void endless(int* out) {
  while (atomicAdd(out, 0) == 0) {}
  *out = 2;
}
