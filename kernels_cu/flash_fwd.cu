// Exact attention, forward, on tensor cores, for float16 and bfloat16: O = softmax(scale Q K^T) V.
//
// One block owns BLOCK_M queries of one head and walks over the key tiles that they see. The scores
// of a tile live in registers only (FlashAttention-2: Dao 2023, algorithm 1): device memory holds no
// N x N array. Constants: ELEMENT (Half or BFloat16), HEAD_DIM, HEAD_DIM_V (multiples of 16; the true sizes come
// at run time), BLOCK_M, BLOCK_N, NUM_WARPS, BAND_RIGHT, SCALE_POSITIVE, and those of variant.cuh and numerics.cuh.

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
#include "split.cuh"
#include "query_rows.cuh"
#include "numerics.cuh"
#include "rounded.cuh"
#include "softmax.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int M_TILES = BLOCK_M / NUM_WARPS / MMA_M;   // of a warp
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr int DIM_TILES = HEAD_DIM_V / MMA_N;

// The step of O += P V before which the next key tile is fetched: the copy takes registers, and those of the
// scores of earlier steps are free by then.
constexpr int PREFETCH_STEP = BLOCK_N < 4 * MMA_K ? BLOCK_N / MMA_K / 2 : 2;

// Whether a tile's scores leave no registers for addresses of queries that are kept from tile to tile: they are added
// up anew, from those of the values, which differ by the rows of a warp.
constexpr bool ADD_QUERY_ADDRESSES = BLOCK_N > HEAD_DIM_V;

static_assert(!STACKED || !(DROPOUT || BLOCK_MASK || LENGTHS == PACKED), "these do not tell stacked heads apart");
static_assert(BLOCK_M == NUM_WARPS * M_TILES * MMA_M, "a warp owns whole 16-row tiles");
static_assert(HEAD_DIM % MMA_K == 0 && HEAD_DIM_V % MMA_K == 0 && BLOCK_N % MMA_K == 0, "whole mma steps");

using QueryTile = SharedTile<BLOCK_M, HEAD_DIM>;
using KeyTile = SharedTile<BLOCK_N, HEAD_DIM>;
using ValueTile = SharedTile<BLOCK_N, HEAD_DIM_V>;
using OutTile = SharedTile<BLOCK_M, HEAD_DIM_V>;       // takes the place of the query tile

