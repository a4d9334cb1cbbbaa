"""Counters: tiny kernels whose instructions, bytes, sectors, wavefronts, flops and barriers can be counted by hand."""

import re
import threading

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import OPTIONS, launch, poisoned, zeros
from .test_tensor_core import mma_source


def profiled(source, grid, block, *args, **options):
    """The one KernelProfile of a launch."""
    with ptxsim.profile() as profile:
        launch(source, grid, block, *args, **options)
    (kernel,) = profile.kernels
    return kernel


STRIDED = """
extern "C" __global__ void strided(const float* x, float* out, int stride, int shift) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = x[i * stride + shift];
}"""


@pytest.mark.parametrize(
    "stride, shift, sectors_per_warp, distinct",
    [
        (1, 0, 4, 16),  # 128 bytes in a row
        (2, 0, 8, 32),
        (8, 0, 32, 128),  # one sector per lane
        (16, 3, 32, 128),
        (1, 1, 5, 17),  # one element off: a fifth sector, shared with the next warp
        (0, 5, 1, 1),  # everybody reads the same word
    ],
)
def test_sectors_of_coalesced_and_strided_loads(stride, shift, sectors_per_warp, distinct):
    """Four warps: sectors count per request, distinct sectors once per launch; the store is coalesced."""
    x, out = zeros(128 * 16 + 16), zeros(128)
    kernel = profiled(STRIDED, 2, 64, x, out, np.int32(stride), np.int32(shift))
    assert (kernel.name, kernel.launches) == ("strided", 1)
    assert kernel.global_load_sectors == 4 * sectors_per_warp
    assert kernel.distinct_load_sectors == distinct
    assert (kernel.global_store_sectors, kernel.distinct_store_sectors) == (16, 16)
    assert kernel.global_store_bytes == 512
    if stride:
        assert kernel.global_load_bytes == 512


def test_wide_accesses_move_four_times_the_bytes():
    source = """
    extern "C" __global__ void wide(const float4* x, float4* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      out[i] = x[i];
    }"""
    kernel = profiled(source, 1, 64, zeros(256), zeros(256))
    assert (kernel.global_load_bytes, kernel.global_store_bytes) == (1024, 1024)
    assert (kernel.global_load_sectors, kernel.distinct_load_sectors) == (32, 32)


def test_inactive_lanes_move_nothing():
    source = """
    extern "C" __global__ void tail(const float* x, float* out, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) out[i] = x[i];
    }"""
    kernel = profiled(source, 3, 32, zeros(40), zeros(40), np.int32(40))
    assert (kernel.global_load_bytes, kernel.global_store_bytes) == (160, 160)
    assert (kernel.global_load_sectors, kernel.global_store_sectors) == (5, 5)


def test_reading_twice_counts_twice_but_is_distinct_once():
    source = """
    extern "C" __global__ void twice(const float* x, float* out) {
      volatile const float* y = x;
      out[threadIdx.x] = y[threadIdx.x] + y[threadIdx.x];
    }"""
    kernel = profiled(source, 6, 32, zeros(32), zeros(32))
    assert kernel.global_load_sectors == 6 * 2 * 4 and kernel.distinct_load_sectors == 4
    assert kernel.global_store_sectors == 6 * 4 and kernel.distinct_store_sectors == 4
    assert kernel.global_load_bytes == 6 * 2 * 128


SHARED = """
extern "C" __global__ void shared(float* out, int stride) {{
  extern __shared__ __align__(16) {type} tile[];
  int t = threadIdx.x;
  tile[t * stride] = {make};
  __syncwarp();
  out[t] = (float)({read});
}}"""
FLOAT = SHARED.format(type="float", make="t", read="((volatile float*)tile)[t * stride]")
DOUBLE = SHARED.format(type="double", make="t", read="((volatile double*)tile)[t * stride]")


@pytest.mark.parametrize(
    "stride, conflicts", [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (32, 32), (33, 1), (0, 1)]
)
def test_bank_conflicts_of_words(stride, conflicts):
    """32 lanes over 32 banks: a store and a load of `conflicts` wavefronts each; one word for all is a broadcast."""
    kernel = profiled(FLOAT, 1, 32, poisoned(32, np.float32), np.int32(stride), shared_mem=33 * 32 * 4)
    assert kernel.shared_wavefronts == 2 * conflicts
    assert kernel.shared_ideal_wavefronts == 2


@pytest.mark.parametrize("stride, wavefronts", [(1, 2), (2, 4), (16, 32)])
def test_bank_conflicts_of_double_words(stride, wavefronts):
    """8-byte accesses go in two halves of 16 lanes."""
    kernel = profiled(DOUBLE, 1, 32, poisoned(32, np.float32), np.int32(stride), shared_mem=16 * 32 * 8)
    assert kernel.shared_wavefronts == 2 * wavefronts
    assert kernel.shared_ideal_wavefronts == 4


