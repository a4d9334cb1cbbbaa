"""Lower bounds in cycles: kernels whose limiting resource, and how much of it they need, can be worked out by hand."""

import numpy as np
import pytest

from cupyflash import attention, ptxsim
from cupyflash.ptxsim.devices import BOUNDED, DEVICES, device

from .launching import launch, poisoned, zeros
from .test_profile import profiled


def bound(source, grid, block, *args, on="A100", **options):
    return profiled(source, grid, block, *args, **options).lower_bound(on)


COPY = """
extern "C" __global__ void copy(const float4* x, float4* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i];
}"""


@pytest.mark.parametrize("arch", BOUNDED)
def test_a_stream_copy_is_bound_by_device_memory(arch):
    """Each byte is read once and written once, whatever the number of blocks: bytes / (bandwidth / clock)."""
    x, y = zeros(4 * 128 * 200), zeros(4 * 128 * 200)
    found, gpu = bound(COPY, 200, 128, x, y, on=arch), device(arch)
    assert found.limited_by == "DRAM"
    assert found.cycles == pytest.approx(2 * x.nbytes / gpu.bandwidth * gpu.clock)
    assert found.seconds == pytest.approx(2 * x.nbytes / (gpu.bandwidth * 1e9))
    assert (found.device, found.arch) == (gpu.name, arch)
    assert found.resources["L2"] == x.nbytes / 64 / min(gpu.sms, 200)


def test_what_is_read_and_written_crosses_once_at_least():
    source = """
    extern "C" __global__ void twice(float* x) { x[blockIdx.x * 128 + threadIdx.x] *= 2; }"""
    x = zeros(128 * 8)
    assert bound(source, 8, 128, x).resources["DRAM"] == pytest.approx(x.nbytes / 2039 * 1.41)


PRODUCTS = """
extern "C" __global__ void products(float* out, int n) {
  float d[4][4] = {};
  unsigned a = threadIdx.x * 0, b = a;
  for (int k = 0; k < n; ++k)
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, "
          "{%0, %1, %2, %3};" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]) : "r"(a), "r"(b));
  out[threadIdx.x] = d[0][0] + d[1][1] + d[2][2] + d[3][3];
}"""


@pytest.mark.parametrize(
    "name, cycles", [("A100", 2), ("RTX 4090", 8), ("L40S", 4), ("H100", 1), ("B200", 0.5), ("RTX 5090", 8)]
)
def test_a_loop_of_tensor_instructions_is_bound_by_them(name, cycles):
    """16 * 8 * 16 multiply-adds of a warp; 5 blocks are on 5 SMs, each with 4 warps that do 4 * 40 of them."""
    found = bound(PRODUCTS, 5, 128, poisoned(128, np.float32), np.int32(40), on=name)
    assert found.limited_by == "tensor"
    assert found.cycles == 4 * 4 * 40 * cycles


GATHER = """
extern "C" __global__ void gather(const int* where, float* out, int n) {
  __shared__ volatile float tile[1024];
  int t = threadIdx.x, at = where[t];
  for (int k = 0; k < 32; ++k) tile[32 * k + t] = k;
  __syncthreads();
  float sum = 0;
  for (int k = 0; k < n; ++k) sum += tile[at];
  out[t] = sum;
}"""


def test_bank_conflicts_are_bound_by_shared_memory():
    """32 lanes in one bank take 32 cycles; without conflicts one, and then other things take longer."""
    n, out = 50, poisoned(32, np.float32)
    same_bank = np.arange(32, dtype=np.int32) * 32
    found = bound(GATHER, 1, 32, same_bank, out, np.int32(n))
    assert found.limited_by == "shared memory"
    assert found.cycles == 32 + 32 * n
    free = bound(GATHER, 1, 32, np.arange(32, dtype=np.int32), out, np.int32(n))
    assert free.resources["shared memory"] == 32 + n


