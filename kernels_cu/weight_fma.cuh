// The backward's elementwise step in register tiles: P = exp(S - lse) and dS = P * (dP - delta).

// What the scores of a query are reduced by: its lse, or for a query that saw no key what makes 0 of its weights.
__device__ __forceinline__ ELEMENT weight_shift(ELEMENT lse) { return lse == -infinity() ? ELEMENT(infinity()) : lse; }

__device__ __forceinline__ ELEMENT weight_of(ELEMENT score, ELEMENT scale, ELEMENT shift) {
    return exp(fma(score, scale, -shift));
}
