// Register tiles: products of shared-memory tiles by fused multiply-adds, in float or double.
//
// A block owns TILE_ROWS rows (queries, or keys) and walks over the others TILE_COLUMNS at a time. 16 lanes
// share a row of scores and of results, so that a warp has two of them at a time. What a lane multiplies
// comes as 16-byte vectors: the two rows broadcast, the other operand from 16 neighbouring rows or vectors,
// all free of bank conflicts under the swizzle of SharedTile.

constexpr int VECTOR = 16 / sizeof(ELEMENT);   // elements in one 16-byte access
constexpr int UNITS = sizeof(ELEMENT) / 2;     // 16-bit elements of the copies that one element is
constexpr int LINE_VECTORS = CHUNKS_PER_LINE;
constexpr int ROW_LANES = 16;
constexpr int THREAD_ROWS = TILE_ROWS / (NUM_WARPS * WARP_SIZE / ROW_LANES);
constexpr int THREAD_COLUMNS = TILE_COLUMNS / ROW_LANES;

static_assert(TILE_ROWS == NUM_WARPS * 2 * THREAD_ROWS && TILE_COLUMNS == ROW_LANES * THREAD_COLUMNS,
              "whole register tiles");
static_assert(HEAD_DIM * UNITS % LINE == 0 && HEAD_DIM_V * UNITS % LINE == 0, "whole lines");

using Scores = ELEMENT[THREAD_ROWS][THREAD_COLUMNS];   // of a thread's rows and columns lane % 16 + 16 n

// Rows of the two half-warps lie HALF_STEP apart, 4 where there are enough: the swizzle then puts their
// neighbouring words into different halves of the banks.
constexpr int HALF_STEP = TILE_ROWS < 8 ? TILE_ROWS / 2 : 4;

__device__ __forceinline__ int first_row(int warp, int lane) {
    const int row = warp * THREAD_ROWS;
    return row / HALF_STEP * 2 * HALF_STEP + lane / ROW_LANES * HALF_STEP + row % HALF_STEP;
}

// Distance of a thread's row m from its row 0.
__device__ constexpr int row_step(int m) { return m / 4 * 8 + m % 4; }

template <int ROWS, int COLS>
using FmaTile = SharedTile<ROWS, COLS * UNITS>;

template <int ROWS, int COLS, int NUM_THREADS>
struct FmaTileLoader : TileLoader<ROWS, COLS * UNITS, NUM_THREADS> {
    __device__ FmaTileLoader(FmaTile<ROWS, COLS> tile, const ELEMENT* matrix, int64_t row_stride, int head_dim,
                             int thread)
        : TileLoader<ROWS, COLS * UNITS, NUM_THREADS>(tile, reinterpret_cast<const uint16_t*>(matrix),
                                                      row_stride * UNITS, head_dim * UNITS, thread) {}
};

struct Vector {
    ELEMENT element[VECTOR];
};

__device__ __forceinline__ void unpack(uint4 bits, float (&x)[4]) {
    x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y);
    x[2] = __uint_as_float(bits.z), x[3] = __uint_as_float(bits.w);
}

__device__ __forceinline__ void unpack(uint4 bits, double (&x)[2]) {
    x[0] = __hiloint2double(bits.y, bits.x), x[1] = __hiloint2double(bits.w, bits.z);
}

__device__ __forceinline__ Vector load_vector(uint32_t shared) {
    Vector vector;
    unpack(ld_shared_v4(shared), vector.element);
    return vector;
}

__device__ __forceinline__ uint4 pack(const float (&x)[4]) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}

__device__ __forceinline__ uint4 pack(const double (&x)[2]) {
    return {uint32_t(__double2loint(x[0])), uint32_t(__double2hiint(x[0])), uint32_t(__double2loint(x[1])),
            uint32_t(__double2hiint(x[1]))};
}

// To device memory.
__device__ __forceinline__ void store_vector(ELEMENT* target, const Vector& vector) {
    *reinterpret_cast<uint4*>(target) = pack(vector.element);
}

__device__ __forceinline__ void st_shared(uint32_t shared, float x) { st_shared(shared, __float_as_uint(x)); }

__device__ __forceinline__ void st_shared(uint32_t shared, double x) {
    st_shared_v2(shared, {uint32_t(__double2loint(x)), uint32_t(__double2hiint(x))});
}

// Vector k of row m of this thread; `address`: of vector 0 of its row 0.
template <typename Tile>
__device__ __forceinline__ Vector load_row(uint32_t address, int m, int k) {
    const uint32_t vector = address ^ (k % LINE_VECTORS ^ m % 4) * 16;
    return load_vector(vector + row_step(m) * Tile::ROW_BYTES + k / LINE_VECTORS * 128);
}

// Hands a thread's scores, or what became of them, to the lanes that share its rows.
template <typename Tile>
__device__ __forceinline__ void store_scores(Tile tile, int row, int lane, const Scores& scores) {
#pragma unroll
    for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
        for (int n = 0; n < THREAD_COLUMNS; ++n) {
            const int column = lane % ROW_LANES + n * ROW_LANES;
            const uint32_t vector = tile.address(row + row_step(m), column / VECTOR);
            st_shared(vector + column % VECTOR * sizeof(ELEMENT), scores[m][n]);
        }
}