ROW = """
extern "C" __global__ void row(float* out) {
  __shared__ float tile[1024];
  int t = threadIdx.x;
  for (int k = 0; k < 32; ++k) tile[32 * k + t] = k * t;
  __syncwarp();
  const float* mine = tile + 32 * t;
  out[t] = (mine[4] * mine[5] + mine[6]) * mine[7];
}"""


def test_neighbours_may_be_joined_into_one_access_of_16_bytes():
    """ptxas makes one LDS.128 of the four loads: 32 wavefronts and not 4 * 32. Single words apart stay as they are."""
    out = poisoned(32, np.float32)
    joined = profiled(ROW, 1, 32, out)
    stores = 32
    loads = joined.shared_wavefronts - stores
    assert loads in (32, 128)  # NVRTC may have joined them itself
    assert joined.lower_bound("A100").resources["shared memory"] == stores + 32
    apart = profiled(
        ROW.replace("mine[5]", "mine[9]").replace("mine[6]", "mine[14]").replace("[7]", "[19]"), 1, 32, out
    )
    assert apart.lower_bound("A100").resources["shared memory"] == stores + 4 * 32


WALK = """
extern "C" __global__ void walk(float* out, int n) {
  __shared__ float tile[1024];
  int t = threadIdx.x;
  for (int k = 0; k < 32; ++k) tile[32 * k + t] = k * t;
  __syncwarp();
  float sum = 0;
  #pragma unroll 1
  for (int k = 0; k < n; ++k) sum += tile[AT];
  out[t] = sum;
}"""


@pytest.mark.parametrize("at, counted, left", [("32 * t + k", 32, 8), ("32 * k + t", 1, 1), ("32 * t", 32, 32)])
def test_turns_of_a_loop_may_be_joined_if_their_addresses_are_neighbours(at, counted, left):
    """A row read word by word may become reads of four words, a column may not."""
    n = 20
    kernel = profiled(WALK.replace("AT", at), 1, 32, poisoned(32, np.float32), np.int32(n))
    assert kernel.shared_wavefronts in (32 + n * counted, 32 + counted)  # NVRTC may load what stays the same once
    loads = kernel.shared_wavefronts - 32
    assert kernel.lower_bound("A100").resources["shared memory"] == 32 + loads * left / counted


EXPONENTIALS = """
extern "C" __global__ void exponentials(float* x, int n) {
  float v = x[threadIdx.x];
  for (int k = 0; k < n; ++k) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(v));
  x[threadIdx.x] = v;
}"""


@pytest.mark.parametrize("arch", BOUNDED)
def test_exponentials_are_bound_by_special_functions(arch):
    """16 lanes a cycle: two cycles for each warp, of which there are four on one SM."""
    found = bound(EXPONENTIALS, 1, 128, zeros(128), np.int32(100), on=arch)
    assert found.limited_by == "MUFU"
    assert found.cycles == 4 * 100 * 2


MULTIPLY_ADDS = """
extern "C" __global__ void multiply_adds({type}* x, int n) {{
  {type} a = x[threadIdx.x], v = a, w = a;
  for (int k = 0; k < n; ++k) {{ {body} }}
  x[threadIdx.x] = v + w;
}}"""
PTX = {
    "fma": 'asm volatile("fma.rn.{t} %0, %1, %1, %0;" : "+{c}"(v) : "{c}"(a));',
    "separate": 'asm volatile("mul.rn.{t} %0, %0, %1;" : "+{c}"(v) : "{c}"(a));'
    'asm volatile("add.rn.{t} %0, %0, %1;" : "+{c}"(v) : "{c}"(a));',
    "fusible": 'asm volatile("mul.{t} %0, %0, %1;" : "+{c}"(v) : "{c}"(a));'
    'asm volatile("add.{t} %0, %0, %1;" : "+{c}"(v) : "{c}"(a));',
    "additions": 'asm volatile("add.{t} %0, %0, %1;" : "+{c}"(v) : "{c}"(a));'
    'asm volatile("add.{t} %0, %0, %1;" : "+{c}"(w) : "{c}"(a));'
    'asm volatile("mul.{t} %0, %0, %1;" : "+{c}"(w) : "{c}"(a));',
}


