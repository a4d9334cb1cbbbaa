"""Calls that need a stack: where each lane returns to, and the registers that its callers left behind."""

import numpy as np

from .callgraph import sizes
from .flow import bits
from .recurrence import Recurrence


class Saved:
    """Values of registers at each depth of calls: arrays of one element, or of one for each lane of a chunk."""

    def __init__(self, lanes):
        self.n = lanes
        self.levels = []

    def keep(self, depth, index, lanes, value):
        """Keep the elements of these lanes."""
        while len(self.levels) <= depth:
            self.levels.append({})
        level = self.levels[depth]
        level[index] = self.changed(level.get(index, value), lanes, value)

    def restored(self, depth, index, lanes, value):
        """An array in which these lanes have again what was kept of them."""
        return self.changed(value, lanes, self.levels[depth][index])

    def changed(self, old, lanes, value):
        """An array that has these lanes' elements from `value`, the others from `old`."""
        if old is value or lanes.size == self.n:
            return value
        new = np.array(np.broadcast_to(old, self.n))
        new[lanes] = value if value.size == 1 else value[lanes]
        return new


class Stack:
    """The calls that the lanes of a chunk are in. `depth`: their number for each lane."""

    def __init__(self, chunk):
        self.chunk, self.program = chunk, chunk.launch.program
        self.depth = np.zeros(chunk.n, np.int32)
        self.back = []  # for each depth, the block where each lane goes on
        self.saved = Saved(chunk.n)
        self.moves, self.recurrence = 0, Recurrence(chunk)

    def state(self):
        """All that the lanes will find again when they return, as it is now; further depths come behind."""
        levels = zip(self.back, self.saved.levels, strict=False)
        return [self.depth.copy(), *(part for back, level in levels for part in (back.copy(), *level.values()))]

    def move(self, x, block, result):
        """Let a group whose block ends in a call or a return follow it; `result`: what the block has returned."""
        if block.ending.opcode == "call":
            self.call(x, block, *result)
        else:
            self.leave(x)
        self.moves += 1
        if self.recurrence.again(self.moves):
            self.chunk.fall_behind(x, True)

    def call(self, x, block, address, end):
        """`address`: of the functions, None for the one that the instruction names; `end`: of each lane's frame."""
        chunk, lanes = self.chunk, x.positions()
        depth = int(self.depth[lanes[0]])
        if depth == len(self.back):
            self.back.append(np.empty(chunk.n, np.int32))
        self.back[depth][lanes] = block.targets[0]
        saved = self.saved_by(block)
        for index in saved:
            self.saved.keep(depth, index, lanes, chunk.registers[index])
        for observer in chunk.observers:
            observer.called(depth, saved, lanes)
        begin = x.of_active(end)
        for frame, there in self.functions(x, block, address):
            self.check_room(x, block, frame, begin, there)
            chunk.pc[lanes[there]] = frame.entry
            for observer in chunk.observers:
                observer.entered(lanes[there], begin[there], frame.start, self.program.places[frame.end])
            if end.size == 1 and np.count_nonzero(there) == chunk.n:
                chunk.registers[frame.register.index] = end
            else:
                chunk.write_register(frame.register.index, lanes[there], begin[there])
        self.depth[lanes] = depth + 1

    def leave(self, x):
        chunk, lanes = self.chunk, x.positions()
        depth = int(self.depth[lanes[0]]) - 1
        self.depth[lanes] = depth
        chunk.pc[lanes] = back = self.back[depth][lanes]
        for after in np.unique(back):
            own = lanes[back == after]
            saved = self.saved_by(self.program.blocks[after - 1])
            for index in saved:
                chunk.registers[index] = self.saved.restored(depth, index, own, chunk.registers[index])
            for observer in chunk.observers:
                observer.returned(depth, saved, own)

    def saved_by(self, block):
        """Registers that the call at the end of a block may change, though they are needed after it: of a function that
        may run again."""
        frame = self.program.frame_of(block)
        return bits(self.program.blocks[block.targets[0]].live_in) if frame.recursive else []

    def functions(self, x, block, address):
        """(frame, which active lanes) for each function that a group calls."""
        call = block.ending.operands
        if address is None:
            yield self.program.frames[self.program.module.parsed.addresses[call.target.name]], np.ones(x.active, bool)
            return
        addresses = x.of_active(address)
        for value in np.unique(addresses):
            there = addresses == value
            frame = self.program.frames.get(int(value))
            if frame is None or frame.function.name not in call.names:
                raise self.error(x, block, there, self.complaint(int(value), call), "function pointer")
            yield frame, there

    def complaint(self, address, call):
        """What is wrong with the address of a function."""
        parsed = self.program.module.parsed
        name = next((name for name, at in parsed.addresses.items() if at == address), None)
        if name is None or name not in parsed.functions:
            return f"call of 0x{address:x}, which is the address of no function"
        has, gets = sizes(parsed.functions[name].parameters), sizes(call.passed)
        if has != gets:
            return f"call of {name} with results and arguments of {gets} bytes, it has them of {has}"
        return f"call of {name}, which is none of those that the instruction says it calls"

    def check_room(self, x, block, frame, begin, there):
        full = there & (begin.astype(np.int64) + frame.reach > self.program.local_bytes)
        if full.any():
            depth = int(self.depth[x.positions()[0]]) + 1
            stack = f"the stack of {self.program.local_bytes:,} bytes"
            what = f"call of {frame.function.name}, {depth} calls deep, overflows {stack}"
            raise self.error(x, block, full, what, "stack overflow")

    def error(self, x, block, which, what, kind):
        """The exception for the first of some active lanes."""
        lanes = np.arange(x.n) if x.mask is None else np.flatnonzero(x.mask)
        return x.error(block.ending, int(lanes[which][0]), what, kind)
