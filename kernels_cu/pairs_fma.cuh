// Pairs of register tiles that are looked at one by one.

// Calls visit(m, n, row, column) for the pairs of this thread, whose row 0 and column 0 are given.
template <typename Visit>
__device__ __forceinline__ void for_each_pair(int first_row, int first_column, Visit visit) {
#pragma unroll
    for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
        for (int n = 0; n < THREAD_COLUMNS; ++n) visit(m, n, first_row + row_step(m), first_column + n * ROW_LANES);
}

// A bool for each of them: whether it is left after every mask, or after dropout.
struct PairBits {
    static_assert(THREAD_ROWS * THREAD_COLUMNS <= 32, "one bit each");
    uint32_t bits = 0;

    __device__ void add(int m, int n, bool bit) { bits |= uint32_t(bit) << (n * THREAD_ROWS + m); }

    __device__ bool operator()(int m, int n) const { return bits >> (n * THREAD_ROWS + m) & 1; }

    // Bit m: that of row m at this column of the tile, which another lane may hold.
    __device__ uint32_t column(int tile_column, int lane) const {
        const int holder = lane / ROW_LANES * ROW_LANES + tile_column % ROW_LANES;
        return __shfl_sync(FULL_WARP, bits, holder) >> tile_column / ROW_LANES * THREAD_ROWS;
    }
};
