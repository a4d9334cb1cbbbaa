// Gradients of keys and values on tensor cores, for float16 and bfloat16: dV = P^T dO, dK = scale dS^T Q.
//
// One block owns BLOCK_N keys and walks over the query tiles that see them, of every head and batch
// that uses these keys, in a fixed order: no atomics. P is rebuilt from lse, transposed, in registers.
// Two warps share the rows of a key tile, so that each has more rows: the first of the pair keeps K in registers and
// computes S, P and dV, the second keeps V and computes dP, dS and dK. It finds P in shared memory, or S where dS takes
// more of it than P.
// Constants: ELEMENT, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, NUM_WARPS, BAND_RIGHT, those of variant.cuh and
// numerics.cuh, and WITH_DKEY, WITH_DVALUE: one gradient at a time where they are sums over different dimensions.

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
constexpr int NUM_PAIRS = NUM_WARPS / 2;
constexpr int M_TILES = BLOCK_N / NUM_PAIRS / MMA_M;   // of a warp: here the keys are the rows
constexpr int N_TILES = BLOCK_M / MMA_N;

static_assert(BLOCK_N == NUM_PAIRS * M_TILES * MMA_M, "two warps own whole 16-row tiles");

using KeyTile = SharedTile<BLOCK_N, HEAD_DIM>;
using ValueTile = SharedTile<BLOCK_N, HEAD_DIM_V>;
using QueryTile = SharedTile<BLOCK_M, HEAD_DIM>;
using DoutTile = SharedTile<BLOCK_M, HEAD_DIM_V>;
constexpr int OWNED_BYTES = KeyTile::BYTES + ValueTile::BYTES;
constexpr int STAGE_BYTES = QueryTile::BYTES + DoutTile::BYTES + 2 * BLOCK_M * 4;
// The barrier of what goes from one warp to another; __syncthreads has 0. One for each pair would let pairs go their own
// ways, but takes two more slots a tile, and they meet at the next tile.
constexpr int SENT = 1;

