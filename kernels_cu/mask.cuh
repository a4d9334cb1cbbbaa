// Masks of score fragments: the visible part of a tile.

// The visible part of a tile, for the two rows that this lane has in each of its 16-row tiles.
template <int M_TILES>
struct TileMask {
    int limit[M_TILES][2];   // last visible column of the tile; negative where there is none

    __device__ TileMask(int64_t first_query, int first_key, int seqlen_k, int causal_shift, int lane) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                limit[m][half] =
                    last_visible_key(first_query + m * MMA_M + half * 8 + lane / 4, seqlen_k, causal_shift) - first_key;
    }

    __device__ bool visible(int m, int half, int column) const { return column <= limit[m][half]; }

    // Removes masked scores: selected, so that not even a NaN among them survives.
    template <int N_TILES>
    __device__ void apply(float (&scores)[M_TILES][N_TILES][4], int lane) const {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!visible(m, i / 2, n * MMA_N + lane % 4 * 2 + i % 2)) scores[m][n][i] = -infinity();
    }
};

// The same with keys as rows and queries as columns: query i sees key j iff i >= j - causal_shift.
template <int M_TILES>
struct TransposedTileMask {
    int limit[M_TILES][2];   // first column of the tile that sees this lane's key, BLOCK_M where no query does

    // The rows behind the last query are zeros, which a key that is not finite would spoil itself with.
    __device__ TransposedTileMask(int64_t first_key, int first_query, int seqlen_q, int causal_shift, int lane) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int64_t first = first_key + m * MMA_M + half * 8 + lane / 4 - int64_t(causal_shift) - first_query;
                limit[m][half] =
                    first < seqlen_q - first_query ? int(min(max(first, int64_t(0)), int64_t(BLOCK_M))) : BLOCK_M;
            }
    }

    __device__ bool visible(int m, int half, int column) const { return !CAUSAL || column >= limit[m][half]; }
};
