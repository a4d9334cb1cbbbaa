// Kernels of simulation and analysis: constant memory, special functions, gathers, halos, data that steer control flow.

#define PI 3.14159265358979323846

// Stockham: a Fourier transform of 128 in shared memory, each thread two points a pass.
extern "C" __global__ void fourier(const float2* x, float2* out) {
  __shared__ float2 box[2][128];
  int t = threadIdx.x, from = 0;
  box[0][t] = x[blockIdx.x * 128 + t];
  box[0][t + 64] = x[blockIdx.x * 128 + t + 64];
  for (int n = 1; n < 128; n *= 2, from ^= 1) {
    __syncthreads();  // of the pass before
    int k = t % n;
    float s, c;
    sincosf(float(-PI) * k / n, &s, &c);
    float2 a = box[from][t], b = box[from][t + 64];
    float2 turned = make_float2(b.x * c - b.y * s, b.x * s + b.y * c);
    int to = (t - k) * 2 + k;
    box[1 - from][to] = make_float2(a.x + turned.x, a.y + turned.y);
    box[1 - from][to + n] = make_float2(a.x - turned.x, a.y - turned.y);
  }
  __syncthreads();
  out[blockIdx.x * 128 + t] = box[from][t];
  out[blockIdx.x * 128 + t + 64] = box[from][t + 64];
}

// Bodies that attract each other, in tiles of a block.
extern "C" __global__ void attraction(const float4* bodies, float3* pull, int n) {
  __shared__ float4 tile[64];
  int i = blockIdx.x * 64 + threadIdx.x;
  float4 mine = i < n ? bodies[i] : make_float4(0, 0, 0, 0);
  float3 sum = make_float3(0, 0, 0);
  for (int start = 0; start < n; start += 64) {
    tile[threadIdx.x] = start + threadIdx.x < n ? bodies[start + threadIdx.x] : make_float4(0, 0, 0, 0);
    __syncthreads();
    #pragma unroll 4
    for (int j = 0; j < 64; ++j) {
      float x = tile[j].x - mine.x, y = tile[j].y - mine.y, z = tile[j].z - mine.z;
      float inverse = rsqrtf(x * x + y * y + z * z + 0.01f), w = tile[j].w * inverse * inverse * inverse;
      sum.x += w * x;
      sum.y += w * y;
      sum.z += w * z;
    }
    __syncthreads();
  }
  if (i < n) pull[i] = sum;
}

// A sparse matrix by rows: a group of 8 lanes for each, so that short rows do not idle a warp.
extern "C" __global__ void sparse_rows(const int* starts, const int* columns, const double* values, const double* x,
                                       double* y, int rows) {
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 8, lane = threadIdx.x % 8;
  double sum = 0.0;
  if (row < rows)
    for (int j = starts[row] + lane; j < starts[row + 1]; j += 8) sum += values[j] * x[columns[j]];
  for (int step = 4; step; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step, 8);
  if (row < rows && lane == 0) y[row] = sum;
}

// A filter whose weights are in constant memory, over a tile with its halo.
__constant__ float weights[5][5] = {{1, 4, 6, 4, 1}, {4, 16, 24, 16, 4}, {6, 24, 36, 24, 6}, {4, 16, 24, 16, 4},
                                    {1, 4, 6, 4, 1}};
extern "C" __global__ void blur(const unsigned char* image, unsigned char* out, int height, int width) {
  __shared__ unsigned char tile[8 + 4][32 + 4];
  int column = blockIdx.x * 32, row = blockIdx.y * 8;
  for (int i = threadIdx.y * 32 + threadIdx.x; i < 12 * 36; i += 256) {
    int y = min(max(row + i / 36 - 2, 0), height - 1), x = min(max(column + i % 36 - 2, 0), width - 1);
    tile[i / 36][i % 36] = image[y * width + x];
  }
  __syncthreads();  // of the tile
  row += threadIdx.y;
  column += threadIdx.x;
  if (row >= height || column >= width) return;
  float sum = 0.0f;
  for (int y = 0; y < 5; ++y)
    for (int x = 0; x < 5; ++x) sum += weights[y][x] * tile[threadIdx.y + y][threadIdx.x + x];
  out[row * width + column] = (unsigned char)__float2uint_rn(sum / 256.0f);
}

