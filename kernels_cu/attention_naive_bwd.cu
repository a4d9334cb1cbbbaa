// The standard backward: from P, which the kernels of attention_naive.cu have stored,
//
//     dP = dO V^T,  dS = P (dP - rowsum(P dP) + dlse),  dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO.
//
// Each kernel is the formula of its step, one thread per number (one warp per row of dS). dP and dS are
// written to device memory and rounded to ELEMENT there; sums are float32 (float64 for double). A gradient
// sums over the batches that share its operand, in a fixed order. Constant: ELEMENT = Half, BFloat16, float
// or double. Grid: one dimension, of 256-thread blocks.

#include "common.cuh"
#include "ptx.cuh"
#include "element.cuh"
#include "naive.cuh"

// SummedOperand with any column stride.
template <typename T>
struct SummedMatrix {
    T* data;
    int64_t row_stride, column_stride;
    int64_t owner_stride[MAX_BATCH_DIMS];
    int64_t reduced_stride[MAX_BATCH_DIMS];

    __device__ T* matrix(const BatchShape& owner, int owner_index, const BatchShape& reduced, int reduced_index) const {
        return data + owner.offset(owner_index, owner_stride) + reduced.offset(reduced_index, reduced_stride);
    }
};

struct Params {
    SummedMatrix<const Bits> query, key, value, dout;
    SummedMatrix<Bits> weights;     // P
    SummedMatrix<Bits> dscores;     // dP, then dS in its place
    SummedMatrix<Bits> gradient;    // dQ, dK or dV; not used by dweights and dscores, for which every batch is an owner
    const Compute* dlse;            // (batch, seqlen_q); null where there is none
    BatchShape owner, reduced;
    int num_owners, num_reduced;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int causal_shift;               // key j is visible to query i iff j <= i + causal_shift
    Compute scale;

    template <typename T>
    __device__ T* matrix(const SummedMatrix<T>& operand, int owner_idx, int reduced_idx = 0) const {
        return operand.matrix(owner, owner_idx, reduced, reduced_idx);
    }
    __device__ int num_visible(int query_idx) const { return num_visible_keys(query_idx, seqlen_k, causal_shift); }
    __device__ int first_query(int key_idx) const { return int(max(int64_t(0), int64_t(key_idx) - causal_shift)); }
};

// dP = dO V^T where the key is visible, and 0 elsewhere: one thread per weight.
extern "C" __global__ void dweights(const __grid_constant__ Params params) {
    const int64_t row = thread_index() / params.seqlen_k;
    const int key_idx = int(thread_index() % params.seqlen_k);
    const int query_idx = int(row % params.seqlen_q), batch_idx = int(row / params.seqlen_q);
    if (row >= int64_t(params.num_owners) * params.seqlen_q) return;

    const Bits* dout = params.matrix(params.dout, batch_idx) + query_idx * params.dout.row_stride;
    const Bits* value = params.matrix(params.value, batch_idx) + key_idx * params.value.row_stride;
    Compute dot = 0;
    if (key_idx < params.num_visible(query_idx))
        for (int d = 0; d < params.head_dim_v; ++d)
            dot = fma(Element<ELEMENT>::load(dout[d * params.dout.column_stride]),
                      Element<ELEMENT>::load(value[d * params.value.column_stride]), dot);
    params.dscores.data[thread_index()] = Element<ELEMENT>::round(dot);
}

// dS = P (dP - rowsum(P dP) + dlse), in place of dP: one warp per row.
extern "C" __global__ void dscores(const __grid_constant__ Params params) {
    const int64_t row = thread_index() / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
    if (row >= int64_t(params.num_owners) * params.seqlen_q) return;

    const int num_visible = params.num_visible(int(row % params.seqlen_q));
    const Bits* weights = params.weights.data + row * params.seqlen_k;
    Bits* dscores = params.dscores.data + row * params.seqlen_k;
    Compute delta = 0;
    for (int j = lane; j < num_visible; j += WARP_SIZE)
        delta = fma(Element<ELEMENT>::load(weights[j]), Element<ELEMENT>::load(dscores[j]), delta);
    delta = warp_sum(delta);
    if (params.dlse) delta -= params.dlse[row];
    for (int j = lane; j < num_visible; j += WARP_SIZE)
        dscores[j] = Element<ELEMENT>::round(Element<ELEMENT>::load(weights[j]) *
                                             (Element<ELEMENT>::load(dscores[j]) - delta));
}

// sum += w . x over `count` terms
__device__ void accumulate(Compute& sum, const Bits* w, int64_t w_stride, const Bits* x, int64_t x_stride, int count) {
    for (int t = 0; t < count; ++t)
        sum = fma(Element<ELEMENT>::load(w[t * w_stride]), Element<ELEMENT>::load(x[t * x_stride]), sum);
}

// Which element of the gradient a thread computes.
struct Position {
    int owner, row, column;
    bool exists;

    __device__ Position(const Params& params, int rows, int columns) {
        const int64_t line = thread_index() / columns;
        column = int(thread_index() % columns), row = int(line % rows), owner = int(line / rows);
        exists = line < int64_t(params.num_owners) * rows;
    }

    __device__ void store(const Params& params, Compute value) const {
        const auto& to = params.gradient;
        params.matrix(to, owner)[row * to.row_stride + column * to.column_stride] = Element<ELEMENT>::round(value);
    }
};

// dQ = scale dS K, over the keys that the query sees: one thread per element.
extern "C" __global__ void dquery(const __grid_constant__ Params params) {
    const Position at(params, params.seqlen_q, params.head_dim);
    if (!at.exists) return;
    Compute sum = 0;
    for (int r = 0; r < params.num_reduced; ++r)
        accumulate(sum, params.matrix(params.dscores, at.owner, r) + at.row * params.dscores.row_stride, 1,
                   params.matrix(params.key, at.owner, r) + at.column * params.key.column_stride, params.key.row_stride,
                   params.num_visible(at.row));
    at.store(params, params.scale * sum);
}

// dK = scale dS^T Q, over the queries that see the key: one thread per element.
extern "C" __global__ void dkey(const __grid_constant__ Params params) {
    const Position at(params, params.seqlen_k, params.head_dim);
    if (!at.exists) return;
    const int first = params.first_query(at.row);
    Compute sum = 0;
    for (int r = 0; r < params.num_reduced; ++r)
        accumulate(sum, params.matrix(params.dscores, at.owner, r) + first * params.dscores.row_stride + at.row,
                   params.dscores.row_stride,
                   params.matrix(params.query, at.owner, r) + first * params.query.row_stride +
                       at.column * params.query.column_stride,
                   params.query.row_stride, params.seqlen_q - first);
    at.store(params, params.scale * sum);
}

// dV = P^T dO, over the queries that see the key: one thread per element.
extern "C" __global__ void dvalue(const __grid_constant__ Params params) {
    const Position at(params, params.seqlen_k, params.head_dim_v);
    if (!at.exists) return;
    const int first = params.first_query(at.row);
    Compute sum = 0;
    for (int r = 0; r < params.num_reduced; ++r)
        accumulate(sum, params.matrix(params.weights, at.owner, r) + first * params.weights.row_stride + at.row,
                   params.weights.row_stride,
                   params.matrix(params.dout, at.owner, r) + first * params.dout.row_stride +
                       at.column * params.dout.column_stride,
                   params.dout.row_stride, params.seqlen_q - first);
    at.store(params, sum);
}
