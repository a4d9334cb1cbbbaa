"""How fast a launch could be at best on a GPU: a lower bound in cycles, never an estimate.

A multiprocessor (SM) has units that work side by side: tensor cores, shared memory, schedulers, float and integer
pipes, special functions. Each needs at least its work divided by its rate, so the launch needs at least the largest
of these; latency, barriers, dependencies, clock and the wait for memory come on top, and are not modelled. The work is
counted by the simulator (profile) and reduced to what machine code must keep of it (least_work); the rates are in
devices. Then

    cycles >= max over resources ( work of all blocks / SMs that have a block / rate ),

as if the work could be spread perfectly. The second-level cache has to deliver each distinct sector at least once, and
what cp.async.cg loads each time, for that goes past the first-level cache. Device memory has to move each distinct
sector once, one that is both read and written too: of several launches the one with most, for the others may find data
in the cache. That row, and a bound that it limits, hold if all data are in device memory before the first launch and
after the last; if the cache holds them, the next resource of the table is the bound.

Shared memory has to serve a warp's access as often as one bank has distinct words among all its lanes. For 8 and 16
bytes a lane that may be less than the profile's wavefronts, which are those of each half or quarter of the warp: lanes
of different parts that read one address may be served together.

The code is the one that was compiled for the architecture that ran; another one may get other code of the same source.
"""

import collections
import dataclasses

from .devices import L2_BYTES, SCHEDULERS, device
from .least_work import least_work

_SECTOR = 32
_WARP = 32
_SHARED, _DRAM = "shared memory", "DRAM"


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """Cycles that a kernel's launches need at least on a device, for each resource; 0 where none of it is needed."""

    device: str
    arch: str
    clock: float  # GHz
    resources: dict

    @property
    def cycles(self):
        """The bound."""
        return max(self.resources.values())

    @property
    def seconds(self):
        """The bound as time, at the device's clock."""
        return self.cycles / (self.clock * 1e9)

    @property
    def limited_by(self):
        """The resource that gives it, "none" where nothing is counted."""
        return max(self.resources, key=self.resources.get) if self.cycles else "none"

    def as_dict(self):
        """All of it by name."""
        mine = {"cycles": self.cycles, "seconds": self.seconds, "limited_by": self.limited_by}
        return dataclasses.asdict(self) | mine

    def __str__(self):
        ordered = sorted(self.resources.items(), key=lambda item: -item[1])
        rows = [f"  {name:<20}{cycles:>16,.0f}  {cycles / self.cycles:6.1%}" for name, cycles in ordered if cycles]
        head = f"at least {self.cycles:,.0f} cycles on {self.device} ({self.arch}), limited by {self.limited_by}"
        if self.limited_by == _DRAM:
            head += ", if the data start and end there"
        return "\n".join([head, *rows])


class Executed:
    """What launches of one kernel executed: the part of their counts that bounds are made of."""

    def __init__(self):
        self.warps = collections.Counter()  # (program, basic block) -> warps that ran it
        self.wavefronts = collections.Counter()  # (program, instruction of shared memory) -> least wavefronts
        self.uncached_sectors = 0  # loaded past the first-level cache
        # Distinct ones of each launch:
        self.loaded_sectors = 0
        self.stored_sectors = 0  # or changed by atomics, whichever are more
        self.touched_sectors = 0  # loaded, stored or both, of the launch with most of them
        self.most_blocks = 0  # of one launch

    def add(self, launch, distinct):
        """Add one launch that has come to its end. `distinct`: sectors by "load", "store" and "atomic"."""
        counters, program = launch.counters, launch.program
        for index, (warps, _) in counters.runs.items():
            self.warps[program, index] += warps
        for ins, counts in counters.counted.items():
            if ins.opcode == "cp" and "cg" in ins.modifiers:
                self.uncached_sectors += counts.get("global_load_sectors", 0)
        for ins, wavefronts in counters.least_wavefronts.items():
            self.wavefronts[program, ins] += wavefronts
        self.loaded_sectors += distinct["load"]
        self.stored_sectors += max(distinct["store"], distinct["atomic"])
        self.touched_sectors = max(self.touched_sectors, counters.sectors.union("load", "store", "atomic"))
        self.most_blocks = max(self.most_blocks, launch.blocks)


def lower_bound(kernel, name):
    """Cycles that a profiled kernel needs at least on a device.

    Parameters
    ----------
    kernel : KernelProfile
        All launches of it together.
    name : str
        A device (``"A100"``), or an architecture for its first device in `devices` (``"sm_80"``).

    Returns
    -------
    LowerBound

    Raises
    ------
    ValueError
        For a device that is not in the table.
    """
    executed, gpu = kernel.executed, device(name)
    work, wavefronts = collections.Counter(), 0
    for (program, index), warps in executed.warps.items():
        for kind, count in least_work(program).of_block[index].items():
            work[kind] += warps * count
    for (program, ins), count in executed.wavefronts.items():
        wavefronts += count * least_work(program).kept.get(ins, 1)
    pipes = _pipes(work, gpu)
    sms = min(gpu.sms, executed.most_blocks) or 1
    tensor = {"f16": gpu.tensor_f16, "f16 f16": gpu.tensor_f16_f16, "tf32": gpu.tensor_tf32}
    lanes = {"FP32": gpu.fp32, "FP64": gpu.fp64, "ALU": gpu.alu, "MUFU": gpu.mufu, "shuffle": gpu.shuffle}
    cycles = {"tensor": sum(work["mma", type_] / rate for type_, rate in tensor.items() if rate)}
    cycles[_SHARED] = wavefronts
    cycles["issue"] = sum(pipes.values()) / SCHEDULERS
    cycles |= {pipe: pipes[pipe] * _WARP / rate for pipe, rate in lanes.items()}
    cycles["FP16"] = pipes["FP16"] * 2 * _WARP / gpu.fp16
    cycles["conversion"] = max(pipes["to half"], pipes["integer conversion"]) * _WARP / gpu.alu
    cycles["L2"] = _through_l2(executed) * _SECTOR / L2_BYTES
    cycles = {name: count / sms for name, count in cycles.items()}
    cycles[_DRAM] = executed.touched_sectors * _SECTOR / gpu.dram_bytes
    return LowerBound(gpu.name, gpu.arch, gpu.clock, cycles)


def _through_l2(executed):
    """Sectors that cross between SMs and the second-level cache in the busier of the two directions."""
    return max(executed.loaded_sectors, executed.uncached_sectors, executed.stored_sectors)


def _pipes(work, gpu):
    """Warp instructions of each pipe, after all merging."""
    fused = {t: work[f"{t} fma"] + max(work[f"{t} mul"], work[f"{t} add"]) for t in ("f16", "f32", "f64")}
    three = 2 if int(gpu.arch[3:]) >= 90 else 1  # operands that a minimum takes beyond the first
    return {
        "tensor": work["tensor"],
        "memory": work["memory"],
        "FP32": fused["f32"],
        "FP64": fused["f64"],
        "FP16": fused["f16"],
        "ALU": work["minimum"] / three,
        "MUFU": work["special"] + max(work["reciprocal"], work["root"]),
        "to half": work["to half"],
        "integer conversion": work["integer conversion"],
        "shuffle": work["shuffle"],
        "other": work["other"],
    }
