// The four element types: how a value is stored (Bits) and what it is computed in (Compute).

template <typename T>
struct Element {   // float and double are stored as they are
    using Bits = T;
    using Compute = T;
    static __device__ T load(T value) { return value; }
    static __device__ T round(T value) { return value; }
};

template <>
struct Element<Half> {
    using Bits = uint16_t;
    using Compute = float;
    static __device__ float load(uint16_t bits) { return cvt_f32_f16(bits); }
    static __device__ uint16_t round(float value) { return uint16_t(cvt_rn_x2<Half>(value, 0.0f)); }
};

// An operand's value in a type that may be narrower. A finite one stays so: it becomes the largest of its sign.
template <typename To, typename From>
__device__ __forceinline__ To converted(From value) {
    if constexpr (sizeof(To) < sizeof(From)) {
        constexpr From LARGEST = 3.4028234663852886e38;
        if (fabs(value) > LARGEST && fabs(value) < infinity()) return To(value < 0 ? -LARGEST : LARGEST);
    }
    return To(value);
}

#if __CUDA_ARCH__ >= 800
template <>
struct Element<BFloat16> {   // the upper half of a float
    using Bits = uint16_t;
    using Compute = float;
    static __device__ float load(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
    static __device__ uint16_t round(float value) { return uint16_t(cvt_rn_x2<BFloat16>(value, 0.0f)); }
};
#endif
