// Joins attention over parts of the keys: O = sum_s exp(lse_s - lse) O_s, with lse = ln sum_s exp(lse_s).
//
// One warp per query. A part with lse -inf saw no key and adds nothing. A sink joins the sum here, once. Constants:
// ELEMENT, that of the result; PARTIAL, that of the parts; LENGTHS, SINK and RETURN_MAX of variant.cuh. Grid: one
// dimension.

#include "common.cuh"
#include "ptx.cuh"
#include "element.cuh"

using Compute = Element<PARTIAL>::Compute;
#define BAND_RIGHT 0   // the band is the parts' affair; variant.cuh asks for the constant

#include "dual.cuh"
#include "philox.cuh"
#include "variant.cuh"
#include "sequence.cuh"

struct Params {
    const Element<PARTIAL>::Bits* partial_out;   // (num_parts, num_rows, head_dim_v)
    const Compute* partial_lse;                  // (num_parts, num_rows)
    const Compute* partial_max;                  // as partial_lse; with RETURN_MAX
    Operand<Element<ELEMENT>::Bits> out;
    Compute* lse;                                // (batch, seqlen_q); null where it is not wanted
    BatchShape batch;
    int64_t num_rows;
    int num_parts, num_batches;
    int seqlen_q, seqlen_k, head_dim_v, band_left, band_right;
    VariantParams<Operand> variant;
};

// Unlike fmax, of a number and NaN it is NaN.
__device__ Compute larger(Compute a, Compute b) { return b > a || b != b ? b : a; }

extern "C" __global__ void flash_combine(const __grid_constant__ Params params) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t query = int64_t(blockIdx.x) * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (query >= int64_t(params.num_batches) * params.seqlen_q) return;
    const int batch = int(query / params.seqlen_q), row = int(query % params.seqlen_q);
    auto rows = [&](const auto& operand) { return operand.matrix(params.batch, batch); };
    const Sequence sequence(params, rows);
    if (LENGTHS == PACKED && row >= sequence.seqlen_q) return;
    const int64_t at = sequence.first_row(params, batch) + row;

    Compute lse_max = -infinity();
    for (int part = 0; part < params.num_parts; ++part)
        lse_max = larger(lse_max, params.partial_lse[part * params.num_rows + at]);
    const bool saw_key = lse_max != -infinity();
    Compute sink = -infinity();
#ifdef SINK
    // A query behind its batch's length has no sink either: its parts have lse -inf.
    if (row < sequence.seqlen_q) sink = converted<Compute>(Element<SINK>::load(*rows(params.variant.attn_sink)));
    lse_max = larger(lse_max, sink);
#endif
    const bool saw_none = lse_max == -infinity();
    auto weight = [&](Compute lse) { return saw_none ? Compute(0) : exp(lse - lse_max); };
    Compute sum = weight(sink);
    for (int part = 0; part < params.num_parts; ++part) sum += weight(params.partial_lse[part * params.num_rows + at]);

    Element<ELEMENT>::Bits* out = rows(params.out) + (sequence.first_query + row) * params.out.row_stride;
    for (int d = lane; d < params.head_dim_v; d += WARP_SIZE) {
        Compute total = 0;
        for (int part = 0; part < params.num_parts; ++part) {
            const int64_t from = part * params.num_rows + at;
            const Compute lse = params.partial_lse[from];
            if (lse == -infinity()) continue;
            total = fma(weight(lse), Element<PARTIAL>::load(params.partial_out[from * params.head_dim_v + d]), total);
        }
        out[d] = Element<ELEMENT>::round(saw_key ? total / sum : Compute(0));
    }
    if (lane == 0) {
        if (params.lse) params.lse[at] = saw_none ? Compute(-infinity()) : lse_max + log(sum);
#if RETURN_MAX
        Compute row_max = -infinity();
        for (int part = 0; part < params.num_parts; ++part)
            row_max = larger(row_max, params.partial_max[part * params.num_rows + at]);
        params.variant.row_max[at] = row_max;
#endif
    }
}
