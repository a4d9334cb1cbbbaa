// Gradient of queries on tensor cores, for float16 and bfloat16: dQ = scale dS K.
//
// One block owns BLOCK_M queries and walks over the key tiles that they see, as the forward does; P is
// rebuilt from lse. Where queries are broadcast, it sums over every batch that uses them, in a fixed
// order. Constants: ELEMENT, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES, BAND_RIGHT, and those of
// variant.cuh and numerics.cuh.

#include "common.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "mma.cuh"
#include "element.cuh"

using Compute = float;

#include "options.cuh"
#include "visible.cuh"
#include "mask.cuh"
#include "block_range.cuh"
#include "nonfinite.cuh"
#include "numerics.cuh"
#include "rounded.cuh"
#include "weight.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int M_TILES = BLOCK_M / NUM_WARPS / MMA_M;   // of a warp
constexpr int N_TILES = BLOCK_N / MMA_N;

static_assert(BLOCK_M == NUM_WARPS * M_TILES * MMA_M, "a warp owns whole 16-row tiles");

using QueryTile = SharedTile<BLOCK_M, HEAD_DIM>;
using DoutTile = SharedTile<BLOCK_M, HEAD_DIM_V>;
using KeyTile = SharedTile<BLOCK_N, HEAD_DIM>;
using ValueTile = SharedTile<BLOCK_N, HEAD_DIM_V>;
constexpr int STAGE_BYTES = KeyTile::BYTES + ValueTile::BYTES;

struct Params {
    SummedOperand<const uint16_t> query, key, value, dout;
    SummedOperand<uint16_t> dquery;
    RowValues lse_log2, delta;
    BatchShape owner, reduced;
    int num_reduced;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int band_left, band_right;   // key j is visible to query i iff i + band_left <= j <= i + band_right
    float scale_log2;       // softmax_scale * log2(e)
    float scale;
    VariantParams<SummedOperand> variant;
};

// At least one block per multiprocessor: ptxas would spill to have room for more than shared memory has.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) flash_bwd_dq(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const QueryTile query_tile{uint32_t(__cvta_generic_to_shared(shared))};
    const DoutTile dout_tile{query_tile.base + QueryTile::BYTES};
    const KeyTile key_tile{dout_tile.base + DoutTile::BYTES};   // of the first stage, as the next
    const ValueTile value_tile{key_tile.base + KeyTile::BYTES};

    const int thread = threadIdx.x, lane = thread % WARP_SIZE;
    const int warp = __shfl_sync(FULL_WARP, thread / WARP_SIZE, 0);   // tells the compiler that it is uniform
    const int num_query_tiles = ceil_div(params.seqlen_q, BLOCK_M);
    const int owner = blockIdx.x / num_query_tiles;
    // Under a causal mask the last queries see the most keys: longest blocks first.
    const int first_query = (num_query_tiles - 1 - blockIdx.x % num_query_tiles) * BLOCK_M;
    const int warp_row = warp * M_TILES * MMA_M;
#if LENGTHS == PADDED   // of each batch that is summed; the queries behind them have gradient 0
    const int64_t first_row = first_query;
    const int num_rows = min(BLOCK_M, params.seqlen_q - first_query);
#else
    auto own_rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, 0); };
    const Sequence sequence(params, own_rows);
    const KeyTiles all_tiles = key_tiles(first_query, sequence);
    const int64_t first_row = sequence.first_query + first_query;
    const int num_rows = min(BLOCK_M, sequence.seqlen_q - first_query), num_queries = num_rows;
    if (LENGTHS == PACKED && num_rows <= 0) return;   // a tile that only the longest sequences have
#endif

    const FragmentAddress query_address = fragment_address(query_tile, warp_row, lane);
    const FragmentAddress dout_address = fragment_address(dout_tile, warp_row, lane);
    const FragmentAddress key_column = fragment_address_b(key_tile, 0, lane);
    const FragmentAddress key_row = fragment_address(key_tile, 0, lane);
    const FragmentAddress value_column = fragment_address_b(value_tile, 0, lane);

    float dquery[M_TILES][HEAD_DIM / MMA_N][4] = {};

    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, reduced); };
