// The backward's elementwise step in register tiles: P = exp(S - lse) and dS = P * (dP - delta).

// What the scores of a query are reduced by: its lse, or for a query that saw no key what makes 0 of its weights.
__device__ __forceinline__ ELEMENT weight_shift(ELEMENT lse) { return lse == -infinity() ? ELEMENT(infinity()) : lse; }

__device__ __forceinline__ ELEMENT weight_of(ELEMENT score, ELEMENT scale, ELEMENT shift) {
    return natural_exponential(fma(score, scale, -shift));
}

// No weight is more than 1: where all scores of a row are huge, the rounding of lse alone could make it so.
__device__ __forceinline__ ELEMENT weight_of(ELEMENT final_score, ELEMENT shift) {
    const ELEMENT exponent = final_score - shift;
    return natural_exponential(exponent > ELEMENT(0) ? ELEMENT(0) : exponent);   // a NaN stays
}

// The final score of query i and key j, -inf where they are no pair.
__device__ __forceinline__ Dual final_score(const ScoreFunction& function, const Sequence& sequence, ELEMENT product,
                                            int i, int j, bool visible) {
    if (i >= sequence.seqlen_q || j >= sequence.seqlen_k || !visible || !function.keeps(i, j))
        return {-infinity(), ELEMENT(1)};
    return function(product, i, j);
}
