// Integer names, constants, and the strided operand that every kernel takes.

using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;

// Values of LENGTHS in variant.cuh, for preprocessor conditions, where an undefined name would count as 0.
#define PADDED 1
#define PACKED 2

constexpr int WARP_SIZE = 32;
constexpr uint32_t FULL_WARP = 0xffffffff;
constexpr int MAX_BATCH_DIMS = 8;
constexpr int MAX_SEQLEN = 0x7fffffff;
constexpr float LN2 = 0.693147180559945309f;
constexpr float LOG2_E = 1.442695040888963407f;

__device__ constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0); }
__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

template <bool VALUE>
struct Constant {
    static constexpr bool value = VALUE;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// Which matrix of a batched array: the mixed-radix digits of a linear index. Broadcasting and
// grouped heads need no code of their own: the host gives such a dimension stride 0.
struct BatchShape {
    int ndim;
    int size[MAX_BATCH_DIMS];

    __device__ int64_t offset(int index, const int64_t (&stride)[MAX_BATCH_DIMS]) const {
        int64_t elements = 0;
#pragma unroll 1
        for (int dim = ndim - 1; dim >= 0; --dim) {
            elements += (index % size[dim]) * stride[dim];
            index /= size[dim];
        }
        return elements;
    }
};

// A batched matrix (..., rows, columns) with unit column stride. Strides count elements, in 64 bits.
template <typename T>
struct Operand {
    T* data;
    int64_t row_stride;
    int64_t batch_stride[MAX_BATCH_DIMS];

    __device__ T* matrix(const BatchShape& batch, int index) const { return data + batch.offset(index, batch_stride); }
};

// An operand of a backward kernel. A block owns one matrix of a gradient, which an index over the owner
// dimensions names, and sums over the reduced dimensions: those that broadcast it or that share its head.
template <typename T>
struct SummedOperand {
    T* data;
    int64_t row_stride;
    int64_t owner_stride[MAX_BATCH_DIMS];
    int64_t reduced_stride[MAX_BATCH_DIMS];

    __device__ T* matrix(const BatchShape& owner, int owner_index, const BatchShape& reduced, int reduced_index) const {
        return data + owner.offset(owner_index, owner_stride) + reduced.offset(reduced_index, reduced_stride);
    }
};

// One float per query: row_stride is 1.
using RowValues = SummedOperand<const float>;
