// The backward's elementwise step: P = exp(S - lse), dS = P * (dP - delta), for two neighbouring columns.

struct WeightPair {
    float2 weight;
    float2 dscore;

    // lse_log2 and delta may differ between the two. What is masked is selected, not multiplied, so that
    // no NaN of a masked pair survives.
    __device__ __forceinline__ WeightPair(const float* score, const float* dweight, float scale_log2, float2 lse_log2,
                                          float2 delta, bool visible_x, bool visible_y) {
        weight.x = visible_x ? ex2_approx(__fmaf_rn(score[0], scale_log2, -lse_log2.x)) : 0.0f;
        weight.y = visible_y ? ex2_approx(__fmaf_rn(score[1], scale_log2, -lse_log2.y)) : 0.0f;
        dscore.x = visible_x ? weight.x * (dweight[0] - delta.x) : 0.0f;
        dscore.y = visible_y ? weight.y * (dweight[1] - delta.y) : 0.0f;
    }
};
