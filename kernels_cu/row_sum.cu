// Sums of one value per query: over the queries of a batch that count, and over the batches that share a result.
//
// So end the gradients of operands with one number for each batch: ALiBi slopes, a bias that is one number, and sinks.
// A sink is a score whose weight exp(sink - lse) has no value, so that dP is 0 and its gradient
// -exp(sink - lse) * delta. One block per result; each thread takes every NUM_THREADS-th query, and a tree adds what
// they have: the same order each time. Constants: ELEMENT (float or double) of the values, RESULT, the element type of
// the results, NUM_THREADS, LENGTHS and SINK of variant.cuh.

#include "common.cuh"
#include "ptx.cuh"
#include "element.cuh"

using Bits = Element<RESULT>::Bits;

constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;

struct Params {
    SummedOperand<const ELEMENT> values;   // one per query: row_stride is 1; delta, with a sink
    SummedOperand<Bits> result;
#if LENGTHS
    SummedOperand<const int> seqlens_q;    // as in VariantParams
#endif
#ifdef SINK
    SummedOperand<const ELEMENT> lse;
    SummedOperand<const Element<SINK>::Bits> attn_sink;
#endif
    BatchShape owner, reduced;
    int num_reduced, seqlen_q;
};

__device__ ELEMENT warp_sum(ELEMENT x) {
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(FULL_WARP, x, lanes);
    return x;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) row_sum(const __grid_constant__ Params params) {
    __shared__ ELEMENT warp_sums[NUM_WARPS];
    const int thread = threadIdx.x, owner = blockIdx.x;

    ELEMENT sum = 0;
    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, reduced); };
        int64_t first_query = 0;
        int num_queries = params.seqlen_q;
#if LENGTHS == PADDED
        if (params.seqlens_q.data) num_queries = *rows(params.seqlens_q);
#elif LENGTHS == PACKED
        const int* offsets = rows(params.seqlens_q);
        first_query = offsets[0], num_queries = offsets[1] - offsets[0];
#endif
        const ELEMENT* values = rows(params.values) + first_query;
#ifdef SINK
        const ELEMENT* lse = rows(params.lse) + first_query;
        const ELEMENT sink = converted<ELEMENT>(Element<SINK>::load(*rows(params.attn_sink)));
        if (sink == -infinity()) continue;   // there is none
#endif
        for (int64_t query = thread; query < num_queries; query += NUM_THREADS) {
#ifdef SINK
            // No weight is more than 1, as in weight.cuh.
            const ELEMENT exponent = sink - lse[query];
            sum -= exp(exponent > ELEMENT(0) ? ELEMENT(0) : exponent) * values[query];
#else
            sum += values[query];
#endif
        }
    }

    sum = warp_sum(sum);
    if (thread % WARP_SIZE == 0) warp_sums[thread / WARP_SIZE] = sum;
    __syncthreads();   // the sums of all warps are there
    if (thread < WARP_SIZE) {
        sum = warp_sum(thread < NUM_WARPS ? warp_sums[thread] : ELEMENT(0));
        if (thread == 0)
            *params.result.matrix(params.owner, owner, params.reduced, 0) = Element<RESULT>::round(sum);
    }
}
