// Fragments of mma.m16n8k16, as lane l holds them (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   accumulator 16x8:  [0], [1] row l / 4, columns 2 (l % 4) + {0, 1};   [2], [3] the same, 8 rows down
//   A 16x16: the accumulators of two neighbouring 16x8 tiles, packed in pairs
//   B 16x8, taken from shared memory by ldmatrix, two n tiles at a time

constexpr int MMA_M = 16;
constexpr int MMA_N = 8;
constexpr int MMA_K = 16;

// Where this lane points ldmatrix for a 16x16 block at row 0, column 0 of a tile.
// A row-major block as the A operand, or a (key, dim) block transposed into the B operand.
template <typename Tile>
__device__ __forceinline__ uint32_t fragment_address(Tile tile, int row, int lane) {
    return tile.address(row + lane % 16, lane / 16);
}

// A (key, dim) block whose rows are the columns of the B operand: K in S = Q K^T.
template <typename Tile>
__device__ __forceinline__ uint32_t fragment_address_b(Tile tile, int row, int lane) {
    return tile.address(row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// acc += A B^T, for row-major tiles A (rows, DEPTH) and B (columns, DEPTH). `stage`: bytes to B's buffer,
// where there are several.
template <typename Element, int DEPTH, typename TileA, typename TileB, int M_TILES, int N_TILES>
__device__ __forceinline__ void mma_abt(float (&acc)[M_TILES][N_TILES][4], uint32_t a_address, uint32_t b_address,
                                        int stage = 0) {
#pragma unroll
    for (int k = 0; k < DEPTH / MMA_K; ++k) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            ldmatrix_x4(a[m], fragment_column(a_address, k) + m * MMA_M * TileA::ROW_BYTES);
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, fragment_column(b_address, k) + stage + n * MMA_N * TileB::ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
                mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// acc += A B, for A fragments of 16 columns in registers and the 16 rows of a row-major tile B that begin
// `offset` bytes behind b_address.
template <typename Element, int M_TILES, int N_TILES>
__device__ __forceinline__ void mma_ab(float (&acc)[M_TILES][N_TILES][4], const uint32_t (&a)[M_TILES][4],
                                       uint32_t b_address, int offset) {
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, fragment_column(b_address, n / 2) + offset);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
            mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// factor * acc, rounded to 16 bits, to rows of a shared tile.
template <typename Element, int M_TILES, int N_TILES, typename Tile>
__device__ void store_fragments(Tile tile, int first_row, const float (&acc)[M_TILES][N_TILES][4], float factor,
                                int lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
                st_shared(tile.address(first_row + m * MMA_M + half * 8 + lane / 4, n) + lane % 4 * 4,
                          cvt_rn_x2<Element>(mul_rn(acc[m][n][2 * half], factor),
                                             mul_rn(acc[m][n][2 * half + 1], factor)));
}