@pytest.mark.parametrize("form, each", [("fma", 1), ("separate", 2), ("fusible", 1), ("additions", 2)])
@pytest.mark.parametrize("type_, pipe, rate", [("float", "FP32", 64), ("double", "FP64", 32)])
def test_a_multiplication_and_an_addition_are_one_unless_rounded_apart(form, each, type_, pipe, rate):
    body = PTX[form].format(t="f32" if type_ == "float" else "f64", c=type_[0])
    x = zeros(128, np.dtype(type_))
    found = bound(MULTIPLY_ADDS.format(type=type_, body=body), 1, 128, x, np.int32(64))
    final = 1  # v + w
    assert found.resources[pipe] == 4 * (64 * each + final) * 32 / rate


def test_what_is_the_same_for_all_threads_is_not_counted():
    """Arithmetic on arguments and block indices may be done once for a warp, by the scalar unit."""
    source = """
    extern "C" __global__ void scalars(float* out, float x, int n) {
      for (int k = 0; k < n; ++k) asm volatile("fma.rn.f32 %0, %0, %0, %0;" : "+f"(x));
      out[threadIdx.x] = x;
    }"""
    found = bound(source, 1, 32, poisoned(32, np.float32), np.float32(1), np.int32(20))
    assert found.resources["FP32"] == 0


def test_copies_past_the_first_level_cache_cross_each_time():
    source = """
    extern "C" __global__ void again(const uint4* x, unsigned* out, int n) {
      __shared__ uint4 tile[32];
      unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
      for (int k = 0; k < n; ++k) {
        asm volatile("cp.async.HOW.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + threadIdx.x) : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
      }
      out[threadIdx.x] = 1;
    }"""
    x, out = zeros(128, np.uint32), zeros(32, np.uint32)
    past = bound(source.replace("HOW", "cg"), 1, 32, x, out, np.int32(30))
    cached = bound(source.replace("HOW", "ca"), 1, 32, x, out, np.int32(30))
    assert (past.resources["L2"], cached.resources["L2"]) == (30 * 512 / 64, 512 / 64)
    assert past.resources["DRAM"] == cached.resources["DRAM"]


def test_work_is_spread_over_no_more_multiprocessors_than_there_are_blocks():
    x = zeros(128)
    one, many = (bound(EXPONENTIALS, blocks, 32, x, np.int32(10)).resources["MUFU"] for blocks in (1, 1080))
    assert (one, many) == (20, 1080 * 20 / 108)


def test_launches_add_up():
    with ptxsim.profile() as profile:
        for n in (10, 30):
            launch(EXPONENTIALS, 1, 32, zeros(32), np.int32(n))
    assert profile.kernels[0].lower_bound("A100").cycles == 40 * 2


BROADCAST = """
extern "C" __global__ void broadcast(const float4* x, float4* out) {
  __shared__ float4 s[32];
  int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  out[t] = s[AT];
}"""


@pytest.mark.parametrize(
    "at, counted, least", [("t", 4, 4), ("(int)x[0].x & 31", 4, 1), ("t / 2", 4, 2), ("t * 8 & 31", 16, 4)]
)
def test_wide_loads_of_one_address_may_be_served_together(at, counted, least):
    """The four quarters of a warp that read 16 bytes a lane are four wavefronts of the profile; at least it takes as
    many as one bank has distinct words."""
    kernel = profiled(BROADCAST.replace("AT", at), 1, 32, zeros(128), zeros(128))
    assert kernel.shared_wavefronts == 4 + counted
    assert kernel.lower_bound("A100").resources["shared memory"] == 4 + least


