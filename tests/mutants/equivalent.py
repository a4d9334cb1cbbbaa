"""Mutants that survive, each with the reason why nothing that a test could observe is different."""

#: Reason -> (file, line as the mutant has it, or how that line starts).
EQUIVALENT: dict[str, list[tuple[str, str]]] = {
    "The step before which the next key tile is fetched decides how many registers are live, nothing else.": [
        ("flash_fwd.cu", "constexpr int PREFETCH_STEP = BLOCK_N < 4 * MMA_K ? BLOCK_N / MMA_K / 3"),
        ("flash_fwd.cu", "constexpr int PREFETCH_STEP = BLOCK_N < 4 * MMA_K ? BLOCK_N / MMA_K / 2 : 1"),
        ("flash_fwd.cu", "constexpr int PREFETCH_STEP = BLOCK_N < 4 * MMA_K ? BLOCK_N / MMA_K / 2 : 3"),
    ],
    "Every lane of a warp computes the same number of that warp.": [
        ("flash_fwd.cu", "const int warp = __shfl_sync(FULL_WARP, thread / WARP_SIZE, 1);"),
    ],
    "The upper half of the register is dropped.": [
        (
            "element.cuh",
            "static __device__ uint16_t round(float value) { return uint16_t(cvt_rn_x2<Half>(value, 1.5f)); }",
        ),
    ],
    "All lanes of the warp hold the same sum.": [
        ("flash_bwd_delta.cu", "if (lane == 1) {"),
    ],
    # All other scores that are not finite make NaN of P, and of dS with it.
    "What a key of score -inf adds to dq, 0 times infinity, is not promised to be NaN.": [
        ("flash_bwd_dq.cu", "removed: spread_nonfinite<ELEMENT>(dquery,"),
        ("flash_bwd_dq.cu", ";   // every warp has seen the keys"),
    ],
    "The four lanes that share a row hold the same lse.": [
        ("flash_fwd.cu", "if (params.lse && lane % 4 == 1 && row < num_rows)"),
    ],
    "Lanes 2 and 3, and 0 and 1, hold the same after the exchange before.": [
        ("softmax.cuh", "tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL_WARP, tile_max, 3));"),
        ("softmax.cuh", "row_sum[m][half] += __shfl_xor_sync(FULL_WARP, row_sum[m][half], 3);"),
    ],
    "Accumulators of a row that saw no key are 0, whatever finite factor they are multiplied by.": [
        ("softmax.cuh", "return max_scaled[m][half] == NO_KEY ? 0.5f : rcp_approx(row_sum[m][half]);"),
        ("softmax.cuh", "return max_scaled[m][half] == NO_KEY ? 1.5f : rcp_approx(row_sum[m][half]);"),
    ],
    "The maximum starts from any score of the row and tile, and then takes them all.": [
        ("softmax.cuh", "float tile_max = scores[m][1][2 * half];"),
    ],
    "One key seen by all is not a whole tile of them.": [
        (
            "block_range.cuh",
            "const int seen_by_all = "
            "max(last_visible_key(first_query, sequence.seqlen_k, sequence.band_right) + 1, 1);",
        ),
    ],
    "A tile starts at a multiple of BLOCK_M, so that the sum is below 2**31 for every query that exists.": [
        (
            "flash_fwd.cu",
            "const TileMask<M_TILES> mask(int(first_query) + warp_row, tile * BLOCK_N, sequence, lane);",
        ),
        (
            "mask.cuh",
            "__device__ TileMask(int first_query, int first_key, const Sequence& sequence, int lane) {",
        ),
    ],
    "Only in the last tile of 2**31 stacked rows is the sum beyond an int, more than a test can simulate.": [
        ("query_rows.cuh", "return [this, head = sequence.head(int(first_row) + row)](const auto& operand) {"),
    ],
    "Rows that are copied one by one are the same rows.": [
        ("query_rows.cuh", "if constexpr (true || STACKED)"),
    ],
    "Nothing is stored of a row that does not count, whatever was loaded.": [
        ("query_rows.cuh", "return row <= num_rows && sequence.counts(first_row + row)"),
        ("query_rows.cuh", "return row < num_rows || sequence.counts(first_row + row)"),
    ],
    "Functions that are made beside those that are asked for are in registers, and dropped.": [
        ("query_rows.cuh", "static constexpr int NUMBER = STACKED ? 2 * M_TILES : 2;"),
        ("query_rows.cuh", "for (int n = 0; n <= NUMBER; ++n)"),
    ],
    "The compiler computes the same addresses in another way, with other registers.": [
        ("flash_fwd.cu", "constexpr bool ADD_QUERY_ADDRESSES = BLOCK_M > HEAD_DIM_V"),
        ("flash_fwd.cu", "constexpr bool ADD_QUERY_ADDRESSES = BLOCK_N <= HEAD_DIM_V"),
        ("flash_fwd.cu", "constexpr bool ADD_QUERY_ADDRESSES = BLOCK_N >= HEAD_DIM_V"),
        ("flash_fwd.cu", "constexpr bool ADD_QUERY_ADDRESSES = BLOCK_N > HEAD_DIM;"),
        ("flash_fwd.cu", "const uint32_t query_rows = ADD_QUERY_ADDRESSES ? query_address.rows : opaque("),
        ("tile.cuh", ";   // a chain: otherwise i * step is computed for each i"),
    ],
    "One more line of chunks is beyond every head dimension, and none of it is stored.": [
        ("tile.cuh", "for (int line = 0; line <= Tile::LINES; ++line) {"),
    ],
    "An element behind the last of an array of registers is written and never read, and the compiler drops it.": [
        ("mask.cuh", "for (int m = 0; m <= M_TILES; ++m)"),
        ("nonfinite.cuh", "for (int m = 0; m <= M_TILES; ++m)"),
        ("nonfinite.cuh", "for (int m = 0; m <= M_TILES; ++m)"),
        ("softmax.cuh", "for (int m = 0; m <= M_TILES; ++m)"),
    ],
    "A thread beyond the last element would copy an element a second time: every digit of its index wraps around.": [
        ("strided_copy.cu", "if (false) if (line >= int64_t(params.num_batches) * params.rows) return;"),
        ("strided_copy.cu", "if (line > int64_t(params.num_batches) * params.rows) return;"),
    ],
    "Differs from 2**31 elements to copy or rows of lse on: more blocks than a test can run in the simulator.": [
        ("attention_naive_bwd.cu", "const int line = thread_index() / columns;"),
        ("naive.cuh", "__device__ int thread_index() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }"),
        ("naive.cuh", "__device__ int64_t thread_index() { return int(blockIdx.x) * blockDim.x + threadIdx.x; }"),
        ("strided_copy.cu", "const int index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;"),
        ("strided_copy.cu", "const int64_t index = int(blockIdx.x) * blockDim.x + threadIdx.x;"),
        ("strided_copy.cu", "const int line = index / params.columns;"),
        ("strided_copy.cu", "if (line >= int(params.num_batches) * params.rows) return;"),
        ("sequence.cuh", "int64_t row = int(batch) * params.seqlen_q;"),
    ],
}


def reason(mutant) -> str | None:
    """Why this mutant is equivalent to the kernel, if it is known to be."""
    for why, lines in EQUIVALENT.items():
        if any(mutant.file == file and mutant.mutated_line.startswith(line) for file, line in lines):
            return why
    return None
