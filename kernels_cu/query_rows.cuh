// Where the rows of a tile of queries lie. Queries of stacked heads (variant.cuh) are the rows of one matrix to the
// kernel, head by head; in memory each head has its own, and what a score depends on may differ between them.

template <typename Params, typename Rows>
struct QueryRows {
    const Params& params;
    const Sequence& sequence;
    Rows rows;        // gives an operand's matrix, of stacked heads for the first
    int first_row;    // of the tile

    __device__ QueryRows(const Params& params, const Sequence& sequence, Rows rows, int first_row)
        : params(params), sequence(sequence), rows(rows), first_row(first_row) {}

    // What gives an operand's matrix for the head of a row of the tile.
    __device__ __forceinline__ auto of_head(int row) const {
        if constexpr (STACKED)
            return [this, head = sequence.head(int64_t(first_row) + row)](const auto& operand) {
                return rows(operand) + head * operand.batch_stride[params.batch.ndim - 1];
            };
        else
            return rows;
    }

    // Where a row of the tile begins in an operand.
    template <typename Operand>
    __device__ __forceinline__ auto begin(const Operand& operand, int row) const {
        return of_head(row)(operand) + (sequence.first_query + sequence.query(first_row + row)) * operand.row_stride;
    }

    // Starts the copy of the tile of Q, of which `num_rows` rows exist; zeros stand for the others.
    template <int NUM_THREADS, typename Tile>
    __device__ __forceinline__ void load_async(Tile tile, int num_rows, int thread) const {
        if constexpr (STACKED)
            load_rows_async<NUM_THREADS>(tile, [&](int row) {
                return row < num_rows && sequence.counts(first_row + row) ? begin(params.query, row) : nullptr;
            }, params.head_dim, thread);
        else
            TileLoader<Tile::NUM_ROWS, Tile::NUM_COLS, NUM_THREADS>(
                tile, begin(params.query, 0), params.query.row_stride, params.head_dim, thread).load_async(num_rows);
    }

    // Stores ROWS rows of the tile of O, as far as they exist; the 32 lanes of one warp.
    template <int ROWS, typename Tile>
    __device__ __forceinline__ void store(Tile tile, int warp_row, int num_rows, int lane) const {
        if constexpr (STACKED)   // matrices of one row, at any place
            for (int row = warp_row; row < min(warp_row + ROWS, num_rows); ++row)
                store_rows<1>(tile, row, begin(params.out, row) - row * params.out.row_stride, params.out.row_stride,
                              row + 1, params.head_dim_v, lane);
        else
            store_rows<ROWS>(tile, warp_row, begin(params.out, 0), params.out.row_stride, num_rows, params.head_dim_v,
                             lane);
    }
};

// What becomes of the scores in a lane's rows: of stacked heads, in each by itself.
template <int M_TILES>
struct ScoreFunctions {
    static constexpr int NUMBER = STACKED ? 2 * M_TILES : 1;
    ScoreFunction of_row[NUMBER];

    template <typename Params, typename Rows>
    __device__ ScoreFunctions(const Params& params, const Sequence& sequence, const QueryRows<Params, Rows>& rows,
                              int warp_row, int lane) {
#pragma unroll
        for (int n = 0; n < NUMBER; ++n)
            of_row[n] = ScoreFunction(params, sequence, rows.of_head(warp_row + n * 8 + lane / 4));
    }

    __device__ __forceinline__ const ScoreFunction& operator()(int m, int half) const {
        return of_row[(2 * m + half) % NUMBER];
    }
};
