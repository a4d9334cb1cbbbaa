// Exact attention, forward, on tensor cores, for float16 and bfloat16: O = softmax(scale Q K^T) V.
//
// One block owns BLOCK_M queries of one head and walks over the key tiles that they see. The scores
// of a tile live in registers only (FlashAttention-2: Dao 2023, algorithm 1): device memory holds no
// N x N array. Constants: ELEMENT (Half or BFloat16), HEAD_DIM, HEAD_DIM_V (multiples of 16; the true sizes come
// at run time), BLOCK_M, BLOCK_N, NUM_WARPS, CAUSAL, SCALE_POSITIVE.

#include "common.cuh"
#include "ptx.cuh"
#include "tile.cuh"
#include "mma.cuh"
#include "visible.cuh"
#include "mask.cuh"
#include "block_range.cuh"
#include "nonfinite.cuh"
#include "softmax.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int M_TILES = BLOCK_M / NUM_WARPS / MMA_M;   // of a warp
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr int DIM_TILES = HEAD_DIM_V / MMA_N;

// The step of O += P V before which the next key tile is fetched: the copy takes registers, and those of the
// scores of earlier steps are free by then.
constexpr int PREFETCH_STEP = BLOCK_N > HEAD_DIM_V ? 1 : BLOCK_N / MMA_K / 2;

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
    int causal_shift;       // key j is visible to query i iff j <= i + causal_shift
    float scale_log2;       // softmax_scale * log2(e)
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
    const int num_query_tiles = ceil_div(params.seqlen_q, BLOCK_M);
    const int batch = blockIdx.x / num_query_tiles;
    // Under a causal mask the last queries see the most keys: longest blocks first.
    const int first_query = (num_query_tiles - 1 - blockIdx.x % num_query_tiles) * BLOCK_M;
    const int num_queries = min(BLOCK_M, params.seqlen_q - first_query);
    const int warp_row = warp * M_TILES * MMA_M;
    const KeyTiles tiles = key_tiles(first_query, params.seqlen_q, params.seqlen_k, params.causal_shift);

    TileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS> key_loader(
        key_tile, params.key.matrix(params.batch, batch), params.key.row_stride, params.head_dim, thread);
    TileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS> value_loader(
        value_tile, params.value.matrix(params.batch, batch), params.value.row_stride, params.head_dim_v, thread);
    TileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS>(
        query_tile, params.query.matrix(params.batch, batch) + first_query * params.query.row_stride,
        params.query.row_stride, params.head_dim, thread).load_async(num_queries);
    if (tiles.end > 0) key_loader.load_async(params.seqlen_k);

    const FragmentAddress query_address = fragment_address(query_tile, warp_row, lane);
    const FragmentAddress key_address = fragment_address_b(key_tile, 0, lane);
    const FragmentAddress value_address = fragment_address(value_tile, 0, lane);

    float acc[M_TILES][DIM_TILES][4] = {};
    // A scale that is not positive would make a minimum of the maximum: the scores are multiplied by it beforehand.
    OnlineSoftmax<M_TILES> softmax(SCALE_POSITIVE ? params.scale_log2 : 1.0f);

    int keys_left = params.seqlen_k;   // from the current tile on
    auto visit = [&](int tile, auto boundary) {
        float scores[M_TILES][N_TILES][4] = {};
        cp_async_wait_group<0>();
        __syncthreads();   // the key tile has landed, and every warp is done with the last value tile
        value_loader.load_async(keys_left);

        // S = Q K^T
        mma_abt<ELEMENT, HEAD_DIM, QueryTile, KeyTile>(scores, query_address, key_address);

        if constexpr (!SCALE_POSITIVE) multiply(scores, params.scale_log2);
        const TileMask<M_TILES> mask(
            int64_t(first_query) + warp_row, tile * BLOCK_N, params.seqlen_k, params.causal_shift, lane);
        if constexpr (boundary.value) mask.apply(scores, lane);

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
        if constexpr (boundary.value && CAUSAL) {
            if (__syncthreads_or(holds_nonfinite<ELEMENT>(value_loader))) {
                spread_nonfinite<ELEMENT>(acc, value_tile, mask, lane);
                __syncthreads();   // every warp has seen the values
                remove_nonfinite<ELEMENT>(value_loader);
            }
        }
        __syncthreads();   // the value tile has landed, and every warp is done with the key tile
        keys_left -= BLOCK_N;

        // O += P V
#pragma unroll
        for (int k = 0; k < BLOCK_N / MMA_K; ++k) {
            if (k == PREFETCH_STEP && tile + 1 < tiles.end) key_loader.load_async(keys_left);
            uint32_t weight[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
                softmax.exponentiate<ELEMENT>(m, scores[m][2 * k], scores[m][2 * k + 1], weight[m]);
            mma_ab<ELEMENT>(acc, weight, value_address + k * MMA_K * ValueTile::ROW_BYTES);
        }
    };
    int tile = 0;
    for (; tile < tiles.interior; ++tile) visit(tile, Constant<false>());
    for (; tile < tiles.end; ++tile) visit(tile, Constant<true>());

    // O / l, rounded to 16 bits, through the query tile to rows of 16-byte chunks
    cp_async_wait_group<0>();
    __syncthreads();   // every warp is done with the query tile, which has landed even where there is no key
    softmax.reduce_sum();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + m * MMA_M + half * 8 + lane / 4;
            const float inverse = softmax.inverse_sum(m, half);
#pragma unroll
            for (int d = 0; d < DIM_TILES; ++d)
                st_shared(out_tile.address(row, d) + lane % 4 * 4,
                          cvt_rn_x2<ELEMENT>(mul_rn(acc[m][d][2 * half], inverse),
                                             mul_rn(acc[m][d][2 * half + 1], inverse)));
            if (params.lse && lane % 4 == 0 && row < num_queries)
                params.lse[int64_t(batch) * params.seqlen_q + first_query + row] = softmax.log_sum_exp(m, half);
        }
    __syncwarp();   // a warp stores only the rows that it wrote
    store_rows<M_TILES * MMA_M>(out_tile, warp_row,
                                params.out.matrix(params.batch, batch) + first_query * params.out.row_stride,
                                params.out.row_stride, num_queries, params.head_dim_v, lane);
}
