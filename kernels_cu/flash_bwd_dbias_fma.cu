// Gradient of the bias in float32 or float64 throughout: sums of P * (dP - delta).
//
// The algorithm of flash_bwd_dbias.cu with the register tiles of fma.cuh. V and K take turns in one buffer. Constants:
// ELEMENT (float or double), HEAD_DIM, HEAD_DIM_V (whole 128-byte lines; the true sizes come at run time), BLOCK_M,
// BLOCK_N, NUM_WARPS, those of dbias.cuh, variant.cuh and numerics.cuh.

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
#include "weight_fma.cuh"
#include "dbias.cuh"

using QueryTile = FmaTile<BLOCK_M, HEAD_DIM>;
using DoutTile = FmaTile<BLOCK_M, HEAD_DIM_V>;
using ValueTile = FmaTile<BLOCK_N, HEAD_DIM_V>;
using KeyTile = FmaTile<BLOCK_N, HEAD_DIM>;   // takes turns with the value tile

struct Params {
    SummedOperand<const ELEMENT> query, key, value, dout;
    SummedOperand<DbiasBits> dbias;
    SummedOperand<const ELEMENT> lse, delta;   // one per query: row_stride is 1
    BatchShape owner, reduced;
    int num_reduced;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int band_left, band_right;   // key j is visible to query i iff i + band_left <= j <= i + band_right
    ELEMENT scale;
    VariantParams<SummedOperand> variant;
    int64_t dbias_column_stride;
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS) flash_bwd_dbias_fma(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const QueryTile query_tile{uint32_t(__cvta_generic_to_shared(shared))};
    const DoutTile dout_tile{query_tile.base + QueryTile::BYTES};
    const ValueTile value_tile{dout_tile.base + DoutTile::BYTES};
    const KeyTile key_tile{value_tile.base};

    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    const BiasTile own(params);
    const int row = first_row(warp, lane), column = lane % ROW_LANES;
    const uint32_t query_address = query_tile.address(row, 0), dout_address = dout_tile.address(row, 0);
    const uint32_t key_address = key_tile.address(column, 0), value_address = value_tile.address(column, 0);

    Scores dbias = {};

    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) {
            return operand.matrix(params.owner, own.owner, params.reduced, reduced);
        };
        const Sequence sequence(params, rows);
        const BiasTile::Walk walk = own.walk(sequence);
        int first_query = SUM_QUERIES ? walk.begin * BLOCK_M : own.first_query;
        int first_key = SUM_KEYS ? walk.begin * BLOCK_N : own.first_key;
        FmaTileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS> query_loader(
            query_tile, rows(params.query) + (sequence.first_query + first_query) * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread);
        FmaTileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS> dout_loader(
            dout_tile, rows(params.dout) + (sequence.first_query + first_query) * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread);
        const ELEMENT* lse_rows = rows(params.lse) + sequence.first_query;
        const ELEMENT* delta_rows = rows(params.delta) + sequence.first_query;
        const ScoreFunction score_function(params, sequence, rows);
        const Dropout dropout(params, rows);

        for (int tile = walk.begin; tile < walk.end; ++tile) {
            const int num_keys = sequence.seqlen_k - first_key;
            ELEMENT lse[THREAD_ROWS], delta[THREAD_ROWS];
#pragma unroll
            for (int m = 0; m < THREAD_ROWS; ++m) {
                const int query = first_query + row + row_step(m);
                const bool exists = query < sequence.seqlen_q;
                lse[m] = exists ? lse_rows[query] : ELEMENT(0);
                delta[m] = exists ? delta_rows[query] : ELEMENT(0);
            }
            __syncthreads();   // every warp is done with the last tiles
            if (SUM_QUERIES || tile == walk.begin) {
                query_loader.load_async(sequence.seqlen_q - first_query);
                dout_loader.load_async(sequence.seqlen_q - first_query);
            }
            FmaTileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS>(
                value_tile, rows(params.value) + (sequence.first_key + first_key) * params.value.row_stride,
                params.value.row_stride, params.head_dim_v, thread).load_async(num_keys);
            cp_async_wait_group<0>();
            __syncthreads();   // the tiles have landed

            // dP = dO V^T
            Scores dweights = {};
            multiply_transposed<DoutTile, ValueTile>(dweights, dout_address, value_address);
            __syncthreads();   // every warp is done with the value tile
            FmaTileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS>(
                key_tile, rows(params.key) + (sequence.first_key + first_key) * params.key.row_stride,
                params.key.row_stride, params.head_dim, thread).load_async(num_keys);
            cp_async_wait_group<0>();
            __syncthreads();   // the key tile has landed

            // S = Q K^T
            Scores scores = {};
            multiply_transposed<QueryTile, KeyTile>(scores, query_address, key_address);
            const RowMask mask(int64_t(first_query) + row, first_key, num_keys, sequence);
            for_each_pair(first_query + row, first_key + column, [&](int m, int n, int i, int j) {
                const Dual score =
                    final_score(score_function, sequence, scores[m][n], i, j, mask.visible(m, j - first_key));
                if (score.value == -infinity()) return;
#if DROPOUT
                dweights[m][n] *= dropout.keeps(i, j) ? dropout.keep_scale : ELEMENT(0);
#endif
                dbias[m][n] += weight_of(score.value, lse[m]) * (dweights[m][n] - delta[m]);
            });
            if (SUM_QUERIES)
                first_query += BLOCK_M;
            else
                first_key += BLOCK_N;
        }
    }

    if constexpr (SUM_QUERIES) {
        // Sums over the queries of each warp, in the place of the tiles.
        static_assert(NUM_WARPS * BLOCK_N * sizeof(ELEMENT) <= QueryTile::BYTES, "the sums fit into one tile");
        ELEMENT(*partial)[BLOCK_N] = reinterpret_cast<ELEMENT(*)[BLOCK_N]>(shared);
        __syncthreads();   // every warp is done with the tiles
#pragma unroll
        for (int n = 0; n < THREAD_COLUMNS; ++n) {
            ELEMENT sum = 0;
#pragma unroll
            for (int m = 0; m < THREAD_ROWS; ++m) sum += dbias[m][n];
            sum += __shfl_xor_sync(FULL_WARP, sum, ROW_LANES);
            if (lane < ROW_LANES) partial[warp][column + n * ROW_LANES] = sum;
        }
        __syncthreads();   // the sums of all warps are there
        own.store_column_sums(params, partial);
    } else {
        const BiasGradient target = own.gradient(params);
#pragma unroll
        for (int m = 0; m < THREAD_ROWS; ++m) {
            const int i = own.first_query + row + row_step(m);
            ELEMENT sum = 0;
#pragma unroll
            for (int n = 0; n < THREAD_COLUMNS; ++n) {
                const int j = own.first_key + column + n * ROW_LANES;
                if constexpr (SUM_KEYS)
                    sum += dbias[m][n];
                else if (i < params.seqlen_q && j < params.seqlen_k)
                    target.store(i, j, dbias[m][n]);
            }
            if constexpr (SUM_KEYS) {
                for (int lanes = 1; lanes < ROW_LANES; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
                if (column == 0 && i < params.seqlen_q) target.store(i, 0, sum);
            }
        }
    }
}
