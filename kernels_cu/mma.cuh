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
