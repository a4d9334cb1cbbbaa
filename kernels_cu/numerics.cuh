// Choices of arithmetic for research; the defaults are the plain kernels.
//
//   EXP_DEGREE         0: ex2.approx; 3, 5: a polynomial of that degree in the fraction of the exponent
//   EXP_ACCURATE       the exponential through double precision
//   P_FLOAT32          weights multiply V as the sum of two 16-bit numbers
//   RESCALE_THRESHOLD  how far the maximum may grow, in powers of 2, before earlier sums are rescaled to it
//   TWO_LEVEL          each tile's P V is a sum of its own, which is then added

#ifndef EXP_DEGREE
#define EXP_DEGREE 0
#endif
#ifndef EXP_ACCURATE
#define EXP_ACCURATE 0
#endif
#ifndef P_FLOAT32
#define P_FLOAT32 0
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 0
#endif
#ifndef TWO_LEVEL
#define TWO_LEVEL 0
#endif

// 2^x = 2^floor(x) 2^fraction, the latter by a polynomial whose largest relative error on [0, 1) is least among those
// with constant term 1 and float32 coefficients (Sollya's fpminimax; FlashAttention-4 2026, section on exp2 emulation).
__device__ __forceinline__ float exp2_polynomial(float x) {
    constexpr float DEGREE_3[] = {1.0f, 0.695146143436431884765625f, 0.227564394474029541015625f,
                                  0.077119089663028717041015625f};
    constexpr float DEGREE_5[] = {1.0f, 0.693151414394378662109375f, 0.24016360938549041748046875f,
                                  5.5802188813686370849609375e-2f, 9.01452265679836273193359375e-3f,
                                  1.86810153536498546600341796875e-3f};
    const float whole = floorf(x), fraction = x - whole;
    float power = EXP_DEGREE == 3 ? DEGREE_3[3] : DEGREE_5[5];
#pragma unroll
    for (int degree = EXP_DEGREE - 1; degree >= 0; --degree)
        power = __fmaf_rn(power, fraction, EXP_DEGREE == 3 ? DEGREE_3[degree % 4] : DEGREE_5[degree]);
    if (!(x >= -126.0f)) return x != x ? x : 0.0f;   // a NaN stays; what would be subnormal is 0
    return __int_as_float(__float_as_int(power) + (int(whole) << 23));
}

// 2^x
__device__ __forceinline__ float exponential(float x) {
#if EXP_ACCURATE
    return float(exp2(double(x)));
#elif EXP_DEGREE
    return exp2_polynomial(x);
#else
    return ex2_approx(x);
#endif
}
