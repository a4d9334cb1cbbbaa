// The backward's elementwise step: P = exp(S - lse), dS = P * (dP - delta), for two neighbouring columns.

// The final score of query i and key j in base 2, -inf where they are no pair; its derivative is that of the score.
__device__ __forceinline__ Dual final_score(const ScoreFunction& function, const Sequence& sequence, float product,
                                            int i, int j, bool visible) {
    if (i >= sequence.seqlen_q || j >= sequence.seqlen_k || !visible || !function.keeps(i, j))
        return {-infinity(), 0.0f};
    const Dual score = function(product, i, j);
    return {in_base_2(score.value), score.derivative};
}

// No weight is more than 1: where all scores of a row are huge, the rounding of lse alone could make it so.
__device__ __forceinline__ float weight_of(float score_log2, float lse_log2) {
    const float exponent = score_log2 - lse_log2;
    return exponential(exponent > 0.0f ? 0.0f : exponent);   // a NaN stays
}

// P, 0 where the score is -inf.
__device__ __forceinline__ float final_weight(const Dual& score, float lse_log2) {
    return score.value == -infinity() ? 0.0f : weight_of(score.value, lse_log2);
}

// P in the place of the products of two neighbouring columns. What is masked is selected, not multiplied, so that no
// NaN of a masked pair survives.
__device__ __forceinline__ void to_weights(float* product, float scale_log2, float2 lse_log2, bool visible_x,
                                           bool visible_y) {
    product[0] = visible_x ? exponential(__fmaf_rn(product[0], scale_log2, -lse_log2.x)) : 0.0f;
    product[1] = visible_y ? exponential(__fmaf_rn(product[1], scale_log2, -lse_log2.y)) : 0.0f;
}

// dS of two neighbouring columns; delta may differ between them.
struct DscorePair {
    float2 dscore;
    float2 dfinal;   // of the final scores, where they are functions of the scaled ones

    // Of weights. What is masked is selected here, too.
    __device__ __forceinline__ DscorePair(const float* weight, const float* dweight, float2 delta, bool visible_x,
                                          bool visible_y) {
        dscore = {visible_x ? weight[0] * (dweight[0] - delta.x) : 0.0f,
                  visible_y ? weight[1] * (dweight[1] - delta.y) : 0.0f};
    }

    // Of final scores, in base 2.
    __device__ __forceinline__ DscorePair(const Dual& score_x, const Dual& score_y, const float* dweight,
                                          float2 lse_log2, float2 delta) {
        dfinal = {weight_of(score_x.value, lse_log2.x) * (dweight[0] - delta.x),
                  weight_of(score_y.value, lse_log2.y) * (dweight[1] - delta.y)};
        dscore = {dfinal.x * score_x.derivative, dfinal.y * score_y.derivative};
        if (score_x.value == -infinity()) dfinal.x = dscore.x = 0.0f;
        if (score_y.value == -infinity()) dfinal.y = dscore.y = 0.0f;
    }
};