// Black and Scholes (1973): prices of calls.
extern "C" __global__ void options(const double* spot, const double* strike, const double* years, double* price,
                                   double rate, double volatility, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double root = volatility * sqrt(years[i]);
  double d = (log(spot[i] / strike[i]) + (rate + 0.5 * volatility * volatility) * years[i]) / root;
  price[i] = spot[i] * normcdf(d) - strike[i] * exp(-rate * years[i]) * normcdf(d - root);
}

// A hash table with open addressing: keys are taken by compare-and-swap, counts added.
extern "C" __global__ void count_keys(const unsigned long long* keys, unsigned long long* slots, unsigned* counts,
                                      int n, int size) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned long long key = keys[i], hash = key * 0x9E3779B97F4A7C15ull;
  for (int at = hash >> 58;; at = (at + 1) % size) {
    unsigned long long found = atomicCAS(slots + at, 0ull, key);
    if (found == 0 || found == key) {
      atomicAdd(counts + at, 1u);
      return;
    }
  }
}

// int8 by dp4a, four products an instruction; scaled to float.
extern "C" __global__ void quantised_product(const int* a, const int* b, const float* scale, float* out, int quads) {
  int row = blockIdx.x, column = threadIdx.x, sum = 0;
  for (int j = 0; j < quads; ++j) sum = __dp4a(a[row * quads + j], b[column * quads + j], sum);
  out[row * blockDim.x + column] = scale[row] * __int2float_rn(sum);
}

// Salmon et al. (2011), Philox 4x32-10.
extern "C" __global__ void philox(uint4* out, unsigned k0, unsigned k1) {
  uint4 c = make_uint4(blockIdx.x * blockDim.x + threadIdx.x, 0, 0, 0);
  #pragma unroll
  for (int round = 0; round < 10; ++round) {
    unsigned high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
    unsigned high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
    c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = c;
}

// The distance of Levenshtein, one antidiagonal after the other, three of them kept.
extern "C" __global__ void edit_distance(const char* a, const char* b, int* out, int na, int nb) {
  extern __shared__ int diagonals[];
  int length = na + 1;
  for (int d = 0; d <= na + nb; ++d) {
    int *now = diagonals + d % 3 * length, *last = diagonals + (d + 2) % 3 * length,
        *before = diagonals + (d + 1) % 3 * length;
    for (int i = threadIdx.x; i <= na; i += blockDim.x) {
      int j = d - i;
      if (j < 0 || j > nb) continue;
      now[i] = i == 0 ? j : j == 0 ? i
               : min(min(last[i - 1], last[i]) + 1, before[i - 1] + (a[i - 1] != b[j - 1]));
    }
    __syncthreads();  // of the antidiagonal
  }
  if (threadIdx.x == 0) *out = diagonals[(na + nb) % 3 * length + na];
}

// Linear equations by Gauss and Jordan with pivots: one block, a thread for each column and one for the right side.
extern "C" __global__ void solve(double* matrix, double* right, int n) {
  extern __shared__ double box[];  // n rows of n + 1
  __shared__ int pivot;
  int t = threadIdx.x, width = n + 1;
  for (int i = 0; i < n; ++i) box[i * width + t] = t < n ? matrix[i * n + t] : right[i];
  for (int k = 0; k < n; ++k) {
    __syncthreads();
    if (t == 0) {
      pivot = k;
      for (int i = k + 1; i < n; ++i)
        if (fabs(box[i * width + k]) > fabs(box[pivot * width + k])) pivot = i;
    }
    __syncthreads();
    double mine = box[pivot * width + t];
    box[pivot * width + t] = box[k * width + t];
    box[k * width + t] = mine;
    __syncthreads();
    double factor = mine / box[k * width + k];
    __syncthreads();  // the pivot has been read
    box[k * width + t] = factor;
    __syncthreads();
    for (int i = 0; i < n; ++i) {
      double lead = box[i * width + k];
      if (i != k && t > k) box[i * width + t] -= lead * factor;
    }
  }
  __syncthreads();
  if (t < n) right[t] = box[t * width + n];
}

// A frontier of a breadth-first search: who finds a vertex first puts it on the next list.
extern "C" __global__ void visit(const int* starts, const int* edges, const int* frontier, int count, int* level,
                                 int* next, int* next_count, int depth) {
  for (int f = blockIdx.x; f < count; f += gridDim.x) {
    int vertex = frontier[f];
    for (int e = starts[vertex] + threadIdx.x; e < starts[vertex + 1]; e += blockDim.x)
      if (atomicCAS(level + edges[e], -1, depth) == -1) next[atomicAdd(next_count, 1)] = edges[e];
  }
}
