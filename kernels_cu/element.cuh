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

#if __CUDA_ARCH__ >= 800
template <>
struct Element<BFloat16> {   // the upper half of a float
    using Bits = uint16_t;
    using Compute = float;
    static __device__ float load(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
    static __device__ uint16_t round(float value) { return uint16_t(cvt_rn_x2<BFloat16>(value, 0.0f)); }
};
#endif
