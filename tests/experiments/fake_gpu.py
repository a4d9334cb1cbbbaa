"""In place of CuPy on a machine with a GPU: arrays in host memory, kernels in the simulator, a clock that is told."""

import re
import threading
import types

import numpy as np

from cupyflash import ptxsim
from cupyflash.ptxsim import parse
from cupyflash.ptxsim.loaded import LoadedModule


class FakeArray:
    """Memory of the card; nothing but what the experiments use."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.data = types.SimpleNamespace(ptr=array.__array_interface__["data"][0])

    def __getitem__(self, index):
        return FakeArray(self.array[index])

    def set(self, host):
        self.array[...] = host

    def get(self):
        return self.array.copy()

    def fill(self, value):
        self.array.fill(value)


class PtxModule(ptxsim.RawModule):
    """As the driver loads PTX: nothing of the source is left."""

    def __init__(self, ptx, arch):
        self.code, self.file_path, self.options, self.name_expressions = "", None, (), ()
        self.dynamic_limits, self._loaded, self._lock, self._arch = {}, {}, threading.Lock(), arch
        self.ptx, self.enable_cooperative_groups = ptx, False

    def _load(self, arch):
        with self._lock:
            if arch not in self._loaded:
                self._loaded[arch] = LoadedModule(self, parse.parse(self.ptx), {}, arch)
            return self._loaded[arch]


class FakeCupy:
    """One GPU of an architecture, whose driver knows PTX to a version.

    ``hardware`` are the simulator's settings that it computes by; ``after(kernel, arrays)`` may change what a kernel
    leaves in memory.
    """

    __version__ = "14.2.0"

    def __init__(self, arch="sm_80", ptx_version=(9, 9), after=lambda kernel, arrays: None, **hardware):
        self.arch, self.ptx_version, self.after, self.hardware = arch, ptx_version, after, hardware
        self.live, self.loaded, self.refuse = [], [], lambda name: None
        self.cuda = types.SimpleNamespace(
            Device=lambda: types.SimpleNamespace(
                id=0, compute_capability=arch.removeprefix("sm_"), pci_bus_id="0000:00:00.0"
            ),
            runtime=types.SimpleNamespace(
                getDeviceProperties=lambda number: {"name": b"NVIDIA Fake 1", "l2CacheSize": 1 << 20},
                driverGetVersion=lambda: 13000,
            ),
        )

    def empty(self, shape, dtype):
        return self._kept(np.empty(shape, dtype))

    def asarray(self, host):
        return self._kept(np.array(host))

    def _kept(self, array):
        self.live.append(array)
        return FakeArray(array)

    def RawModule(self, *, code=None, path=None, options=()):
        if path is None:
            with ptxsim.settings(arch=self.arch):
                return self._module(ptxsim.RawModule(code=code, options=options), "NVRTC")
        ptx = open(path).read()
        version = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
        if tuple(map(int, version.groups())) > self.ptx_version:
            raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with ...")
        return self._module(PtxModule(ptx, self.arch), "driver")

    def _module(self, module, assembler):
        return types.SimpleNamespace(get_function=lambda name: self._kernel(module, name, assembler))

    def _kernel(self, module, name, assembler):
        self.loaded.append((assembler, name))
        self.refuse(name)
        with ptxsim.settings(arch=self.arch):
            kernel = module.get_function(name)
        cupy = self

        class Kernel:
            max_dynamic_shared_size_bytes = 48 * 1024

            def __call__(self, grid, block, args, *, shared_mem=0):
                with ptxsim.settings(arch=cupy.arch, **cupy.hardware), ptxsim.device_memory(*cupy.live):
                    kernel.max_dynamic_shared_size_bytes = self.max_dynamic_shared_size_bytes
                    arrays = tuple(x.array if isinstance(x, FakeArray) else x for x in args)
                    kernel(grid, block, arrays, shared_mem=shared_mem)
                cupy.after(name, cupy.live)
                cupy.live.clear()

        return Kernel()
