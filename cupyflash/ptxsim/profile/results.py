"""What a profile holds: the same counters for a kernel and for each of its source lines."""

import dataclasses
from pathlib import Path

from ..cost_model import Executed, lower_bound
from ..occupancy import occupancy
from ..resources import resources

SECTOR_BYTES = 32
WARP = 32


def ratio(part, whole):
    """part / whole, None where there is nothing to measure."""
    return part / whole if whole else None


@dataclasses.dataclass
class Counts:
    """Counters; how each counts is written at `KernelProfile`."""

    instructions: dict = dataclasses.field(default_factory=dict)  # class -> warp instructions
    opcodes: dict = dataclasses.field(default_factory=dict)  # such as "fma.f32", "ld.global" -> warp instructions
    flops: dict = dataclasses.field(default_factory=dict)  # f16, bf16, f32, f64 -> scalar operations of all lanes
    mma_flops: int = 0
    lane_instructions: int = 0
    predicated_off: int = 0
    branches: int = 0
    divergent_branches: int = 0
    global_load_requests: int = 0
    global_load_bytes: int = 0
    global_load_sectors: int = 0
    global_load_ideal_sectors: int = 0
    distinct_load_sectors: int = 0
    global_store_requests: int = 0
    global_store_bytes: int = 0
    global_store_sectors: int = 0
    global_store_ideal_sectors: int = 0
    distinct_store_sectors: int = 0
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_ideal_wavefronts: int = 0
    local_requests: int = 0
    local_load_bytes: int = 0
    local_store_bytes: int = 0
    atomics: int = 0
    atomic_lanes: int = 0
    atomic_passes: int = 0
    global_atomic_sectors: int = 0
    distinct_atomic_sectors: int = 0
    barriers: int = 0

    @property
    def warp_instructions(self):
        """Warp instructions of all classes."""
        return sum(self.instructions.values())

    @property
    def active_lane_efficiency(self):
        """Lanes that take part in an instruction, as a share of 32 for each warp instruction."""
        return ratio(self.lane_instructions, WARP * self.warp_instructions)

    @property
    def branch_efficiency(self):
        """Share of the conditional branches at which all lanes of the warp went the same way."""
        return ratio(self.branches - self.divergent_branches, self.branches)

    @property
    def global_load_efficiency(self):
        """Ideal sectors over sectors of the loads."""
        return ratio(self.global_load_ideal_sectors, self.global_load_sectors)

    @property
    def global_store_efficiency(self):
        """Ideal sectors over sectors of the stores."""
        return ratio(self.global_store_ideal_sectors, self.global_store_sectors)

    @property
    def shared_efficiency(self):
        """Ideal wavefronts over wavefronts."""
        return ratio(self.shared_ideal_wavefronts, self.shared_wavefronts)

    @property
    def compulsory_bytes(self):
        """Bytes of the distinct sectors that were loaded, and of those that were stored or changed by atomics."""
        return SECTOR_BYTES * (self.distinct_load_sectors + self.distinct_store_sectors + self.distinct_atomic_sectors)

    def add(self, name, value, times=1):
        """Add `times` a number, or a dict of numbers, to a counter."""
        if isinstance(value, dict):
            counts = getattr(self, name)
            for key, count in value.items():
                counts[key] = counts.get(key, 0) + count * times
        else:
            setattr(self, name, getattr(self, name) + value * times)

    def counters(self):
        """The counters and what is derived from them, by name."""
        stored = {name: getattr(self, name) for name in COUNTERS}
        return {**stored, **{name: getattr(self, name) for name in DERIVED}}


COUNTERS = tuple(field.name for field in dataclasses.fields(Counts))
DICTS = ("instructions", "opcodes", "flops")
DERIVED = tuple(name for name, value in vars(Counts).items() if isinstance(value, property))
LINE_COUNTERS = tuple(name for name in (*COUNTERS, *DERIVED) if name not in DICTS)  # lines can be put in order by them


@dataclasses.dataclass
class LineProfile(Counts):
    """Counters of the instructions of one line of CUDA C++.

    Instructions without a line are kept by their line of PTX, with `file` "PTX".
    """

    file: str = ""
    line: int = 0
    text: str = ""  # of the line, where the module's source has it
    callers: set = dataclasses.field(default_factory=set)  # (file, line) in the kernel of calls that it is inlined at

    def as_dict(self):
        """Place, text, callers and counters by name."""
        callers = [list(caller) for caller in sorted(self.callers)]
        return {"file": self.file, "line": self.line, "text": self.text, "callers": callers, **self.counters()}


