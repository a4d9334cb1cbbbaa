// Which key tiles a query tile visits: [begin, end). Those in [interior_begin, interior_end) hold no masked pair.
// A block mask leaves out some of them: after begin comes next(begin).

#if BLOCK_MASK
static_assert(BLOCK_MASK % BLOCK_M == 0 && BLOCK_MASK % BLOCK_N == 0, "a tile lies in one block of the mask");
#endif

struct KeyTiles {
    static constexpr bool BOUNDARY_FIRST = false;   // without a left edge, the last tiles are cut: by the last key, too

    int begin = 0;
    int interior_begin = 0;
    int interior_end;
    int end;
#if BLOCK_MASK
    const uint32_t* block_row;   // bits of the query tile's block

    __device__ bool kept(int tile) const {
        const int block = tile * BLOCK_N / BLOCK_MASK;
        return block_row[block / 32] >> block % 32 & 1;
    }
#endif

    // Leaves out what the block mask does.
    template <typename Params, typename Rows>
    __device__ __forceinline__ void take_block_mask(const Params& params, Rows rows, int first_query) {
#if BLOCK_MASK
        const auto& mask = params.variant.block_mask;
        block_row = rows(mask) + first_query / BLOCK_MASK * mask.row_stride;
        begin = next(begin - 1);
#endif
    }

    __device__ __forceinline__ int next(int tile) const {
        ++tile;
#if BLOCK_MASK
        while (tile < end && !kept(tile)) ++tile;
#endif
        return tile;
    }

    // Whether a tile may hold masked pairs.
    __device__ __forceinline__ bool cut(int tile) const {
        return REMOVES_ANYWHERE || tile >= interior_end || (BAND_LEFT && tile < interior_begin);
    }
};

__device__ __forceinline__ KeyTiles key_tiles(int first_row, const Sequence& sequence) {
    const int last_row = first_row + min(BLOCK_M, sequence.seqlen_q - first_row) - 1;
    // Heads are stacked where a tile holds several: their first query and their last.
    const int first_query = STACKED ? 0 : first_row;
    const int last_query = STACKED ? sequence.seqlen_q - 1 : last_row;
    const int seen_by_all = max(last_visible_key(first_query, sequence.seqlen_k, sequence.band_right) + 1, 0);
    const int seen_by_any = max(last_visible_key(last_query, sequence.seqlen_k, sequence.band_right) + 1, 0);
    KeyTiles tiles;
    tiles.interior_end = seen_by_all / BLOCK_N;
    tiles.end = ceil_div(seen_by_any, BLOCK_N);
    if constexpr (BAND_LEFT) {
        const int seen_first = first_visible_key(first_query, sequence.seqlen_k, sequence.band_left);
        tiles.begin = seen_first < sequence.seqlen_k ? seen_first / BLOCK_N : tiles.end;
        const int seen_by_last = first_visible_key(last_query, sequence.seqlen_k, sequence.band_left);
        tiles.interior_begin = min(ceil_div(seen_by_last, BLOCK_N), tiles.end);
    }
    if constexpr (SPLIT) tiles.begin = max(tiles.begin, sequence.split_begin / BLOCK_N);
    if constexpr (LENGTHS)
        if (last_query < first_query) tiles.interior_end = tiles.end = 0;   // no query of this tile exists
    return tiles;
}

// Which query tiles a key tile visits, in the same terms.
struct QueryTiles {
    static constexpr bool BOUNDARY_FIRST = true;    // without a left edge, the first tiles are cut, if any

    int begin;
    int interior_begin;
    int interior_end;
    int end;
#if BLOCK_MASK
    const uint32_t* block_column;   // the words that have the bit of the key tile's block
    int64_t block_stride;
    int block_bit;

    __device__ bool kept(int tile) const {
        return block_column[tile * BLOCK_M / BLOCK_MASK * block_stride] >> block_bit & 1;
    }
#endif

