// Gradient of queries in float32 or float64 throughout: dQ = scale dS K.
//
// The algorithm of flash_bwd_dq.cu with the register tiles of fma.cuh. V and K take turns in one buffer: dP
// needs V, and then S and dQ need K. Constants: ELEMENT (float or double), HEAD_DIM, HEAD_DIM_V (whole 128-byte lines;
// the true sizes come at run time), BLOCK_M, BLOCK_N, NUM_WARPS, BAND_RIGHT, and those of variant.cuh and numerics.cuh.

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
constexpr int TILE_ROWS = BLOCK_M, TILE_COLUMNS = BLOCK_N;

#include "fma.cuh"
#include "mask_fma.cuh"
#include "pairs_fma.cuh"
#include "nonfinite_fma.cuh"
#include "weight_fma.cuh"

using QueryTile = FmaTile<BLOCK_M, HEAD_DIM>;
using DoutTile = FmaTile<BLOCK_M, HEAD_DIM_V>;
using DscoreTile = FmaTile<BLOCK_M, BLOCK_N>;
using ValueTile = FmaTile<BLOCK_N, HEAD_DIM_V>;
using KeyTile = FmaTile<BLOCK_N, HEAD_DIM>;   // takes turns with the value tile

struct Params {
    SummedOperand<const ELEMENT> query, key, value, dout;
    SummedOperand<ELEMENT> dquery;
    SummedOperand<const ELEMENT> lse, delta;   // one per query: row_stride is 1
    BatchShape owner, reduced;
    int num_reduced;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int band_left, band_right;   // key j is visible to query i iff i + band_left <= j <= i + band_right
    ELEMENT scale;
    VariantParams<SummedOperand> variant;
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS) flash_bwd_dq_fma(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const QueryTile query_tile{uint32_t(__cvta_generic_to_shared(shared))};
    const DoutTile dout_tile{query_tile.base + QueryTile::BYTES};
    const DscoreTile dscore_tile{dout_tile.base + DoutTile::BYTES};
    const ValueTile value_tile{dscore_tile.base + DscoreTile::BYTES};
    const KeyTile key_tile{value_tile.base};

    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    const int num_query_tiles = ceil_div(params.seqlen_q, BLOCK_M);
    const int owner = blockIdx.x / num_query_tiles;
    // Under a causal mask the last queries see the most keys: longest blocks first.
    const int first_query = (num_query_tiles - 1 - blockIdx.x % num_query_tiles) * BLOCK_M;
#if LENGTHS == PACKED
    const Sequence own(params, [&](const auto& x) { return x.matrix(params.owner, owner, params.reduced, 0); });
    const int num_rows = min(BLOCK_M, own.seqlen_q - first_query);   // of the gradient
    if (num_rows <= 0) return;   // a tile that only the longest sequences have
    const int64_t first_row_of_block = own.first_query + first_query;
#else
    const int num_rows = min(BLOCK_M, params.seqlen_q - first_query);   // also those behind a length, whose rows are 0
    const int64_t first_row_of_block = first_query;
#endif

    const int row = first_row(warp, lane), column = lane % ROW_LANES;
    const uint32_t query_address = query_tile.address(row, 0), dout_address = dout_tile.address(row, 0);
    const uint32_t dscore_address = dscore_tile.address(row, 0);
    const uint32_t key_address = key_tile.address(column, 0), value_address = value_tile.address(column, 0);
    const Columns<KeyTile> columns(key_tile, lane);

    Accumulator<KeyTile> dquery = {};

    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, reduced); };
        const Sequence sequence(params, rows);
        const int num_queries = min(BLOCK_M, sequence.seqlen_q - first_query);
        KeyTiles tiles = key_tiles(first_query, sequence);
        tiles.take_block_mask(params, rows, first_query);
        if (LENGTHS && num_queries < BLOCK_M) tiles.interior_end = tiles.begin;   // rows without a query get nothing
        const ScoreFunction score_function(params, sequence, rows);
        const Dropout dropout(params, rows);
        FmaTileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS>(
            query_tile, rows(params.query) + (sequence.first_query + first_query) * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread).load_async(num_queries);
        FmaTileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS>(
            dout_tile, rows(params.dout) + (sequence.first_query + first_query) * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread).load_async(num_queries);
        FmaTileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS> key_loader(
            key_tile, rows(params.key) + (sequence.first_key + tiles.begin * BLOCK_N) * params.key.row_stride,
            params.key.row_stride, params.head_dim, thread);
        FmaTileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS> value_loader(
            value_tile, rows(params.value) + (sequence.first_key + tiles.begin * BLOCK_N) * params.value.row_stride,
            params.value.row_stride, params.head_dim_v, thread);

        const ELEMENT* lse = rows(params.lse) + sequence.first_query + first_query;
        const ELEMENT* deltas = rows(params.delta) + sequence.first_query + first_query;
        ELEMENT shift[THREAD_ROWS], delta[THREAD_ROWS], dslope[THREAD_ROWS] = {};   // dslope: this lane's part
