// Gradient of queries in float32 or float64 throughout: dQ = scale dS K.
//
// The algorithm of flash_bwd_dq.cu with the register tiles of fma.cuh. V and K take turns in one buffer: dP
// needs V, and then S and dQ need K. Each tile's dS K starts from zero (two-level sums). Constants:
// ELEMENT (float or double), HEAD_DIM, HEAD_DIM_V (whole 128-byte lines; the true sizes come at run time), BLOCK_M,
// BLOCK_N, NUM_WARPS, BAND_RIGHT.

#include "common.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "element.cuh"

using Compute = ELEMENT;

#include "dual.cuh"
#include "philox.cuh"
#include "variant.cuh"
#include "sequence.cuh"
#include "score.cuh"
#include "dropout.cuh"
#include "visible.cuh"
#include "block_range.cuh"

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
    const int num_queries = min(BLOCK_M, params.seqlen_q - first_query);
    const Sequence sequence(params, [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, 0); });
    const KeyTiles tiles = key_tiles(first_query, sequence);

    const int row = first_row(warp, lane), column = lane % ROW_LANES;
    const uint32_t query_address = query_tile.address(row, 0), dout_address = dout_tile.address(row, 0);
    const uint32_t dscore_address = dscore_tile.address(row, 0);
    const uint32_t key_address = key_tile.address(column, 0), value_address = value_tile.address(column, 0);
    const Columns<KeyTile> columns(key_tile, lane);

    Accumulator<KeyTile> dquery = {};

    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, reduced); };
        FmaTileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS>(
            query_tile, rows(params.query) + first_query * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread).load_async(num_queries);
        FmaTileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS>(
            dout_tile, rows(params.dout) + first_query * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread).load_async(num_queries);
        FmaTileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS> key_loader(
            key_tile, rows(params.key), params.key.row_stride, params.head_dim, thread);
        FmaTileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS> value_loader(
            value_tile, rows(params.value), params.value.row_stride, params.head_dim_v, thread);

        ELEMENT shift[THREAD_ROWS], delta[THREAD_ROWS];
#pragma unroll
        for (int m = 0; m < THREAD_ROWS; ++m) {
            const int query = row + row_step(m);
            const bool exists = query < num_queries;
            shift[m] = exists ? weight_shift(rows(params.lse)[first_query + query]) : ELEMENT(0);
            delta[m] = exists ? rows(params.delta)[first_query + query] : ELEMENT(0);
        }

        for (int tile = 0; tile < tiles.end; ++tile) {
            const int first_key = tile * BLOCK_N, num_keys = params.seqlen_k - first_key;
            __syncthreads();   // every warp is done with the last key tile
            value_loader.load_async(num_keys);
            cp_async_wait_group<0>();
            __syncthreads();   // the value tile has landed, and before the first the queries and dout

            // dP = dO V^T
            Scores dscores = {};
            multiply_transposed<DoutTile, ValueTile>(dscores, dout_address, value_address);
            __syncthreads();   // every warp is done with the value tile
            key_loader.load_async(num_keys);
            cp_async_wait_group<0>();
            __syncthreads();   // the key tile has landed

            // S = Q K^T, dS = P * (dP - delta). What is masked is selected, so that no NaN of it survives.
            Scores scores = {};
            multiply_transposed<QueryTile, KeyTile>(scores, query_address, key_address);
            const RowMask mask(int64_t(first_query) + row, first_key, num_keys, sequence);
#pragma unroll
            for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
                for (int n = 0; n < THREAD_COLUMNS; ++n) {
                    const ELEMENT weight = weight_of(scores[m][n], params.scale, shift[m]);
                    const ELEMENT dscore = weight * (dscores[m][n] - delta[m]);
                    dscores[m][n] = mask.visible(m, column + n * ROW_LANES) ? dscore : ELEMENT(0);
                }
            store_scores(dscore_tile, row, lane, dscores);
            __syncwarp();   // only the lanes of a warp share its rows

            if (BAND_RIGHT && tile >= tiles.interior_end &&
                __syncthreads_or(holds_nonfinite<NUM_THREADS>(key_tile, thread))) {
                // Of the queries that see such a key it has made dS NaN.
                remove_nonfinite<NUM_THREADS>(key_tile, thread);
                __syncthreads();   // they are gone
            }
            Accumulator<KeyTile> tile_dquery = {};
            multiply<DscoreTile>(tile_dquery, dscore_address, columns);
            add<KeyTile>(dquery, tile_dquery);
        }
    }

    store_accumulator<KeyTile>(
        dquery, params.dquery.matrix(params.owner, owner, params.reduced, 0) + first_query * params.dquery.row_stride,
        params.dquery.row_stride, row, num_queries, params.head_dim, lane,
        [&](int, ELEMENT x) { return x * params.scale; });
}
