// Masks of register tiles: which of its columns a thread's row m sees under a band.

// The column of an edge for row 0 of a thread; beyond all rows and columns of the tile either way, it stays so.
__device__ __forceinline__ int within_tile(int64_t column) {
    return int(min(max(column, int64_t(-TILE_ROWS)), int64_t(TILE_COLUMNS)));
}

// Queries are the rows, keys the columns.
struct RowMask {
    int diagonal;      // last column that row 0 of this thread sees, if there are so many
    int first;         // first one, of a band with a left edge
    int num_keys;      // columns that exist
    int num_queries;   // rows from row 0 of this thread on, of a batch with its own length

    __device__ RowMask(int64_t query, int first_key, int num_keys, const Sequence& sequence)
        : diagonal(last_visible_key(query, MAX_SEQLEN, sequence.band_right) - first_key), num_keys(num_keys) {
        if (BAND_LEFT) first = within_tile(query + sequence.band_left - first_key);
        if (LENGTHS) num_queries = int(sequence.seqlen_q - query);
    }

    __device__ bool visible(int m, int column) const {
        return column - row_step(m) <= diagonal && (!BAND_LEFT || column - row_step(m) >= first) &&
               column < num_keys && (!LENGTHS || row_step(m) < num_queries);
    }
};

// Keys are the rows, queries the columns: query i sees key j iff j - band_right <= i <= j - band_left.
struct TransposedRowMask {
    int first;         // first column that sees row 0 of this thread
    int last;          // last one, of a band with a left edge
    int num_queries;   // columns that exist
    int num_keys;      // rows from row 0 of this thread on, of a batch with its own length

    __device__ TransposedRowMask(int64_t key, int first_query, int num_queries, const Sequence& sequence)
        : first(-TILE_ROWS), num_queries(num_queries) {
        if (BAND_RIGHT) first = within_tile(key - sequence.band_right - first_query);
        if (BAND_LEFT) last = within_tile(key - sequence.band_left - first_query);
        if (LENGTHS) num_keys = int(sequence.seqlen_k - key);
    }

    __device__ bool visible(int m, int column) const {
        return column - row_step(m) >= first && (!BAND_LEFT || column - row_step(m) <= last) &&
               column < num_queries && (!LENGTHS || row_step(m) < num_keys);
    }
};
