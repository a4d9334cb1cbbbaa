// Masks of score fragments: the visible part of a tile.

// The band of a tile, for the two rows that this lane has in each of its 16-row tiles.
template <int M_TILES>
struct TileMask {
    int last[M_TILES][2];    // visible column of the tile; negative where there is none
    int first[M_TILES][2];   // of a band with a left edge

    __device__ TileMask(int64_t first_query, int first_key, const Sequence& sequence, int lane) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int64_t query = sequence.query(first_query + m * MMA_M + half * 8 + lane / 4);
                last[m][half] = last_visible_key(query, sequence.seqlen_k, sequence.band_right) - first_key;
                if (LENGTHS && query >= sequence.seqlen_q) last[m][half] = -1;
                first[m][half] = first_visible_key(query, sequence.seqlen_k, sequence.band_left) - first_key;
            }
    }

    __device__ bool visible(int m, int half, int column) const {
        return column <= last[m][half] && (!BAND_LEFT || column >= first[m][half]);
    }

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

// Which columns of a tile are left after every mask, as bits, for the two rows of this lane in each 16-row tile.
template <int M_TILES, int N_TILES>
struct SeenColumns {
    static constexpr int WORDS = ceil_div(N_TILES * MMA_N, 32);
    uint32_t bits[M_TILES][2][WORDS];

    // seen(m, n, i): whether element i of fragment (m, n) is left. The four lanes of a row put theirs together.
    template <typename Seen>
    __device__ SeenColumns(int lane, Seen seen) : bits{} {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int word = 0; word < WORDS; ++word) {
                    uint32_t own = 0;
#pragma unroll
                    for (int n = word * 4; n < min(word * 4 + 4, N_TILES); ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            if (seen(m, n, 2 * half + i)) own |= 1u << (n % 4 * MMA_N + lane % 4 * 2 + i);
                    own |= __shfl_xor_sync(FULL_WARP, own, 1);
                    own |= __shfl_xor_sync(FULL_WARP, own, 2);
                    bits[m][half][word] = own;
                }
    }

    __device__ bool visible(int m, int half, int column) const { return bits[m][half][column / 32] >> column % 32 & 1; }
};

// The same with keys as rows and queries as columns: query i sees key j iff j - band_right <= i <= j - band_left.
template <int M_TILES>
struct TransposedTileMask {
    int sees_first, sees_last;   // columns of the tile for this lane's first key: a row further down, one further
    int num_queries, num_keys;   // from the tile's first query, and from this lane's first key

    // Far from an int's ends, for rows to be added.
    static __device__ int clamped(int64_t x) {
        return int(min(max(x, int64_t(-MAX_SEQLEN / 2)), int64_t(MAX_SEQLEN / 2)));
    }

    __device__ TransposedTileMask(int64_t first_key, int first_query, const Sequence& sequence, int lane) {
        const int64_t key = first_key + lane / 4;
        sees_first = clamped(key - first_query - sequence.band_right);
        sees_last = clamped(key - first_query - sequence.band_left);
        num_queries = sequence.seqlen_q - first_query;
        num_keys = int(sequence.seqlen_k - key);
    }

    // The rows behind the last query are zeros, which a key that is not finite would spoil itself with.
    __device__ bool visible(int m, int half, int column) const {
        const int row = m * MMA_M + half * 8;
        return (!BANDED || column < num_queries) && (!LENGTHS || row < num_keys) &&
               (!BAND_RIGHT || column - row >= sees_first) && (!BAND_LEFT || column - row <= sees_last);
    }
};
