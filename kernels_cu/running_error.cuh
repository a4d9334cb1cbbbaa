// A double that knows how far the number that kernels compute in its place may be from it.
//
// Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, second edition, section 3.3): where
// |a' - a| <= e_a and |b' - b| <= e_b for what was computed, each operation hands on how far e_a and e_b move its exact
// result, and adds one rounding of what is computed, UNIT_ROUNDOFF (|result| + error), and SMALLEST where kernels flush
// to zero. A function f is moved by at most e_a times the largest |f'| within e_a of a, and rounded as its library
// says.
//
// A comparison that the errors leave open may come out either way. Then all ways are gone, one evaluation each, and the
// error covers them all: `branches` has what this thread's comparisons are to say.
//
// Constants: UNIT_ROUNDOFF, of the kernels and of double together; SMALLEST, LARGEST, the kernels' normal numbers;
// NARROW, whether constants are rounded to float.

constexpr int MAX_OPEN_COMPARISONS = 6;

// Largest errors of the library's functions, in units in the last place (CUDA C++ Programming Guide, mathematical
// functions).
constexpr int ULPS = 2, POW_ULPS = 9;

struct Branches {
    unsigned outcomes;   // of open comparisons, one bit each in their order
    int met;             // how many there were
};
__shared__ Branches branches[THREADS];

struct RunningError {
    double value, error;

    RunningError() = default;

    template <typename T>
    explicit __device__ RunningError(T constant) : value(double(constant)), error(0) {
        const double rounded = NARROW ? double(float(value)) : value;
        if (rounded != value && !isnan(value)) error = isfinite(rounded) ? fabs(rounded - value) : infinity();
    }

    // Computed with this many roundings from operands that moved it by `moved`.
    static __device__ RunningError rounded(double value, double moved, int roundings = 1) {
        RunningError result;
        result.value = value;
        const double reach = fabs(value) + moved;
        // The last factor covers the roundings of the errors themselves.
        result.error = (moved + roundings * UNIT_ROUNDOFF * reach + SMALLEST) * (1 + 0x1p-48);
        if (!(reach <= LARGEST)) result.error = infinity();
        return result;
    }

    // Infinite because an operand was, whatever the other is.
    static __device__ RunningError sum(double value, RunningError a, RunningError b) {
        RunningError result = rounded(value, a.error + b.error);
        const bool from_operand = isinf(a.value) || isinf(b.value);
        if (isinf(value) && from_operand && isfinite(a.error) && isfinite(b.error)) result.error = 0;
        return result;
    }

    static __device__ bool outcome(bool certainly, bool certainly_not) {
        if (certainly || certainly_not) return certainly;
        Branches& own = branches[threadIdx.x];
        return own.outcomes >> min(own.met++, MAX_OPEN_COMPARISONS) & 1;
    }

    __device__ double low() const { return value - error; }
    __device__ double high() const { return value + error; }
    __device__ RunningError operator-() const { return of(-value, error); }
    static __device__ RunningError of(double value, double error) {
        RunningError result;
        result.value = value, result.error = error;
        return result;
    }
};

__device__ inline RunningError operator+(RunningError a, RunningError b) {
    return RunningError::sum(a.value + b.value, a, b);
}
__device__ inline RunningError operator-(RunningError a, RunningError b) {
    return RunningError::sum(a.value - b.value, a, b);
}
__device__ inline RunningError operator*(RunningError a, RunningError b) {
    return RunningError::rounded(a.value * b.value,
                                 fabs(a.value) * b.error + fabs(b.value) * a.error + a.error * b.error);
}
// |a' / b' - a / b| <= (e_a + |a / b| e_b) / (|b| - e_b). Two roundings: for sm_100 and later NVRTC 13.5 multiplies
// by the rounded reciprocal where a float is divided by a constant.
__device__ inline RunningError operator/(RunningError a, RunningError b) {
    const double quotient = a.value / b.value, least = fabs(b.value) - b.error;
    const double moved = (a.error + fabs(quotient) * b.error) / least;
    return RunningError::rounded(quotient, least > SMALLEST ? moved : infinity(), 2);
}

__device__ inline bool operator<(RunningError a, RunningError b) {
    if (isnan(a.value) || isnan(b.value)) return false;
    return RunningError::outcome(a.high() < b.low(), a.low() >= b.high());
}
__device__ inline bool operator<=(RunningError a, RunningError b) {
    if (isnan(a.value) || isnan(b.value)) return false;
    return RunningError::outcome(a.high() <= b.low(), a.low() > b.high());
}
__device__ inline bool operator==(RunningError a, RunningError b) {
    if (isnan(a.value) || isnan(b.value)) return false;
    const bool exact = a.error == 0 && b.error == 0;
    return RunningError::outcome(exact && a.value == b.value,
                                 exact ? a.value != b.value : a.high() < b.low() || b.high() < a.low());
}
__device__ inline bool isnan(RunningError x) { return isnan(x.value); }

__device__ inline RunningError fabs(RunningError x) { return RunningError::of(fabs(x.value), x.error); }
__device__ inline RunningError exp(RunningError x) {
    return RunningError::rounded(exp(x.value), exp(x.value) * expm1(x.error), 2 * ULPS);
}
__device__ inline RunningError log(RunningError x) {
    return RunningError::rounded(log(x.value), x.low() > SMALLEST ? -log1p(-x.error / x.value) : infinity(), 2 * ULPS);
}
__device__ inline RunningError sqrt(RunningError x) {
    const double root = sqrt(x.value), least = root + sqrt(max(x.low(), 0.0));
    return RunningError::rounded(root, x.error == 0 ? 0 : x.low() >= 0 ? x.error / least : infinity());
}
__device__ inline RunningError tanh(RunningError x) {
    const double slope = 1 / cosh(max(fabs(x.value) - x.error, 0.0));
    return RunningError::rounded(tanh(x.value), x.error * slope * slope, 2 * ULPS);
}
__device__ inline RunningError sin(RunningError x) { return RunningError::rounded(sin(x.value), x.error, 2 * ULPS); }
__device__ inline RunningError cos(RunningError x) { return RunningError::rounded(cos(x.value), x.error, 2 * ULPS); }
// |x|^p is exp(p log |x|); where x may be 0, it is at most what it is at the far end.
__device__ inline RunningError pow(RunningError x, RunningError p) {
    const double power = pow(x.value, p.value), least = fabs(x.value) - x.error;
    double moved = infinity();
    if (x.error == 0 && p.error == 0)
        moved = 0;
    else if (least > SMALLEST)
        moved = fabs(power) * expm1((fabs(p.value) + p.error) * -log1p(-x.error / fabs(x.value)) +
                                    fabs(log(fabs(x.value))) * p.error);
    else if (p.value > 0 && p.error == 0)
        moved = fabs(power) + pow(fabs(x.value) + x.error, p.value);
    return RunningError::rounded(power, moved, 2 * POW_ULPS);
}
