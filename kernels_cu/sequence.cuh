// The queries and keys of one matrix of the batch, where not all rows count, and which keys a query sees:
// query i sees key j iff i + band_left <= j <= i + band_right, as far as the band has these edges.

// How many heads' queries are the rows of one matrix.
template <typename Params>
__device__ __forceinline__ int stacked_heads(const Params& params) {
#if STACKED
    return params.variant.stacked_heads;
#else
    return 1;
#endif
}

struct Sequence {
    int seqlen_q, seqlen_k;                   // of each head
    int64_t first_query = 0, first_key = 0;   // rows before this sequence's in packed operands
    int shift = 0;                            // the diagonal: query i at key i + shift
    int band_left, band_right;
    int rows_per_head, num_rows;              // of the query matrix: of stacked heads, those that do not count, too
    int split = 0, split_begin = 0;           // which part of the keys, and its first key
    int num_keys;                             // of all parts

    // `rows` gives an operand's matrix for this batch.
    template <typename Params, typename Rows>
    __device__ __forceinline__ Sequence(const Params& params, Rows rows)
        : seqlen_q(params.seqlen_q),
          seqlen_k(params.seqlen_k),
          band_left(params.band_left),
          band_right(params.band_right) {
#if LENGTHS == PADDED
        if (params.variant.seqlens_q.data) seqlen_q = *rows(params.variant.seqlens_q);
        if (params.variant.seqlens_k.data) seqlen_k = *rows(params.variant.seqlens_k);
#elif LENGTHS == PACKED
        const int* offset_q = rows(params.variant.seqlens_q);
        const int* offset_k = rows(params.variant.seqlens_k);
        first_query = offset_q[0], first_key = offset_k[0];
        seqlen_q = offset_q[1] - offset_q[0], seqlen_k = offset_k[1] - offset_k[0];
#endif
#if LENGTHS
        if (params.variant.bottom_right) shift = seqlen_k - seqlen_q;
        band_left = clamped(int64_t(band_left) + shift);
        band_right = clamped(int64_t(band_right) + shift);
#endif
#ifdef ALIBI
        shift += params.variant.shift;
#endif
        rows_per_head = params.seqlen_q;
        num_rows = STACKED ? stacked_heads(params) * rows_per_head : seqlen_q;
        num_keys = seqlen_k;
    }

    // A row's query, and its head among the stacked ones; a row behind the last belongs to the last head.
    __device__ __forceinline__ int64_t query(int64_t row) const {
        return STACKED ? uint32_t(row) % uint32_t(rows_per_head) : row;
    }
    __device__ __forceinline__ int head(int64_t row) const {
        return STACKED ? int(min(row, int64_t(num_rows - 1))) / rows_per_head : 0;
    }

    // Whether the row's query is one of this sequence's.
    __device__ __forceinline__ bool counts(int64_t row) const { return query(row) < seqlen_q; }

    // Leaves the keys of one part.
    template <typename Params>
    __device__ __forceinline__ void take_split(const Params& params, int index) {
#if SPLIT
        split = index;
        split_begin = index * params.variant.split_size;
        seqlen_k = int(min(int64_t(seqlen_k), int64_t(split_begin) + params.variant.split_size));
#endif
    }

    // Where row 0 of the batch lies in arrays of one value per query.
    template <typename Params>
    __device__ __forceinline__ int64_t first_row(const Params& params, int batch) const {
#if LENGTHS == PACKED
        int64_t row = batch % params.variant.num_heads * params.variant.total_queries + first_query;
#else
        int64_t row = int64_t(batch) * params.seqlen_q;
#endif
#if SPLIT
        row += split * params.variant.num_rows;
#endif
        return row;
    }

    // Beyond all rows either way, an edge stays so.
    static __device__ int clamped(int64_t edge) {
        return int(min(max(edge, int64_t(-MAX_SEQLEN)), int64_t(MAX_SEQLEN)));
    }
};
