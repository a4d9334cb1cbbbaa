// What a user's functions are told of a pair, and how they read arrays of 16-bit floats.

// Query i and key j of head h of batch b, which has L queries and S keys.
struct Pair {
    int b, h, i, j, L, S;
};

struct HalfArray {
    const uint16_t* bits;

    __device__ __forceinline__ float operator[](int64_t n) const { return cvt_f32_f16(bits[n]); }
};

struct BFloat16Array {
    const uint16_t* bits;

    __device__ __forceinline__ float operator[](int64_t n) const { return __uint_as_float(uint32_t(bits[n]) << 16); }
};