struct Params {
    Operand<const uint16_t> query, key, value;
    Operand<uint16_t> out;
    float* lse;             // (batch, seqlen_q), natural logarithm; null where it is not wanted
    BatchShape batch;
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int band_left, band_right;   // key j is visible to query i iff i + band_left <= j <= i + band_right
    float scale_log2;            // softmax_scale * log2(e)
    float scale;
    VariantParams<Operand> variant;
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS) flash_fwd(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t shared_base = uint32_t(__cvta_generic_to_shared(shared));
    const QueryTile query_tile{shared_base};
    const OutTile out_tile{shared_base};
    const KeyTile key_tile{shared_base + max_of(QueryTile::BYTES, OutTile::BYTES)};
    const ValueTile value_tile{key_tile.base + KeyTile::BYTES};

    const int thread = threadIdx.x, lane = thread % WARP_SIZE;
    const int warp = __shfl_sync(FULL_WARP, thread / WARP_SIZE, 0);   // tells the compiler that it is uniform
    // Stacked heads are one matrix here, whose rows count as its queries; the batch is that of the first head.
    const int heads = stacked_heads(params);
    const int num_query_tiles = ceil_div(heads * params.seqlen_q, BLOCK_M);
    const BlockOfSplit block(params, blockIdx.x);
    const int batch = block.index / num_query_tiles * heads;
    // Under a causal mask the last queries see the most keys: longest blocks first.
    const int first_query = (num_query_tiles - 1 - block.index % num_query_tiles) * BLOCK_M;
    auto rows = [&](const auto& operand) { return operand.matrix(params.batch, batch); };
    Sequence sequence(params, rows);
    sequence.take_split(params, block.split);
    const int num_queries = min(BLOCK_M, sequence.num_rows - first_query);   // none, in some blocks of short sequences
    if (LENGTHS == PACKED && num_queries <= 0) return;   // a tile that only the longest sequences have
    const QueryRows query_rows(params, sequence, rows, first_query);
    const int warp_row = warp * M_TILES * MMA_M;
    KeyTiles tiles = key_tiles(first_query, sequence);
    tiles.take_block_mask(params, rows, first_query);

    TileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS> key_loader(
        key_tile, rows(params.key) + (sequence.first_key + tiles.begin * BLOCK_N) * params.key.row_stride,
        params.key.row_stride, params.head_dim, thread);
    TileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS> value_loader(
        value_tile, rows(params.value) + (sequence.first_key + tiles.begin * BLOCK_N) * params.value.row_stride,
        params.value.row_stride, params.head_dim_v, thread);
    query_rows.template load_async<NUM_THREADS>(query_tile, num_queries, thread);
    int keys_left = sequence.seqlen_k - tiles.begin * BLOCK_N;   // from the current tile on
    if (tiles.begin < tiles.end) key_loader.load_async(keys_left);

    const FragmentAddress query_address = fragment_address(query_tile, warp_row, lane);
    const FragmentAddress key_address = fragment_address_b(key_tile, 0, lane);
    const FragmentAddress value_address = fragment_address(value_tile, 0, lane);

    float acc[M_TILES][DIM_TILES][4] = {};
    // A scale that is not positive would make a minimum of the maximum: the scores are multiplied by it beforehand.
    OnlineSoftmax<M_TILES> softmax(SCALE_POSITIVE && !PAIR_BY_PAIR ? params.scale_log2 : 1.0f);
    const ScoreFunctions<M_TILES> score_functions(params, sequence, query_rows, warp_row, lane);
    const Dropout dropout(params, rows);
    auto visit = [&](int tile, auto boundary) {
        float scores[M_TILES][N_TILES][4] = {};
        cp_async_wait_group<0>();
        __syncthreads();   // the key tile has landed, and every warp is done with the last value tile
        value_loader.load_async(keys_left);

        // S = Q K^T
        const uint32_t query_rows = ADD_QUERY_ADDRESSES ? opaque(query_address.rows) : query_address.rows;
        mma_abt<ELEMENT, HEAD_DIM, QueryTile, KeyTile>(scores, {query_address.lane_part, query_rows}, key_address);

        const TileMask<M_TILES> mask(int64_t(first_query) + warp_row, tile * BLOCK_N, sequence, lane);
        if constexpr (PAIR_BY_PAIR) {
            for_each_score(scores, first_query + warp_row, tile * BLOCK_N, lane,
                           [&](float& score, int m, int half, int column, int i, int j) {
                const ScoreFunction& score_function = score_functions(m, half);
                const int query = int(sequence.query(i));
                const bool seen = query < sequence.seqlen_q && j < sequence.seqlen_k &&
                                  (!boundary.value || mask.visible(m, half, column)) && score_function.keeps(query, j);
                score = seen ? in_base_2(score_function(score, query, j).value) : -infinity();
            });
        } else {
            if constexpr (!SCALE_POSITIVE) multiply(scores, params.scale_log2);
            if constexpr (boundary.value) mask.apply(scores, lane);
        }

        float alpha[M_TILES][2];
        softmax.update_max(scores, alpha);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            if (__any_sync(FULL_WARP, alpha[m][0] != 1.0f || alpha[m][1] != 1.0f)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    softmax.row_sum[m][half] *= alpha[m][half];
#pragma unroll
                    for (int d = 0; d < DIM_TILES; ++d) {
                        acc[m][d][2 * half] = mul_rn(acc[m][d][2 * half], alpha[m][half]);
                        acc[m][d][2 * half + 1] = mul_rn(acc[m][d][2 * half + 1], alpha[m][half]);
                    }
                }
            }

        cp_async_wait_group<0>();
        if constexpr ((boundary.value && BANDED) || REMOVES_ANYWHERE) {
            if (__syncthreads_or(holds_nonfinite<ELEMENT>(value_loader))) {
                if constexpr (REMOVES_ANYWHERE) {
                    const SeenColumns<M_TILES, N_TILES> seen(
                        lane, [&](int m, int n, int i) { return scores[m][n][i] != -infinity(); });
                    spread_nonfinite<ELEMENT>(acc, value_tile, seen, lane);
                } else {
                    spread_nonfinite<ELEMENT>(acc, value_tile, mask, lane);
                }
                __syncthreads();   // every warp has seen the values
                remove_nonfinite<ELEMENT>(value_loader);
            }
        }
        __syncthreads();   // the value tile has landed, and every warp is done with the key tile
        keys_left -= BLOCK_N;
        const int next_tile = tiles.next(tile);
        if constexpr (BLOCK_MASK) {
            const int skipped = next_tile - tile - 1;
            key_loader.skip(skipped), value_loader.skip(skipped);
            keys_left -= skipped * BLOCK_N;
        }

        // O += P V
        accumulate(acc, [&](auto& acc) {
#pragma unroll
            for (int k = 0; k < BLOCK_N / MMA_K; ++k) {
                if (k == PREFETCH_STEP && next_tile < tiles.end) key_loader.load_async(keys_left);
                Weights<ELEMENT, M_TILES> weights(softmax, scores, k);
                weights.drop(dropout, first_query + warp_row + lane / 4, tile * BLOCK_N + k * MMA_K + lane % 4 * 2);
                weights.multiply(acc, value_address + k * MMA_K * ValueTile::ROW_BYTES);
            }
        });
    };
    for_each_tile(tiles, visit);

    // O / l, rounded to 16 bits, through the query tile to rows of 16-byte chunks
    cp_async_wait_group<0>();
    __syncthreads();   // every warp is done with the query tile, which has landed even where there is no key
    softmax.reduce_sum();
    const int64_t first_row = sequence.first_row(params, batch) + first_query;
    // Queries that are there but do not count, behind their batch's length, get zeros.
    const int num_rows = LENGTHS == PADDED ? min(BLOCK_M, heads * params.seqlen_q - first_query) : num_queries;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + m * MMA_M + half * 8 + lane / 4;
            const bool counts = LENGTHS != PADDED || sequence.counts(first_query + row);
            if (!counts) softmax.forget(m, half);
