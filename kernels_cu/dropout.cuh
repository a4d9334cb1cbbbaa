// Dropout of weights: which pairs are kept depends on their position and the seed alone.

struct Dropout {
#if DROPOUT
    Philox philox;
    uint32_t drop_below;
    Place first;
    Compute keep_scale;   // 1 / (1 - p): what is kept stands for all

    // `rows` gives an operand's matrix for this batch.
    template <typename Params, typename Rows>
    __device__ Dropout(const Params& params, Rows rows)
        : philox(params.variant.philox),
          drop_below(params.variant.drop_below),
          first(params, rows),
          keep_scale(params.variant.keep_scale) {}

    __device__ bool keeps(int i, int j) const {
        j += first.key;
        const uint4 four = words(i, j);
        const uint32_t word = j & 2 ? (j & 1 ? four.w : four.z) : (j & 1 ? four.y : four.x);
        return word >= drop_below;
    }

    // Bits that are left of a packed pair at keys j and j + 1, j even: unless keys are counted from an odd one, both
    // are words of one counter.
    __device__ uint32_t kept_keys(int i, int j) const {
        if (ORIGIN) return kept_bits(keeps(i, j), keeps(i, j + 1));
        const uint4 four = words(i, j);
        const uint2 pair = j & 2 ? uint2{four.z, four.w} : uint2{four.x, four.y};
        return kept_bits(pair.x >= drop_below, pair.y >= drop_below);
    }

    // The same at queries i and i + 1.
    __device__ uint32_t kept_queries(int i, int j) const { return kept_bits(keeps(i, j), keeps(i + 1, j)); }

    // Makes gradients of dropped and scaled weights those of the weights.
    __device__ void scale(float* pair, uint32_t kept) const {
        pair[0] *= kept & 0x0000ffff ? keep_scale : Compute(0);
        pair[1] *= kept & 0xffff0000 ? keep_scale : Compute(0);
    }

private:
    // Of the four keys that have counted key j among them.
    __device__ uint4 words(int i, int j) const {
        return philox({uint32_t(j) >> 2, uint32_t(first.query + i), uint32_t(first.head), uint32_t(first.batch)});
    }

    static __device__ uint32_t kept_bits(bool low, bool high) {
        return (low ? 0x0000ffff : 0) | (high ? 0xffff0000 : 0);
    }
#else
    template <typename Params, typename Rows>
    __device__ Dropout(const Params&, Rows) {}
#endif
};
