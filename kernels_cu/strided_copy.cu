// Copies a batched matrix between any two strided layouts: one thread per element.
//
// It packs operands whose rows the 16-byte loads of the tiled kernels cannot read, and brings their
// results back to the caller's strides. Constant: ELEMENT_BYTES = 2, 4 or 8. Grid: one dimension.

#include "common.cuh"

#if ELEMENT_BYTES == 2
using Bits = uint16_t;
#elif ELEMENT_BYTES == 4
using Bits = uint32_t;
#elif ELEMENT_BYTES == 8
using Bits = int64_t;
#else
#error "ELEMENT_BYTES is 2, 4 or 8"
#endif

struct Params {
    const Bits* source;
    Bits* target;
    int64_t source_row_stride, source_column_stride;   // strides count elements
    int64_t target_row_stride, target_column_stride;
    int64_t source_batch_stride[MAX_BATCH_DIMS], target_batch_stride[MAX_BATCH_DIMS];
    BatchShape batch;
    int num_batches;     // product of the batch shape
    int rows, columns;
};

extern "C" __global__ void strided_copy(const __grid_constant__ Params params) {
    const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t line = index / params.columns;
    const int column = int(index % params.columns);
    const int row = int(line % params.rows), batch_idx = int(line / params.rows);
    if (line >= int64_t(params.num_batches) * params.rows) return;

    const Bits* source = params.source + params.batch.offset(batch_idx, params.source_batch_stride);
    Bits* target = params.target + params.batch.offset(batch_idx, params.target_batch_stride);
    target[row * params.target_row_stride + column * params.target_column_stride] =
        source[row * params.source_row_stride + column * params.source_column_stride];
}
