// Gradients of keys and values on tensor cores, for float16 and bfloat16: dV = P^T dO, dK = scale dS^T Q.
//
// One block owns BLOCK_N keys and walks over the query tiles that see them, of every head and batch
// that uses these keys, in a fixed order: no atomics. P is rebuilt from lse, transposed, in registers.
// Constants: ELEMENT, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES, BAND_RIGHT, those of variant.cuh
// and numerics.cuh, and WITH_DKEY, WITH_DVALUE: one gradient at a time where not both accumulators fit the registers.

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
constexpr int M_TILES = BLOCK_N / NUM_WARPS / MMA_M;   // of a warp: here the keys are the rows
constexpr int N_TILES = BLOCK_M / MMA_N;

static_assert(BLOCK_N == NUM_WARPS * M_TILES * MMA_M, "a warp owns whole 16-row tiles");

using KeyTile = SharedTile<BLOCK_N, HEAD_DIM>;
using ValueTile = SharedTile<BLOCK_N, HEAD_DIM_V>;
using QueryTile = SharedTile<BLOCK_M, HEAD_DIM>;
using DoutTile = SharedTile<BLOCK_M, HEAD_DIM_V>;
constexpr int STAGE_BYTES = QueryTile::BYTES + DoutTile::BYTES + 2 * BLOCK_M * 4;

struct Params {
    SummedOperand<const uint16_t> query, key, value, dout;
    SummedOperand<uint16_t> dkey, dvalue;
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
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) flash_bwd_dkdv(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const KeyTile key_tile{uint32_t(__cvta_generic_to_shared(shared))};
    const ValueTile value_tile{key_tile.base + KeyTile::BYTES};
    const QueryTile query_tile{value_tile.base + ValueTile::BYTES};   // of the first stage, as the next three
    const DoutTile dout_tile{query_tile.base + QueryTile::BYTES};
    const uint32_t lse_base = dout_tile.base + DoutTile::BYTES, delta_base = lse_base + BLOCK_M * 4;

    const int thread = threadIdx.x, lane = thread % WARP_SIZE;
    const int warp = __shfl_sync(FULL_WARP, thread / WARP_SIZE, 0);   // tells the compiler that it is uniform
    const int num_key_tiles = ceil_div(params.seqlen_k, BLOCK_N);
    const int owner = blockIdx.x / num_key_tiles;
    const int first_key = blockIdx.x % num_key_tiles * BLOCK_N;   // under a causal mask the longest block is the first
    const int warp_row = warp * M_TILES * MMA_M;
#if LENGTHS == PADDED   // of each batch that is summed; the keys behind them have gradient 0
    const int64_t first_row = first_key;
    const int num_rows = min(BLOCK_N, params.seqlen_k - first_key);
#else
    auto own_rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, 0); };
    const Sequence sequence(params, own_rows);
    const QueryTiles all_tiles = query_tiles(first_key, sequence);
    const int64_t first_row = sequence.first_key + first_key;
    const int num_rows = min(BLOCK_N, sequence.seqlen_k - first_key), num_keys = num_rows;
    if (LENGTHS == PACKED && num_rows <= 0) return;   // a tile that only the longest sequences have
