// Exact attention, forward, in float32 or float64 throughout: O = softmax(scale Q K^T) V.
//
// The algorithm of flash_fwd.cu with register tiles and fused multiply-adds in place of tensor cores. K and
// V take turns in one buffer: a tile's arithmetic is long against its copy, and the space saved holds a second
// block on most multiprocessors. Weights go through shared memory, from the lane that computed them to those
// that multiply with them. Constants: ELEMENT (float or double), HEAD_DIM, HEAD_DIM_V (whole 128-byte lines; the true
// sizes come at run time), BLOCK_M, BLOCK_N, NUM_WARPS, BAND_RIGHT, and those of variant.cuh and numerics.cuh.

#include "common.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "element.cuh"

using Compute = ELEMENT;

#include "options.cuh"
#include "split.cuh"
#include "visible.cuh"
#include "block_range.cuh"
#include "numerics.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int TILE_ROWS = BLOCK_M, TILE_COLUMNS = BLOCK_N;

#include "fma.cuh"
#include "mask_fma.cuh"
#include "pairs_fma.cuh"
#include "nonfinite_fma.cuh"

using QueryTile = FmaTile<BLOCK_M, HEAD_DIM>;
using WeightTile = FmaTile<BLOCK_M, BLOCK_N>;
using KeyTile = FmaTile<BLOCK_N, HEAD_DIM>;
using ValueTile = FmaTile<BLOCK_N, HEAD_DIM_V>;   // takes turns with the key tile

struct Params {
    Operand<const ELEMENT> query, key, value;
    Operand<ELEMENT> out;
    ELEMENT* lse;           // (batch, seqlen_q), natural logarithm; null where it is not wanted
    BatchShape batch;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int band_left, band_right;   // key j is visible to query i iff i + band_left <= j <= i + band_right
    ELEMENT scale;
    VariantParams<Operand> variant;
};

// The maximum of a row that saw no key: finite, for -inf - -inf would be NaN, and below every score.
constexpr ELEMENT NO_KEY = sizeof(ELEMENT) == 4 ? -3.402823466e38f : -1.7976931348623157e308;

// The maximum of a row's scores. A NaN among them, which fmax passes over, is in the sum.
__device__ ELEMENT largest_score(ELEMENT row_max, ELEMENT row_sum) {
    if (row_sum == ELEMENT(0)) return -infinity();
    return row_sum != row_sum && row_max < ELEMENT(infinity()) ? row_sum : row_max;
}

