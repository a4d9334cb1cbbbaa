// out = in^T, n x n matrices, n a multiple of 32; a block of 32 x 32 threads
// moves a tile.
#ifndef PADDING
#define PADDING 0   // unused columns of the tile
#endif

extern "C" __global__
void transpose(const float* in, float* out, int n) {
    __shared__ float tile[32][32 + PADDING];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * 32, column = blockIdx.x * 32;

    tile[y][x] = in[(row + y) * n + column + x];
    __syncthreads();
    out[(column + y) * n + row + x] = tile[x][y];
}
