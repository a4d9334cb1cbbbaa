// What CuPy's own kernels are made of: its headers, and loops in the form that its generators write.

#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/float16.cuh>
#include <cupy/atomics.cuh>

// An ElementwiseKernel: arrays with shape and strides by value, an index per thread.
typedef float T;
extern "C" __global__ void elementwise(const CArray<T, 2> _raw_x, const CArray<T, 2> _raw_y, CArray<T, 2> _raw_z,
                                       CIndexer<2> _ind) {
  ;
  CUPY_FOR(i, _ind.size()) {
    _ind.set(i);
    const T& x = _raw_x[_ind.get()];
    const T& y = _raw_y[_ind.get()];
    T& z = _raw_z[_ind.get()];
    z = (x - y) * (x - y);
  }
  ;
}

// A ReductionKernel over the last axis: a tree of a block whose threads begin with several elements each.
#define REDUCE(a, b) (a + b)
#define _REDUCE(_offset)                                          \
  if (_tid < _offset) {                                           \
    float _a = _sdata[_tid], _b = _sdata[(_tid + _offset)];       \
    _sdata[_tid] = REDUCE(_a, _b);                                \
  }
extern "C" __global__ void reduction(const CArray<float16, 2, true> _raw_in, CArray<float16, 1, true> _raw_out,
                                     CIndexer<1> _out_ind) {
  __shared__ float _sdata[64];
  unsigned int _tid = threadIdx.x;
  ptrdiff_t columns = _raw_in.shape()[1];
  for (ptrdiff_t _i = blockIdx.x; _i < _out_ind.size(); _i += gridDim.x) {
    float _s = 0.0f;
    for (ptrdiff_t _j = _tid; _j < columns; _j += blockDim.x) {
      ptrdiff_t where[2] = {_i, _j};
      _s = REDUCE(_s, static_cast<float>(_raw_in[where]));
    }
    _sdata[_tid] = _s;
    __syncthreads();  // of all elements
    for (unsigned int _block = 32; _block > 0; _block >>= 1) {
      _REDUCE(_block);
      __syncthreads();
    }
    if (_tid == 0) _raw_out[_i] = float16(_sdata[0]);
    __syncthreads();
  }
}

extern "C" __global__ void complex_functions(const complex<double>* z, complex<double>* out, double* lengths) {
  complex<double> w = z[threadIdx.x];
  lengths[threadIdx.x] = abs(w);
  out[threadIdx.x] = w * w / (w + complex<double>(3.0, 1.0)) - conj(w) + exp(w * 0.25) + sqrt(w);
}

extern "C" __global__ void halves(const float16* x, float16* y, float16* sum, bool* finite) {
  float16 a = x[threadIdx.x], b = x[threadIdx.x + 32];
  y[threadIdx.x] = max(a * b, a + b) / float16(3.0f);
  finite[threadIdx.x] = isfinite(a) && !isnan(b) && a < b;
  atomicAdd(sum + threadIdx.x % 2, a);
}

// A matrix by fancy indices, with 64-bit integers that are added atomically.
extern "C" __global__ void scatter_add(const CArray<long long, 1, true> indices, const CArray<long long, 1, true> values,
                                       CArray<long long, 1> out) {
  CUPY_FOR(i, indices.size()) {
    ptrdiff_t at = indices[i];
    if (at < 0) at += out.size();
    atomicAdd(&out[at], values[i]);
  }
}
