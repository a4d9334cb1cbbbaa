// c = a b, n x n matrices, n a multiple of 16; a block of 16 x 16 threads
// computes a tile of c.
extern "C" __global__
void product(const float* a, const float* b, float* c, int n) {
    __shared__ float tile_a[16][16], tile_b[16][16];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;

    float sum = 0;
    for (int first = 0; first < n; first += 16) {
        tile_a[y][x] = a[row * n + first + x];
        tile_b[y][x] = b[(first + y) * n + column];
        __syncthreads();   // both tiles are complete
        for (int i = 0; i < 16; i++) {
            sum += tile_a[y][i] * tile_b[i][x];
        }
#ifdef SECOND_BARRIER
        __syncthreads();   // every thread is done with them
#endif
    }
    c[row * n + column] = sum;
}
