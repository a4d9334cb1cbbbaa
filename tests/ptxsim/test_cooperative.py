"""Cooperative launches: which grids are resident, where the driver's workspace lies, and what ordinary launches say."""

from pathlib import Path

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim import occupancy

from .launching import poisoned

GROUPS = (Path(__file__).parent / "kernels" / "cooperative_grid.cu").read_text()

# A barrier as cooperative groups make it, and what they make it of.
SOURCE = """
__device__ unsigned* workspace() {
  unsigned high, low;
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  return (unsigned*)((unsigned long long)high << 32 | low);
}
extern "C" __global__ void meet(unsigned* out) {
  unsigned* barrier = workspace() + 1;
  if (threadIdx.x == 0) {
    atomicAdd(barrier, 1);
    while (*(volatile unsigned*)barrier % gridDim.x);
  }
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = *barrier + workspace()[0];
}
extern "C" __global__ void look(unsigned* out) { out[threadIdx.x] = workspace() != nullptr; }
extern "C" __global__ void crowded(const float* x, float* out) {
  extern __shared__ float s[];
  float v[100];
#pragma unroll
  for (int i = 0; i < 100; i++) v[i] = x[i * 32 + threadIdx.x];
  s[threadIdx.x] = v[50];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; i++) out[i * 32 + threadIdx.x] = v[99 - i] * v[i] * s[threadIdx.x ^ 1];
}"""


@pytest.fixture(scope="module")
def module():
    return ptxsim.RawModule(code=SOURCE, enable_cooperative_groups=True)


@pytest.mark.parametrize("choices", [{}, {"chunk_lanes": 32}, {"workers": 2, "chunk_lanes": 32}])
def test_all_blocks_are_there_at_once(module, choices):
    """More of them than are simulated together by default; each launch has a barrier of its own."""
    for blocks in (7, 1000):
        out = poisoned(blocks * 32, np.uint32)
        with ptxsim.settings(**choices):
            module.get_function("meet")((blocks,), (32,), (out,))
        assert (out == blocks + 32).all()


def test_the_workspace_is_of_cooperative_launches_only(module):
    ordinary = ptxsim.RawModule(code=SOURCE)
    for raw, has_one in ((module, True), (ordinary, False)):
        out, kernel = poisoned(1, np.uint32), raw.get_function("look")
        kernel((1,), (1,), (out,))
        assert out[0] == has_one == kernel.enable_cooperative_groups == raw.enable_cooperative_groups
    kernel = ptxsim.RawKernel(SOURCE, "look", enable_cooperative_groups=True)
    kernel((1,), (1,), (out,))
    assert out[0] == kernel.enable_cooperative_groups == 1


def test_a_grid_that_synchronises_in_an_ordinary_launch():
    jacobi = ptxsim.RawKernel(GROUPS, "jacobi")
    x, sizes = np.ones(64, np.float32), (np.int32(64), np.int32(1))
    with pytest.raises(ptxsim.SimulationError, match=r"trap: this_grid\(\).sync\(\) needs .*enable_cooperative_groups"):
        jacobi((2,), (32,), (x, x.copy(), x.copy(), *sizes))
    with ptxsim.sanitize() as report:
        jacobi((2,), (32,), (x, x.copy(), x.copy(), *sizes))
    (finding,) = report.findings
    assert finding.kind == "trap" and finding.calls[-1].startswith("kernel.cu:")


@pytest.mark.parametrize(
    "arch, name, sms, threads, shared",
    [
        ("sm_80", "A100", 108, 32, 0),  # limited by blocks
        ("sm_80", "A100", 108, 1024, 0),  # by warps
        ("sm_80", "A100", 108, 64, 40000),  # by shared memory
        ("sm_89", "RTX 4090", 128, 256, 0),
        ("sm_90", "H100", 132, 64, 100000),
    ],
)
def test_the_most_blocks_that_are_resident(module, arch, name, sms, threads, shared):
    with ptxsim.settings(arch=arch):
        kernel = module.get_function("look")
        kernel.max_dynamic_shared_size_bytes = shared
        most = sms * occupancy(arch, threads, kernel.num_regs, shared).blocks
        out = poisoned(threads, np.uint32)
        kernel((most // sms, sms), (threads,), (out,), shared_mem=shared)
        assert (out == 1).all()
        message = (
            rf"grid: {most + 1} blocks of look .* resident at once.*: {name} \({arch}\) holds {most} with {threads}"
        )
        with pytest.raises(ValueError, match=message):
            kernel((most + 1,), (threads,), (out,), shared_mem=shared)


def test_registers_of_a_large_kernel_count(module):
    kernel, arguments = module.get_function("crowded"), (np.zeros(3200, np.float32), poisoned(3200, np.float32))
    most = 108 * occupancy("sm_80", 256, kernel.num_regs, 0).blocks
    assert kernel.num_regs > 32 and most < 108 * 8
    with pytest.raises(ValueError, match=rf"holds {most} with 256 threads .* {kernel.num_regs} registers per thread"):
        kernel((most + 1,), (256,), arguments)


def test_where_nobody_knows_how_many_are_resident(module, tmp_path):
    """No board of that architecture is known; the registers of PTX are not."""
    out = poisoned(32, np.uint32)
    with ptxsim.settings(arch="sm_87"):
        module.get_function("look")((7000,), (32,), (out,))
    file = tmp_path / "module.ptx"
    file.write_text(ptxsim.compile_ptx(SOURCE))
    loaded = ptxsim.RawModule(path=str(file), enable_cooperative_groups=True)
    loaded.get_function("look")((108 * 8,), (256,), (poisoned(256, np.uint32),))
    with pytest.raises(ValueError, match=r"A100 \(sm_80\) holds 864 with 256 threads and 0 bytes of shared memory$"):
        loaded.get_function("look")((108 * 8 + 1,), (256,), (poisoned(256, np.uint32),))