@dataclasses.dataclass(frozen=True)
class LaunchShape:
    """How a kernel was launched."""

    grid: tuple
    block: tuple
    static_shared_bytes: int
    dynamic_shared_bytes: int
    arch: str

    @property
    def threads(self):
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self):
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def as_dict(self):
        """Everything by name, grid and block as lists."""
        return {**dataclasses.asdict(self), "grid": list(self.grid), "block": list(self.block)}


@dataclasses.dataclass(repr=False)
class KernelProfile(Counts):
    """What all launches of one kernel did. Distinct sectors are those of each launch, added up.

    Attributes
    ----------
    name, launches, shapes, lines
        The kernel; how often it was launched; LaunchShape -> launches; a `LineProfile` for each source line, which has
        the counters below, too.
    instructions, opcodes : dict
        Warp instructions by class, and by opcode and type.
    warp_instructions
        Warp instructions of all classes.
    flops : dict
        Scalar operations of all lanes, by type.
    mma_flops
        Operations of tensor cores.
    lane_instructions, predicated_off
        Lanes that instructions were issued for, and how many of them a guard switched off.
    active_lane_efficiency
        `lane_instructions` over 32 for each warp instruction.
    branches, divergent_branches, branch_efficiency
        Branches of warps, those at which lanes went different ways, and the share of the others.
    global_load_requests, global_load_bytes, global_load_sectors, global_load_ideal_sectors, global_load_efficiency
        Loads of warps, their bytes, the sectors of 32 bytes that they touch, as few as would do, and the ratio.
    global_store_requests, global_store_bytes, global_store_sectors, global_store_ideal_sectors, global_store_efficiency
        The same of stores.
    distinct_load_sectors, distinct_store_sectors, distinct_atomic_sectors
        Each sector once for each launch.
    compulsory_bytes
        Bytes of all of these: what must cross the memory bus even with a perfect cache.
    block_load_sectors
        Each sector once for each block that loads it (of the kernel only, not of lines).
    shared_requests, shared_wavefronts, shared_ideal_wavefronts, shared_efficiency
        Accesses of warps, the wavefronts (passes through the banks) that they take, as few as would do, and the ratio.
    local_requests, local_load_bytes, local_store_bytes
        Of the threads' own arrays.
    atomics, atomic_lanes, atomic_passes, global_atomic_sectors
        Atomics of warps, their lanes, their turns at one address, and sectors.
    barriers
        Of blocks.
    resources, occupancy
        What ptxas gives the kernel, and how many of its blocks fit on a multiprocessor.

    Notes
    -----
    Everything is counted for the kernel and for the line of CUDA C++ that an instruction comes from; with inlined
    functions that is the innermost line.

    Instructions. A PTX instruction counts once for each warp in which a lane executes its basic block, also where a
    guard (`@p`) switches it off: the warp issues it all the same. `lane_instructions` adds up those lanes, and
    `predicated_off` how many of them a guard switched off. `instructions` counts by class, `opcodes` by opcode and
    type.

    Branches. A conditional branch, exit or indexed branch counts once for each warp that comes to it, and is divergent
    if the warp's active lanes go different ways.

    FLOPs. `flops`: an addition, subtraction or multiplication is one operation of a lane, a fused multiply-add two, of
    a packed pair twice as many; lanes that a guard switches off have none; divisions, roots and special functions are
    not counted here. `mma_flops`: 2 m n k for each warp. (mma and ldmatrix count in full under a guard.)

    Global memory. A request is one load or store of one warp in which a lane acts. It moves the `bytes` of its lanes
    and touches `sectors`, distinct ones of 32 bytes; `ideal_sectors` would hold its distinct bytes if they lay
    together. The `distinct` sectors of a launch are counted once however many warps ask for them: what a perfect cache
    would have to read or write. A line's are those that it touches itself, so those of lines add up to more than those
    of the kernel. Where malloc has put an array does not matter: memory counts as beginning at a multiple of 256 bytes,
    as on a GPU. An array's memory is that of its last `.base` that is a NumPy array, its own without one; a view may
    begin further on. `block_load_sectors` are the distinct sectors that each thread block loads, added up: what a
    perfect cache of each block would have to read.

    Shared memory. An access of 4 bytes or less a lane is one phase of 32 lanes, of 8 bytes two of 16, of 16 bytes four
    of 8; ldmatrix and stmatrix have one for each matrix. A phase takes as many wavefronts as one bank has distinct
    words of 4 bytes; one for each phase in which a lane acts is ideal.

    cp.async is a global load and a shared store; zeros that it fills in are not loaded.

    Local memory. Bytes of loads and stores to a thread's own arrays, not the parameters of calls; PTX knows no spills.

    Atomics. `atomics` are warp instructions with an acting lane, `atomic_lanes` their lanes, and `atomic_passes` add up
    the most lanes that have one address, which must take turns. They are neither loads nor stores; the sectors that
    they touch are `global_atomic_sectors`.

    Barriers. Once for each thread block that a barrier lets go on, on the line where its first thread waits.

    How blocks are grouped and scheduled does not change a count, unless the kernel itself does something else, as one
    that polls memory.
    """

    name: str = ""
    launches: int = 0
    shapes: dict = dataclasses.field(default_factory=dict)  # LaunchShape -> launches
    block_load_sectors: int = 0  # distinct ones of each thread block, added up
    lines: list = dataclasses.field(default_factory=list)  # of LineProfile, by file and line
    module: object = None  # the RawModule
    executed: Executed = dataclasses.field(default_factory=Executed)  # what bounds are made of
    assembled: dict = dataclasses.field(default_factory=dict)  # arch -> Resources that were asked for

    def __repr__(self):
        launches = f"{self.launches} launch{'es' * (self.launches != 1)}"
        return f"<{self.name}: {launches}, {self.warp_instructions:,} warp instructions>"

    def __str__(self):
        from .table import kernel_table

        return kernel_table(self)

    def line_table(self, count=10, by="warp_instructions"):
        """The `hottest` lines, as text."""
        from .table import line_table

        return line_table(self, count, by)

    @property
    def shape(self):
        """The LaunchShape with most launches."""
        return max(self.shapes, key=self.shapes.get)

    @property
    def resources(self):
        """What one thread and one block need, for the architecture that ran: see `resources`."""
        arch = self.shape.arch
        if arch not in self.assembled:
            self.assembled[arch] = resources(self.module, self.name, arch)
        return self.assembled[arch]

    @property
    def occupancy(self):
        """Blocks and warps on a multiprocessor of the architecture that ran: see `occupancy`."""
        needs, shape = self.resources, self.shape
        shared = needs.static_shared_bytes + shape.dynamic_shared_bytes
        return occupancy(shape.arch, shape.threads, needs.registers, shared, needs.barriers)

    def lower_bound(self, device):
        """Cycles that the launches need at least on a device or architecture: see `cost_model`."""
        return lower_bound(self, device)

    def to_html(self, path):
        """Write a page that shows the source with what each line costs, and what bounds the kernel.

        The page needs no other file. Without NVRTC it lacks registers and occupancy.
        """
        from .page import page

        Path(path).write_text(page(self), encoding="utf-8")

    def figure(self):
        """The same as a Matplotlib figure, of the lines that do most. Raises ImportError without Matplotlib."""
        from .figure import figure

        return figure(self)

    def to_png(self, path):
        """Write the `figure`."""
        from .figure import write

        write(self, path)

    def hottest(self, count=10, by="warp_instructions"):
        """The `count` lines with most of a counter, most first; lines that have none of it are left out.

        Raises ValueError for a counter that does not exist or is no number.
        """
        if by not in LINE_COUNTERS:
            raise ValueError(f"by: {by!r}, must be one of {', '.join(LINE_COUNTERS)}")
        lines = [line for line in self.lines if getattr(line, by)]
        return sorted(lines, key=lambda line: -getattr(line, by))[:count]

    def outlook(self):
        """Resources, occupancy and lower bounds by name; None for what nobody here can tell, as without NVRTC."""
        from .annotated import bounds, when_known

        needs, fit = when_known(lambda: self.resources), when_known(lambda: self.occupancy)
        return {
            "resources": needs and needs.as_dict(),
            "occupancy": fit and fit.as_dict(),
            "lower_bounds": {bound.device: bound.as_dict() for bound in bounds(self)[0]},
        }

    def as_dict(self):
        """Everything by name; `lines` and `shapes` are lists of dicts."""
        shapes = [{**shape.as_dict(), "launches": count} for shape, count in self.shapes.items()]
        return {
            "name": self.name,
            "launches": self.launches,
            "shapes": shapes,
            **self.counters(),
            "block_load_sectors": self.block_load_sectors,
            **self.outlook(),
            "lines": [line.as_dict() for line in self.lines],
        }
