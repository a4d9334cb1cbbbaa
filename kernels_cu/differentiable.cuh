// What `score` is in a user's expression: a dual number that nothing but differentiable functions can open.
//
// It converts to no plain number, so that an expression that would lose the derivative does not compile. Plain numbers
// that it meets become its own type first, Compute: 0.5 * score is a product of two floats where scores are float.
// What has no score in it is plain C++. Where a function has a corner, its derivative is that of the side that the
// comparison takes: abs that of x at 0, min and max that of their first argument where both are equal.

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

template <bool>
struct Enable {};
template <>
struct Enable<true> {
    using Type = int;
};

// Numbers of the language: what is no class and can be multiplied.
template <typename T, typename = decltype(1.0 * T())>
using IfPlain = typename Enable<!__is_class(T)>::Type;

class Differentiable {
    Compute value, derivative;

    __device__ __forceinline__ Differentiable(Compute value, Compute derivative)
        : value(value), derivative(derivative) {}

    // f(x) from f(x.value) and f'(x.value).
    __device__ __forceinline__ Differentiable mapped(Compute image, Compute slope) const {
        return {image, slope * derivative};
    }

public:
    explicit __device__ __forceinline__ Differentiable(Dual x) : value(x.value), derivative(x.derivative) {}

    template <typename T, IfPlain<T> = 0>
    __device__ __forceinline__ Differentiable(T constant) : value(constant), derivative(0) {}

    template <typename T>
    explicit __device__ operator T() const {
        static_assert(sizeof(T) == 0, "score is not a plain number: as one it would lose its derivative");
        return T();
    }

    friend __device__ __forceinline__ Dual opened(Differentiable x) { return {x.value, x.derivative}; }

    __device__ __forceinline__ Differentiable operator+() const { return *this; }
    __device__ __forceinline__ Differentiable operator-() const { return {-value, -derivative}; }

    friend __device__ __forceinline__ Differentiable operator+(Differentiable a, Differentiable b) {
        return {a.value + b.value, a.derivative + b.derivative};
    }
    friend __device__ __forceinline__ Differentiable operator-(Differentiable a, Differentiable b) {
        return {a.value - b.value, a.derivative - b.derivative};
    }
    friend __device__ __forceinline__ Differentiable operator*(Differentiable a, Differentiable b) {
        return {a.value * b.value, a.derivative * b.value + a.value * b.derivative};
    }
    friend __device__ __forceinline__ Differentiable operator/(Differentiable a, Differentiable b) {
        const Compute quotient = a.value / b.value;
        return {quotient, (a.derivative - quotient * b.derivative) / b.value};
    }

    // With a constant, whose derivative would turn an infinite value into NaN.
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator+(Differentiable a, T b) {
        return {a.value + Compute(b), a.derivative};
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator+(T a, Differentiable b) {
        return b + a;
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator-(Differentiable a, T b) {
        return {a.value - Compute(b), a.derivative};
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator-(T a, Differentiable b) {
        return {Compute(a) - b.value, -b.derivative};
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator*(Differentiable a, T b) {
        return {a.value * Compute(b), a.derivative * Compute(b)};
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator*(T a, Differentiable b) {
        return b * a;
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator/(Differentiable a, T b) {
        return {a.value / Compute(b), a.derivative / Compute(b)};
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable operator/(T a, Differentiable b) {
        const Compute quotient = Compute(a) / b.value;
        return {quotient, -quotient / b.value * b.derivative};
    }

    friend __device__ __forceinline__ bool operator<(Differentiable a, Differentiable b) { return a.value < b.value; }
    friend __device__ __forceinline__ bool operator>(Differentiable a, Differentiable b) { return b.value < a.value; }
    friend __device__ __forceinline__ bool operator<=(Differentiable a, Differentiable b) { return a.value <= b.value; }
    friend __device__ __forceinline__ bool operator>=(Differentiable a, Differentiable b) { return b.value <= a.value; }
    friend __device__ __forceinline__ bool operator==(Differentiable a, Differentiable b) { return a.value == b.value; }
    friend __device__ __forceinline__ bool operator!=(Differentiable a, Differentiable b) { return !(a == b); }

    friend __device__ __forceinline__ bool isnan(Differentiable x) { return isnan(x.value); }

    friend __device__ __forceinline__ Differentiable abs(Differentiable x) { return x < 0 ? -x : x; }
    friend __device__ __forceinline__ Differentiable fabs(Differentiable x) { return abs(x); }
    // A NaN gives way to a number.
    friend __device__ __forceinline__ Differentiable min(Differentiable a, Differentiable b) {
        return a <= b || isnan(b) ? a : b;
    }
    friend __device__ __forceinline__ Differentiable max(Differentiable a, Differentiable b) {
        return a >= b || isnan(b) ? a : b;
    }
    friend __device__ __forceinline__ Differentiable fmin(Differentiable a, Differentiable b) { return min(a, b); }
    friend __device__ __forceinline__ Differentiable fmax(Differentiable a, Differentiable b) { return max(a, b); }

    friend __device__ __forceinline__ Differentiable exp(Differentiable x) {
        const Compute image = exp(x.value);
        return x.mapped(image, image);
    }
    friend __device__ __forceinline__ Differentiable log(Differentiable x) {
        return {log(x.value), x.derivative / x.value};
    }
    friend __device__ __forceinline__ Differentiable sqrt(Differentiable x) {
        const Compute image = sqrt(x.value);
        return x.mapped(image, Compute(0.5) / image);
    }
    // tanh' = 1 - tanh^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|), which does not cancel.
    friend __device__ __forceinline__ Differentiable tanh(Differentiable x) {
        const Compute e = exp(Compute(-2) * fabs(x.value));
        return x.mapped(tanh(x.value), Compute(4) * e / ((Compute(1) + e) * (Compute(1) + e)));
    }
    friend __device__ __forceinline__ Differentiable sin(Differentiable x) {
        return x.mapped(sin(x.value), cos(x.value));
    }
    friend __device__ __forceinline__ Differentiable cos(Differentiable x) {
        return x.mapped(cos(x.value), -sin(x.value));
    }
    template <typename T, IfPlain<T> = 0>
    friend __device__ __forceinline__ Differentiable pow(Differentiable x, T constant) {
        const Compute exponent(constant);
        if (exponent == Compute(0)) return 1;
        return x.mapped(pow(x.value, exponent), exponent * pow(x.value, exponent - Compute(1)));
    }
};
