// What nonfinite.cuh does for tensor cores, for register tiles: a weight of 0 would make NaN of a masked infinity.

__device__ __forceinline__ bool is_finite(ELEMENT x) { return fabs(x) < ELEMENT(infinity()); }

// Calls visit(address of a vector) for this thread's share of a tile.
template <int NUM_THREADS, typename Tile, typename Visit>
__device__ __forceinline__ void for_each_vector(Tile tile, int thread, Visit visit) {
#pragma unroll 1
    for (int offset = thread * 16; offset < Tile::BYTES; offset += NUM_THREADS * 16) visit(tile.base + offset);
}

template <int NUM_THREADS, typename Tile>
__device__ bool holds_nonfinite(Tile tile, int thread) {
    bool found = false;
    for_each_vector<NUM_THREADS>(tile, thread, [&](uint32_t address) {
        for (const ELEMENT x : load_vector(address).element) found |= !is_finite(x);
    });
    return found;
}

template <int NUM_THREADS, typename Tile>
__device__ void remove_nonfinite(Tile tile, int thread) {
    for_each_vector<NUM_THREADS>(tile, thread, [&](uint32_t address) {
        Vector vector = load_vector(address);
        for (ELEMENT& x : vector.element) x = is_finite(x) ? x : ELEMENT(0);
        st_shared_v4(address, pack(vector.element));
    });
}

// Makes NaN of every element of acc to which a seen row of the tile contributes a non-finite value.
// seen_by(j) gives what tells of row m of this thread whether it sees row j of the tile.
template <typename Tile, typename SeenBy>
__device__ __forceinline__ void spread_nonfinite_where(Accumulator<Tile>& acc, const Columns<Tile>& columns,
                                                       SeenBy seen_by) {
#pragma unroll 1
    for (int j = 0; j < TILE_COLUMNS; ++j) {
        const auto seen = seen_by(j);
#pragma unroll
        for (int c = 0; c < Columns<Tile>::COUNT; ++c) {
            const Vector value = columns.load(j, c);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                for (int m = 0; m < THREAD_ROWS; ++m)
                    if (!is_finite(value.element[e]) && seen(m)) acc[m][c][e] = not_a_number();
        }
    }
}

template <typename Tile, typename Mask>
__device__ void spread_nonfinite(Accumulator<Tile>& acc, const Columns<Tile>& columns, const Mask& mask) {
    spread_nonfinite_where<Tile>(acc, columns, [&](int j) { return [&mask, j](int m) { return mask.visible(m, j); }; });
}

template <typename Tile>
__device__ void spread_nonfinite(Accumulator<Tile>& acc, const Columns<Tile>& columns, const PairBits& pairs,
                                 int lane) {
    spread_nonfinite_where<Tile>(acc, columns, [&](int j) {
        const uint32_t rows = pairs.column(j, lane);
        return [rows](int m) { return rows >> m & 1; };
    });
}
