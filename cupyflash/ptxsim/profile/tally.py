"""From the counts of launches, by block and instruction, to those of a kernel and of its source lines."""

import functools

from .results import KernelProfile, LaunchShape, LineProfile
from .sources import line_texts
from .static import instruction_class, mma_flops, opcode_key, scalar_flops, source_of

_texts = functools.lru_cache(8)(line_texts)


class Tally:
    """All launches of one kernel."""

    def __init__(self, name):
        self.kernel = KernelProfile(name=name)
        self.lines = {}
        self.per_warp = {}  # (program, block) -> what one warp's run of it counts

    def add(self, launch):
        """Add one launch."""
        kernel, counters, program = self.kernel, launch.counters, launch.program
        static = program.shared_bytes
        shape = LaunchShape(launch.grid, launch.block, static, launch.shared_bytes - static, program.module.arch)
        kernel.module = program.module.raw
        kernel.launches += 1
        kernel.shapes[shape] = kernel.shapes.get(shape, 0) + 1
        for index, (warps, lanes) in counters.runs.items():
            self.add_block(program, index, warps, lanes)
        for ins, counts in counters.counted.items():
            self.add_instruction(ins, counts)
        kernel.block_load_sectors += counters.block_load_sectors
        for (what, source), sectors in counters.sectors.counts().items():
            self.line(source).add(f"distinct_{what}_sectors", sectors)
        distinct = {what: counters.sectors.union(what) for what in ("load", "store", "atomic")}
        for what, sectors in distinct.items():
            kernel.add(f"distinct_{what}_sectors", sectors)
        kernel.executed.add(launch, distinct)
        kernel.lines = [self.lines[source] for source in sorted(self.lines)]

    def add_block(self, program, index, warps, lanes):
        key = (program, index)
        if key not in self.per_warp:
            self.per_warp[key] = _per_line(program.blocks[index])
            self.add_callers(program.blocks[index])
        for source, (number, classes, opcodes, flops, products) in self.per_warp[key].items():
            for counts in (self.line(source), self.kernel):
                counts.add("instructions", classes, warps)
                counts.add("opcodes", opcodes, warps)
                counts.add("flops", flops, lanes)
                counts.add("mma_flops", products, warps)
                counts.add("lane_instructions", number, lanes)

    def add_callers(self, block):
        for ins in _instructions(block):
            if ins.calls:
                file, _, number = ins.calls[-1].rpartition(":")
                self.line(source_of(ins)).callers.add((file, int(number)))

    def add_instruction(self, ins, counted):
        for counts in (self.line(source_of(ins)), self.kernel):
            for name, value in counted.items():
                counts.add(name, value)
            flops = scalar_flops(ins)
            if flops and "predicated_off" in counted:
                counts.add("flops", dict([flops]), -counted["predicated_off"])

    def line(self, source):
        """The counts of a line."""
        if source not in self.lines:
            file, number = source
            text = _texts(self.kernel.module.code).get(source, "")
            self.lines[source] = LineProfile(file=file, line=number, text=text)
        return self.lines[source]


def _instructions(block):
    return [*block.code, *([block.ending] if block.ending else [])]


def _per_line(block):
    """Source line -> (instructions, their classes, opcodes and scalar FLOPs, FLOPs of tensor cores)."""
    lines = {}
    for ins in _instructions(block):
        number, classes, opcodes, flops, products = lines.setdefault(source_of(ins), (0, {}, {}, {}, 0))
        _one_more(classes, instruction_class(ins), 1)
        _one_more(opcodes, opcode_key(ins), 1)
        if scalar := scalar_flops(ins):
            _one_more(flops, *scalar)
        lines[source_of(ins)] = number + 1, classes, opcodes, flops, products + mma_flops(ins)
    return lines


def _one_more(counts, key, count):
    counts[key] = counts.get(key, 0) + count
