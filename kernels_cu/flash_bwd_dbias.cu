// Gradient of the bias on tensor cores, for float16 and bfloat16: the bias is added to the final scores, so that it is
// the sum of their gradients, P * (dP - delta), over all pairs that share an element of the bias.
//
// One block owns a tile of the gradient and sums over every batch that shares it, in a fixed order; P is rebuilt from
// lse. Constants: ELEMENT, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, NUM_WARPS, those of dbias.cuh, variant.cuh and
// numerics.cuh.

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
#include "numerics.cuh"
#include "weight.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int M_TILES = BLOCK_M / NUM_WARPS / MMA_M;   // of a warp
constexpr int N_TILES = BLOCK_N / MMA_N;

#include "dbias.cuh"

static_assert(BLOCK_M == NUM_WARPS * M_TILES * MMA_M, "a warp owns whole 16-row tiles");

using QueryTile = SharedTile<BLOCK_M, HEAD_DIM>;
using DoutTile = SharedTile<BLOCK_M, HEAD_DIM_V>;
using KeyTile = SharedTile<BLOCK_N, HEAD_DIM>;
using ValueTile = SharedTile<BLOCK_N, HEAD_DIM_V>;

struct Params {
    SummedOperand<const uint16_t> query, key, value, dout;
    SummedOperand<DbiasBits> dbias;
    RowValues lse_log2, delta;
    BatchShape owner, reduced;
    int num_reduced;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int band_left, band_right;   // key j is visible to query i iff i + band_left <= j <= i + band_right
    float scale_log2;            // softmax_scale * log2(e)
    float scale;
    VariantParams<SummedOperand> variant;
    int64_t dbias_column_stride;
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS) flash_bwd_dbias(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const QueryTile query_tile{uint32_t(__cvta_generic_to_shared(shared))};
    const DoutTile dout_tile{query_tile.base + QueryTile::BYTES};
    const KeyTile key_tile{dout_tile.base + DoutTile::BYTES};
    const ValueTile value_tile{key_tile.base + KeyTile::BYTES};

    const int thread = threadIdx.x, lane = thread % WARP_SIZE;
    const int warp = __shfl_sync(FULL_WARP, thread / WARP_SIZE, 0);   // tells the compiler that it is uniform
    const int warp_row = warp * M_TILES * MMA_M;
    const BiasTile own(params);

    const FragmentAddress query_address = fragment_address(query_tile, warp_row, lane);
    const FragmentAddress dout_address = fragment_address(dout_tile, warp_row, lane);
    const FragmentAddress key_address = fragment_address_b(key_tile, 0, lane);
    const FragmentAddress value_address = fragment_address_b(value_tile, 0, lane);

    float dbias[M_TILES][N_TILES][4] = {};

    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) {
            return operand.matrix(params.owner, own.owner, params.reduced, reduced);
        };
        const Sequence sequence(params, rows);
        const BiasTile::Walk walk = own.walk(sequence);
        int first_query = SUM_QUERIES ? walk.begin * BLOCK_M : own.first_query;
        int first_key = SUM_KEYS ? walk.begin * BLOCK_N : own.first_key;
        TileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS> query_loader(
            query_tile, rows(params.query) + (sequence.first_query + first_query) * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread);
        TileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS> dout_loader(
            dout_tile, rows(params.dout) + (sequence.first_query + first_query) * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread);
        TileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS> key_loader(
            key_tile, rows(params.key) + (sequence.first_key + first_key) * params.key.row_stride,
            params.key.row_stride, params.head_dim, thread);
        TileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS> value_loader(
            value_tile, rows(params.value) + (sequence.first_key + first_key) * params.value.row_stride,
            params.value.row_stride, params.head_dim_v, thread);
        const float* lse_log2_rows = rows(params.lse_log2) + sequence.first_query;
        const float* delta_rows = rows(params.delta) + sequence.first_query;
        const ScoreFunction score_function(params, sequence, rows);
        const Dropout dropout(params, rows);

        for (int tile = walk.begin; tile < walk.end; ++tile) {
            __syncthreads();   // every warp is done with the last tiles
            if (SUM_QUERIES || tile == walk.begin) {
                query_loader.load_async(sequence.seqlen_q - first_query);
                dout_loader.load_async(sequence.seqlen_q - first_query);
            }
            if (!SUM_QUERIES || tile == walk.begin) {
                key_loader.load_async(sequence.seqlen_k - first_key);
                value_loader.load_async(sequence.seqlen_k - first_key);
            }
            cp_async_wait_group<0>();
            __syncthreads();   // the tiles have landed

            // S = Q K^T, dP = dO V^T
            float scores[M_TILES][N_TILES][4] = {}, dweights[M_TILES][N_TILES][4] = {};
            mma_abt<ELEMENT, HEAD_DIM, QueryTile, KeyTile>(scores, query_address, key_address);
            mma_abt<ELEMENT, HEAD_DIM_V, DoutTile, ValueTile>(dweights, dout_address, value_address);

            const TileMask<M_TILES> mask(int64_t(first_query) + warp_row, first_key, sequence, lane);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = first_query + warp_row + m * MMA_M + half * 8 + lane / 4;
                    if (i >= sequence.seqlen_q) continue;
                    // The same query for both keys of a pair.
                    const float2 lse_log2 = {lse_log2_rows[i], lse_log2_rows[i]};
                    const float2 delta = {delta_rows[i], delta_rows[i]};
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n) {
                        const int column = n * MMA_N + lane % 4 * 2, j = first_key + column;
                        const float* score = scores[m][n] + 2 * half;
                        float* dweight = dweights[m][n] + 2 * half;
#if DROPOUT
                        dropout.scale(dweight, dropout.kept_keys(i, j));
#endif
                        auto final_score_of = [&](int e) {
                            return final_score(score_function, sequence, score[e], i, j + e,
                                               mask.visible(m, half, column + e));
                        };
                        const DscorePair pair(final_score_of(0), final_score_of(1), dweight, lse_log2, delta);
                        dbias[m][n][2 * half] += pair.dfinal.x;
                        dbias[m][n][2 * half + 1] += pair.dfinal.y;
                    }
                }
            if (SUM_QUERIES)
                first_query += BLOCK_M;
            else
                first_key += BLOCK_N;
        }
    }

    if constexpr (SUM_QUERIES) {
        // Sums over the queries of each warp, in the place of the tiles.
        static_assert(NUM_WARPS * BLOCK_N * sizeof(float) <= QueryTile::BYTES, "the sums fit into one tile");
        float(*partial)[BLOCK_N] = reinterpret_cast<float(*)[BLOCK_N]>(shared);
        __syncthreads();   // every warp is done with the tiles
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = 0.0f;
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) sum += dbias[m][n][e] + dbias[m][n][2 + e];
                for (int lanes = 4; lanes < WARP_SIZE; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
                if (lane < 4) partial[warp][n * MMA_N + lane * 2 + e] = sum;
            }
        __syncthreads();   // the sums of all warps are there
        own.store_column_sums(params, partial);
    } else {
        const BiasGradient target = own.gradient(params);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = own.first_query + warp_row + m * MMA_M + half * 8 + lane / 4;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int j = own.first_key + n * MMA_N + lane % 4 * 2 + e;
                        const float value = dbias[m][n][2 * half + e];
                        if constexpr (SUM_KEYS)
                            sum += value;
                        else if (i < params.seqlen_q && j < params.seqlen_k)
                            target.store(i, j, value);
                    }
                if constexpr (SUM_KEYS) {
                    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
                    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
                    if (lane % 4 == 0 && i < params.seqlen_q) target.store(i, 0, sum);
                }
            }
    }
}