// Joins a logit without a value to a row: its accumulator, maximum and sum.
template <int COUNT>
__device__ void add_sink(ELEMENT (&acc)[COUNT][VECTOR], ELEMENT& row_max, ELEMENT& row_sum, ELEMENT sink) {
    const ELEMENT old_max = row_max;
    row_max = fmax(old_max, sink);
    const ELEMENT factor = natural_exponential(old_max - row_max);
    row_sum = fma(row_sum, factor, natural_exponential(sink - row_max));
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) acc[c][e] *= factor;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) flash_fwd_fma(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const QueryTile query_tile{uint32_t(__cvta_generic_to_shared(shared))};
    const WeightTile weight_tile{query_tile.base + QueryTile::BYTES};
    const KeyTile key_tile{weight_tile.base + WeightTile::BYTES};
    const ValueTile value_tile{key_tile.base};

    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    const int num_query_tiles = ceil_div(params.seqlen_q, BLOCK_M);
    const BlockOfSplit block(params, blockIdx.x);
    const int batch = block.index / num_query_tiles;
    // Under a causal mask the last queries see the most keys: longest blocks first.
    const int first_query = (num_query_tiles - 1 - block.index % num_query_tiles) * BLOCK_M;
    auto rows = [&](const auto& operand) { return operand.matrix(params.batch, batch); };
    Sequence sequence(params, rows);
    sequence.take_split(params, block.split);
    const int num_queries = min(BLOCK_M, sequence.seqlen_q - first_query);   // none, in some blocks of short sequences
    if (LENGTHS == PACKED && num_queries <= 0) return;   // a tile that only the longest sequences have
    KeyTiles tiles = key_tiles(first_query, sequence);
    tiles.take_block_mask(params, rows, first_query);

    FmaTileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS> key_loader(
        key_tile, rows(params.key) + (sequence.first_key + tiles.begin * BLOCK_N) * params.key.row_stride,
        params.key.row_stride, params.head_dim, thread);
    FmaTileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS> value_loader(
        value_tile, rows(params.value) + (sequence.first_key + tiles.begin * BLOCK_N) * params.value.row_stride,
        params.value.row_stride, params.head_dim_v, thread);
    FmaTileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS>(
        query_tile, rows(params.query) + (sequence.first_query + first_query) * params.query.row_stride,
        params.query.row_stride, params.head_dim, thread).load_async(num_queries);

    const int row = first_row(warp, lane), column = lane % ROW_LANES;
    const uint32_t query_address = query_tile.address(row, 0), weight_address = weight_tile.address(row, 0);
    const uint32_t key_address = key_tile.address(column, 0);
    const Columns<ValueTile> columns(value_tile, lane);

    Accumulator<ValueTile> acc = {};
    // What the sums are relative to, and this lane's part of them.
    ELEMENT row_max[THREAD_ROWS], row_sum[THREAD_ROWS];
    Largest<ELEMENT, THREAD_ROWS> largest(NO_KEY);
#pragma unroll
    for (int m = 0; m < THREAD_ROWS; ++m) {
        row_max[m] = NO_KEY;
        row_sum[m] = 0;
    }

    const ScoreFunction score_function(params, sequence, rows);
    const Dropout dropout(params, rows);
    for (int tile = tiles.begin; tile < tiles.end; tile = tiles.next(tile)) {
        const int first_key = tile * BLOCK_N, num_keys = sequence.seqlen_k - first_key;
        __syncthreads();   // every warp is done with the last value tile
        key_loader.load_async(num_keys);
        cp_async_wait_group<0>();
        __syncthreads();   // the key tile has landed

        Scores scores = {};
        multiply_transposed<QueryTile, KeyTile>(scores, query_address, key_address);
        __syncthreads();   // every warp is done with the key tile
        value_loader.load_async(num_keys);
        if constexpr (BLOCK_MASK) {
            const int skipped = tiles.next(tile) - tile - 1;
            key_loader.skip(skipped), value_loader.skip(skipped);
        }

        const RowMask mask(int64_t(first_query) + row, first_key, num_keys, sequence);
        const bool boundary = tiles.cut(tile);
        // Scores times the scale, whatever its sign; then their maximum, P = exp(S - max), and its sum.
        ELEMENT alpha[THREAD_ROWS];
        PairBits seen;
        if constexpr (PAIR_BY_PAIR) {
            for_each_pair(first_query + row, first_key + column, [&](int m, int n, int i, int j) {
                const bool visible =
                    i < sequence.seqlen_q && mask.visible(m, j - first_key) && score_function.keeps(i, j);
                scores[m][n] = visible ? score_function(scores[m][n], i, j).value : -infinity();
                seen.add(m, n, scores[m][n] != -infinity());
            });
        } else {
#pragma unroll
            for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
                for (int n = 0; n < THREAD_COLUMNS; ++n) scores[m][n] *= params.scale;
            if (boundary) {
#pragma unroll
                for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
                    for (int n = 0; n < THREAD_COLUMNS; ++n)
                        if (!mask.visible(m, column + n * ROW_LANES)) scores[m][n] = -infinity();
            }
        }
#pragma unroll
        for (int m = 0; m < THREAD_ROWS; ++m) {
            const ELEMENT old_max = row_max[m];
            ELEMENT tile_max = scores[m][0];
#pragma unroll
            for (int n = 1; n < THREAD_COLUMNS; ++n) tile_max = fmax(tile_max, scores[m][n]);
#pragma unroll
            for (int lanes = ROW_LANES / 2; lanes > 0; lanes /= 2)
                tile_max = fmax(tile_max, __shfl_xor_sync(FULL_WARP, tile_max, lanes));
            tile_max = fmax(old_max, tile_max);
            largest.add(m, tile_max);
            row_max[m] = rescaled_to(old_max, tile_max, ELEMENT(0.6931471805599453));
            alpha[m] = natural_exponential(old_max - row_max[m]);
            ELEMENT tile_sum = 0;
#pragma unroll
            for (int n = 0; n < THREAD_COLUMNS; ++n) {
                scores[m][n] = natural_exponential(scores[m][n] - row_max[m]);
                tile_sum += scores[m][n];
            }
            row_sum[m] = fma(row_sum[m], alpha[m], tile_sum);
        }
#if DROPOUT
        for_each_pair(first_query + row, first_key + column, [&](int m, int n, int i, int j) {
            if (!dropout.keeps(i, j)) scores[m][n] = 0;
        });
#endif
        store_scores(weight_tile, row, lane, scores);
        cp_async_wait_group<0>();
        __syncthreads();   // the value tile has landed, and so have the weights

        if ((BANDED || REMOVES_ANYWHERE) && boundary &&
            __syncthreads_or(holds_nonfinite<NUM_THREADS>(value_tile, thread))) {
            if constexpr (REMOVES_ANYWHERE)
                spread_nonfinite(acc, columns, seen, lane);
            else
                spread_nonfinite(acc, columns, mask);
            __syncthreads();   // every warp has seen the values
            remove_nonfinite<NUM_THREADS>(value_tile, thread);
            __syncthreads();   // they are gone
        }
        accumulate_rescaled(acc, alpha, [&](auto& sum) { multiply<WeightTile>(sum, weight_address, columns); });
    }

    const int64_t first_row = sequence.first_row(params, batch) + first_query;
    // Queries that are there but do not count, behind their batch's length, get zeros.
    const int num_rows = LENGTHS == PADDED ? min(BLOCK_M, params.seqlen_q - first_query) : num_queries;
#pragma unroll
    for (int m = 0; m < THREAD_ROWS; ++m) {
        const int query = row + row_step(m);
        const bool stores = column == 0 && query < num_rows;
#pragma unroll
        for (int lanes = ROW_LANES / 2; lanes > 0; lanes /= 2)
            row_sum[m] += __shfl_xor_sync(FULL_WARP, row_sum[m], lanes);
        if (LENGTHS == PADDED && query >= num_queries) {
            row_max[m] = NO_KEY;
            row_sum[m] = 0;
        }
#if RETURN_MAX
        if (stores)
            params.variant.row_max[first_row + query] = largest_score(largest(m, row_max[m]), row_sum[m]);
#endif
#if defined(SINK) && !SPLIT
        const bool saw_key = row_sum[m] != ELEMENT(0);
        const ELEMENT sink = converted<ELEMENT>(Element<SINK>::load(*rows(params.variant.attn_sink)));
        if (query < num_queries) add_sink(acc[m], row_max[m], row_sum[m], sink);
#endif
        // log 0 = -inf: no key
        if (params.lse && stores) params.lse[first_row + query] = row_max[m] + log(row_sum[m]);
#if defined(SINK) && !SPLIT
        if (!saw_key) row_sum[m] = 0;   // no value, whatever the sink is
#endif
#if DROPOUT
        row_sum[m] /= dropout.keep_scale;
#endif
    }
    auto finish = [&](int m, ELEMENT x) { return row_sum[m] == ELEMENT(0) ? ELEMENT(0) : x / row_sum[m]; };
#if SPLIT
    store_accumulator_unaligned<ValueTile>(acc, params.variant.partial_out + first_row * params.head_dim_v,
                                           params.head_dim_v, row, num_rows, params.head_dim_v, lane, finish);
#else
    store_accumulator<ValueTile>(
        acc, rows(params.out) + (sequence.first_query + first_query) * params.out.row_stride, params.out.row_stride,
        row, num_rows, params.head_dim_v, lane, finish);
#endif
}
