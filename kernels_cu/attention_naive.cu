// The standard method: O = softmax(scale Q K^T) V in three kernels that write S and P to device memory.
//
// Each kernel is the formula of its step, one thread per number (one warp per softmax row), with no
// tiling and no tensor cores: what a tiled kernel is read against, and the traffic it saves. Sums and
// exponentials are float32 (float64 for double); S and P are rounded to ELEMENT where they are stored.
// Constant: ELEMENT = Half, BFloat16, float or double. Grid: one dimension, of 256-thread blocks.

#include "common.cuh"
#include "ptx.cuh"
#include "element.cuh"
#include "naive.cuh"

// A batched matrix with any strides, counted in elements.
template <typename T>
struct Matrix {
    T* data;
    int64_t row_stride, column_stride;
    int64_t batch_stride[MAX_BATCH_DIMS];

    __device__ T* matrix(const BatchShape& batch, int index) const { return data + batch.offset(index, batch_stride); }
};

struct Params {
    Matrix<const Bits> query, key, value;
    Matrix<Bits> out;
    Bits* scores;        // (batch, seqlen_q, seqlen_k): S, then P in its place
    Compute* lse;        // (batch, seqlen_q), natural logarithm; null where it is not wanted
    BatchShape batch;
    int num_batches;     // product of the batch shape
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int causal_shift;    // key j is visible to query i iff j <= i + causal_shift
    Compute scale;

    __device__ int num_visible(int query_idx) const { return num_visible_keys(query_idx, seqlen_k, causal_shift); }
};

__device__ Compute warp_max(Compute x) {
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) {
        const Compute other = __shfl_xor_sync(FULL_WARP, x, lanes);
        x = x > other || x != x ? x : other;   // a NaN stays, so that its row shows it
    }
    return x;
}

// S = scale Q K^T, and -inf where the key is not visible: one thread per score.
extern "C" __global__ void scores(const __grid_constant__ Params params) {
    const int64_t row = thread_index() / params.seqlen_k;
    const int key_idx = int(thread_index() % params.seqlen_k);
    const int query_idx = int(row % params.seqlen_q), batch_idx = int(row / params.seqlen_q);
    if (row >= int64_t(params.num_batches) * params.seqlen_q) return;

    const Bits* query = params.query.matrix(params.batch, batch_idx) + query_idx * params.query.row_stride;
    const Bits* key = params.key.matrix(params.batch, batch_idx) + key_idx * params.key.row_stride;
    Compute score = -infinity();
    if (key_idx < params.num_visible(query_idx)) {
        Compute dot = 0;
        for (int d = 0; d < params.head_dim; ++d)
            dot = fma(Element<ELEMENT>::load(query[d * params.query.column_stride]),
                      Element<ELEMENT>::load(key[d * params.key.column_stride]), dot);
        score = dot * params.scale;
    }
    params.scores[thread_index()] = Element<ELEMENT>::round(score);
}

// P = exp(S - max S) / sum exp(S - max S), in place, and lse: one warp per row.
extern "C" __global__ void softmax(const __grid_constant__ Params params) {
    const int64_t row = thread_index() / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
    if (row >= int64_t(params.num_batches) * params.seqlen_q) return;

    Bits* scores = params.scores + row * params.seqlen_k;
    Compute row_max = -infinity();
    for (int j = lane; j < params.seqlen_k; j += WARP_SIZE) {
        const Compute score = Element<ELEMENT>::load(scores[j]);
        row_max = row_max > score || row_max != row_max ? row_max : score;
    }
    row_max = warp_max(row_max);
    const Compute safe_max = row_max == -infinity() ? Compute(0) : row_max;   // -inf - -inf would be NaN

    Compute row_sum = 0;
    for (int j = lane; j < params.seqlen_k; j += WARP_SIZE)
        row_sum += exp(Element<ELEMENT>::load(scores[j]) - safe_max);
    row_sum = warp_sum(row_sum);

    for (int j = lane; j < params.seqlen_k; j += WARP_SIZE) {
        const Compute weight = exp(Element<ELEMENT>::load(scores[j]) - safe_max);
        scores[j] = Element<ELEMENT>::round(row_sum == Compute(0) ? Compute(0) : weight / row_sum);
    }
    if (params.lse && lane == 0) params.lse[row] = safe_max + log(row_sum);   // log 0 = -inf: no key
}

// O = P V over the visible keys, so that nothing masked is read: one thread per output.
extern "C" __global__ void weighted_values(const __grid_constant__ Params params) {
    const int64_t row = thread_index() / params.head_dim_v;
    const int column = int(thread_index() % params.head_dim_v);
    const int query_idx = int(row % params.seqlen_q), batch_idx = int(row / params.seqlen_q);
    if (row >= int64_t(params.num_batches) * params.seqlen_q) return;

    const Bits* weights = params.scores + row * params.seqlen_k;
    const Bits* value = params.value.matrix(params.batch, batch_idx) + column * params.value.column_stride;
    Bits* out = params.out.matrix(params.batch, batch_idx) + query_idx * params.out.row_stride;
    Compute sum = 0;
    for (int j = 0; j < params.num_visible(query_idx); ++j)
        sum = fma(Element<ELEMENT>::load(weights[j]), Element<ELEMENT>::load(value[j * params.value.row_stride]), sum);
    out[column * params.out.column_stride] = Element<ELEMENT>::round(sum);
}
