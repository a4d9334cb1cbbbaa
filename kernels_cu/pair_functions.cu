// A user's functions by themselves, in double: their values for all pairs, one thread per pair.
//
// With ERRORS also how far kernels may be from these, who compute in float or in double (running_error.cuh). A query
// or a key that does not exist, behind its batch's length, has value and derivative 0 and is not kept.
// `block_bits` says which blocks of BLOCK_MASK queries and keys the mask leaves a pair of: a CUDA block per word of
// 32 blocks of keys.
//
// Grid: one dimension of blocks of THREADS. Constants: SCORE_MOD, MASK_MOD, ERRORS and those of running_error.cuh.

#include "common.cuh"
#include "ptx.cuh"

#if ERRORS
#include "running_error.cuh"
using Compute = RunningError;
#else
using Compute = double;
#endif

#include "dual.cuh"
#include "user_functions.cuh"

struct Params {
    const double *score, *score_error;
    double *value, *derivative, *value_error, *derivative_error;
    bool* keep;
    uint32_t* bits;
    const int *seqlens_q, *seqlens_k;   // of each matrix
    int64_t num_pairs;
    int seqlen_q, seqlen_k, num_heads;
    int first_batch, first_head, first_query, first_key;   // what b, h, i and j count from
    AuxArrays aux;
};

__device__ Pair pair_of(const Params& params, int64_t index) {
    const int j = int(index % params.seqlen_k), i = int(index / params.seqlen_k % params.seqlen_q);
    const int64_t matrix = index / params.seqlen_k / params.seqlen_q;
    return {params.first_batch + int(matrix / params.num_heads), params.first_head + int(matrix % params.num_heads),
            params.first_query + i, params.first_key + j, params.seqlens_q[matrix], params.seqlens_k[matrix]};
}

__device__ bool exists(const Params& params, Pair pair) {
    return pair.i - params.first_query < pair.L && pair.j - params.first_key < pair.S;
}

#if MASK_MOD
extern "C" __global__ void __launch_bounds__(THREADS) mask_values(const __grid_constant__ Params params) {
    const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= params.num_pairs) return;
    const Pair pair = pair_of(params, index);
    params.keep[index] = exists(params, pair) && mask_mod(pair, params.aux);
}
#endif

#if MASK_MOD && defined(BLOCK_MASK)
extern "C" __global__ void __launch_bounds__(THREADS) block_bits(const __grid_constant__ Params params) {
    const int num_words = ceil_div(ceil_div(params.seqlen_k, BLOCK_MASK), 32);
    const int num_rows = ceil_div(params.seqlen_q, BLOCK_MASK);
    const int word = blockIdx.x % num_words, row = blockIdx.x / num_words % num_rows;
    const int64_t matrix = blockIdx.x / num_words / num_rows;
    const int first_query = row * BLOCK_MASK, num_queries = min(BLOCK_MASK, params.seqlen_q - first_query);
    uint32_t bits = 0;
    for (int bit = 0; bit < 32; ++bit) {
        const int64_t first_key = (int64_t(word) * 32 + bit) * BLOCK_MASK;
        if (first_key >= params.seqlen_k) break;
        const int num_keys = int(min(int64_t(BLOCK_MASK), params.seqlen_k - first_key));
        bool kept = false;
        for (int64_t n = threadIdx.x; n < int64_t(num_queries) * num_keys && !kept; n += THREADS) {
            const int i = first_query + int(n / num_keys), j = int(first_key + n % num_keys);
            kept = mask_mod(pair_of(params, (matrix * params.seqlen_q + i) * params.seqlen_k + j), params.aux);
        }
        if (__syncthreads_or(kept)) bits |= 1u << bit;
    }
    if (threadIdx.x == 0) params.bits[blockIdx.x] = bits;
}
#endif

#if SCORE_MOD && !ERRORS
extern "C" __global__ void __launch_bounds__(THREADS) score_values(const __grid_constant__ Params params) {
    const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= params.num_pairs) return;
    const Pair pair = pair_of(params, index);
    Dual result = {0, 0};
    if (exists(params, pair)) result = score_mod({params.score[index], 1}, pair, params.aux);
    params.value[index] = result.value;
    params.derivative[index] = result.derivative;
}
#endif

#if SCORE_MOD && ERRORS
// How far any number within the error of `other` may be from `value`.
__device__ double distance(double value, RunningError other) {
    const double apart = other.value == value || isnan(other.value) && isnan(value) ? 0 : fabs(other.value - value);
    return apart + other.error >= 0 ? apart + other.error : infinity();
}

extern "C" __global__ void __launch_bounds__(THREADS) score_errors(const __grid_constant__ Params params) {
    const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= params.num_pairs) return;
    const Pair pair = pair_of(params, index);
    double value_error = 0, derivative_error = 0;
    if (exists(params, pair)) {
        const double value = params.value[index], derivative = params.derivative[index];
        const Dual score = {RunningError::of(params.score[index], params.score_error[index]), RunningError(1)};
        // Once for each way that the comparisons within the error, which the first evaluation counts, may go.
        int open = 0;
        for (unsigned outcomes = 0; outcomes < 1u << open || outcomes == 0; ++outcomes) {
            branches[threadIdx.x] = {outcomes, 0};
            const Dual result = score_mod(score, pair, params.aux);
            value_error = max(value_error, distance(value, result.value));
            // What is removed has no derivative.
            if (result.value.value != -infinity() || result.value.error != 0)
                derivative_error = max(derivative_error, distance(derivative, result.derivative));
            open = max(open, branches[threadIdx.x].met);
            if (open > MAX_OPEN_COMPARISONS) {
                value_error = derivative_error = infinity();
                break;
            }
        }
    }
    params.value_error[index] = value_error;
    params.derivative_error[index] = derivative_error;
}
#endif
