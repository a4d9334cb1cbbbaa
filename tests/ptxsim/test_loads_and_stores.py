"""ld and st: every width, sign and vector length, wide and negative offsets, cache and ordering modifiers."""

import ml_dtypes
import numpy as np
import pytest

from .launching import launch, poisoned
from .values import specials

WIDTHS = {
    "s8": np.int8,
    "u8": np.uint8,
    "s16": np.int16,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
}


@pytest.mark.parametrize("ptx_type", WIDTHS)
def test_loads_extend_into_a_wider_register(ptx_type):
    """A signed load fills a 64-bit register with its sign, an unsigned one with zeros; a store keeps the low bytes."""
    source = f"""
    extern "C" __global__ void extend(const void* x, long long* wide, void* back, int size) {{
      int i = threadIdx.x;
      long long v;
      asm volatile("ld.global.{ptx_type} %0, [%1];" : "=l"(v) : "l"((const char*)x + i * size));
      wide[i] = v;
      asm volatile("st.global.{ptx_type} [%0], %1;" :: "l"((char*)back + i * size), "l"(v) : "memory");
    }}"""
    dtype = WIDTHS[ptx_type]
    x = np.random.default_rng(1).integers(0, 256, 64 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    wide, back = poisoned(64, np.int64), poisoned(64, dtype)
    launch(source, 1, 64, x, wide, back, np.int32(x.itemsize))
    np.testing.assert_array_equal(wide.view(np.uint64), x.astype(np.int64).view(np.uint64))
    np.testing.assert_array_equal(back, x)


VECTORS = [
    (kind, length)
    for kind in ("u8", "u16", "u32", "u64", "f32", "f64")
    for length in (2, 4)
    if length * int(kind[1:]) <= 128
]


@pytest.mark.parametrize("kind, length", VECTORS)
@pytest.mark.parametrize("space", ["global", "shared", "generic"])
def test_vectors_keep_their_order(space, kind, length):
    """ld.vN then st.vN with the elements reversed."""
    bits = int(kind[1:])
    constraint = {"u8": "h", "u16": "h", "u32": "r", "u64": "l", "f32": "f", "f64": "d"}[kind]
    c_type = {"u8": "short", "u16": "short", "u32": "int", "u64": "long long", "f32": "float", "f64": "double"}[kind]
    dot = "" if space == "generic" else f".{space}"
    names = ", ".join(f"v{k}" for k in range(length))
    outs = ", ".join(f'"={constraint}"(v{k})' for k in range(length))
    ins = ", ".join(f'"{constraint}"(v{k})' for k in reversed(range(length)))
    loaded = "{" + ", ".join(f"%{k}" for k in range(length)) + "}"
    stored = "{" + ", ".join(f"%{k + 1}" for k in range(length)) + "}"
    pointers = "s, s" if space == "shared" else "x + offset, out + offset"
    to_shared = "unsigned s = (unsigned)__cvta_generic_to_shared(tile + offset);" if space == "shared" else ""
    address = "r" if space == "shared" else "l"
    before, after = pointers.split(", ")
    source = f"""
    extern "C" __global__ void vectors(const char* x, char* out) {{
      __shared__ __align__(16) char tile[1024];
      int offset = threadIdx.x * {length * bits // 8};
      for (int k = 0; k < {length * bits // 8}; ++k) tile[offset + k] = x[offset + k];
      {to_shared}
      {c_type} {names};
      asm volatile("ld{dot}.v{length}.{kind} {loaded}, [%{length}];" : {outs} : "{address}"({before}) : "memory");
      asm volatile("st{dot}.v{length}.{kind} [%0], {stored};" :: "{address}"({after}), {ins} : "memory");
      if ({int(space == "shared")})
        for (int k = 0; k < {length * bits // 8}; ++k) out[offset + k] = tile[offset + k];
    }}"""
    dtype = np.dtype(f"u{bits // 8}")
    size = 48 * length * bits // 8
    x = np.random.default_rng(2).integers(0, 256, size + 16, dtype=np.uint8)
    x = x[-x.ctypes.data % 16 :][:size].view(dtype).reshape(48, length)
    out = poisoned(size + 16, np.uint8)
    aligned = out[-out.ctypes.data % 16 :][:size]
    launch(source, 1, 48, x, aligned)
    np.testing.assert_array_equal(aligned.view(dtype).reshape(48, length), x[:, ::-1])


MODIFIERS = [
    ("ld.global.nc.u32", "st.global.wb.u32"),
    ("ld.global.ca.u32", "st.global.cg.u32"),
    ("ld.global.cg.u32", "st.global.cs.u32"),
    ("ld.global.cs.u32", "st.global.wt.u32"),
    ("ld.global.cv.u32", "st.volatile.global.u32"),
    ("ld.volatile.global.u32", "st.relaxed.gpu.global.u32"),
    ("ld.relaxed.gpu.global.u32", "st.release.gpu.global.u32"),
    ("ld.acquire.sys.global.u32", "st.release.cta.global.u32"),
    ("ld.global.L1::no_allocate.u32", "st.global.L1::no_allocate.u32"),
    ("ld.global.L2::128B.u32", "st.u32"),
    ("ld.u32", "st.global.b32"),
]


def test_modifiers_that_do_not_change_the_value():
    bodies = "".join(
        f'asm volatile("{load} %0, [%1];" : "=r"(v) : "l"(x + {k} * 32 + i) : "memory");'
        f'asm volatile("{store} [%0], %1;" :: "l"(out + {k} * 32 + i), "r"(v + {k}) : "memory");'
        for k, (load, store) in enumerate(MODIFIERS)
    )
    source = f"""
    extern "C" __global__ void modifiers(const unsigned* x, unsigned* out) {{
      int i = threadIdx.x; unsigned v; {bodies}
    }}"""
    x = np.random.default_rng(3).integers(0, 2**32, (len(MODIFIERS), 32), dtype=np.uint32)
    out = poisoned(x.shape, np.uint32)
    launch(source, 1, 32, x, out)
    np.testing.assert_array_equal(out, x + np.arange(len(MODIFIERS), dtype=np.uint32)[:, None])


def test_hints_have_no_effect():
    source = """
    extern "C" __global__ void hints(const int* x, int* out) {
      asm volatile("prefetch.global.L2 [%0];" :: "l"(x + threadIdx.x));
      asm volatile("nanosleep.u32 20;");
      out[threadIdx.x] = x[threadIdx.x];
      __threadfence_block(); __threadfence(); __threadfence_system();
    }"""
    x, out = np.arange(32, dtype=np.int32), poisoned(32, np.int32)
    launch(source, 1, 32, x, out)
    np.testing.assert_array_equal(out, x)


def test_immediate_offsets_of_both_signs():
    source = """
    extern "C" __global__ void offsets(const int* x, int* out) {
      const int* middle = x + 32 + threadIdx.x;
      int a, b, c;
      asm volatile("ld.global.s32 %0, [%1+-128];" : "=r"(a) : "l"(middle));
      asm volatile("ld.global.s32 %0, [%1+128];" : "=r"(b) : "l"(middle));
      asm volatile("ld.global.s32 %0, [%1+-4];" : "=r"(c) : "l"(middle));
      out[3 * threadIdx.x] = a; out[3 * threadIdx.x + 1] = b; out[3 * threadIdx.x + 2] = c;
    }"""
    x = np.arange(100, dtype=np.int32) ** 2
    out = poisoned((32, 3), np.int32)
    launch(source, 1, 32, x, out)
    i = np.arange(32) + 32
    np.testing.assert_array_equal(out, np.stack([x[i - 32], x[i + 32], x[i - 1]], 1))


def test_offsets_beyond_32_bits():
    """The index of the element overflows 32 bits in bytes and in elements on the way to a small array."""
    source = """
    extern "C" __global__ void far(const float* x, float* out, long long shift) {
      const float* away = x + shift;
      long long back = threadIdx.x - shift;
      out[threadIdx.x] = away[back];
    }"""
    x = np.random.default_rng(4).normal(size=64).astype(np.float32)
    for shift in (2**31, -(2**33), 2**40 + 3):
        out = poisoned(64, np.float32)
        launch(source, 1, 64, x, out, np.int64(shift))
        np.testing.assert_array_equal(out, x)


def test_negative_strides_of_a_view():
    """A pointer argument is element [0, ..., 0] of the view, here its highest address."""
    source = """
    extern "C" __global__ void reversed(const double* x, double* out, long long stride) {
      out[threadIdx.x] = x[threadIdx.x * stride];
    }"""
    x = np.random.default_rng(5).normal(size=32)
    out = poisoned(32, np.float64)
    launch(source, 1, 32, x[::-1], out, np.int64(-1))
    np.testing.assert_array_equal(out, x[::-1])


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.bool_, np.int64]
)
def test_copies_of_every_dtype_keep_the_bits(dtype):
    itemsize = np.dtype(dtype).itemsize
    c_type = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[itemsize]
    source = f"""
    extern "C" __global__ void copy(const {c_type}* x, {c_type}* out) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      out[i] = x[i];
    }}"""
    bits = specials({1: "u16", 2: "f16", 4: "f32", 8: "f64"}[itemsize]).view(np.uint8)
    x = np.resize(bits & 1 if dtype is np.bool_ else bits, 64 * itemsize).view(dtype)
    out = np.zeros(64, dtype)
    launch(source, 2, 32, x, out)
    assert out.tobytes() == x.tobytes()
