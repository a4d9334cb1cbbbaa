"""The signatures and attributes of cupy.RawModule and cupy.RawKernel: taken, or refused with the reason."""

import inspect
import io
import re

import cupy
import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim.profile.results import COUNTERS, DERIVED

from .launching import poisoned

SOURCE = """
extern "C" __global__ void twice(const float* x, float* out) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = 2 * s[threadIdx.x ^ 1];
}
extern "C" __global__ void __launch_bounds__(96) bounded(float* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void crowded(const float* x, float* out) {
  float v[200];
#pragma unroll
  for (int i = 0; i < 200; i++) v[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; i++) out[i * 32 + threadIdx.x] = v[199 - i] * v[i];
}"""


@pytest.mark.parametrize("name", ["RawModule", "RawKernel"])
def test_signatures_are_those_of_cupy(name):
    declared = getattr(cupy, name).__doc__.splitlines()[0].partition("(")[2].rstrip(")").split(", ")
    names = [parameter.split()[-1].partition("=")[0] for parameter in declared]
    own = inspect.signature(getattr(ptxsim, name)).parameters
    assert list(own) == [parameter for parameter in names if parameter != "*"]
    keyword_only = names[names.index("*") + 1 :]
    assert [n for n, p in own.items() if p.kind is p.KEYWORD_ONLY] == keyword_only


def test_a_raw_kernel_runs():
    x, out = np.arange(64, dtype=np.float32), poisoned(64, np.float32)
    kernel = ptxsim.RawKernel(SOURCE.replace("2 *", "FACTOR *"), "twice", ("-DFACTOR=3",), "nvrtc")
    kernel((1,), (64,), (x, out))
    np.testing.assert_array_equal(out, 3 * x.reshape(32, 2)[:, ::-1].ravel())
    with pytest.raises(ValueError, match="no kernel 'thrice' in this module; it has twice, bounded, crowded"):
        ptxsim.RawKernel(SOURCE, "thrice")


@pytest.mark.parametrize(
    "choice, reason",
    [
        ({"backend": "nvcc"}, "backend: 'nvcc', must be 'nvrtc'"),
        ({"translate_cucomplex": True}, "translate_cucomplex: must be False"),
        ({"jitify": True}, "jitify: must be False"),
    ],
)
def test_choices_that_are_not_possible(choice, reason):
    default = dict.fromkeys(choice, "nvrtc" if "backend" in choice else False)
    for make in (ptxsim.RawModule, lambda code, **choices: ptxsim.RawKernel(code, "twice", **choices)):
        make(SOURCE, **default)
        with pytest.raises(ValueError, match=reason):
            make(SOURCE, **choice)


CUDA_ATTRIBUTES = (
    "max_threads_per_block shared_size_bytes const_size_bytes local_size_bytes num_regs ptx_version binary_version "
    "cache_mode_ca max_dynamic_shared_size_bytes preferred_shared_memory_carveout"
).split()


def test_attributes_of_a_kernel():
    module = ptxsim.RawModule(SOURCE)
    twice, bounded, crowded = map(module.get_function, module.kernels)
    assert twice.shared_size_bytes == 256 and twice.local_size_bytes == 0
    assert twice.num_regs == ptxsim.resources(module, "twice").registers > 0
    assert twice.max_threads_per_block == 1024 and bounded.max_threads_per_block == 96
    assert crowded.num_regs > 64
    warps_of_a_quarter = 65536 // 4 // (32 * (crowded.num_regs + 7 & ~7))
    assert crowded.max_threads_per_block == 4 * 32 * warps_of_a_quarter < 1024
    assert twice.max_dynamic_shared_size_bytes == 48 * 1024 - 256
    assert twice.ptx_version == twice.binary_version == 80
    assert twice.attributes == {name: getattr(twice, name) for name in twice.attributes}
    assert set(twice.attributes) == set(CUDA_ATTRIBUTES) <= set(dir(cupy.RawKernel))


def test_constant_memory_of_a_module():
    """As much as the assembler gives the module's variables."""
    source = """
    __constant__ short odd[3];
    __constant__ double matrix[5];
    extern "C" __global__ void sum(double* out) { *out = odd[threadIdx.x] + matrix[threadIdx.x]; }
    extern "C" __global__ void none() {}"""
    log, module = io.StringIO(), ptxsim.RawModule(source, options=("-Xptxas=-dlcm=ca",))
    module.compile(log)
    (reserved,) = re.findall(r"(\d+) bytes cmem\[3\]", log.getvalue())
    for kernel in map(module.get_function, module.kernels):
        assert kernel.const_size_bytes == int(reserved) == 48
        assert kernel.cache_mode_ca == 1 and ptxsim.RawKernel(SOURCE, "twice").cache_mode_ca == 0


