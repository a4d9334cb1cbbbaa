"""Integers of 128 bits, which NVRTC makes of carries: products, shifts, and divisions that add after a subtraction."""

import numpy as np

from cupyflash import ptxsim

from .launching import poisoned

SOURCE = """
typedef unsigned long long u64;
typedef unsigned __int128 u128;
__device__ void put(u64*& out, u128 value) {
  *out++ = (u64)value;
  *out++ = (u64)(value >> 64);
}
extern "C" __global__ void operations(const u64* x, u64* out) {
  x += 3 * threadIdx.x;
  out += 12 * threadIdx.x;
  u128 a = (u128)x[0] << 64 | x[1], b = (u128)(x[2] >> 7) << (x[2] & 63) | 1;
  put(out, a * b);
  put(out, a / b);
  put(out, a % b);
  put(out, a / 1000003);
  put(out, (u128)((__int128)a / -(__int128)(b >> 60 | 1)));
  put(out, (u128)((__int128)a >> (x[2] & 127)));
}"""


def truncated(a, b):
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def test_operations():
    x = np.random.default_rng().integers(0, 2**64, (64, 3), dtype=np.uint64)
    x[::5, 0] = 0
    out = poisoned((64, 6, 2), np.uint64)
    module = ptxsim.RawModule(code=SOURCE, options=("--device-int128",))
    module.get_function("operations")((1,), (64,), (x, out))
    for (high, low, c), results in zip(x.tolist(), out.tolist(), strict=True):
        a, b = high << 64 | low, (c >> 7) << (c & 63) & 2**128 - 1 | 1
        signed = a - 2**128 if a >> 127 else a
        expected = [a * b, a // b, a % b, a // 1000003, truncated(signed, -(b >> 60 | 1)), signed >> (c & 127)]
        assert [low | high << 64 for low, high in results] == [value % 2**128 for value in expected]