// acc[m][n] += row m . row (lane % 16 + 16 n) of another tile, whose vector 0 of n = 0 is at `other`.
template <typename RowTile, typename OtherTile>
__device__ __forceinline__ void multiply_transposed(Scores& acc, uint32_t rows,
                                                    uint32_t other) {
#pragma unroll 1
    for (int line = 0; line < RowTile::LINES; ++line) {
#pragma unroll
        for (int k = 0; k < LINE_VECTORS; ++k) {
            Vector row[THREAD_ROWS];
#pragma unroll
            for (int m = 0; m < THREAD_ROWS; ++m) row[m] = load_row<RowTile>(rows, m, k);
#pragma unroll
            for (int n = 0; n < THREAD_COLUMNS; ++n) {
                const Vector column = load_vector((other ^ k * 16) + n * ROW_LANES * OtherTile::ROW_BYTES);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i)
#pragma unroll
                    for (int m = 0; m < THREAD_ROWS; ++m)
                        acc[m][n] = fma(row[m].element[i], column.element[i], acc[m][n]);
            }
        }
        rows += 128;
        other += 128;
    }
}

// A thread's columns of a product: vectors lane % 16 + 16 c of a row of `Tile`. Lanes beyond the last
// vector compute it again.
template <typename Tile>
struct Columns {
    static constexpr int COUNT = ceil_div(Tile::LINES * LINE_VECTORS, ROW_LANES);

    uint32_t address[COUNT];   // in row 0

    __device__ Columns(Tile tile, int lane) {
#pragma unroll
        for (int c = 0; c < COUNT; ++c)
            address[c] = tile.address(0, min(index(c, lane), Tile::LINES * LINE_VECTORS - 1));
    }

    static __device__ int index(int c, int lane) { return c * ROW_LANES + lane % ROW_LANES; }

    __device__ Vector load(int row, int c) const {
        return load_vector((address[c] ^ row % 8 * 16) + row * Tile::ROW_BYTES);
    }
};

// This thread's part of a product with a tile: rows x columns.
template <typename Tile>
using Accumulator = ELEMENT[THREAD_ROWS][Columns<Tile>::COUNT][VECTOR];

// acc[m] += sum_j row m [j] * columns[j] over j < TILE_COLUMNS
template <typename RowTile, typename Tile>
__device__ __forceinline__ void multiply(Accumulator<Tile>& acc, uint32_t rows, const Columns<Tile>& columns) {
#pragma unroll 1   // more in flight would take more registers than there are
    for (int k = 0; k < TILE_COLUMNS / VECTOR; ++k) {
        Vector weight[THREAD_ROWS];
#pragma unroll
        for (int m = 0; m < THREAD_ROWS; ++m) weight[m] = load_row<RowTile>(rows, m, k);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
#pragma unroll
            for (int c = 0; c < Columns<Tile>::COUNT; ++c) {
                const Vector value = columns.load(k * VECTOR + i, c);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                    for (int m = 0; m < THREAD_ROWS; ++m)
                        acc[m][c][e] = fma(weight[m].element[i], value.element[e], acc[m][c][e]);
            }
    }
}

// acc = acc alpha + what `products` adds, for a factor of each row.
template <int COUNT, typename Products>
__device__ __forceinline__ void accumulate_rescaled(ELEMENT (&acc)[THREAD_ROWS][COUNT][VECTOR],
                                                    const ELEMENT (&alpha)[THREAD_ROWS], Products products) {
    ELEMENT tile[THREAD_ROWS][COUNT][VECTOR] = {};
    auto for_each = [&](auto update) {
#pragma unroll
        for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
            for (int c = 0; c < COUNT; ++c)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) update(acc[m][c][e], alpha[m], tile[m][c][e]);
    };
    if constexpr (TILES_APART) {
        products(tile);
        for_each([](ELEMENT& x, ELEMENT alpha, ELEMENT added) { x = fma(x, alpha, added); });
    } else {
        for_each([](ELEMENT& x, ELEMENT alpha, ELEMENT) { x *= alpha; });
        products(acc);
    }
}

// Stores finish(m, x) of each element x in row m of the accumulator to the rows from `matrix` on, of which
// `num_rows` rows and `head_dim` columns exist.
template <typename Tile, typename Finish>
__device__ __forceinline__ void store_accumulator(const Accumulator<Tile>& acc, ELEMENT* matrix, int64_t row_stride,
                                                  int row, int num_rows, int head_dim, int lane, Finish finish) {
#pragma unroll
    for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
        for (int c = 0; c < Columns<Tile>::COUNT; ++c) {
            const int column = Columns<Tile>::index(c, lane) * VECTOR;
            if (row + row_step(m) >= num_rows || column >= head_dim) continue;
            Vector vector;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) vector.element[e] = finish(m, acc[m][c][e]);
            store_vector(matrix + (row + row_step(m)) * row_stride + column, vector);
        }
}

// The same to rows that 16-byte stores do not fit.
template <typename Tile, typename Finish>
__device__ __forceinline__ void store_accumulator_unaligned(const Accumulator<Tile>& acc, ELEMENT* matrix,
                                                            int64_t row_stride, int row, int num_rows, int head_dim,
                                                            int lane, Finish finish) {
#pragma unroll
    for (int m = 0; m < THREAD_ROWS; ++m)
#pragma unroll
        for (int c = 0; c < Columns<Tile>::COUNT; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const int column = Columns<Tile>::index(c, lane) * VECTOR + e;
                if (row + row_step(m) < num_rows && column < head_dim)
                    matrix[(row + row_step(m)) * row_stride + column] = finish(m, acc[m][c][e]);
            }
}
