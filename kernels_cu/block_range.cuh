// Which key tiles a query tile visits: [0, interior) hold no masked pair, [interior, end) hold some,
// and those from `end` on are masked as a whole.

struct KeyTiles {
    int interior;
    int end;
};

__device__ __forceinline__ KeyTiles key_tiles(int first_query, int seqlen_q, int seqlen_k, int causal_shift) {
    const int last_query = first_query + min(BLOCK_M, seqlen_q - first_query) - 1;
    const int seen_by_all = max(last_visible_key(first_query, seqlen_k, causal_shift) + 1, 0);
    const int seen_by_any = max(last_visible_key(last_query, seqlen_k, causal_shift) + 1, 0);
    return {seen_by_all / BLOCK_N, ceil_div(seen_by_any, BLOCK_N)};
}

// Which query tiles a key tile visits: [begin, interior) hold some masked pair, [interior, end) hold none.
struct QueryTiles {
    int begin;
    int interior;
    int end;
};

__device__ __forceinline__ QueryTiles query_tiles(int first_key, int seqlen_q, int seqlen_k, int causal_shift) {
    const int end = ceil_div(seqlen_q, BLOCK_M);
    if (!CAUSAL) return {0, 0, end};
    const int last_key = first_key + min(BLOCK_N, seqlen_k - first_key) - 1;
    const int64_t sees_first = max(int64_t(first_key) - causal_shift, int64_t(0));   // the first query that does
    const int64_t sees_all = max(int64_t(last_key) - causal_shift, int64_t(0));
    const int begin = int(min(sees_first / BLOCK_M, int64_t(end)));
    const int interior = int(min((sees_all + BLOCK_M - 1) / BLOCK_M, int64_t(end)));
    return {begin, interior, end};
}
