// Fragments of mma.m16n8k16, as lane l holds them (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   accumulator 16x8:  [0], [1] row l / 4, columns 2 (l % 4) + {0, 1};   [2], [3] the same, 8 rows down
//   A 16x16: the accumulators of two neighbouring 16x8 tiles, packed in pairs
//   B 16x8, taken from shared memory by ldmatrix, two n tiles at a time

constexpr int MMA_M = 16;
constexpr int MMA_N = 8;
constexpr int MMA_K = 16;

// Where a lane points ldmatrix for the 16x16 blocks in 16 rows of a tile. Its two parts stay apart, for tiles
// whose rows are as long have the same lane parts, and the compiler keeps each in one register.
struct FragmentAddress {
    uint32_t lane_part;   // from the 16 rows to the lane's chunk of the block in column 0
    uint32_t rows;

    __device__ __forceinline__ FragmentAddress operator+(int bytes) const { return {lane_part, rows + bytes}; }

    // Of the block in column k, 16 elements wide: a swizzled line holds four of them.
    __device__ __forceinline__ uint32_t column(int k) const { return rows + (lane_part ^ k % 4 * 32) + k / 4 * 128; }
};

// A row-major block as the A operand, or a (key, dim) block transposed into the B operand.
template <typename Tile>
__device__ __forceinline__ FragmentAddress fragment_address(Tile tile, int row, int lane) {
    return {Tile{0}.address(lane % 16, lane / 16), tile.base + row * Tile::ROW_BYTES};
}

// A (key, dim) block whose rows are the columns of the B operand: K in S = Q K^T.
template <typename Tile>
__device__ __forceinline__ FragmentAddress fragment_address_b(Tile tile, int row, int lane) {
    return {Tile{0}.address(lane / 16 * 8 + lane % 8, lane / 8 % 2), tile.base + row * Tile::ROW_BYTES};
}

// Column k of the A operand, and all of it.
template <typename TileA, int M_TILES>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[M_TILES][4], FragmentAddress a_address, int k) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) ldmatrix_x4(a[m], a_address.column(k) + m * MMA_M * TileA::ROW_BYTES);
}

template <int DEPTH, typename TileA, int K_STEPS, int M_TILES>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[K_STEPS][M_TILES][4], FragmentAddress a_address) {
#pragma unroll
    for (int k = 0; k < DEPTH / MMA_K; ++k) load_fragments<TileA>(a[k], a_address, k);
}

// acc += A B^T, for column k of A and of a row-major tile B (columns, DEPTH).
template <typename Element, typename TileB, int M_TILES, int N_TILES>
__device__ __forceinline__ void mma_abt_step(float (&acc)[M_TILES][N_TILES][4], const uint32_t (&a)[M_TILES][4],
                                             FragmentAddress b_address, int k) {
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, b_address.column(k) + n * MMA_N * TileB::ROW_BYTES);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
            mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// acc += A B^T, for row-major tiles A (rows, DEPTH) and B.
template <typename Element, int DEPTH, typename TileA, typename TileB, int M_TILES, int N_TILES>
__device__ __forceinline__ void mma_abt(float (&acc)[M_TILES][N_TILES][4], FragmentAddress a_address,
                                        FragmentAddress b_address) {
#pragma unroll
    for (int k = 0; k < DEPTH / MMA_K; ++k) {
        uint32_t a[M_TILES][4];
        load_fragments<TileA>(a, a_address, k);
        mma_abt_step<Element, TileB>(acc, a, b_address, k);
    }
}

// The same with A in registers.
template <typename Element, int DEPTH, typename TileB, int K_STEPS, int M_TILES, int N_TILES>
__device__ __forceinline__ void mma_abt(float (&acc)[M_TILES][N_TILES][4], const uint32_t (&a)[K_STEPS][M_TILES][4],
                                        FragmentAddress b_address) {
#pragma unroll
    for (int k = 0; k < DEPTH / MMA_K; ++k) mma_abt_step<Element, TileB>(acc, a[k], b_address, k);
}

// acc += A B, for A fragments of 16 columns in registers and 16 rows of a row-major tile B.
template <typename Element, int M_TILES, int N_TILES>
__device__ __forceinline__ void mma_ab(float (&acc)[M_TILES][N_TILES][4], const uint32_t (&a)[M_TILES][4],
                                       FragmentAddress b_address) {
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, b_address.column(n / 2));
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
            mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// Where the lanes of a warp leave 16x8 accumulators in shared memory for the same lanes of another warp.
template <int N_TILES>
struct FragmentExchange {
    uint32_t base;

    __device__ FragmentExchange(uint32_t shared, int lane) : base(shared + lane * 16) {}

    __device__ uint32_t address(int m, int n) const { return base + (m * N_TILES + n) * WARP_SIZE * 16; }

    template <int M_TILES>
    __device__ __forceinline__ void send(const float (&fragments)[M_TILES][N_TILES][4]) const {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                const float* x = fragments[m][n];
                st_shared_v4(address(m, n), {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                             __float_as_uint(x[3])});
            }
    }

    // All four elements of a fragment, or one of them.
    __device__ __forceinline__ void receive(float (&fragment)[4], int m, int n) const {
        const uint4 x = ld_shared_v4(address(m, n));
        fragment[0] = __uint_as_float(x.x), fragment[1] = __uint_as_float(x.y);
        fragment[2] = __uint_as_float(x.z), fragment[3] = __uint_as_float(x.w);
    }

    __device__ __forceinline__ float received(int m, int n, int i) const {
        return __uint_as_float(ld_shared(address(m, n) + i * 4));
    }
};

template <int M_TILES, int N_TILES>
__device__ __forceinline__ void set_zero(float (&acc)[M_TILES][N_TILES][4]) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
}

// factor * acc, rounded to 16 bits, to rows of a shared tile.
template <typename Element, int M_TILES, int N_TILES, typename Tile>
__device__ void store_fragments(Tile tile, int first_row, const float (&acc)[M_TILES][N_TILES][4], float factor,
                                int lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
                st_shared(tile.address(first_row + m * MMA_M + half * 8 + lane / 4, n) + lane % 4 * 4,
                          cvt_rn_x2<Element>(mul_rn(acc[m][n][2 * half], factor),
                                             mul_rn(acc[m][n][2 * half + 1], factor)));
}

// Calls visit(score, m, half, column of the tile, row, column) for this lane's elements of fragments whose element
// (0, 0) is at (first_row, first_column).
template <int M_TILES, int N_TILES, typename Visit>
__device__ __forceinline__ void for_each_score(float (&scores)[M_TILES][N_TILES][4], int first_row, int first_column,
                                               int lane, Visit visit) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, column = n * MMA_N + lane % 4 * 2 + i % 2;
                visit(scores[m][n][i], m, half, column, first_row + m * MMA_M + half * 8 + lane / 4,
                      first_column + column);
            }
}
