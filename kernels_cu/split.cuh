// Keys in parts: few queries against many keys leave most of a GPU idle, unless several blocks share a tile's keys.

// Which part a block of the grid computes, and what its number would be without parts.
struct BlockOfSplit {
    uint32_t index, split = 0;

    template <typename Params>
    __device__ __forceinline__ BlockOfSplit(const Params& params, uint32_t block) : index(block) {
#if SPLIT
        index = block / params.variant.num_splits, split = block % params.variant.num_splits;
#endif
    }
};

// Two neighbouring columns of a row, of which `num_columns` exist.
__device__ __forceinline__ void store_pair(float* row, int column, int num_columns, float2 pair) {
    if (column < num_columns) row[column] = pair.x;
    if (column + 1 < num_columns) row[column + 1] = pair.y;
}
