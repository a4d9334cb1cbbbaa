// NVIDIA's C++ standard library: atomics by scope, complex numbers, limits, spans, arrays.

#include <cuda/atomic>
#include <cuda/std/array>
#include <cuda/std/complex>
#include <cuda/std/limits>
#include <cuda/std/span>

// One block hands a message to another; who waits sees it once the flag is up.
extern "C" __global__ void messages(int* sum, int* message, int* flag) {
  cuda::atomic_ref<int, cuda::thread_scope_device>(*sum).fetch_add(threadIdx.x, cuda::memory_order_relaxed);
  cuda::atomic_ref<int, cuda::thread_scope_device> raised(*flag);
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    message[0] = 5;
    raised.store(1, cuda::memory_order_release);
  } else {
    while (!raised.load(cuda::memory_order_acquire));
    message[1] = message[0];
  }
}

// z <- z * z + c while |z| <= 2: the set of Mandelbrot, the turns until then of each thread's point.
extern "C" __global__ void escapes(const float* real, const float* imaginary, unsigned char* turns, int most) {
  cuda::std::complex<float> c(real[threadIdx.x], imaginary[threadIdx.x]), z;
  int k = 0;
  while (k < most && cuda::std::norm(z) <= 4.0f) {
    z = z * z + c;
    ++k;
  }
  turns[threadIdx.x] = k;
}

// The least element of each row, through a span and an array of columns.
extern "C" __global__ void least(const float* x, float* out, int n) {
  cuda::std::span<const float> row(x + threadIdx.x * n, n);
  cuda::std::array<float, 2> smallest = {cuda::std::numeric_limits<float>::max(), 0.0f};
  for (float value : row)
    if (value < smallest[0]) smallest = {value, smallest[0]};
  out[2 * threadIdx.x] = smallest[0];
  out[2 * threadIdx.x + 1] = smallest[1];
}
