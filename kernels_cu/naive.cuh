// What the kernels of the standard method share: types, one thread per number, sums over a warp.

using Bits = Element<ELEMENT>::Bits;
using Compute = Element<ELEMENT>::Compute;

__device__ int64_t thread_index() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// Key j is visible to query i iff j <= i + causal_shift: visible keys are the first ones of a row.
__device__ int num_visible_keys(int query_idx, int seqlen_k, int causal_shift) {
    return int(max(int64_t(0), min(int64_t(seqlen_k), int64_t(query_idx) + causal_shift + 1)));
}

__device__ Compute warp_sum(Compute x) {
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(FULL_WARP, x, lanes);
    return x;
}