def test_warnings_of_the_compiler():
    source = 'extern "C" __global__ void unused(int* x) { int nobody_reads_it = *x; }'
    log = io.StringIO()
    ptxsim.RawKernel(source, "unused").compile(log)
    assert "nobody_reads_it" in log.getvalue()


def test_streams():
    x, out = np.arange(64, dtype=np.float32), poisoned(64, np.float32)
    kernel = ptxsim.RawKernel(SOURCE, "twice")
    kernel((1,), (64,), (x, out), stream=cupy.cuda.Stream.null)
    np.testing.assert_array_equal(out, 2 * x.reshape(32, 2)[:, ::-1].ravel())
    with pytest.raises(TypeError, match=r"stream: int, must be a cupy.cuda.Stream or None"):
        kernel((1,), (64,), (x, out), stream=0)


def test_attributes_follow_the_settings():
    kernel = ptxsim.RawKernel(SOURCE, "twice")
    for arch in ("sm_75", "sm_90"):
        with ptxsim.settings(arch=arch):
            assert kernel.num_regs == ptxsim.resources(SOURCE, "twice", arch).registers


@pytest.mark.parametrize("value", [-1, 2.0, True, "64"])
def test_sizes_that_are_no_sizes(value):
    kernel = ptxsim.RawKernel(SOURCE, "twice")
    with pytest.raises(ValueError, match=r"max_dynamic_shared_size_bytes: .* must be a non-negative integer"):
        kernel.max_dynamic_shared_size_bytes = value


def test_attributes_that_do_not_exist_are_refused():
    module = ptxsim.RawModule(SOURCE)
    kernel = module.get_function("twice")
    kernel.preferred_shared_memory_carveout = 50
    with pytest.raises(AttributeError):
        kernel.max_dynamic_shared_size = 65536
    with pytest.raises(AttributeError):
        kernel.num_regs = 32
    with pytest.raises(AttributeError):
        module.option = ()


TEMPLATE = """
template <typename T> __device__ T fetched(cudaTextureObject_t t, int i) { return tex1Dfetch<T>(t, i); }
template <typename T> __global__ void axpy(T a, const T* x, T* y, int n) {
  int i = threadIdx.x;
  if (i <= n) y[i] += a * x[i];
}
template <typename T> __global__ void textured(cudaTextureObject_t t, T* y) {
  y[0] = fetched<T>(t, threadIdx.x);
}"""


def test_template_instances_are_shown_as_they_were_asked_for():
    module = ptxsim.RawModule(TEMPLATE, name_expressions=("axpy<float>", "textured<float>"))
    assert sorted(module.kernels) == ["axpy<float>", "textured<float>"]
    arguments = (np.float32(2), np.ones(4, np.float32), np.zeros(4, np.float32), np.int32(4))
    with ptxsim.profile() as profile, ptxsim.sanitize() as report:
        module.get_function("axpy<float>")((1,), (32,), arguments)
    assert report.findings[0].kernel == "axpy<float>" and "kernel axpy<float>, kernel.cu:5" in str(report)
    with pytest.raises(ptxsim.MemoryFault, match=r"kernel axpy<float>, thread \(4, 0, 0\)"):
        module.get_function("axpy<float>")((1,), (32,), arguments)
    with ptxsim.profile() as profile:
        module.get_function("axpy<float>")((1,), (32,), (*arguments[:3], np.int32(3)))
    assert list(profile.as_dict()) == ["axpy<float>"] and profile.kernels[0].resources.registers > 0
    with pytest.raises(ValueError, match=r"no kernel 'axpy' in this module; it has .*axpy<float>[^;]*$"):
        module.get_function("axpy")
    with pytest.raises(ValueError, match=r"there is .*axpy<float>"):
        ptxsim.resources(module, "axpy")
    with pytest.raises(ValueError, match=r"kernel: must be given, the module has .*axpy<float>"):
        ptxsim.resources(module)