static_assert(STAGE_BYTES <= OWNED_BYTES, "a stage fits into the place of the keys and values");

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
    // Once the keys and values are in registers, one of two stages takes their place: that at 0, the other one is at
    // OWNED_BYTES.
    const QueryTile query_tile{key_tile.base};
    const DoutTile dout_tile{query_tile.base + QueryTile::BYTES};
    const uint32_t lse_base = dout_tile.base + DoutTile::BYTES, delta_base = lse_base + BLOCK_M * 4;

    const int thread = threadIdx.x, lane = thread % WARP_SIZE;
    const int warp = __shfl_sync(FULL_WARP, thread / WARP_SIZE, 0);   // tells the compiler that it is uniform
    const int num_key_tiles = ceil_div(params.seqlen_k, BLOCK_N);
    const int owner = blockIdx.x / num_key_tiles;
    const int first_key = blockIdx.x % num_key_tiles * BLOCK_N;   // under a causal mask the longest block is the first
    const bool first_of_pair = warp < NUM_PAIRS;
    const int warp_row = warp % NUM_PAIRS * (M_TILES * MMA_M);
    const FragmentExchange<N_TILES> exchange(
        query_tile.base + OWNED_BYTES + STAGE_BYTES + warp_row * (BLOCK_M * 4), lane);
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

    // Of K, Q and dO, for S^T and dV; or of V, dO and Q, for dP^T and dK.
    const FragmentAddress own_row = first_of_pair ? fragment_address(key_tile, warp_row, lane)
                                                  : fragment_address(value_tile, warp_row, lane);
    const FragmentAddress column = first_of_pair ? fragment_address_b(query_tile, 0, lane)
                                                 : fragment_address_b(dout_tile, 0, lane);
    const FragmentAddress row = first_of_pair ? fragment_address(dout_tile, 0, lane)
                                              : fragment_address(query_tile, 0, lane);

    union {   // of the two warps of a pair
        float dvalue[M_TILES][HEAD_DIM_V / MMA_N][4];
        float dkey[M_TILES][HEAD_DIM / MMA_N][4];
    } sum;
    if (first_of_pair)
        set_zero(sum.dvalue);
    else
        set_zero(sum.dkey);

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
        if (WITH_DKEY)
            TileLoader<BLOCK_N, HEAD_DIM_V, NUM_THREADS>(
                value_tile, rows(params.value) + (sequence.first_key + first_key) * params.value.row_stride,
                params.value.row_stride, params.head_dim_v, thread).load_async(num_keys);
        TileLoader<BLOCK_M, HEAD_DIM, NUM_THREADS> query_loader(
            query_tile, rows(params.query) + (sequence.first_query + first_query) * params.query.row_stride,
            params.query.row_stride, params.head_dim, thread);
        TileLoader<BLOCK_M, HEAD_DIM_V, NUM_THREADS> dout_loader(
            dout_tile, rows(params.dout) + (sequence.first_query + first_query) * params.dout.row_stride,
            params.dout.row_stride, params.head_dim_v, thread);
        RowLoader<BLOCK_M> row_loader(lse_base, rows(params.lse_log2) + sequence.first_query + first_query,
                                      rows(params.delta) + sequence.first_query + first_query, thread);

        int queries_left = (BAND_LEFT ? min(sequence.seqlen_q, tiles.end * BLOCK_M) : sequence.seqlen_q) - first_query;
        int stage = OWNED_BYTES;
        auto fetch = [&](int stage) {
            query_loader.load_async(queries_left, stage);
            dout_loader.load_async(queries_left, stage);
            row_loader.load_async(queries_left, stage);
            cp_async_commit_group();
            queries_left -= BLOCK_M;
        };

        uint32_t own[max_of(HEAD_DIM, HEAD_DIM_V) / MMA_K][M_TILES][4];   // K or V
        auto visit = [&](int tile, auto boundary) {
            cp_async_wait_group<0>();
            __syncthreads();   // this stage has landed, and every warp is done with the other and with what it received
            if constexpr (BLOCK_MASK) {
                const int skipped = tiles.next(tile) - tile - 1;
                query_loader.skip(skipped), dout_loader.skip(skipped), row_loader.skip(skipped);
                queries_left -= skipped * BLOCK_M;
            }
            if (queries_left > 0) fetch(OWNED_BYTES - stage);

            const TransposedTileMask<M_TILES> mask(
                int64_t(first_key) + warp_row, tile * BLOCK_M, sequence, lane);
            // Element i of fragment (m, n): its query, key, and whether the one sees the other.
            auto query_of = [&](int n, int i) { return tile * BLOCK_M + n * MMA_N + lane % 4 * 2 + i % 2; };
            auto key_of = [&](int m, int i) { return first_key + warp_row + m * MMA_M + i / 2 * 8 + lane / 4; };
            auto visible = [&](int m, int n, int i) {
                return !boundary.value || mask.visible(m, i / 2, n * MMA_N + lane % 4 * 2 + i % 2);
            };
            auto final_score_of = [&](int m, int n, int i, float product) {
                return final_score(score_function, sequence, product, query_of(n, i), key_of(m, i), visible(m, n, i));
            };
            auto row_values = [&](uint32_t base, int n) {
                return ld_shared_v2(base + stage + (n * MMA_N + lane % 4 * 2) * 4);
            };

            // S^T = K Q^T and P^T by the first of a pair, dP^T = V dO^T by the second
            float products[M_TILES][N_TILES][4] = {};
            if (first_of_pair) {
                mma_abt<ELEMENT, HEAD_DIM, QueryTile>(products, own, column + stage);
                if constexpr (!PAIR_BY_PAIR) {
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n) {
                        const float2 lse_log2 = row_values(lse_base, n);
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                to_weights(products[m][n] + 2 * half, params.scale_log2, lse_log2,
                                           visible(m, n, 2 * half), visible(m, n, 2 * half + 1));
                    }
                }
                if (WITH_DKEY) {
                    exchange.send(products);
                    bar_arrive(SENT, NUM_THREADS);   // and does not wait
                }
            } else if (WITH_DKEY) {
                mma_abt<ELEMENT, HEAD_DIM_V, DoutTile>(products, own, column + stage);
                bar_sync(SENT, NUM_THREADS);   // what the first of the pair has sent is there
            }

            if constexpr (boundary.value && (BANDED || LENGTHS || REMOVES_ANYWHERE)) {
                if (__syncthreads_or(holds_nonfinite<ELEMENT>(query_loader, stage) ||
                                     holds_nonfinite<ELEMENT>(dout_loader, stage))) {
                    // A query that is not finite has made dS NaN for the keys that it sees, unless a score function
                    // made something finite of infinity.
                    auto spread = [&](auto& gradient, auto tile, auto product_of) {
                        if constexpr (REMOVES_ANYWHERE)
                            spread_nonfinite<ELEMENT>(
                                gradient, tile, SeenColumns<M_TILES, N_TILES>(lane, [&](int m, int n, int i) {
                                    return final_score_of(m, n, i, product_of(m, n, i)).value != -infinity();
                                }), lane);
                        else
                            spread_nonfinite<ELEMENT>(gradient, tile, mask, lane);
                    };
                    if (first_of_pair) {
                        if (WITH_DVALUE)
                            spread(sum.dvalue, DoutTile{dout_tile.base + stage},
                                   [&](int m, int n, int i) { return products[m][n][i]; });
                    } else if (WITH_DKEY && CHANGES_SCORES) {
                        spread(sum.dkey, QueryTile{query_tile.base + stage},
                               [&](int m, int n, int i) { return exchange.received(m, n, i); });
                    }
                    __syncthreads();   // every warp has seen the values
                    remove_nonfinite<ELEMENT>(query_loader, stage);
                    remove_nonfinite<ELEMENT>(dout_loader, stage);
                    __syncthreads();   // they are gone
                }
            }

            // dV += P^T dO, dK += dS^T Q, 16 queries at a time
            auto multiply = [&](auto& gradient, int row_bytes, auto set_factors) {
                accumulate(gradient, [&](auto& gradient) {
#pragma unroll
                    for (int k = 0; k < BLOCK_M / MMA_K; ++k) {
                        Rounded<ELEMENT, M_TILES> factors;
#pragma unroll
                        for (int n = 2 * k; n < 2 * k + 2; ++n) set_factors(factors, n);
                        factors.multiply(gradient, row + stage + k * MMA_K * row_bytes);
                    }
                });
            };
            auto set_weights = [&](auto& weights, int n) {
                const float2 lse_log2 = PAIR_BY_PAIR ? row_values(lse_base, n) : float2{};
#pragma unroll
                for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        const float* product = products[m][n] + i;
                        const int part = n % 2 * 2 + i / 2;
                        if constexpr (PAIR_BY_PAIR)
                            weights.set(m, part,
                                        {final_weight(final_score_of(m, n, i, product[0]), lse_log2.x),
                                         final_weight(final_score_of(m, n, i + 1, product[1]), lse_log2.y)});
                        else
                            weights.set(m, part, {product[0], product[1]});
#if DROPOUT
                        weights.keep(m, part, dropout.kept_queries(query_of(n, i), key_of(m, i)));
#endif
                    }
            };
            auto set_dscores = [&](auto& dscores, int n) {
                const float2 delta = row_values(delta_base, n);
                const float2 lse_log2 = PAIR_BY_PAIR ? row_values(lse_base, n) : float2{};
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    float received[4];
                    exchange.receive(received, m, n);
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        float* dweight = products[m][n] + i;
#if DROPOUT
                        dropout.scale(dweight, dropout.kept_queries(query_of(n, i), key_of(m, i)));
#endif
                        auto pair = [&](const float* x) {
                            if constexpr (PAIR_BY_PAIR)
                                return DscorePair(final_score_of(m, n, i, x[0]), final_score_of(m, n, i + 1, x[1]),
                                                  dweight, lse_log2, delta);
                            else
                                return DscorePair(x, dweight, delta, visible(m, n, i), visible(m, n, i + 1));
                        };
                        dscores.set(m, n % 2 * 2 + i / 2, pair(received + i).dscore);
                    }
                }
            };
            if (first_of_pair) {
                if (WITH_DVALUE) multiply(sum.dvalue, DoutTile::ROW_BYTES, set_weights);
            } else if (WITH_DKEY) {
                multiply(sum.dkey, QueryTile::ROW_BYTES, set_dscores);
            }
            stage = OWNED_BYTES - stage;
        };
        if (tiles.begin < tiles.end) fetch(stage);
        cp_async_wait_group<0>();
        __syncthreads();   // the keys and values have landed
        if (first_of_pair)
            load_fragments<HEAD_DIM, KeyTile>(own, own_row);
        else if (WITH_DKEY)
            load_fragments<HEAD_DIM_V, ValueTile>(own, own_row);
        for_each_tile(tiles, visit);
        __syncthreads();   // every warp is done with all tiles
    }

#if DROPOUT
    const float value_factor = params.variant.keep_scale;
#else
    const float value_factor = 1.0f;
#endif
    auto store = [&](const auto& fragments, auto tile, float factor, const SummedOperand<uint16_t>& gradient,
                     int head_dim) {
        store_fragments<ELEMENT>(tile, warp_row, fragments, factor, lane);
        __syncwarp();   // a warp stores only the rows that it wrote
        uint16_t* matrix = gradient.matrix(params.owner, owner, params.reduced, 0);
        store_rows<M_TILES * MMA_M>(tile, warp_row, matrix + first_row * gradient.row_stride, gradient.row_stride,
                                    num_rows, head_dim, lane);
    };
    if (first_of_pair) {
        if (WITH_DVALUE) store(sum.dvalue, value_tile, value_factor, params.dvalue, params.head_dim_v);
    } else if (WITH_DKEY) {
        store(sum.dkey, key_tile, params.scale, params.dkey, params.head_dim);
    }
}