#if LENGTHS == PADDED
        const Sequence sequence(params, rows);
        const int num_queries = min(BLOCK_M, sequence.seqlen_q - first_query);
        const KeyTiles all_tiles = key_tiles(first_query, sequence);
#endif
        KeyTiles tiles = all_tiles;
        tiles.take_block_mask(params, rows, first_query);
        // Rows without a query get nothing.
        if (LENGTHS == PADDED && num_queries < BLOCK_M) tiles.interior_end = tiles.begin;
        const ScoreFunction score_function(params, sequence, rows);
        const Dropout dropout(params, rows);
        TileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS>(
            query_tile, rows(params.query) + (sequence.first_query + first_query) * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread).load_async(num_queries);
        TileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS>(
            dout_tile, rows(params.dout) + (sequence.first_query + first_query) * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread).load_async(num_queries);
        TileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS> key_loader(
            key_tile, rows(params.key) + (sequence.first_key + tiles.begin * BLOCK_N) * params.key.row_stride,
            params.key.row_stride, params.head_dim, thread);
        TileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS> value_loader(
            value_tile, rows(params.value) + (sequence.first_key + tiles.begin * BLOCK_N) * params.value.row_stride,
            params.value.row_stride, params.head_dim_v, thread);

        const float* lse_log2_rows = rows(params.lse_log2) + sequence.first_query + first_query;
        const float* delta_rows = rows(params.delta) + sequence.first_query + first_query;
        float lse_log2[M_TILES][2], delta[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row + m * MMA_M + half * 8 + lane / 4;
                lse_log2[m][half] = row < num_queries ? lse_log2_rows[row] : 0.0f;
                delta[m][half] = row < num_queries ? delta_rows[row] : 0.0f;
            }

        float dslope[M_TILES][2] = {};
        int keys_left = sequence.seqlen_k - tiles.begin * BLOCK_N, stage = 0;
        auto fetch = [&](int stage) {
            key_loader.load_async(keys_left, stage);
            value_loader.load_async(keys_left, stage);
            keys_left -= BLOCK_N;
        };

        auto visit = [&](int tile, auto boundary) {
            cp_async_wait_group<0>();
            __syncthreads();   // this stage has landed, and every warp is done with the other
            const int next_tile = tiles.next(tile);
            if constexpr (BLOCK_MASK) {
                const int skipped = next_tile - tile - 1;
                key_loader.skip(skipped), value_loader.skip(skipped);
                keys_left -= skipped * BLOCK_N;
            }
            if (NUM_STAGES == 2 && next_tile < tiles.end) fetch(STAGE_BYTES - stage);

            // S = Q K^T, dP = dO V^T
            float scores[M_TILES][N_TILES][4] = {}, dweights[M_TILES][N_TILES][4] = {};
            mma_abt<ELEMENT, HEAD_DIM, QueryTile, KeyTile>(scores, query_address, key_column + stage);
            mma_abt<ELEMENT, HEAD_DIM_V, DoutTile, ValueTile>(dweights, dout_address, value_column + stage);

            const TileMask<M_TILES> mask(
                int64_t(first_query) + warp_row, tile * BLOCK_N, sequence, lane);
            auto final_score_of = [&](int m, int n, int i) {
                const int half = i / 2, column = n * MMA_N + lane % 4 * 2 + i % 2;
                return final_score(score_function, sequence, scores[m][n][i],
                                   first_query + warp_row + m * MMA_M + half * 8 + lane / 4, tile * BLOCK_N + column,
                                   !boundary.value || mask.visible(m, half, column));
            };
            auto dscore_pair = [&](int m, int n, int half) {
                const float* dweight = dweights[m][n] + 2 * half;
                const float2 row_lse = {lse_log2[m][half], lse_log2[m][half]};
                const float2 row_delta = {delta[m][half], delta[m][half]};
                if constexpr (PAIR_BY_PAIR) {
                    return DscorePair(final_score_of(m, n, 2 * half), final_score_of(m, n, 2 * half + 1), dweight,
                                      row_lse, row_delta);
                } else {
                    const int column = n * MMA_N + lane % 4 * 2;
                    const bool visible_x = !boundary.value || mask.visible(m, half, column);
                    const bool visible_y = !boundary.value || mask.visible(m, half, column + 1);
                    float* score = scores[m][n] + 2 * half;
                    to_weights(score, params.scale_log2, row_lse, visible_x, visible_y);
                    return DscorePair(score, dweight, row_delta, visible_x, visible_y);
                }
            };
            // Without a causal mask all queries see the same keys, and the branch serves the compiler alone: it keeps
            // the registers of the products before and after it apart.
            if constexpr (boundary.value) {
                if (__syncthreads_or(holds_nonfinite<ELEMENT>(key_loader, stage))) {
                    const KeyTile keys{key_tile.base + stage};
                    if constexpr (REMOVES_ANYWHERE) {
                        const SeenColumns<M_TILES, N_TILES> seen(
                            lane, [&](int m, int n, int i) { return final_score_of(m, n, i).value != -infinity(); });
                        spread_nonfinite<ELEMENT>(dquery, keys, seen, lane);
                    } else {
                        spread_nonfinite<ELEMENT>(dquery, keys, mask, lane);
                    }
                    __syncthreads();   // every warp has seen the keys
                    remove_nonfinite<ELEMENT>(key_loader, stage);
                    __syncthreads();   // they are gone
                }
            }

            // dQ += dS K, 16 keys at a time
            accumulate(dquery, [&](auto& dquery) {
#pragma unroll
                for (int k = 0; k < BLOCK_N / MMA_K; ++k) {
                    Rounded<ELEMENT, M_TILES> dscore;
#pragma unroll
                    for (int n = 2 * k; n < 2 * k + 2; ++n)
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int query = first_query + warp_row + m * MMA_M + half * 8 + lane / 4;
                                const int key = tile * BLOCK_N + n * MMA_N + lane % 4 * 2;
#if DROPOUT
                                dropout.scale(dweights[m][n] + 2 * half, dropout.kept_keys(query, key));
#endif
                                const DscorePair pair = dscore_pair(m, n, half);
#if WITH_DSLOPE
                                dslope[m][half] = __fmaf_rn(-pair.dfinal.x, score_function.distance(query, key),
                                                            dslope[m][half]);
                                dslope[m][half] = __fmaf_rn(-pair.dfinal.y, score_function.distance(query, key + 1),
                                                            dslope[m][half]);
#endif
                                dscore.set(m, n % 2 * 2 + half, pair.dscore);
                            }
                    dscore.multiply(dquery, key_row + stage + k * MMA_K * KeyTile::ROW_BYTES);
                }
            });
            if (NUM_STAGES == 2) {
                stage = STAGE_BYTES - stage;
            } else if (next_tile < tiles.end) {
                __syncthreads();   // every warp is done with the only stage
                fetch(0);
            }
        };
        if (tiles.begin < tiles.end) fetch(0);
        for_each_tile(tiles, visit);
        cp_async_wait_group<0>();
        __syncthreads();   // every warp is done with all tiles, and no copy is under way

#if WITH_DSLOPE
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                dslope[m][half] += __shfl_xor_sync(FULL_WARP, dslope[m][half], 1);
                dslope[m][half] += __shfl_xor_sync(FULL_WARP, dslope[m][half], 2);
                const int row = warp_row + m * MMA_M + half * 8 + lane / 4;
                if (lane % 4 == 0 && row < num_rows)
                    rows(params.variant.dslope_rows)[first_row + row] = dslope[m][half];
            }
#endif
    }

    store_fragments<ELEMENT>(query_tile, warp_row, dquery, params.scale, lane);
    __syncwarp();   // a warp stores only the rows that it wrote
    uint16_t* matrix = params.dquery.matrix(params.owner, owner, params.reduced, 0);
    store_rows<M_TILES * MMA_M>(query_tile, warp_row, matrix + first_row * params.dquery.row_stride,
                                params.dquery.row_stride, num_rows, params.head_dim, lane);
}
