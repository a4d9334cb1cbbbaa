// Dropout of weights: which pairs are kept depends on their position and the seed alone.

struct Dropout {
#if DROPOUT
    Philox philox;
    uint32_t drop_below;
    uint32_t head, batch;
    Compute keep_scale;   // 1 / (1 - p): what is kept stands for all

    // `rows` gives an operand's matrix for this batch.
    template <typename Params, typename Rows>
    __device__ Dropout(const Params& params, Rows rows)
        : philox(params.variant.philox),
          drop_below(params.variant.drop_below),
          keep_scale(params.variant.keep_scale) {
        const BatchAndHead matrix(params, rows);
        head = matrix.head;
        batch = matrix.batch;
    }

    __device__ uint4 words(int i, int j) const { return philox({uint32_t(j) >> 2, uint32_t(i), head, batch}); }

    __device__ bool keeps(int i, int j) const {
        const uint4 four = words(i, j);
        const uint32_t word = j & 2 ? (j & 1 ? four.w : four.z) : (j & 1 ? four.y : four.x);
        return word >= drop_below;
    }

    // Bits that are left of a pair at columns j and j + 1, j even: both are words of one counter.
    __device__ uint32_t kept_pair(int i, int j) const {
        const uint4 four = words(i, j);
        const uint2 pair = j & 2 ? uint2{four.z, four.w} : uint2{four.x, four.y};
        return (pair.x >= drop_below ? 0x0000ffff : 0) | (pair.y >= drop_below ? 0xffff0000 : 0);
    }
#else
    template <typename Params, typename Rows>
    __device__ Dropout(const Params&, Rows) {}
#endif
};
