// Online softmax (Milakov and Gimelshein 2018) over score fragments, in base 2.
//
// A row's scores arrive tile by tile. With c = scale log2(e) > 0, the scaled running maximum M and the
// running sum l,
//   M' = max(M, c max_j s_j),   l' = l 2^(M - M') + sum_j 2^(c s_j - M'),   O' = O 2^(M - M') + P V,
// so that a weight takes one fused multiply-add and one ex2.

// M of a row that saw no key: finite, for -inf - -inf would be NaN, and below every score.
constexpr float NO_KEY = -3.402823466e38f;

template <int M_TILES>
struct OnlineSoftmax {
    float scale_log2;              // c
    float max_scaled[M_TILES][2];  // M of the two rows that a lane has in each 16-row tile
    float row_sum[M_TILES][2];     // this lane's part of l
    Largest<float, 2 * M_TILES> largest;

    __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2), largest(NO_KEY) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                max_scaled[m][half] = NO_KEY;
                row_sum[m][half] = 0.0f;
            }
    }

    // Takes in the scores of one tile; alpha is the factor for what was accumulated before it.
    template <int N_TILES>
    __device__ void update_max(const float (&scores)[M_TILES][N_TILES][4], float (&alpha)[M_TILES][2]) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float tile_max = scores[m][0][2 * half];
#pragma unroll
                for (int n = 0; n < N_TILES; ++n)
                    tile_max = fmaxf(tile_max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL_WARP, tile_max, 1));
                tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL_WARP, tile_max, 2));
                const float old_max = max_scaled[m][half];
                float new_max = fmaxf(old_max, tile_max * scale_log2);
                largest.add(2 * m + half, new_max);
                new_max = rescaled_to(old_max, new_max, 1.0f);
                max_scaled[m][half] = new_max;
                alpha[m][half] = exponential(old_max - new_max);
            }
    }

    // P of one element; the row sums take it as it is before it is rounded to 16 bits.
    __device__ __forceinline__ float weight(int m, int half, float score) {
        const float weight = exponential(__fmaf_rn(score, scale_log2, neg(max_scaled[m][half])));
        row_sum[m][half] += weight;
        return weight;
    }

    // Sums l over the four lanes that share a row.
    __device__ void reduce_sum() {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_sum[m][half] += __shfl_xor_sync(FULL_WARP, row_sum[m][half], 1);
                row_sum[m][half] += __shfl_xor_sync(FULL_WARP, row_sum[m][half], 2);
            }
    }

    // Joins a logit without a value, in base 2, to the sum of a row; returns the factor for what was accumulated.
    __device__ float add_sink(int m, int half, float sink_log2) {
        const float old_max = max_scaled[m][half];
        max_scaled[m][half] = fmaxf(old_max, sink_log2);
        const float factor = exponential(old_max - max_scaled[m][half]);
        row_sum[m][half] = __fmaf_rn(row_sum[m][half], factor, exponential(sink_log2 - max_scaled[m][half]));
        return factor;
    }

    // Makes a row one that saw no key.
    __device__ void forget(int m, int half) {
        max_scaled[m][half] = NO_KEY;
        row_sum[m][half] = 0.0f;
    }

    // max_j of the scores, natural.
    __device__ float row_max(int m, int half) const {
        if (row_sum[m][half] != row_sum[m][half]) return not_a_number();   // fmaxf has left a NaN out
        return max_scaled[m][half] == NO_KEY ? -infinity() : largest(2 * m + half, max_scaled[m][half]) * LN2;
    }

    // 1 / l, and 0 for a row that saw no key.
    __device__ float inverse_sum(int m, int half) const {
        return max_scaled[m][half] == NO_KEY ? 0.0f : rcp_approx(row_sum[m][half]);
    }

    // ln sum_j exp(scale s_j), and -inf for a row that saw no key.
    __device__ float log_sum_exp(int m, int half) const {
        return (max_scaled[m][half] + lg2_approx(row_sum[m][half])) * LN2;
    }
};

template <int M_TILES, int N_TILES>
__device__ void multiply(float (&scores)[M_TILES][N_TILES][4], float factor) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] *= factor;
}

// P of a warp's rows and 16 keys as A fragments.
template <typename T, int M_TILES>
struct Weights : Rounded<T, M_TILES> {
    // Of the keys from column 16 k of the tile on.
    template <int N_TILES>
    __device__ __forceinline__ Weights(OnlineSoftmax<M_TILES>& softmax, const float (&scores)[M_TILES][N_TILES][4],
                                       int k) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    weight[i] = softmax.weight(m, half, scores[m][2 * k + i / 2][2 * half + i % 2]);
#pragma unroll
                for (int side = 0; side < 2; ++side)
                    this->set(m, half + 2 * side, {weight[2 * side], weight[2 * side + 1]});
            }
    }

    // Zeroes what is dropped; (row, column): of the lane's first element.
    __device__ __forceinline__ void drop(const Dropout& dropout, int row, int column) {
#if DROPOUT
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int part = 0; part < 4; ++part)
                this->keep(m, part, dropout.kept_keys(row + m * MMA_M + part % 2 * 8, column + part / 2 * MMA_N));
#endif
    }
};
