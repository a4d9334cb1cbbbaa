// A weight of 0 does not protect an mma from the value that it multiplies: 0 * inf and 0 * NaN are NaN.
// In a tile with masked pairs, non-finite values are therefore taken out of shared memory before the
// product, and given by hand to the queries that do see them.

template <typename Element>
constexpr uint32_t EXPONENT = 0;
template <>
constexpr uint32_t EXPONENT<Half> = 0x7c00;
template <>
constexpr uint32_t EXPONENT<BFloat16> = 0x7f80;

// Inf and NaN have an exponent of all ones. `shift` chooses an element of a pair: 0 or 16.
template <typename Element>
__device__ __forceinline__ bool is_nonfinite(uint32_t pair, int shift) {
    return (pair >> shift & EXPONENT<Element>) == EXPONENT<Element>;
}

template <typename Element>
__device__ __forceinline__ uint32_t finite_part(uint32_t pair) {
    if (is_nonfinite<Element>(pair, 0)) pair &= 0xffff0000;
    if (is_nonfinite<Element>(pair, 16)) pair &= 0x0000ffff;
    return pair;
}

// Calls visit(address of a chunk) for the chunks that `loader` copied, so that no barrier is needed
// between a thread's copies and its look at them.
template <typename Loader, typename Visit>
__device__ __forceinline__ void for_each_chunk(const Loader& loader, int stage, Visit visit) {
    if (Loader::NUM_ROWS < Loader::ROW_STEP && loader.row >= Loader::NUM_ROWS) return;
#pragma unroll 1
    for (int row = 0; row < Loader::NUM_ROWS; row += Loader::ROW_STEP)
#pragma unroll
        for (int line = 0; line < Loader::Tile::LINES; ++line)
            visit(loader.destination + stage + row * Loader::Tile::ROW_BYTES + line * 128);
}

template <typename Element, typename Loader>
__device__ bool holds_nonfinite(const Loader& loader, int stage = 0) {
    bool found = false;
    for_each_chunk(loader, stage, [&](uint32_t address) {
        const uint4 chunk = ld_shared_v4(address);
        for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w})
            found |= is_nonfinite<Element>(pair, 0) || is_nonfinite<Element>(pair, 16);
    });
    return found;
}

template <typename Element, typename Loader>
__device__ void remove_nonfinite(const Loader& loader, int stage = 0) {
    for_each_chunk(loader, stage, [&](uint32_t address) {
        const uint4 chunk = ld_shared_v4(address);
        st_shared_v4(address, {finite_part<Element>(chunk.x), finite_part<Element>(chunk.y),
                               finite_part<Element>(chunk.z), finite_part<Element>(chunk.w)});
    });
}

// Makes NaN of every element of acc to which a visible row of the tile contributes a non-finite value.
template <typename Element, int M_TILES, int DIM_TILES, typename Tile, typename Mask>
__device__ void spread_nonfinite(float (&acc)[M_TILES][DIM_TILES][4], Tile tile, const Mask& mask, int lane) {
#pragma unroll 1
    for (int row = 0; row < Tile::NUM_ROWS; ++row)
#pragma unroll
        for (int d = 0; d < DIM_TILES; ++d) {
            const uint32_t pair = ld_shared(tile.address(row, d) + lane % 4 * 4);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (mask.visible(m, i / 2, row) && is_nonfinite<Element>(pair, i % 2 * 16))
                        acc[m][d][i] = not_a_number();
        }
}