def test_sixteen_byte_accesses_go_in_four_quarters():
    source = """
    extern "C" __global__ void quads(float4* out, int stride) {
      extern __shared__ float4 tile[];
      int t = threadIdx.x;
      tile[t * stride] = make_float4(t, t, t, t);
      __syncwarp();
      float4 v;
      unsigned a = (unsigned)__cvta_generic_to_shared(tile + t * stride);
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
      out[t] = v;
    }"""
    for stride, wavefronts in ((1, 4), (2, 8), (8, 32)):
        kernel = profiled(source, 1, 32, zeros(128), np.int32(stride), shared_mem=16 * 256)
        assert (kernel.shared_wavefronts, kernel.shared_ideal_wavefronts) == (2 * wavefronts, 8), stride


LDMATRIX = """
extern "C" __global__ void rows(unsigned* out, int row_bytes) {
  extern __shared__ __align__(128) char tile[];
  unsigned a, b, c, d, row = (unsigned)__cvta_generic_to_shared(tile) + threadIdx.x * row_bytes;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(row) : "memory");
  out[threadIdx.x] = a + b + c + d;
}"""


@pytest.mark.parametrize("row_bytes, wavefronts", [(16, 4), (128, 32), (144, 4), (32, 8), (64, 16)])
def test_ldmatrix_wavefronts(row_bytes, wavefronts):
    """Each of the four matrices is a phase of eight 16-byte rows."""
    kernel = profiled(LDMATRIX, 1, 32, poisoned(32, np.uint32), np.int32(row_bytes), shared_mem=32 * 144)
    assert (kernel.shared_wavefronts, kernel.shared_ideal_wavefronts) == (wavefronts, 4)


def test_asynchronous_copies_count_as_global_loads_and_shared_stores():
    source = """
    extern "C" __global__ void fetch(const uint4* x, unsigned* out) {
      __shared__ uint4 tile[32];
      unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + threadIdx.x) : "memory");
      asm volatile("cp.async.wait_all;" ::: "memory");
      out[threadIdx.x] = 1;
    }"""
    kernel = profiled(source, 1, 32, zeros(128, np.uint32), zeros(32, np.uint32))
    assert (kernel.global_load_bytes, kernel.global_load_sectors, kernel.distinct_load_sectors) == (512, 16, 16)
    assert (kernel.shared_wavefronts, kernel.shared_ideal_wavefronts) == (4, 4)


