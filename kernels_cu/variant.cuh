// What a call may do to its scores, each a compile-time constant: what is off leaves no instruction behind.
//
//   BAND_LEFT, BAND_RIGHT   queries see keys from, or up to, a diagonal only
//   LENGTHS                 PADDED: each batch has its own lengths; PACKED: its rows are a part of packed ones
//   SOFTCAP                 scores become cap * tanh(score / cap)
//   BIAS, ALIBI, SINK       element types of the operand
//   MASK, DROPOUT           a bool for each pair; random ones
//   STACKED                 the queries of heads that share their keys are the rows of one matrix, head by head
//   SPLIT                   a block sees split_size keys only, and stores its part for flash_combine.cu
//   RETURN_MAX              also store each row's maximum
//   SCORE_MOD, MASK_MOD     a user's functions of a pair, written out in place of the include below
//   BLOCK_MASK              queries and keys of a block; which blocks MASK_MOD leaves a pair of is known
//   ORIGIN                  what dropout and a user's functions count does not start at 0
//   WITH_DSLOPE             the kernel of dq sums what the gradient of ALiBi slopes is made of
//
// Their order: scale, softcap, score_mod, bias, ALiBi; masks; sink; softmax; dropout.

#include "user_functions.cuh"

#ifndef BAND_LEFT
#define BAND_LEFT 0
#endif
#ifndef LENGTHS
#define LENGTHS 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef MASK
#define MASK 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
#ifndef STACKED
#define STACKED 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef SCORE_MOD
#define SCORE_MOD 0
#endif
#ifndef MASK_MOD
#define MASK_MOD 0
#endif
#ifndef WITH_DSLOPE
#define WITH_DSLOPE 0
#endif
#ifndef BLOCK_MASK
#define BLOCK_MASK 0
#endif
#ifndef ORIGIN
#define ORIGIN 0
#endif
#ifndef RETURN_MAX
#define RETURN_MAX 0
#endif

constexpr bool BANDED = BAND_LEFT || BAND_RIGHT;

#ifdef BIAS
constexpr bool WITH_BIAS = true;
#else
constexpr bool WITH_BIAS = false;
#endif
#ifdef ALIBI
constexpr bool WITH_ALIBI = true;
#else
constexpr bool WITH_ALIBI = false;
#endif

constexpr bool CHANGES_SCORES = SOFTCAP || SCORE_MOD || WITH_BIAS || WITH_ALIBI;
// Whether a pair may be removed in any tile, not only where a band or the last key cuts it.
constexpr bool REMOVES_ANYWHERE = MASK || MASK_MOD || SCORE_MOD || WITH_BIAS;
// Whether each pair is looked at by itself, by its indices.
constexpr bool PAIR_BY_PAIR = CHANGES_SCORES || REMOVES_ANYWHERE;

// One value for each pair of a query and a key, in any layout: of all batches, and of one.
template <typename T>
struct PairValues {
    const T* data;
    int64_t row_stride, column_stride;

    __device__ __forceinline__ T operator()(int i, int j) const { return data[i * row_stride + j * column_stride]; }
};

template <template <typename> class OperandOf, typename T>
struct PairOperand {
    OperandOf<const T> operand;
    int64_t column_stride;

    // `rows` gives an operand's matrix for this batch.
    template <typename Rows>
    __device__ PairValues<T> of_batch(Rows rows) const { return {rows(operand), operand.row_stride, column_stride}; }
};

// A place as dropout and a user's functions count: of the first pair of the whole call, and of a matrix of the result.
struct Place {
    int batch = 0, head = 0, query = 0, key = 0;

    Place() = default;

    // `rows` gives an operand's matrix for this batch.
    template <typename Params, typename Rows>
    __device__ Place(const Params& params, Rows rows) {
#if ORIGIN
        *this = params.variant.origin;
#endif
        const int64_t number = reinterpret_cast<int64_t>(rows(params.variant.batch_number));
        batch += int(number / params.variant.num_heads);
        head += int(number % params.variant.num_heads);
    }
};

// What the variants that are on read. OperandOf: Operand in the forward, SummedOperand in the backward.
template <template <typename> class OperandOf>
struct VariantParams {
#if LENGTHS == PADDED
    OperandOf<const int> seqlens_q, seqlens_k;   // null: all rows count
#elif LENGTHS == PACKED
    OperandOf<const int> seqlens_q, seqlens_k;   // the offsets of a sequence's first row and of the next one's
    int64_t total_queries;
#endif
#if LENGTHS
    int bottom_right;                            // whether the diagonal ends at the last key, not starts at the first
#endif
#if STACKED
    int stacked_heads;                           // through which the batch's last dimension steps
#endif
#if SOFTCAP
    Compute softcap;
#endif
#if MASK
    PairOperand<OperandOf, unsigned char> mask;
#endif
#ifdef BIAS
    PairOperand<OperandOf, Element<BIAS>::Bits> bias;
#endif
#ifdef ALIBI
    OperandOf<const Element<ALIBI>::Bits> alibi_slopes;
    int shift;                                   // of the diagonal, beside what lengths tell
#endif
#if WITH_DSLOPE
    OperandOf<Compute> dslope_rows;              // one value per query: -sum_j dS_ij |i + shift - j|
#endif
#ifdef SINK
    OperandOf<const Element<SINK>::Bits> attn_sink;
#endif
#if DROPOUT
    Philox philox;
    uint32_t drop_below;                         // a pair is kept iff its word is at least this
    Compute keep_scale;                          // 1 / (1 - p)
#endif
#if DROPOUT || LENGTHS == PACKED || SCORE_MOD || MASK_MOD
    OperandOf<const char> batch_number;          // at address 0, one byte for each matrix of the result
    int num_heads;                               // of the result: batch number = batch * num_heads + head
#endif
#if ORIGIN
    Place origin;
#endif
#if SPLIT
    int split_size, num_splits;                  // a multiple of every BLOCK_N; of the longest keys
    int64_t num_rows;                            // of all batches
    Compute* partial_out;                        // (num_splits, num_rows, head_dim_v); lse, row_max without the last
#endif
#if RETURN_MAX
    Compute* row_max;                            // as lse
#endif
#if SCORE_MOD || MASK_MOD
    AuxArrays aux;
#endif
#if BLOCK_MASK
    OperandOf<const uint32_t> block_mask;        // a bit for each block of keys, a row for each block of queries
#endif
};
