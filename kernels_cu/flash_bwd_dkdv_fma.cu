// Gradients of keys and values in float32 or float64 throughout: dV = P^T dO, dK = scale dS^T Q.
//
// The algorithm of flash_bwd_dkdv.cu with the register tiles of fma.cuh. Q, dO and Q again take turns in
// one buffer, P^T and dS^T in another. Constants: ELEMENT (float or double), HEAD_DIM, HEAD_DIM_V (whole
// 128-byte lines; the true sizes come at run time), BLOCK_M, BLOCK_N, NUM_WARPS, BAND_RIGHT, those of variant.cuh and
// numerics.cuh, and WITH_DKEY, WITH_DVALUE: one gradient at a time where both do not fit the registers.

#include "common.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "element.cuh"

using Compute = ELEMENT;

#include "options.cuh"
#include "visible.cuh"
#include "block_range.cuh"
#include "numerics.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int TILE_ROWS = BLOCK_N, TILE_COLUMNS = BLOCK_M;   // here the keys are the rows

#include "fma.cuh"
#include "mask_fma.cuh"
#include "pairs_fma.cuh"
#include "nonfinite_fma.cuh"
#include "weight_fma.cuh"

using KeyTile = FmaTile<BLOCK_N, HEAD_DIM>;
using ValueTile = FmaTile<BLOCK_N, HEAD_DIM_V>;
using WeightTile = FmaTile<BLOCK_N, BLOCK_M>;   // P^T, then dS^T
using QueryTile = FmaTile<BLOCK_M, HEAD_DIM>;
using DoutTile = FmaTile<BLOCK_M, HEAD_DIM_V>;   // takes turns with the query tile

