// Masks of register tiles: which of its columns a thread's row m sees.

// Queries are the rows, keys the columns.
struct RowMask {
    int diagonal;   // last column that row 0 of this thread sees, if there are so many
    int num_keys;   // columns that exist

    __device__ RowMask(int64_t query, int first_key, int num_keys, int band_right)
        : diagonal(last_visible_key(query, MAX_SEQLEN, band_right) - first_key), num_keys(num_keys) {}

    __device__ bool visible(int m, int column) const { return column - row_step(m) <= diagonal && column < num_keys; }
};

// Keys are the rows, queries the columns: query i sees key j iff i >= j - band_right.
struct TransposedRowMask {
    int first;         // first column that sees row 0 of this thread
    int num_queries;   // columns that exist

    __device__ TransposedRowMask(int64_t key, int first_query, int num_queries, int band_right)
        : first(-TILE_ROWS), num_queries(num_queries) {
        if (BAND_RIGHT) first = int(min(max(key - band_right - first_query, int64_t(-TILE_ROWS)), int64_t(TILE_COLUMNS)));
    }

    __device__ bool visible(int m, int column) const { return column - row_step(m) >= first && column < num_queries; }
};
