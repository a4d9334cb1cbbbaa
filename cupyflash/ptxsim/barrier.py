"""Barriers of thread blocks: who waits where, and when a barrier is complete."""

import numpy as np

from .group import WARP


def is_aligned(ins):
    """Whether all lanes of a warp have to come to a barrier together."""
    return ins.opcode == "bar" or "aligned" in ins.modifiers


class Barriers:
    """The 16 named barriers of every block in a chunk."""

    def __init__(self, chunk):
        self.chunk = chunk
        self.waiting = np.full(chunk.n, -1, np.int32)  # the barrier that a lane waits at
        self.count = np.zeros(chunk.n, np.int64)  # threads it expects, 0 for all
        self.value = np.zeros(chunk.n, bool)  # a lane's predicate at bar.red
        self.arrived = {}  # (block, barrier) -> threads of warps that have passed bar.arrive
        self.arriving = {}  # (block, barrier) -> the lanes that have passed it, of warps that have not wholly
        self.somebody = False

    def arrive(self, x, block, number, count, value):
        """A group at bar.sync, bar.arrive or bar.red, whose lanes' pcs are already past it if they must wait.

        Returns True if the group can go on at once: it holds all threads of its blocks.
        """
        chunk, modifiers = self.chunk, block.ending.modifiers
        lanes = x.positions()
        for observer in chunk.observers:
            observer.reached(x, block, number, count)
        if count is None and value is None and number.size == 1 and (x is chunk.everyone or self.whole_blocks(lanes)):
            for observer in chunk.observers:
                observer.barrier(lanes, chunk, block.ending)
            return True
        chunk.pc[lanes] = block.targets[0]
        numbers = x.of_active(number)
        if "arrive" in modifiers:
            for observer in chunk.observers:
                observer.arrive(lanes, numbers, chunk)
            for key in np.unique(np.stack([lanes // chunk.pitch, numbers], 1), axis=0).tolist():
                self.pass_by(*key, lanes[(lanes // chunk.pitch == key[0]) & (numbers == key[1])])
        else:
            self.somebody = True
            self.waiting[lanes] = numbers.astype(np.int32)
            self.count[lanes] = 0 if count is None else x.of_active(count).astype(np.int64)
            self.value[lanes] = False if value is None else x.of_active(value)
        for each in np.unique(numbers):
            self.release(int(each))
        return False

    def pass_by(self, block, number, lanes):
        """Lanes of a block at bar.arrive: a warp counts when all of its lanes that have not exited have been there."""
        chunk, key = self.chunk, (block, number)
        passed = self.arriving.pop(key, np.zeros((chunk.pitch // WARP, WARP), bool))
        passed.reshape(-1)[lanes - block * chunk.pitch] = True
        alive = (chunk.pc[block * chunk.pitch : (block + 1) * chunk.pitch] != chunk.exit).reshape(passed.shape)
        whole = passed.any(1) & ~(alive & ~passed).any(1)
        self.arrived[key] = self.arrived.get(key, 0) + WARP * int(whole.sum())
        passed[whole] = False
        if passed.any():
            self.arriving[key] = passed

    def whole_blocks(self, lanes):
        """Whether these are all the threads left in their blocks."""
        chunk = self.chunk
        alive = (chunk.pc != chunk.exit).reshape(chunk.count, chunk.pitch).sum(1)
        here = np.bincount(lanes // chunk.pitch, minlength=chunk.count)
        return bool(((here == 0) | (here == alive)).all())

    def after_exits(self):
        """Threads have exited: a barrier may have waited only for them."""
        if self.somebody:
            for number in np.unique(self.waiting[self.waiting >= 0]):
                self.release(int(number))

    def release(self, number):
        """Let the lanes go that wait at a barrier which is now complete."""
        chunk = self.chunk
        waiting = (self.waiting == number).reshape(chunk.count, chunk.pitch)
        expected = np.where(waiting, self.count.reshape(waiting.shape), 0).max(1)
        alive = (chunk.pc != chunk.exit).reshape(waiting.shape)
        threads = self.warps_waiting(waiting, alive) * WARP
        for block in np.flatnonzero(waiting.any(1)):
            if expected[block]:
                complete = threads[block] + self.arrived.get((int(block), number), 0) >= expected[block]
            else:
                complete = (waiting[block] | ~alive[block]).all()
            if complete:
                self.arrived.pop((int(block), number), None)
                lanes = block * chunk.pitch + np.flatnonzero(waiting[block])
                ins = chunk.launch.program.blocks[chunk.pc[lanes[0]] - 1].ending
                for observer in chunk.observers:
                    observer.barrier(lanes, chunk, ins)
                self.open(lanes)
        self.somebody = bool((self.waiting >= 0).any())

    def warps_waiting(self, waiting, alive):
        """Warps of each block that wait with all of their lanes that have not exited: an aligned barrier needs them
        together, any other may be reached by several ways, and the first lanes there wait for the last (PTX ISA,
        barrier)."""
        shape = (waiting.shape[0], -1, WARP)
        missing = (alive & ~waiting).reshape(shape).any(2)
        return (waiting.reshape(shape).any(2) & ~missing).sum(1)

    def open(self, lanes):
        """Release lanes; those at bar.red get the reduction of the predicates of all of them."""
        chunk = self.chunk
        self.waiting[lanes] = -1
        values = self.value[lanes]
        for pc in np.unique(chunk.pc[lanes]):
            ending = chunk.launch.program.blocks[pc - 1].ending
            if ending is None or "red" not in ending.modifiers:
                continue
            if "popc" in ending.modifiers:
                result = np.count_nonzero(values)
            else:
                result = values.all() if "and" in ending.modifiers else values.any()
            chunk.write_register(ending.operands[0].index, lanes[chunk.pc[lanes] == pc], result)
