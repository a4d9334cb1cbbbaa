// The backward's elementwise step: P = exp(S - lse), dS = P * (dP - delta), for two neighbouring columns.

struct WeightPair {
    float2 weight;
    float2 dscore;

    // lse_log2 and delta may differ between the two. What is masked is selected, not multiplied, so that
    // no NaN of a masked pair survives.
    __device__ __forceinline__ WeightPair(const float* score, const float* dweight, float scale_log2, float2 lse_log2,
                                          float2 delta, bool visible_x, bool visible_y) {
        weight = {ex2_approx(__fmaf_rn(score[0], scale_log2, -lse_log2.x)),
                  ex2_approx(__fmaf_rn(score[1], scale_log2, -lse_log2.y))};
        dscore = {weight.x * (dweight[0] - delta.x), weight.y * (dweight[1] - delta.y)};
        if (!visible_x) weight.x = dscore.x = 0.0f;
        if (!visible_y) weight.y = dscore.y = 0.0f;
    }
};