    template <typename Params, typename Rows>
    __device__ __forceinline__ void take_block_mask(const Params& params, Rows rows, int first_key) {
#if BLOCK_MASK
        const auto& mask = params.variant.block_mask;
        const int block = first_key / BLOCK_MASK;
        block_column = rows(mask) + block / 32, block_stride = mask.row_stride, block_bit = block % 32;
        begin = next(begin - 1);
#endif
    }

    __device__ __forceinline__ int next(int tile) const {
        ++tile;
#if BLOCK_MASK
        while (tile < end && !kept(tile)) ++tile;
#endif
        return tile;
    }

    __device__ __forceinline__ bool cut(int tile) const {
        return REMOVES_ANYWHERE || tile < interior_begin || (BAND_LEFT && tile >= interior_end);
    }
};

__device__ __forceinline__ QueryTiles query_tiles(int first_key, const Sequence& sequence) {
    const int num_tiles = ceil_div(sequence.seqlen_q, BLOCK_M);
    const int last_key = first_key + min(BLOCK_N, sequence.seqlen_k - first_key) - 1;
    QueryTiles tiles = {0, 0, num_tiles, num_tiles};
    if constexpr (BAND_RIGHT) {   // query i sees key j iff i >= j - band_right
        const int64_t sees_first = max(int64_t(first_key) - sequence.band_right, int64_t(0));
        const int64_t sees_all = max(int64_t(last_key) - sequence.band_right, int64_t(0));
        tiles.begin = sees_first < sequence.seqlen_q ? int(sees_first / BLOCK_M) : num_tiles;
        tiles.interior_begin = int(min((sees_all + BLOCK_M - 1) / BLOCK_M, int64_t(num_tiles)));
    }
    if constexpr (BAND_LEFT) {   // and iff i <= j - band_left
        const int64_t last_sees_any = int64_t(last_key) - sequence.band_left;
        const int64_t last_sees_all = int64_t(first_key) - sequence.band_left;
        tiles.end = int(min(max(last_sees_any + BLOCK_M, int64_t(0)) / BLOCK_M, int64_t(num_tiles)));
        tiles.interior_end = int(min(max(last_sees_all + 1, int64_t(0)) / BLOCK_M, int64_t(num_tiles)));
        if (BAND_RIGHT && int64_t(first_key) - sequence.band_right >= sequence.seqlen_q) tiles.begin = tiles.end;
        tiles.interior_begin = min(tiles.interior_begin, tiles.end);
    }
    if constexpr (LENGTHS) {
        if (last_key < first_key) tiles = {0, 0, 0, 0};   // no key of this tile exists
        if (last_key - first_key < BLOCK_N - 1) tiles.interior_begin = tiles.end;   // some do not, and get nothing
    }
    return tiles;
}

// Calls visit(tile, Constant<whether it may hold masked pairs>) for all tiles in turn.
template <typename Tiles, typename Visit>
__device__ __forceinline__ void for_each_tile(const Tiles& tiles, Visit visit) {
    if constexpr (REMOVES_ANYWHERE) {
        for (int tile = tiles.begin; tile < tiles.end; tile = tiles.next(tile)) visit(tile, Constant<true>());
    } else if constexpr (BAND_LEFT) {
        // Tiles that an edge cuts lie on both sides of the interior ones: one loop body serves both.
        int tile = tiles.begin, interior = tiles.interior_begin;
        while (true) {
            for (; tile < interior; ++tile) visit(tile, Constant<true>());
            if (tile >= tiles.end) break;
            for (; tile < tiles.interior_end; ++tile) visit(tile, Constant<false>());
            interior = tiles.end;
        }
    } else {
        int tile = tiles.begin;
        if constexpr (Tiles::BOUNDARY_FIRST)
            for (; tile < tiles.interior_begin; ++tile) visit(tile, Constant<true>());
        for (; tile < tiles.interior_end; ++tile) visit(tile, Constant<false>());
        if constexpr (!Tiles::BOUNDARY_FIRST)
            for (; tile < tiles.end; ++tile) visit(tile, Constant<true>());
    }
}