@pytest.mark.parametrize("k", [8, 16])
def test_flops_of_tensor_instructions(k):
    """m16n8k is 2 * 16 * 8 * k floating-point operations for each warp: six warps here."""
    a, b, c, d = (np.zeros(192 * n, t) for n, t in ((k // 4, np.uint32), (k // 8, np.uint32), (4, "f4"), (4, "f4")))
    kernel = profiled(mma_source(k, "f16"), 3, 64, a, b, c, d)
    assert kernel.mma_flops == 6 * 2 * 16 * 8 * k


def test_barriers():
    source = """
    extern "C" __global__ void waits(int* out, int n) {
      for (int k = 0; k < n; ++k) __syncthreads();
      out[threadIdx.x] = n;
    }"""
    assert profiled(source, 5, 32, poisoned(32, np.int32), np.int32(7)).barriers == 35
    assert profiled(source, 5, 32, poisoned(32, np.int32), np.int32(0)).barriers == 0


def instructions_of(source):
    """How many PTX instructions the body of the one kernel of a source has."""
    body = ptxsim.compile_ptx(source, OPTIONS).split("{", 1)[1]
    return sum(1 for line in body.splitlines() if re.match(r"\s+[a-z].*;\s*$", line))


STRAIGHT = """
extern "C" __global__ void straight(const float* x, float* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = x[i] * 3.0f + (float)(i * 5);
}"""


def test_straight_code_executes_each_instruction_once_per_warp():
    """Whatever the classes are called, they add up to warps times instructions; a partial warp is a warp."""
    count = instructions_of(STRAIGHT)
    assert count > 8
    for grid, block, warps in ((1, 32, 1), (3, 64, 6), (2, 33, 4)):
        kernel = profiled(STRAIGHT, grid, block, zeros(192), zeros(192))
        assert sum(kernel.instructions.values()) == warps * count


def test_a_divergent_warp_executes_both_sides():
    source = """
    extern "C" __global__ void sides(int* out, int split) {
      int t = threadIdx.x;
      if (t < split) { for (int k = 0; k < 9; ++k) out[t] = atomicAdd(out + t, k); }
      else out[t] = __clz(t) * atomicAdd(out + t, 1) + 3;
    }"""
    totals = {s: sum(profiled(source, 1, 32, zeros(32, "i4"), np.int32(s)).instructions.values()) for s in (0, 16, 32)}
    assert max(totals[0], totals[32]) < totals[16] < totals[0] + totals[32]


def test_launches_of_one_kernel_add_up_and_kernels_stay_apart():
    with ptxsim.profile() as profile:
        assert list(profile.kernels) == []
        for _ in range(3):
            launch(STRIDED, 1, 32, zeros(32), zeros(32), np.int32(1), np.int32(0))
        launch(STRAIGHT, 1, 32, zeros(32), zeros(32))
    launch(STRAIGHT, 1, 32, zeros(32), zeros(32))
    kernels = {kernel.name: kernel for kernel in profile.kernels}
    assert set(kernels) == {"strided", "straight"}
    assert (kernels["strided"].launches, kernels["straight"].launches) == (3, 1)
    assert kernels["strided"].global_load_bytes == 3 * 128
    assert kernels["strided"].distinct_load_sectors == 3 * 4


def test_kernels_of_one_name_in_two_modules_stay_apart():
    """Lines are those of their own source; equal sources are one kernel."""
    first = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = 1; }'
    second = 'extern "C" __global__ void fill(int* out) {\n  out[0] = 2; }'
    with ptxsim.profile() as profile:
        for source in first, second, first:
            ptxsim.RawModule(code=source).get_function("fill")((1,), (32,), (np.zeros(32, np.int32),))
    assert [(kernel.name, kernel.launches) for kernel in profile.kernels] == [("fill", 2), ("fill", 1)]
    stores = [[line.text for line in kernel.lines if line.global_store_requests] for kernel in profile.kernels]
    assert stores == [[first], ["  out[0] = 2; }"]]
    found = profile.as_dict()
    assert {name: kernel["global_store_bytes"] for name, kernel in found.items()} == {"fill": 256, "fill (2)": 128}


def test_launches_that_a_fault_stops_are_told():
    source = 'extern "C" __global__ void fill(int* out, int shift) { out[threadIdx.x + shift] = 1; }'
    with ptxsim.profile() as profile, ptxsim.sanitize() as report:
        for shift in 0, 1 << 20, 1 << 20:
            launch(source, 1, 32, np.zeros(32, np.int32), np.int32(shift))
    assert report.findings
    assert profile.kernels[0].launches == 1 and profile.stopped == {"fill": 2}
    assert str(profile).endswith("\n\nfill: launches that a fault stopped, not counted: 2")


def test_sectors_of_device_variables_do_not_depend_on_the_allocator():
    modules = []
    for size in range(8, 72, 8):
        source = f"""__device__ int table[{size}]; extern "C" __global__ void fill() {{
            if (threadIdx.x < {size}) table[threadIdx.x] = 1; }}"""
        modules.append(ptxsim.RawModule(code=source, options=OPTIONS))
        with ptxsim.profile() as profile:
            modules[-1].get_function("fill")((1,), (96,), ())
        assert profile.kernels[0].distinct_store_sectors == size // 8


def test_a_schedule_does_not_change_what_is_counted():
    first = profiled(STRIDED, 2, 64, zeros(256), zeros(128), np.int32(2), np.int32(0))
    second = profiled(STRIDED, 2, 64, zeros(256), zeros(128), np.int32(2), np.int32(0), schedule="random", seed=4)
    for name in ("instructions", "global_load_bytes", "global_load_sectors", "distinct_load_sectors"):
        assert getattr(first, name) == getattr(second, name), name


def test_threads_profile_their_own_launches():
    """Two Python threads with different architectures and profiles do not see each other."""
    source = 'extern "C" __global__ void which(int* out) { out[threadIdx.x] = __CUDA_ARCH__; }'
    seen, ready = {}, threading.Barrier(2)

    def work(arch, launches):
        with ptxsim.settings(arch=arch, schedule="random", seed=launches), ptxsim.profile() as profile:
            values = set()
            kernel = ptxsim.RawModule(code=source, options=OPTIONS).get_function("which")
            ready.wait(30)
            for _ in range(launches):
                out = poisoned(64, np.int32)
                kernel((2,), (32,), (out[:32],))
                values |= set(out[:32].tolist())
        seen[arch] = values, [k.launches for k in profile.kernels]

    threads = [threading.Thread(target=work, args=case) for case in (("sm_75", 20), ("sm_90", 30))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"sm_75": ({750}, [20]), "sm_90": ({900}, [30])}