#pragma unroll
        for (int m = 0; m < THREAD_ROWS; ++m) {
            const int query = row + row_step(m);
            const bool exists = query < num_queries;
            shift[m] = exists ? weight_shift(lse[query]) : ELEMENT(0);
            delta[m] = exists ? deltas[query] : ELEMENT(0);
        }

        for (int tile = tiles.begin; tile < tiles.end; tile = tiles.next(tile)) {
            const int first_key = tile * BLOCK_N, num_keys = sequence.seqlen_k - first_key;
            __syncthreads();   // every warp is done with the last key tile
            value_loader.load_async(num_keys);
            cp_async_wait_group<0>();
            __syncthreads();   // the value tile has landed, and before the first the queries and dout

            // dP = dO V^T
            Scores dscores = {};
            multiply_transposed<DoutTile, ValueTile>(dscores, dout_address, value_address);
            __syncthreads();   // every warp is done with the value tile
            key_loader.load_async(num_keys);
            if constexpr (BLOCK_MASK) {
                const int skipped = tiles.next(tile) - tile - 1;
                key_loader.skip(skipped), value_loader.skip(skipped);
            }
            cp_async_wait_group<0>();
            __syncthreads();   // the key tile has landed

            // S = Q K^T, dS = P * (dP - delta). What is masked is selected, so that no NaN of it survives.
            Scores scores = {};
            multiply_transposed<QueryTile, KeyTile>(scores, query_address, key_address);
            const RowMask mask(int64_t(first_query) + row, first_key, num_keys, sequence);
            PairBits seen;
#if DROPOUT
            for_each_pair(first_query + row, first_key + column, [&](int m, int n, int i, int j) {
                dscores[m][n] *= dropout.keeps(i, j) ? dropout.keep_scale : ELEMENT(0);
            });
#endif
            if constexpr (PAIR_BY_PAIR) {
                for_each_pair(first_query + row, first_key + column, [&](int m, int n, int i, int j) {
                    const Dual score = final_score(score_function, sequence, scores[m][n], i, j,
                                                   mask.visible(m, j - first_key));
                    const bool counts = score.value != -infinity();
                    const ELEMENT dfinal = weight_of(score.value, shift[m]) * (dscores[m][n] - delta[m]);
                    dscores[m][n] = counts ? dfinal * score.derivative : ELEMENT(0);
                    seen.add(m, n, counts);
#if WITH_DSLOPE
                    if (counts) dslope[m] = fma(-dfinal, score_function.distance(i, j), dslope[m]);
#endif
                });
            } else {
#pragma unroll
                for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
                    for (int n = 0; n < THREAD_COLUMNS; ++n) {
                        const ELEMENT weight = weight_of(scores[m][n], params.scale, shift[m]);
                        const ELEMENT dscore = weight * (dscores[m][n] - delta[m]);
                        dscores[m][n] = mask.visible(m, column + n * ROW_LANES) ? dscore : ELEMENT(0);
                    }
            }
            store_scores(dscore_tile, row, lane, dscores);
            __syncwarp();   // only the lanes of a warp share its rows

            if ((BANDED || LENGTHS || REMOVES_ANYWHERE) && tiles.cut(tile) &&
                __syncthreads_or(holds_nonfinite<NUM_THREADS>(key_tile, thread))) {
                // Of the queries that see such a key it has made dS NaN, unless a score function made something finite
                // of infinity.
                if constexpr (CHANGES_SCORES) {
                    spread_nonfinite(dquery, columns, seen, lane);
                    __syncthreads();   // every warp has seen the keys
                }
                remove_nonfinite<NUM_THREADS>(key_tile, thread);
                __syncthreads();   // they are gone
            }
            accumulate(dquery, [&](auto& sum) { multiply<DscoreTile>(sum, dscore_address, columns); });
        }
        cp_async_wait_group<0>();
        __syncthreads();   // every warp is done with the queries and dout, and no copy is under way
#if WITH_DSLOPE
#pragma unroll
        for (int m = 0; m < THREAD_ROWS; ++m) {
#pragma unroll
            for (int lanes = ROW_LANES / 2; lanes > 0; lanes /= 2)
                dslope[m] += __shfl_xor_sync(FULL_WARP, dslope[m], lanes);
            if (column == 0 && row + row_step(m) < num_rows)
                rows(params.variant.dslope_rows)[first_row_of_block + row + row_step(m)] = dslope[m];
        }
#endif
    }

    store_accumulator<KeyTile>(
        dquery,
        params.dquery.matrix(params.owner, owner, params.reduced, 0) + first_row_of_block * params.dquery.row_stride,
        params.dquery.row_stride, row, num_rows, params.head_dim, lane,
        [&](int, ELEMENT x) { return x * params.scale; });
}
