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