def test_several_launches_may_find_their_data_in_the_cache():
    """The one with most of them moves all of its sectors; the text says what that rests on."""
    x, y = zeros(4 * 128 * 20), zeros(4 * 128 * 20)
    with ptxsim.profile() as profile:
        for blocks in (10, 20, 20):
            launch(COPY, blocks, 128, x, y)
    found = profile.kernels[0].lower_bound("A100")
    assert found.resources["DRAM"] == pytest.approx(2 * x.nbytes / 2039 * 1.41)
    assert found.resources["L2"] == pytest.approx(2.5 * x.nbytes / 64 / 20)
    one = bound(COPY, 200, 128, zeros(4 * 128 * 200), zeros(4 * 128 * 200))
    assert str(one).splitlines()[0].endswith("limited by DRAM, if the data start and end there")


def test_a_kernel_of_which_nothing_counts(tmp_path):
    source = 'extern "C" __global__ void nothing(int n) { if (n == 7) __trap(); }'
    kernel = profiled(source, 1, 32, np.int32(1))
    found = kernel.lower_bound("A100")
    assert (found.cycles, found.limited_by) == (0, "none")
    assert str(found) == "at least 0 cycles on A100 (sm_80), limited by none"
    assert "0 cycles, none" in str(kernel)
    kernel.to_html(tmp_path / "page.html")
    kernel.to_png(tmp_path / "figure.png")
    assert [text.get_text() for text in kernel.figure().axes[0].texts].count("none") == len(BOUNDED)


@pytest.mark.parametrize("head_dim, share", [(128, 0.75), (64, 0.6875)])
def test_a_key_tile_of_flash_fwd(head_dim, share):
    """What more keys cost: with head_dim 128, 32 rows of a warp read 16 KiB of keys, as many of values and 8 KiB of
    queries, and write a quarter of the 32 KiB that are copied: 384 wavefronts in 512 tensor cycles."""
    bounds = []
    for keys in (256, 512):
        q, k = (np.zeros((1, 1, n, head_dim), np.float16) for n in (128, keys))
        with ptxsim.profile() as profile:
            attention(q, k, k)
        bounds.append(profile.kernels[0].lower_bound("A100"))
    less, more = (b.resources for b in bounds)
    assert bounds[1].limited_by == "tensor"
    assert (more["shared memory"] - less["shared memory"]) / (more["tensor"] - less["tensor"]) == share
    # The machine code has 3.46 and 4.38 issue slots for each HMMA, of which a cycle has 4 and an HMMA 2 cycles.
    slots = 8 * (more["issue"] - less["issue"]) / (more["tensor"] - less["tensor"])
    assert 2 < slots < {128: 3.46, 64: 4.38}[head_dim]


def test_text_dict_and_unknown_devices():
    kernel = profiled(EXPONENTIALS, 1, 128, zeros(128), np.int32(100))
    found = kernel.lower_bound("sm_80")
    assert str(found).splitlines()[0] == "at least 800 cycles on A100 (sm_80), limited by MUFU"
    assert found.as_dict()["limited_by"] == "MUFU" and found.as_dict()["resources"]["MUFU"] == 800
    with pytest.raises(ValueError, match="device: 'sm_70', must be one of T4"):
        kernel.lower_bound("sm_70")


@pytest.mark.parametrize(
    "name, peak", [("A100", 312), ("RTX 4090", 165), ("L40S", 362), ("H200", 1070), ("RTX 5090", 209), ("T4", 65)]
)
def test_tensor_rates_are_those_of_the_data_sheets(name, peak):
    """Dense float16 with float32 accumulators, TFLOP/s; the H200's at its highest clock, 1.98 GHz."""
    gpu = DEVICES[name]
    assert gpu.sms * gpu.clock * 2 * gpu.tensor_f16 / 1e3 == pytest.approx(peak, rel=0.02)
