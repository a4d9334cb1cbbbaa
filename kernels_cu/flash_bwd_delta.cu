// What the backward kernels need of each query: delta = rowsum(dO * O) - dlse, and for those on tensor cores lse
// in base 2.
//
// dS = P * (dP - delta), where dP = dO V^T: rowsum(dO * O) is sum_j P_j dP_j without the scores (Dao et
// al. 2022, section 3.1), and a gradient with respect to lse adds P * dlse. One warp per query.
// Constants: ELEMENT, LENGTHS, SINK. Grid: one dimension.

#include "common.cuh"
#include "ptx.cuh"
#include "element.cuh"

using Bits = Element<ELEMENT>::Bits;
using Compute = Element<ELEMENT>::Compute;

#ifndef LENGTHS
#define LENGTHS 0   // whether there are rows that belong to no query, and are not read: their lse is -inf
#endif

struct Params {
    Operand<const Bits> out, dout;
    const Compute* lse;    // (batch, seqlen_q), as are all that follow
    const Compute* dlse;   // null where there is none
    Compute* delta;
    Compute* lse_log2;     // lse log2(e); +inf for a query that saw no key, so that its weights become 0; or null
    BatchShape batch;
    int num_batches, seqlen_q, head_dim_v;
};

extern "C" __global__ void flash_bwd_delta(const __grid_constant__ Params params) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t query = int64_t(blockIdx.x) * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (query >= int64_t(params.num_batches) * params.seqlen_q) return;
    const int batch = int(query / params.seqlen_q), row = int(query % params.seqlen_q);

    const Compute lse = params.lse[query];
    if (LENGTHS && lse == -infinity()) {
        if (lane == 0) {
            params.delta[query] = 0;
            if (params.lse_log2) params.lse_log2[query] = infinity();
        }
        return;
    }

    const Bits* out = params.out.matrix(params.batch, batch) + row * params.out.row_stride;
    const Bits* dout = params.dout.matrix(params.batch, batch) + row * params.dout.row_stride;
    Compute delta = 0;
    for (int d = lane; d < params.head_dim_v; d += WARP_SIZE)
        delta = fma(Element<ELEMENT>::load(out[d]), Element<ELEMENT>::load(dout[d]), delta);
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(FULL_WARP, delta, lanes);
#ifdef SINK
    // The gradient of the sink takes delta of every query, even of one that saw no key, whose dout may be anything.
    bool nonzero = false;
    for (int d = lane; d < params.head_dim_v; d += WARP_SIZE) nonzero |= Element<ELEMENT>::load(out[d]) != 0;
    if (!__any_sync(FULL_WARP, nonzero)) delta = 0;
#endif

    if (lane == 0) {
        const Compute lse = params.lse[query];
        params.delta[query] = params.dlse ? delta - params.dlse[query] : delta;
        if (params.lse_log2) params.lse_log2[query] = lse == -infinity() ? infinity() : lse * LOG2_E;
    }
}
