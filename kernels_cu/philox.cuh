// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four random words for each
// counter, so that the element (i, j) has the same ones whatever tile it lies in.

struct Philox {
    uint32_t key_low, key_high;

    __device__ uint4 operator()(uint4 counter) const {
        uint32_t key0 = key_low, key1 = key_high;
#pragma unroll 1   // unrolled, it would be most of a kernel, and of the time to compile it
        for (int round = 0; round < 10; ++round) {
            const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
            const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
            counter = {high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0};
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        return counter;
    }
};