struct Params {
    SummedOperand<const ELEMENT> query, key, value, dout;
    SummedOperand<ELEMENT> dkey, dvalue;
    SummedOperand<const ELEMENT> lse, delta;   // one per query: row_stride is 1
    BatchShape owner, reduced;
    int num_reduced;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int band_left, band_right;   // key j is visible to query i iff i + band_left <= j <= i + band_right
    ELEMENT scale;
    VariantParams<SummedOperand> variant;
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS) flash_bwd_dkdv_fma(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const KeyTile key_tile{uint32_t(__cvta_generic_to_shared(shared))};
    const ValueTile value_tile{key_tile.base + KeyTile::BYTES};
    const WeightTile weight_tile{value_tile.base + (WITH_DKEY ? ValueTile::BYTES : 0)};   // dV alone needs no V
    const QueryTile query_tile{weight_tile.base + WeightTile::BYTES};
    const DoutTile dout_tile{query_tile.base};

    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    const int num_key_tiles = ceil_div(params.seqlen_k, BLOCK_N);
    const int owner = blockIdx.x / num_key_tiles;
    const int first_key = blockIdx.x % num_key_tiles * BLOCK_N;   // under a causal mask the longest block is the first
#if LENGTHS == PACKED
    const Sequence own(params, [&](const auto& x) { return x.matrix(params.owner, owner, params.reduced, 0); });
    const int num_rows = min(BLOCK_N, own.seqlen_k - first_key);   // of the gradients
    if (num_rows <= 0) return;   // a tile that only the longest sequences have
    const int64_t first_row_of_block = own.first_key + first_key;
#else
    const int num_rows = min(BLOCK_N, params.seqlen_k - first_key);   // also keys behind a length, whose rows are 0
    const int64_t first_row_of_block = first_key;
#endif

    const int row = first_row(warp, lane), column = lane % ROW_LANES;
    const uint32_t key_address = key_tile.address(row, 0), value_address = value_tile.address(row, 0);
    const uint32_t weight_address = weight_tile.address(row, 0);
    const uint32_t query_address = query_tile.address(column, 0), dout_address = dout_tile.address(column, 0);
    const Columns<QueryTile> query_columns(query_tile, lane);
    const Columns<DoutTile> dout_columns(dout_tile, lane);

    Accumulator<QueryTile> dkey = {};
    Accumulator<DoutTile> dvalue = {};

    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, reduced); };
        const Sequence sequence(params, rows);
        const int num_keys = min(BLOCK_N, sequence.seqlen_k - first_key);
        QueryTiles tiles = query_tiles(first_key, sequence);
        tiles.take_block_mask(params, rows, first_key);
        if (LENGTHS && num_keys < BLOCK_N) tiles.interior_begin = tiles.end;   // rows without a key get nothing
        const int begin_query = tiles.begin * BLOCK_M;
        const ScoreFunction score_function(params, sequence, rows);
        const Dropout dropout(params, rows);
        FmaTileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS>(
            key_tile, rows(params.key) + (sequence.first_key + first_key) * params.key.row_stride,
            params.key.row_stride, params.head_dim, thread).load_async(num_keys);
        if (WITH_DKEY)
            FmaTileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS>(
                value_tile, rows(params.value) + (sequence.first_key + first_key) * params.value.row_stride,
                params.value.row_stride, params.head_dim_v, thread).load_async(num_keys);
        FmaTileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS> query_loader(
            query_tile, rows(params.query) + (sequence.first_query + begin_query) * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread);
        FmaTileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS> dout_loader(
            dout_tile, rows(params.dout) + (sequence.first_query + begin_query) * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread);
        const ELEMENT* lse = rows(params.lse) + sequence.first_query;
        const ELEMENT* deltas = rows(params.delta) + sequence.first_query;

        for (int tile = tiles.begin; tile < tiles.end; tile = tiles.next(tile)) {
            const int first_query = tile * BLOCK_M, num_queries = sequence.seqlen_q - first_query;
            auto query_reloader = query_loader;
            __syncthreads();   // every warp is done with the last tile, and with its weights
            query_loader.load_async(num_queries);

            ELEMENT shift[THREAD_COLUMNS], delta[THREAD_COLUMNS];
#pragma unroll
            for (int n = 0; n < THREAD_COLUMNS; ++n) {
                const int query = column + n * ROW_LANES;
                const bool exists = query < num_queries;
                shift[n] = exists ? weight_shift(lse[first_query + query]) : ELEMENT(0);
                delta[n] = exists ? deltas[first_query + query] : ELEMENT(0);
            }
            cp_async_wait_group<0>();
            __syncthreads();   // the query tile has landed, and before the first the keys and values

            // S^T = K Q^T, P^T = exp(S^T - lse). What is masked is selected, so that no NaN of it survives.
            Scores weights = {};
            multiply_transposed<KeyTile, QueryTile>(weights, key_address, query_address);
            const TransposedRowMask mask(int64_t(first_key) + row, first_query, num_queries, sequence);
            const bool boundary = tiles.cut(tile);
            PairBits seen, kept;
            Scores derivatives;   // of the final scores, with respect to the scaled ones
            if constexpr (PAIR_BY_PAIR) {
                for_each_pair(first_key + row, first_query + column, [&](int m, int n, int j, int i) {
                    const Dual score = final_score(score_function, sequence, weights[m][n], i, j,
                                                   mask.visible(m, i - first_query));
                    const bool counts = score.value != -infinity();
                    weights[m][n] = counts ? weight_of(score.value, shift[n]) : ELEMENT(0);
                    derivatives[m][n] = score.derivative;
                    seen.add(m, n, counts);
                });
            } else {
#pragma unroll
                for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
                    for (int n = 0; n < THREAD_COLUMNS; ++n) {
                        const ELEMENT weight = weight_of(weights[m][n], params.scale, shift[n]);
                        weights[m][n] = mask.visible(m, column + n * ROW_LANES) ? weight : ELEMENT(0);
                    }
            }
#if DROPOUT
            Scores kept_weights;
            for_each_pair(first_key + row, first_query + column, [&](int m, int n, int j, int i) {
                kept.add(m, n, dropout.keeps(i, j));
                kept_weights[m][n] = weights[m][n] * (kept(m, n) ? ELEMENT(1) : ELEMENT(0));   // a NaN stays
            });
            if (WITH_DVALUE) store_scores(weight_tile, row, lane, kept_weights);
#else
            if (WITH_DVALUE) store_scores(weight_tile, row, lane, weights);
#endif
            __syncthreads();   // every warp is done with the query tile
            dout_loader.load_async(num_queries);
            if constexpr (BLOCK_MASK) {
                const int skipped = tiles.next(tile) - tile - 1;
                query_loader.skip(skipped), dout_loader.skip(skipped);
            }
            cp_async_wait_group<0>();
            __syncthreads();   // the dout tile has landed, and so have the weights

            // dP^T = V dO^T, dS^T = P^T * (dP^T - delta)
            Scores dscores = {};
            if (WITH_DKEY) {
                multiply_transposed<ValueTile, DoutTile>(dscores, value_address, dout_address);
#pragma unroll
                for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
                    for (int n = 0; n < THREAD_COLUMNS; ++n) {
#if DROPOUT
                        dscores[m][n] *= kept(m, n) ? dropout.keep_scale : ELEMENT(0);
#endif
                        const ELEMENT dscore = weights[m][n] * (dscores[m][n] - delta[n]);
                        if constexpr (PAIR_BY_PAIR)
                            dscores[m][n] = seen(m, n) ? dscore * derivatives[m][n] : ELEMENT(0);
                        else
                            dscores[m][n] = mask.visible(m, column + n * ROW_LANES) ? dscore : ELEMENT(0);
                    }
            }
            auto spoils_masked_keys = [&](auto tile) {
                return (BANDED || LENGTHS || REMOVES_ANYWHERE) && boundary &&
                       __syncthreads_or(holds_nonfinite<NUM_THREADS>(tile, thread));
            };
            if (WITH_DVALUE) {   // dV += P^T dO
                if (spoils_masked_keys(dout_tile)) {
                    if constexpr (PAIR_BY_PAIR)
                        spread_nonfinite(dvalue, dout_columns, seen, lane);
                    else
                        spread_nonfinite(dvalue, dout_columns, mask);
                    __syncthreads();   // every warp has seen the values
                    remove_nonfinite<NUM_THREADS>(dout_tile, thread);
                    __syncthreads();   // they are gone
                }
                accumulate(dvalue, [&](auto& sum) { multiply<WeightTile>(sum, weight_address, dout_columns); });
            }
            if (WITH_DKEY) {   // dK += dS^T Q
                __syncthreads();   // every warp is done with the dout tile, and with its weights
                query_reloader.load_async(num_queries);
                store_scores(weight_tile, row, lane, dscores);
                cp_async_wait_group<0>();
                __syncthreads();   // the query tile has landed again, and so has dS^T
                if (spoils_masked_keys(query_tile)) {
                    // Of the others it has made dS NaN, unless a score function made something finite of infinity.
                    if constexpr (CHANGES_SCORES) {
                        spread_nonfinite(dkey, query_columns, seen, lane);
                        __syncthreads();   // every warp has seen the queries
                    }
                    remove_nonfinite<NUM_THREADS>(query_tile, thread);
                    __syncthreads();   // they are gone
                }
                accumulate(dkey, [&](auto& sum) { multiply<WeightTile>(sum, weight_address, query_columns); });
            }
        }
        cp_async_wait_group<0>();   // of keys and values that no query of this batch sees
    }

    auto store = [&](const SummedOperand<ELEMENT>& gradient, auto tile, const auto& acc, ELEMENT factor, int head_dim) {
        store_accumulator<decltype(tile)>(
            acc, gradient.matrix(params.owner, owner, params.reduced, 0) + first_row_of_block * gradient.row_stride,
            gradient.row_stride, row, num_rows, head_dim, lane, [&](int, ELEMENT x) { return x * factor; });
    };
    if (WITH_DKEY) store(params.dkey, query_tile, dkey, params.scale, params.head_dim);
#if DROPOUT
    const ELEMENT value_factor = params.variant.keep_scale;
#else
    const ELEMENT value_factor = 1;
#endif
    if (WITH_DVALUE) store(params.dvalue, dout_tile, dvalue, value_factor, params.head_dim_v);
}