def test_a_template_without_instances_is_pointed_out():
    with pytest.raises(ValueError, match=r"it has none; a template needs .* name_expressions=\('axpy<float>',\)$"):
        ptxsim.RawKernel(TEMPLATE, "axpy")
    with pytest.raises(ValueError, match=r"it has none$"):
        ptxsim.RawKernel(TEMPLATE, "missing")


def test_refused_instructions_name_the_line_that_they_are_inlined_at():
    module = ptxsim.RawModule(TEMPLATE, name_expressions=("textured<float>",))
    with pytest.raises(NotImplementedError) as refused:
        module.get_function("textured<float>")
    first, second = str(refused.value).splitlines()
    assert first.startswith("textured<float>: the simulator does not know")
    assert second.endswith(" called at kernel.cu:2 called at kernel.cu:8)")


def test_counters_that_do_not_exist_are_refused_with_those_that_do():
    x, out = np.ones(64, np.float32), poisoned(64, np.float32)
    with ptxsim.profile() as profile:
        ptxsim.RawKernel(SOURCE, "twice")((1,), (64,), (x, out))
    for by in "sectors", "instructions":
        with pytest.raises(
            ValueError, match=f"by: '{by}', must be one of mma_flops, .*global_load_sectors, .*shared_eff"
        ):
            profile.line_table(by=by)
    assert "lines with most global load efficiency" in profile.line_table(by="global_load_efficiency")


def test_every_counter_is_explained_where_help_finds_it():
    for name in (*COUNTERS, *DERIVED, "block_load_sectors"):
        assert re.search(rf"^    (\w+, )*{name}\b", ptxsim.KernelProfile.__doc__, re.MULTILINE), name
    assert "A phase takes as many wavefronts" in ptxsim.KernelProfile.__doc__
    assert "KernelProfile" in ptxsim.profile.__doc__


def test_a_profile_is_short_when_represented():
    with ptxsim.profile() as profile:
        assert repr(profile) == "Profile(no launches)"
        ptxsim.RawKernel(SOURCE, "bounded")((1,), (96,), (poisoned(96, np.float32),))
    assert re.fullmatch(r"Profile\(<bounded: 1 launch, \d+ warp instructions>\)", repr(profile))


def test_findings_know_their_thread_and_block():
    source = """
    extern "C" __global__ void far(int* out) { if (threadIdx.y == 1 && blockIdx.x == 2) out[99] = 1; }"""
    with ptxsim.sanitize() as report:
        assert not report and repr(report) == "<Report: no findings>"
        ptxsim.RawKernel(source, "far")((3, 1), (4, 2), (np.zeros(8, np.int32),))
    (finding,) = report.findings
    assert report and repr(report) == "<Report: 1 out of bounds>"
    assert (finding.thread, finding.block) == ((0, 1, 0), (2, 0, 0))
    assert finding.as_dict() | {"thread": (0, 1, 0), "block": (2, 0, 0), "kind": "out of bounds"} == finding.as_dict()
    assert ptxsim.Finding("trap", "far", "kernel.cu:1", "trap").thread is None


@pytest.mark.parametrize(
    "threads, says",
    [(1, "1 thread repeating a loop for ever, thread (0, 0, 0)"), (2, "2 threads repeating a loop for")],
)
def test_a_livelock_in_words(threads, says):
    source = 'extern "C" __global__ void spin(volatile int* x) { while (*x == 0); }'
    with pytest.raises(ptxsim.Deadlock, match=re.escape(says)):
        ptxsim.RawKernel(source, "spin")((1,), (threads,), (np.zeros(1, np.int32),))


def test_static_shared_memory_that_no_gpu_assembles():
    source = """
    extern "C" __global__ void large(int* out) {
      __shared__ int box[12289];
      box[threadIdx.x * 384] = out[threadIdx.x];
      __syncthreads();
      out[threadIdx.x] = box[threadIdx.x * 384 % 7];
    }"""
    with pytest.raises(ValueError, match="49156 bytes of static shared memory, at most 49152"):
        ptxsim.RawKernel(source, "large")((1,), (32,), (np.zeros(32, np.int32),))


def test_a_lower_limit_of_dynamic_shared_memory_holds():
    kernel = ptxsim.RawKernel('extern "C" __global__ void none() {}', "none")
    kernel.max_dynamic_shared_size_bytes = 10
    kernel((1,), (32,), (), shared_mem=10)
    with pytest.raises(ValueError, match=r"shared_mem: 11 bytes.* at most 10"):
        kernel((1,), (32,), (), shared_mem=11)
