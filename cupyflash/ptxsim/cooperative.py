"""Cooperative launches: all blocks of a grid are there at once and may wait for one another.

On a GPU they are there if they fit on its SMs together. The driver gives such a launch a workspace in global memory,
whose address a kernel finds in %envreg1 (upper half) and %envreg2 (lower half). `this_grid().sync()` of
cooperative_groups.h takes its second 32-bit word for the barrier of the grid, and traps without a workspace.
"""

import numpy as np

from .devices import DEVICES
from .memory import zeros_at
from .occupancy import occupancy
from .resources import resources

_WORKSPACE = 32  # bytes
_MOST = {"registers": 255, "barriers": 16}  # that a kernel can need


def workspace():
    """What the driver gives a cooperative launch: the size, a barrier at which nobody has arrived, and what is free."""
    memory = zeros_at(_WORKSPACE, _WORKSPACE).view(np.uint32)
    memory[0] = _WORKSPACE
    return memory


def environment_register(name, launch):
    """%envreg1 or %envreg2 of a launch: half of the address of its workspace, 0 without one."""
    address = 0 if launch.workspace is None else launch.workspace.ctypes.data
    return address >> 32 if name == "envreg1" else address & 0xFFFFFFFF


def why_trap(launch):
    """What to say of a trap: kernels that look for a workspace which they do not have end in one."""
    if launch.workspace is None and "envreg1" in launch.program.specials:
        return "trap: this_grid().sync() needs a module with enable_cooperative_groups=True"
    return "trap"


def check_resident(module, name, arch, blocks, threads, shared_bytes):
    """Raise ValueError for a grid whose blocks a GPU does not hold all at once.

    The GPU is the first of its architecture in `devices`; of others the number of SMs is not known, and no grid is too
    large. Machine code is made only where the number of registers decides; PTX files pass without.
    """
    device = next((device for device in DEVICES.values() if device.arch == arch), None)
    if device is None:
        return

    def resident(registers, barriers):
        return occupancy(arch, threads, registers, shared_bytes, barriers).blocks * device.sms

    if blocks <= resident(**_MOST):
        return
    most, needs = resident(0, 0), f"{threads} threads and {shared_bytes} bytes of shared memory"
    if blocks <= most and module.code is not None:
        found = resources(module, name, arch)
        most, needs = resident(found.registers, found.barriers), f"{needs}, {found.registers} registers per thread"
    if blocks > most:
        raise ValueError(
            f"grid: {blocks} blocks of {name} are too many to be resident at once, as a cooperative launch needs them: "
            f"{device.name} ({arch}) holds {most} with {needs}"
        )
