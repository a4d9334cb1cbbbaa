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
    """Counters; how each counts is written in `cupyflash.ptxsim.profile`."""

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

    def as_dict(self):
        """Place, text and counters by name."""
        return {"file": self.file, "line": self.line, "text": self.text, **self.counters()}


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


@dataclasses.dataclass
class KernelProfile(Counts):
    """What all launches of one kernel did. Distinct sectors are those of each launch, added up."""

    name: str = ""
    launches: int = 0
    shapes: dict = dataclasses.field(default_factory=dict)  # LaunchShape -> launches
    block_load_sectors: int = 0  # distinct ones of each thread block, added up
    lines: list = dataclasses.field(default_factory=list)  # of LineProfile, by file and line
    module: object = None  # the RawModule
    executed: Executed = dataclasses.field(default_factory=Executed)  # what bounds are made of
    assembled: dict = dataclasses.field(default_factory=dict)  # arch -> Resources that were asked for

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
