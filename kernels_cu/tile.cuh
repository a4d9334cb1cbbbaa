// Tiles of 16-bit elements in shared memory, and their copies from and to device memory.

constexpr int CHUNK = 8;               // elements in one 16-byte access
constexpr int CHUNKS_PER_LINE = 8;     // a line of 128 bytes spans all 32 banks
constexpr int LINE = CHUNK * CHUNKS_PER_LINE;

// ROWS x COLS elements. Rows are whole lines, and chunk c of row r lies at chunk c ^ (r % 8) of its
// line: the eight rows that one ldmatrix phase reads then lie in eight different bank groups.
template <int ROWS, int COLS>
struct SharedTile {
    static constexpr int NUM_ROWS = ROWS, NUM_COLS = COLS;
    static constexpr int LINES = ceil_div(COLS, LINE);
    static constexpr int ROW_BYTES = LINES * LINE * 2;
    static constexpr int BYTES = ROWS * ROW_BYTES;

    uint32_t base;   // shared-memory address, a multiple of 128

    __device__ uint32_t address(int row, int chunk) const {
        return base + row * ROW_BYTES + chunk / CHUNKS_PER_LINE * 128 + (chunk % CHUNKS_PER_LINE ^ row % 8) * 16;
    }
};

// One thread's share in copying the successive tiles of a matrix to shared memory: one chunk of each
// line of every ROW_STEP-th row, so that eight threads read 128 consecutive bytes.
template <int ROWS, int COLS, int NUM_THREADS>
struct TileLoader {
    using Tile = SharedTile<ROWS, COLS>;
    static constexpr int NUM_ROWS = ROWS;
    static constexpr int ROW_STEP = NUM_THREADS / CHUNKS_PER_LINE;
    static_assert((ROWS % ROW_STEP == 0 || ROWS < ROW_STEP) && ROW_STEP % 8 == 0, "one swizzle for each thread's rows");

    const uint16_t* source;   // this thread's first chunk of the next tile
    int64_t step;             // elements from one of its rows to the next
    uint32_t destination;
    int row;
    bool last_chunk;          // whether the head dimension reaches this thread's chunk in the last line

    __device__ TileLoader(Tile tile, const uint16_t* matrix, int64_t row_stride, int head_dim, int thread) {
        const int chunk = thread % CHUNKS_PER_LINE;
        row = thread / CHUNKS_PER_LINE;
        source = matrix + row * row_stride + chunk * CHUNK;
        step = (ROWS < ROW_STEP ? ROWS : ROW_STEP) * row_stride;
        destination = tile.address(row, chunk);
        last_chunk = (Tile::LINES - 1) * LINE + chunk * CHUNK < head_dim;
    }

    __device__ void skip(int num_tiles) { source += num_tiles * (ceil_div(ROWS, ROW_STEP) * step); }

    // Starts the copy of the next tile, of which `num_rows` rows exist; zeros stand for the others. `stage`:
    // bytes to the copy's buffer, where there are several.
    __device__ void load_async(int num_rows, int stage = 0) {
        const int rows_left = num_rows - row;
        const int rows_left_in_last_line = last_chunk ? rows_left : 0;
#pragma unroll
        for (int i = 0; i < ceil_div(ROWS, ROW_STEP); ++i) {
            if (ROWS < ROW_STEP && row >= ROWS) break;
#pragma unroll
            for (int line = 0; line < Tile::LINES; ++line)
                cp_async_16(destination + stage + i * ROW_STEP * Tile::ROW_BYTES + line * 128, source + line * LINE,
                            i * ROW_STEP < (line + 1 < Tile::LINES ? rows_left : rows_left_in_last_line));
            source += step;
            source = opaque(source);   // a chain: otherwise i * step is computed for each i
        }
        cp_async_commit_group();
    }
};

// The same for two floats per row of the tiles: all of the first, then all of the second.
template <int ROWS>
struct RowLoader {
    const float* source;
    uint32_t destination;
    int row;   // ROWS for a thread that has nothing to copy

    __device__ RowLoader(uint32_t shared, const float* first, const float* second, int thread)
        : source((thread < ROWS ? first : second) + thread % ROWS),
          destination(shared + thread * 4),
          row(thread < 2 * ROWS ? thread % ROWS : ROWS) {}

    __device__ void skip(int num_tiles) { source += num_tiles * ROWS; }

    __device__ void load_async(int num_rows, int stage) {
        if (row < ROWS) cp_async_4(destination + stage, source, row < num_rows);
        source += ROWS;
    }
};

// Starts the copy of a tile whose row r begins at source(r); zeros stand for a row that is null.
template <int NUM_THREADS, typename Tile, typename Source>
__device__ void load_rows_async(Tile tile, Source source, int head_dim, int thread) {
    const int chunk = thread % CHUNKS_PER_LINE;
    for (int row = thread / CHUNKS_PER_LINE; row < Tile::NUM_ROWS; row += NUM_THREADS / CHUNKS_PER_LINE) {
        const uint16_t* chunks = source(row);
#pragma unroll
        for (int line = 0; line < Tile::LINES; ++line) {
            const int column = line * LINE + chunk * CHUNK;
            cp_async_16(tile.address(row, column / CHUNK), chunks + column, chunks && column < head_dim);
        }
    }
    cp_async_commit_group();
}

// Copies rows of a tile, `num_rows` of them, to device memory; the 32 lanes of one warp.
template <int ROWS, typename Tile>
__device__ void store_rows(Tile tile, int first_row, uint16_t* matrix, int64_t row_stride, int num_rows, int head_dim,
                           int lane) {
    constexpr int ROW_STEP = WARP_SIZE / CHUNKS_PER_LINE;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROW_STEP)
#pragma unroll
        for (int line = 0; line < Tile::LINES; ++line) {
            const int row = first_row + i + lane / CHUNKS_PER_LINE;
            const int chunk = line * CHUNKS_PER_LINE + lane % CHUNKS_PER_LINE;
            if (row < num_rows && chunk * CHUNK < head_dim)
                *reinterpret_cast<uint4*>(matrix + row * row_stride + chunk * CHUNK) =
                    ld_shared_v4(tile.address(row, chunk));
        }
}