#if RETURN_MAX
            if (lane % 4 == 0 && row < num_rows) params.variant.row_max[first_row + row] = softmax.row_max(m, half);
#endif
#if defined(SINK) && !SPLIT
            const float sink_log2 =
                in_base_2(converted<float>(Element<SINK>::load(*query_rows.of_head(row)(params.variant.attn_sink))));
            const bool saw_key = softmax.max_scaled[m][half] != NO_KEY;
            const float factor = counts ? softmax.add_sink(m, half, sink_log2) : 0.0f;
            float inverse = saw_key ? factor * softmax.inverse_sum(m, half) : 0.0f;
#else
            float inverse = softmax.inverse_sum(m, half);
#endif
#if DROPOUT
            inverse *= dropout.keep_scale;
#endif
#pragma unroll
            for (int d = 0; d < DIM_TILES; ++d) {
                float2 out = {mul_rn(acc[m][d][2 * half], inverse), mul_rn(acc[m][d][2 * half + 1], inverse)};
                if (!counts) out = {0.0f, 0.0f};   // whatever it met
#if SPLIT
                if (row < num_rows)
                    store_pair(params.variant.partial_out + (first_row + row) * params.head_dim_v,
                               d * MMA_N + lane % 4 * 2, params.head_dim_v, out);
#else
                st_shared(out_tile.address(row, d) + lane % 4 * 4, cvt_rn_x2<ELEMENT>(out.x, out.y));
#endif
            }
            if (params.lse && lane % 4 == 0 && row < num_rows)
                params.lse[first_row + row] = softmax.log_sum_exp(m, half);
        }
#if !SPLIT
    __syncwarp();   // a warp stores only the rows that it wrote
    query_rows.template store<M_TILES * MMA_M>(out_tile, warp_row, num_rows, lane);
#endif
}
