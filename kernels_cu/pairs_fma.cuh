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
    static constexpr int NUM_WORDS = ceil_div(THREAD_ROWS * THREAD_COLUMNS, 32);
    static_assert(32 % THREAD_ROWS == 0, "a column's bits share a word");
    uint32_t words[NUM_WORDS] = {};

    __device__ void add(int m, int n, bool bit) { words[index(0, n) / 32] |= uint32_t(bit) << index(m, n) % 32; }

    __device__ bool operator()(int m, int n) const { return words[index(0, n) / 32] >> index(m, n) % 32 & 1; }

    // Bit m: that of row m at this column of the tile, which another lane may hold.
    __device__ uint32_t column(int tile_column, int lane) const {
        const int holder = lane / ROW_LANES * ROW_LANES + tile_column % ROW_LANES;
        const int first = index(0, tile_column / ROW_LANES);
        uint32_t word = words[0];
#pragma unroll
        for (int w = 1; w < NUM_WORDS; ++w)
            if (first / 32 == w) word = words[w];
        return __shfl_sync(FULL_WARP, word, holder) >> first % 32;
    }

private:
    static __device__ constexpr int index(int m, int n) { return n * THREAD_ROWS + m; }
};
