// Dual numbers: a value and its derivative with respect to the scaled score, in one evaluation.
//
// A constant has derivative 0, the score itself 1. What only reads the value leaves no instruction of the derivative.

struct Dual {
    Compute value;
    Compute derivative;
};

// c tanh(s / c), with derivative 1 - tanh^2.
__device__ __forceinline__ Dual softcapped(Dual score, Compute cap) {
    const Compute t = tanh(score.value / cap);
    return {cap * t, score.derivative * (Compute(1) - t * t)};
}
