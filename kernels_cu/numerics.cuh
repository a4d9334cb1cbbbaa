// Choices of arithmetic for research; the defaults are the plain kernels.
//
//   EXP_DEGREE         0: the kernel's own exponential; 3, 5: a polynomial of that degree in the exponent's fraction
//   EXP_ACCURATE       float32 exponentials through double precision
//   P_FLOAT32          P and dS multiply as sums of two 16-bit numbers, on tensor cores
//   RESCALE_THRESHOLD  how far the maximum may grow, in powers of 2, before earlier sums are rescaled to it
//   TWO_LEVEL          each tile's products are a sum of their own, then added; the default without tensor cores

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

#ifdef TWO_LEVEL
constexpr bool TILES_APART = TWO_LEVEL;
#else
constexpr bool TILES_APART = sizeof(Element<ELEMENT>::Bits) > 2;
#endif

// 2^whole x, for a positive x and a result that is a normal number.
__device__ __forceinline__ float times_power_of_2(float x, int whole) {
    return __int_as_float(__float_as_int(x) + (whole << 23));
}

__device__ __forceinline__ double times_power_of_2(double x, int whole) {
    return __hiloint2double(__double2hiint(x) + (whole << 20), __double2loint(x));
}

// 2^x = 2^floor(x) 2^fraction, the latter by a polynomial whose largest relative error on [0, 1) is least among those
// with constant term 1 and float32 coefficients (Sollya's fpminimax; FlashAttention-4 2026, section on exp2 emulation).
template <typename T>
__device__ __forceinline__ T exp2_polynomial(T x) {
    constexpr float DEGREE_3[] = {1.0f, 0.695146143436431884765625f, 0.227564394474029541015625f,
                                  0.077119089663028717041015625f};
    constexpr float DEGREE_5[] = {1.0f, 0.693151414394378662109375f, 0.24016360938549041748046875f,
                                  5.5802188813686370849609375e-2f, 9.01452265679836273193359375e-3f,
                                  1.86810153536498546600341796875e-3f};
    constexpr int MAX_EXPONENT = sizeof(T) == 4 ? 128 : 1024;
    const T whole = floor(x), fraction = x - whole;
    T power = EXP_DEGREE == 3 ? DEGREE_3[3] : DEGREE_5[5];
#pragma unroll
    for (int degree = EXP_DEGREE - 1; degree >= 0; --degree)
        power = fma(power, fraction, T(EXP_DEGREE == 3 ? DEGREE_3[degree % 4] : DEGREE_5[degree]));
    if (x >= T(MAX_EXPONENT)) return infinity();
    if (!(x >= T(2 - MAX_EXPONENT))) return x != x ? x : T(0);   // a NaN stays; what would be subnormal is 0
    return times_power_of_2(power, int(whole));
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

// e^x
__device__ __forceinline__ float natural_exponential(float x) {
#if EXP_ACCURATE
    return float(exp(double(x)));
#elif EXP_DEGREE
    return exp2_polynomial(x * LOG2_E);
#else
    return exp(x);
#endif
}

__device__ __forceinline__ double natural_exponential(double x) {
#if EXP_DEGREE
    return exp2_polynomial(x * 1.4426950408889634);
#else
    return exp(x);
#endif
}

// What a row's sums are relative to once its maximum is `maximum`: that, or what they were relative to before, where
// it is less than RESCALE_THRESHOLD times `power_of_2`, the score of a weight of 2, below.
template <typename T>
__device__ __forceinline__ T rescaled_to(T before, T maximum, T power_of_2) {
#if RESCALE_THRESHOLD
    if (maximum - before <= T(RESCALE_THRESHOLD) * power_of_2) return before;
#endif
    return maximum;
}

// The largest scores of a lane's rows, where the sums may be relative to less.
template <typename T, int ROWS>
struct Largest {
#if RESCALE_THRESHOLD
    T score[ROWS];

    __device__ explicit Largest(T none) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) score[row] = none;
    }
    __device__ __forceinline__ void add(int row, T x) { score[row] = fmax(score[row], x); }
    __device__ __forceinline__ T operator()(int row, T) const { return score[row]; }
#else
    __device__ explicit Largest(T) {}
    __device__ __forceinline__ void add(int, T) {}
    __device__ __forceinline__ T operator()(int, T relative_to) const { return relative_to; }
#endif
};

// total += part, element by element.
__device__ __forceinline__ void add(float& total, float part) { total += part; }
__device__ __forceinline__ void add(double& total, double part) { total += part; }

template <typename T, int N>
__device__ __forceinline__ void add(T (&total)[N], const T (&part)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) add(total[i], part[i]);
}

// Adds a tile's products to an accumulator: `products` adds them to what it is given. Where tiles are summed by
// themselves first, roundings grow with the length of a tile and the number of tiles, not with their product.
template <typename Accumulator, typename Products>
__device__ __forceinline__ void accumulate(Accumulator& total, Products products) {
    if constexpr (TILES_APART) {
        Accumulator tile = {};
        products(tile);
        add(total, tile);
    } else {
        products(total);
    }
}

// To two accumulators at once.
template <typename First, typename Second, typename Products>
__device__ __forceinline__ void accumulate(First& first, Second& second, Products products) {
    accumulate(first, [&](First& first) { accumulate(second, [&](Second& second) { products(first, second); }); });
}
