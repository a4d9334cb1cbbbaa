// All inline PTX: one function per instruction, named like it. What an architecture lacks is
// composed here from what it has, so that kernels are written once for sm_75 and later.

struct Half {};      // tags of the 16-bit element types; elements themselves travel as uint16_t bits
struct BFloat16 {};

// PTX ISA, "ex2": at most 2 ulp from the correctly rounded result, ex2(-inf) = +0.
__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float lg2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A multiplication by 1 that keeps subnormals, whatever -ftz says.
__device__ __forceinline__ float mul_rn(float a, float b) {
    float y;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// -x as part of the instruction that takes it: where -ftz is on, the compiler's own is an addition.
__device__ __forceinline__ float neg(float x) {
    float y;
    asm("neg.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same pointer, of which the compiler does not know how it was computed.
__device__ __forceinline__ const uint16_t* opaque(const uint16_t* pointer) {
    asm("" : "+l"(pointer));
    return pointer;
}

// The same number, which the compiler takes for another one each time.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// Two floats, each rounded to nearest even, as one register: `low` in bits 0-15.
template <typename Element>
__device__ __forceinline__ uint32_t cvt_rn_x2(float low, float high);

template <>
__device__ __forceinline__ uint32_t cvt_rn_x2<Half>(float low, float high) {
    uint32_t packed;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("{ .reg .b16 lo, hi; cvt.rn.f16.f32 lo, %1; cvt.rn.f16.f32 hi, %2; mov.b32 %0, {lo, hi}; }"
        : "=r"(packed)
        : "f"(low), "f"(high));
#endif
    return packed;
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ uint32_t cvt_rn_x2<BFloat16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
#endif

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t shared) {
    uint4 chunk;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(shared)
                 : "memory");
    return chunk;
}

__device__ __forceinline__ uint32_t ld_shared(uint32_t shared) {
    uint32_t pair;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(shared) : "memory");
    return pair;
}

__device__ __forceinline__ float2 ld_shared_v2(uint32_t shared) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(shared) : "memory");
    return pair;
}

__device__ __forceinline__ void st_shared_v4(uint32_t shared, uint4 chunk) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w)
                 : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t shared, uint32_t pair) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(pair) : "memory");
}

__device__ __forceinline__ void st_shared_v2(uint32_t shared, uint2 pair) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(pair.x), "r"(pair.y) : "memory");
}

// Copies 16 bytes to shared memory, or writes zeros and leaves the source unread.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const uint16_t* global, bool read) {
#if __CUDA_ARCH__ >= 800
    asm volatile("{ .reg .pred ignore_src; setp.eq.u32 ignore_src, %2, 0;"
                 " cp.async.cg.shared.global [%0], [%1], 16, ignore_src; }"
                 :
                 : "r"(shared), "l"(__cvta_generic_to_global(global)), "r"(uint32_t(read))
                 : "memory");
#else
    st_shared_v4(shared, read ? *reinterpret_cast<const uint4*>(global) : uint4{});
#endif
}

// The same for one float.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const float* global, bool read) {
#if __CUDA_ARCH__ >= 800
    asm volatile("{ .reg .pred ignore_src; setp.eq.u32 ignore_src, %2, 0;"
                 " cp.async.ca.shared.global [%0], [%1], 4, ignore_src; }"
                 :
                 : "r"(shared), "l"(__cvta_generic_to_global(global)), "r"(uint32_t(read))
                 : "memory");
#else
    st_shared(shared, read ? __float_as_uint(*global) : 0);
#endif
}

__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// PTX ISA, "bar": threads meet at a barrier of the block, whole warps; those that arrive do not wait.
__device__ __forceinline__ void bar_sync(int number, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(int number, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// PTX ISA, "ldmatrix": lane 8i + r gives the address of row r of the i-th 8x8 matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// d += a b on the tensor cores: a is 16x16, b is 16x8 (two registers), d is 16x8 in float32.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<Half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void mma_m16n8k16<BFloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                       uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
