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

struct WeightPair {
    float2 weight;
    float2 dscore;
    float2 dfinal;   // of the final scores, where they are functions of the scaled ones

    // lse_log2 and delta may differ between the two. What is masked is selected, not multiplied, so that
    // no NaN of a masked pair survives.
    __device__ __forceinline__ WeightPair(const float* score, const float* dweight, float scale_log2, float2 lse_log2,
                                          float2 delta, bool visible_x, bool visible_y) {
        weight = {exponential(__fmaf_rn(score[0], scale_log2, -lse_log2.x)),
                  exponential(__fmaf_rn(score[1], scale_log2, -lse_log2.y))};
        dscore = {weight.x * (dweight[0] - delta.x), weight.y * (dweight[1] - delta.y)};
        if (!visible_x) weight.x = dscore.x = 0.0f;
        if (!visible_y) weight.y = dscore.y = 0.0f;
    }

    // The same of final scores, in base 2.
    __device__ __forceinline__ WeightPair(const Dual& score_x, const Dual& score_y, const float* dweight,
                                          float2 lse_log2, float2 delta) {
        weight = {weight_of(score_x.value, lse_log2.x), weight_of(score_y.value, lse_log2.y)};
        dfinal = {weight.x * (dweight[0] - delta.x), weight.y * (dweight[1] - delta.y)};
        dscore = {dfinal.x * score_x.derivative, dfinal.y * score_y.derivative};
        if (score_x.value == -infinity()) weight.x = dfinal.x = dscore.x = 0.0f;
        if (score_y.value == -infinity()) weight.y = dfinal.y = dscore.y = 0.0f;
    }
};
