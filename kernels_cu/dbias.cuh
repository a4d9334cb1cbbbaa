// The elements of a bias gradient that one block owns: a tile of one matrix of it.
//
// Where one row of the bias serves all queries (SUM_QUERIES), they are a strip of keys, and the block walks over the
// query tiles; where one column serves all keys (SUM_KEYS), a strip of queries, and it walks over the key tiles.
// Otherwise the walk is one tile long. Constants: DBIAS, the gradient's element type; SUM_QUERIES, SUM_KEYS, at most
// one of them 1.

using DbiasBits = Element<DBIAS>::Bits;

static_assert(!(SUM_QUERIES && SUM_KEYS), "sums over both start from the sums over keys");

struct BiasGradient {
    DbiasBits* data;
    int64_t row_stride, column_stride;

    __device__ void store(int i, int j, Compute value) const {
        data[i * row_stride + j * column_stride] = Element<DBIAS>::round(value);
    }
};

struct BiasTile {
    int owner;                      // matrix of the gradient
    int first_query, first_key;     // 0 where the block walks over them

    // Tiles of queries where the block walks over them, otherwise of keys.
    struct Walk {
        int begin, end;
    };

    template <typename Params>
    __device__ explicit BiasTile(const Params& params) {
        const int query_tiles = SUM_QUERIES ? 1 : ceil_div(params.seqlen_q, BLOCK_M);
        const int key_tiles = SUM_KEYS ? 1 : ceil_div(params.seqlen_k, BLOCK_N);
        const int strip = blockIdx.x / key_tiles;
        first_key = blockIdx.x % key_tiles * BLOCK_N;
        first_query = strip % query_tiles * BLOCK_M;
        owner = strip / query_tiles;
    }

    // The tiles that hold a pair inside the band of a batch.
    __device__ Walk walk(const Sequence& sequence) const {
        if constexpr (SUM_QUERIES) {
            const QueryTiles tiles = query_tiles(first_key, sequence);
            return {tiles.begin, tiles.end};
        }
        const KeyTiles tiles = key_tiles(first_query, sequence);
        if constexpr (SUM_KEYS) return {tiles.begin, tiles.end};
        const int own = first_key / BLOCK_N;
        return {max(tiles.begin, own), min(tiles.end, own + 1)};
    }

    // The matrix that the tile is a part of.
    template <typename Params>
    __device__ BiasGradient gradient(const Params& params) const {
        return {params.dbias.matrix(params.owner, owner, params.reduced, 0), params.dbias.row_stride,
                params.dbias_column_stride};
    }

    // Sums over the rows of a tile, one for each of its columns, from those of each warp: `partial[warp][column]`.
    template <typename Params>
    __device__ void store_column_sums(const Params& params, const Compute (*partial)[BLOCK_N]) const {
        const BiasGradient target = gradient(params);
        for (int column = threadIdx.x; column < BLOCK_N; column += NUM_THREADS) {
            Compute sum = 0;
            for (int warp = 0; warp < NUM_WARPS; ++warp) sum += partial[warp][column];
            if (first_key + column < params.seqlen_k) target.store(0, first_key + column, sum);
        }
    }
};
