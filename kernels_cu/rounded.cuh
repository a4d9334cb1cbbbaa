// Numbers of a warp's rows and 16 columns as A fragments, rounded to 16 bits, or as sums of two such numbers.

template <typename T, int M_TILES>
struct Rounded {
    uint32_t pairs[M_TILES][4];
#if P_FLOAT32
    uint32_t rest[M_TILES][4];   // what the rounding left
#endif

    // Two neighbours, which register `part` of tile m holds.
    __device__ __forceinline__ void set(int m, int part, float2 x) {
        const uint32_t pair = cvt_rn_x2<T>(x.x, x.y);
        pairs[m][part] = pair;
#if P_FLOAT32
        rest[m][part] =
            cvt_rn_x2<T>(x.x - Element<T>::load(uint16_t(pair)), x.y - Element<T>::load(uint16_t(pair >> 16)));
#endif
    }

    // Keeps some bits of them.
    __device__ __forceinline__ void keep(int m, int part, uint32_t bits) {
        pairs[m][part] &= bits;
#if P_FLOAT32
        rest[m][part] &= bits;
#endif
    }

    // acc += these times B, for 16 rows of a row-major tile B.
    template <int N_TILES>
    __device__ __forceinline__ void multiply(float (&acc)[M_TILES][N_TILES][4], FragmentAddress b_address) const {
        mma_ab<T>(acc, pairs, b_address);
#if P_FLOAT32
        mma_ab<T>(acc, rest, b_address);
#endif
    }
};
