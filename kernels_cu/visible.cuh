// Which keys a query sees: key j is visible to query i iff j <= last_visible_key(i).

__device__ __forceinline__ int last_visible_key(int64_t query, int seqlen_k, int causal_shift) {
    if (!CAUSAL) return seqlen_k - 1;
    return int(min(query + causal_shift, int64_t(seqlen_k - 1)));
}
