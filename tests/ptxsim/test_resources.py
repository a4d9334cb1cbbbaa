"""Registers, spills, stack, shared memory and barriers of kernels, as NVRTC's assembler reports them."""

import importlib

import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim import compile as compile_
from cupyflash.ptxsim.errors import CompilerMissing
from cupyflash.ptxsim.resources import Resources, resources

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

SOURCE = r"""
template <class T, int N> __global__ void turned(T* x) {
  __shared__ T tile[N];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[N - 1 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024) crowded(float* x) {  // 1024 threads leave 64 registers to each
  float a[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = a[i * 37 % 96] - a[i] * i;
}
extern "C" __global__ void plain(float* x) { x[threadIdx.x] += 1; }
__device__ __noinline__ float deep(float x) {
  volatile float a[100];
  for (int i = 0; i < 100; ++i) a[i] = x + i;
  return a[int(x) & 63];
}
extern "C" __global__ void calls(float* x) { x[threadIdx.x] = deep(x[threadIdx.x]) + 1; }
"""
NAMES = ("turned<float, 64>", "turned<double, 32>", "turned<short, 32>")


@pytest.fixture(scope="module")
def module():
    return ptxsim.RawModule(code=SOURCE, name_expressions=NAMES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_kernel_of_a_module_by_name_and_by_name_expression(module, arch):
    for name, size in zip(NAMES, (256, 256, 64), strict=True):
        found = resources(module, name, arch)
        assert (found.arch, found.static_shared_bytes, found.barriers) == (arch, size, 1)
        assert found.kernel.startswith("_Z6turned")
    plain = resources(module, "plain", arch)
    assert (plain.kernel, plain.static_shared_bytes, plain.barriers) == ("plain", 0, 0)
    assert 4 <= plain.registers <= 16
    assert plain.spill_store_bytes == plain.spill_load_bytes == plain.stack_bytes == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_and_their_stack(module, arch):
    """96 values in 64 registers: what does not fit is stored and loaded, in words."""
    found = resources(module, "crowded", arch)
    assert found.registers <= 64
    assert found.spill_store_bytes >= 4 * 32 and found.spill_store_bytes % 4 == 0
    assert found.spill_load_bytes >= 4 * 32 and found.stack_bytes >= 4 * 32
    roomy = resources(SOURCE.replace("__launch_bounds__(1024)", "__launch_bounds__(128)"), "crowded", arch)
    assert roomy.registers > 96
    assert roomy.spill_store_bytes == roomy.stack_bytes == 0


def test_the_stack_includes_functions_that_are_called(module):
    found = resources(module, "calls", "sm_80")
    assert found.stack_bytes >= 400
    assert found.spill_store_bytes == 0


def test_options_of_the_module_count():
    source = SOURCE.replace("__launch_bounds__(1024)", "")
    assert resources(ptxsim.RawModule(code=source, options=("--maxrregcount=40",)), "crowded").registers == 40


def test_source_text_of_one_kernel_and_the_architecture_of_the_settings():
    with ptxsim.settings(arch="sm_89"):
        found = resources('extern "C" __global__ void only(int* x) { x[threadIdx.x] = 3; }')
    assert (found.kernel, found.arch) == ("only", "sm_89")
    assert found.as_dict()["registers"] == found.registers


def test_errors(module):
    with pytest.raises(ValueError, match=r"no kernel 'nothing' in what was compiled for sm_80; there is .*plain"):
        resources(module, "nothing", "sm_80")
    with pytest.raises(ValueError, match="kernel: must be given, the module has"):
        resources(module, arch="sm_80")
    with pytest.raises(ValueError, match="arch: 'sm_70', must be one of sm_75"):
        resources(module, "plain", "sm_70")
    with pytest.raises(ptxsim.CompileError, match="nonsense"):
        resources("nonsense", "plain")


def test_each_number_is_read_from_its_own_place(monkeypatch):
    """Logs of NVRTC 13 and of NVRTC 12, with a function that the kernel calls between its lines."""
    log = """
ptxas warning : Value of threads per SM for entry a is out of range. .minnctapersm will be ignored
ptxas info    : 128 bytes gmem, 16 bytes cmem[3]
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
ptxas         .     48 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 3 registers, used 4 barriers, 56 bytes cumulative stack size, 5 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 5.713 ms
ptxas info    : Function properties for called
    64 bytes stack frame, 7 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for called
    64 bytes stack frame, 7 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for b
    16 bytes stack frame, 9 bytes spill stores, 10 bytes spill loads
ptxas info    : Used 11 registers, 360 bytes cmem[0]
"""
    module = importlib.import_module("cupyflash.ptxsim.resources")
    monkeypatch.setattr(module, "assembler_log", lambda *arguments: (log, {"a<int>": "a"}))
    assert resources("", "a<int>", "sm_90") == Resources("a", "sm_90", 3, 1, 2, 56, 5, 4)
    assert resources("", "b", "sm_90") == Resources("b", "sm_90", 11, 9, 10, 16, 0, 0)


def test_a_second_time_needs_no_compiler(module, monkeypatch, tmp_path):
    def missing():
        raise CompilerMissing("no NVRTC")

    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    first = resources(module, "plain", "sm_80")
    monkeypatch.setattr(compile_, "load_nvrtc", missing)
    assert resources(module, "plain", "sm_80") == first
    with pytest.raises(CompilerMissing):
        resources(module, "plain", "sm_90")
    with pytest.raises(CompilerMissing):
        ptxsim.compile_ptx(SOURCE, arch="sm_80", name_expressions=NAMES)
