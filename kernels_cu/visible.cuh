// Which keys a query sees under a band: key j iff first_visible_key(i) <= j <= last_visible_key(i).

__device__ __forceinline__ int last_visible_key(int64_t query, int seqlen_k, int band_right) {
    if (!BAND_RIGHT) return seqlen_k - 1;
    return int(min(query + band_right, int64_t(seqlen_k - 1)));
}

__device__ __forceinline__ int first_visible_key(int64_t query, int seqlen_k, int band_left) {
    if (!BAND_LEFT) return 0;
    return int(min(max(query + band_left, int64_t(0)), int64_t(seqlen_k)));
}