#endif

    const FragmentAddress key_address = fragment_address(key_tile, warp_row, lane);
    const FragmentAddress value_address = fragment_address(value_tile, warp_row, lane);
    const FragmentAddress query_column = fragment_address_b(query_tile, 0, lane);
    const FragmentAddress query_row = fragment_address(query_tile, 0, lane);
    const FragmentAddress dout_column = fragment_address_b(dout_tile, 0, lane);
    const FragmentAddress dout_row = fragment_address(dout_tile, 0, lane);

    float dkey[M_TILES][HEAD_DIM / MMA_N][4] = {}, dvalue[M_TILES][HEAD_DIM_V / MMA_N][4] = {};

    for (int reduced = 0; reduced < params.num_reduced; ++reduced) {
        auto rows = [&](const auto& operand) { return operand.matrix(params.owner, owner, params.reduced, reduced); };
#if LENGTHS == PADDED
        const Sequence sequence(params, rows);
        const QueryTiles all_tiles = query_tiles(first_key, sequence);
        const int num_keys = min(BLOCK_N, sequence.seqlen_k - first_key);
#endif
        QueryTiles tiles = all_tiles;
        tiles.take_block_mask(params, rows, first_key);
        const int first_query = tiles.begin * BLOCK_M;
        const ScoreFunction score_function(params, sequence, rows);
        const Dropout dropout(params, rows);
        TileLoader<BLOCK_N, HEAD_DIM, NUM_THREADS>(
            key_tile, rows(params.key) + (sequence.first_key + first_key) * params.key.row_stride,
            params.key.row_stride, params.head_dim, thread).load_async(num_keys);
        TileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS>(
            value_tile, rows(params.value) + (sequence.first_key + first_key) * params.value.row_stride,
            params.value.row_stride, params.head_dim_v, thread).load_async(num_keys);
        TileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS> query_loader(
            query_tile, rows(params.query) + (sequence.first_query + first_query) * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread);
        TileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS> dout_loader(
            dout_tile, rows(params.dout) + (sequence.first_query + first_query) * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread);
        RowLoader lse_loader(lse_base, rows(params.lse_log2) + sequence.first_query + first_query, thread);
        RowLoader delta_loader(delta_base, rows(params.delta) + sequence.first_query + first_query, thread);

        int queries_left = (BAND_LEFT ? min(sequence.seqlen_q, tiles.end * BLOCK_M) : sequence.seqlen_q) - first_query;
        int stage = 0;
        auto fetch = [&](int stage) {
            query_loader.load_async(queries_left, stage);
            dout_loader.load_async(queries_left, stage);
            lse_loader.load_async(queries_left, stage);
            delta_loader.load_async(queries_left, stage);
            cp_async_commit_group();
            queries_left -= BLOCK_M;
        };

        auto visit = [&](int tile, auto boundary) {
            cp_async_wait_group<0>();
            __syncthreads();   // this stage has landed, and every warp is done with the other
            if constexpr (BLOCK_MASK) {
                const int skipped = tiles.next(tile) - tile - 1;
                query_loader.skip(skipped), dout_loader.skip(skipped);
                lse_loader.skip(skipped), delta_loader.skip(skipped);
                queries_left -= skipped * BLOCK_M;
            }
            if (NUM_STAGES == 2 && queries_left > 0) fetch(STAGE_BYTES - stage);

            // S^T = K Q^T, dP^T = V dO^T
            float scores[M_TILES][N_TILES][4] = {}, dweights[M_TILES][N_TILES][4] = {};
            mma_abt<ELEMENT, HEAD_DIM, KeyTile, QueryTile>(scores, key_address, query_column + stage);
            if (WITH_DKEY)
                mma_abt<ELEMENT, HEAD_DIM_V, ValueTile, DoutTile>(dweights, value_address, dout_column + stage);

            const TransposedTileMask<M_TILES> mask(
                int64_t(first_key) + warp_row, tile * BLOCK_M, sequence, lane);
            auto final_score_of = [&](int m, int n, int i) {
                const int half = i / 2, column = n * MMA_N + lane % 4 * 2 + i % 2;
                return final_score(score_function, sequence, scores[m][n][i], tile * BLOCK_M + column,
                                   first_key + warp_row + m * MMA_M + half * 8 + lane / 4,
                                   !boundary.value || mask.visible(m, half, column));
            };
            auto weight_pair = [&](int m, int n, int half, float2 lse_log2, float2 delta) {
                const float* dweight = dweights[m][n] + 2 * half;
                const int column = n * MMA_N + lane % 4 * 2;
                if constexpr (PAIR_BY_PAIR)
                    return WeightPair(final_score_of(m, n, 2 * half), final_score_of(m, n, 2 * half + 1), dweight,
                                      lse_log2, delta);
                else
                    return WeightPair(scores[m][n] + 2 * half, dweight, params.scale_log2, lse_log2, delta,
                                      !boundary.value || mask.visible(m, half, column),
                                      !boundary.value || mask.visible(m, half, column + 1));
            };
            if constexpr (boundary.value && (BANDED || LENGTHS || REMOVES_ANYWHERE)) {
                if (__syncthreads_or(holds_nonfinite<ELEMENT>(query_loader, stage) ||
                                     holds_nonfinite<ELEMENT>(dout_loader, stage))) {
                    // A query that is not finite has made dS NaN for the keys that it sees, unless a score function
                    // made something finite of infinity.
                    auto spread = [&](const auto& seen) {
                        if (WITH_DVALUE)
                            spread_nonfinite<ELEMENT>(dvalue, DoutTile{dout_tile.base + stage}, seen, lane);
                        if (WITH_DKEY && CHANGES_SCORES)
                            spread_nonfinite<ELEMENT>(dkey, QueryTile{query_tile.base + stage}, seen, lane);
                    };
                    if constexpr (REMOVES_ANYWHERE)
                        spread(SeenColumns<M_TILES, N_TILES>(
                            lane, [&](int m, int n, int i) { return final_score_of(m, n, i).value != -infinity(); }));
                    else
                        spread(mask);
                    __syncthreads();   // every warp has seen the values
                    remove_nonfinite<ELEMENT>(query_loader, stage);
                    remove_nonfinite<ELEMENT>(dout_loader, stage);
                    __syncthreads();   // they are gone
                }
            }

            // dV += P^T dO, dK += dS^T Q, 16 queries at a time
            accumulate(dvalue, dkey, [&](auto& dvalue, auto& dkey) {
#pragma unroll
                for (int k = 0; k < BLOCK_M / MMA_K; ++k) {
                    Rounded<ELEMENT, M_TILES> weight, dscore;
#pragma unroll
                    for (int n = 2 * k; n < 2 * k + 2; ++n) {
                        const int column = n * MMA_N + lane % 4 * 2;
                        const float2 lse_log2 = ld_shared_v2(lse_base + stage + column * 4);
                        const float2 delta = ld_shared_v2(delta_base + stage + column * 4);
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int part = n % 2 * 2 + half;
#if DROPOUT
                                const uint32_t kept = dropout.kept_queries(
                                    tile * BLOCK_M + column, first_key + warp_row + m * MMA_M + half * 8 + lane / 4);
                                dropout.scale(dweights[m][n] + 2 * half, kept);
#endif
                                const WeightPair pair = weight_pair(m, n, half, lse_log2, delta);
                                weight.set(m, part, pair.weight);
#if DROPOUT
                                weight.keep(m, part, kept);
#endif
                                dscore.set(m, part, pair.dscore);
                            }
                    }
                    if (WITH_DVALUE) weight.multiply(dvalue, dout_row + stage + k * MMA_K * DoutTile::ROW_BYTES);
                    if (WITH_DKEY) dscore.multiply(dkey, query_row + stage + k * MMA_K * QueryTile::ROW_BYTES);
                }
            });
            if (NUM_STAGES == 2) {
                stage = STAGE_BYTES - stage;
            } else if (queries_left > 0) {
                __syncthreads();   // every warp is done with the only stage
                fetch(0);
            }
        };
        if (tiles.begin < tiles.end) fetch(0);
        for_each_tile(tiles, visit);
        cp_async_wait_group<0>();
        __syncthreads();   // every warp is done with all tiles, and no copy is under way
    }

    if (WITH_DKEY) store_fragments<ELEMENT>(key_tile, warp_row, dkey, params.scale, lane);
#if DROPOUT
    const float value_factor = params.variant.keep_scale;
#else
    const float value_factor = 1.0f;
#endif
    if (WITH_DVALUE) store_fragments<ELEMENT>(value_tile, warp_row, dvalue, value_factor, lane);
    __syncwarp();   // a warp stores only the rows that it wrote
    auto store = [&](auto tile, const SummedOperand<uint16_t>& gradient, int head_dim) {
        uint16_t* matrix = gradient.matrix(params.owner, owner, params.reduced, 0);
        store_rows<M_TILES * MMA_M>(tile, warp_row, matrix + first_row * gradient.row_stride, gradient.row_stride,
                                    num_rows, head_dim, lane);
    };
    if (WITH_DKEY) store(key_tile, params.dkey, params.head_dim);
    if (WITH_DVALUE) store(value_tile, params.dvalue, params.head_dim_v);
}
