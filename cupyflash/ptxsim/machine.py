"""The scheduler: lanes of a chunk of blocks in lockstep, lowest program counter first.

Lanes that stand at the same basic block run it together. A group keeps running while it stays
together and below every other runnable lane; lanes at a barrier leave the runnable set until the
barrier is complete.
"""

import numpy as np

from .async_copy import AsyncCopies
from .errors import Deadlock, MemoryFault, SimulationError
from .flow import bits, is_barrier
from .memory import GenericSpace, LocalMemory, SharedMemory

WARP = 32
NOBODY = np.int32(2**31 - 1)
POLLS_BEFORE_YIELD = 32
POLLS_BEFORE_HANG_CHECK = 1000


class Group:
    """Lanes that run a basic block together: whole warps, in which `mask` (None: all) is active.
    Translated code sees it as `x`."""

    def __init__(self, chunk, lanes, mask):
        self.chunk = chunk
        self.lanes = lanes  # positions in the chunk, None for all
        self.mask = mask
        self.n = chunk.n if lanes is None else lanes.size
        self.warps = self.n // WARP
        self.active = self.n if mask is None else int(np.count_nonzero(mask))
        everything = slice(None) if lanes is None else lanes
        self.lane = chunk.lane[everything]
        self.shared_base = chunk.shared_base[everything]
        self.local_base = chunk.local_base[everything]
        self.shared, self.local, self.global_ = chunk.shared, chunk.local, chunk.launch.global_
        self.param, self.const, self.generic = chunk.launch.param, chunk.launch.const, chunk.generic
        self.copies = chunk.copies
        self.counters = chunk.counters
        self.memo = {}  # what translated code works out once for this group

    @property
    def changes(self):
        return self.chunk.changes

    @changes.setter
    def changes(self, count):
        self.chunk.changes = count

    def variable_address(self, name, offset):
        """Where a module-scope variable lies in host memory."""
        return np.array([self.chunk.launch.program.module.addresses[name] + offset], np.uint64)

    def positions(self):
        """Positions of the active lanes in the chunk."""
        lanes = np.arange(self.n) if self.lanes is None else self.lanes
        return lanes if self.mask is None else lanes[self.mask]

    def fault(self, ins, sel, bad, address, space, size, why, write):
        """The exception for the first lane with a bad address."""
        first = int(np.flatnonzero(np.broadcast_to(bad, bad.shape if bad.size > 1 else 1))[0])
        at = int(address[first] if address.size > 1 else address[0])
        if sel is not None:
            lane = int(sel[first if bad.size > 1 else 0])
        else:
            lane = first if bad.size > 1 else int(np.argmax(self.mask)) if self.mask is not None else 0
        what = f"{'write' if write else 'read'} of {size} bytes in {space} memory at 0x{at:x}: {why}"
        return MemoryFault(f"{what}; {self.describe(ins, lane)}")

    def error(self, ins, lane, what):
        return SimulationError(f"{what}; {self.describe(ins, lane)}")

    def describe(self, ins, lane):
        lane = lane if self.lanes is None else int(self.lanes[lane])
        return f"{self.chunk.describe(lane)}, {self.chunk.launch.where(ins)}"


class Chunk:
    """Some blocks of a launch, simulated together."""

    def __init__(self, launch, first, count):
        self.launch, self.first, self.count = launch, first, count
        program = launch.program
        self.threads = launch.threads
        self.pitch = -(-self.threads // WARP) * WARP  # lanes per block
        self.n = count * self.pitch
        self.exit = np.int32(len(program.blocks))
        thread = np.arange(self.pitch)
        self.pc = np.tile(np.where(thread < self.threads, 0, self.exit).astype(np.int32), count)
        self.barrier = np.full(self.n, -1, np.int32)  # the one a lane waits at
        self.barrier_count = np.zeros(self.n, np.int64)
        self.barrier_value = np.zeros(self.n, bool)  # a lane's predicate at bar.red
        self.arrived = {}  # (block, barrier) -> threads that passed bar.arrive
        self.penalty = None  # lanes set back because they only poll
        self.changes = 0
        self.idle_rounds = 0
        self.ticks = 0
        self.counters = launch.counters
        self.lane = np.tile((thread % WARP).astype(np.uint32), count)
        self.shared = SharedMemory("shared", launch.shared_bytes, count)
        self.local = LocalMemory("local", program.local_bytes, self.n if program.local_bytes else 0)
        self.shared_base = np.repeat(np.arange(count, dtype=np.int64) * self.shared.pitch, self.pitch)
        self.local_base = np.arange(self.n, dtype=np.int64) * self.local.pitch
        self.generic = GenericSpace(launch.global_, self.shared, self.local, launch.param, launch.const)
        self.random = (
            np.random.default_rng((launch.settings.seed, first)) if launch.settings.schedule == "random" else None
        )
        self.copies = AsyncCopies(self.n, self.random)
        self.everyone = Group(self, None, None)
        self.registers = launch.initial_registers(self)

    # -- choosing who runs ---------------------------------------------------------------------------
    def run(self):
        """Until every lane has exited."""
        if self.random is None and self.pitch == self.threads:
            self.run_group(self.everyone, 0, int(NOBODY))
        while True:
            chosen = self.choose()
            if chosen is None:
                return
            self.run_group(*chosen)

    def choose(self):
        """The next group, its block, and the lowest block of the other runnable lanes."""
        key = np.where(self.barrier >= 0, NOBODY, self.pc)
        key[self.pc == self.exit] = NOBODY
        if self.penalty is not None:
            key = np.where(self.penalty & (key < NOBODY), key + self.exit, key)
        low = int(key.min())
        if low == NOBODY:
            if (self.barrier >= 0).any():
                raise Deadlock(self.standstill())
            return None
        if self.penalty is not None and low >= self.exit:  # everybody polls
            self.give_up_if_idle()
            self.penalty = None
            return self.choose()
        if self.random is not None:
            return self.choose_warp(key)
        active = key == low
        others = int(np.where(active, NOBODY, key).min())
        return self.group(active), low, others

    def choose_warp(self, key):
        by_warp = key.reshape(-1, WARP).min(1)
        warp = int(self.random.choice(np.flatnonzero(by_warp < self.exit)))
        own = slice(warp * WARP, warp * WARP + WARP)
        active = np.zeros(self.n, bool)
        active[own] = key[own] == by_warp[warp]
        others = int(np.where(active[own], NOBODY, key[own]).min())
        return self.group(active), int(by_warp[warp]), others

    def group(self, active):
        warps = active.reshape(-1, WARP).any(1)
        if warps.all():
            return self.everyone if active.all() else Group(self, None, active)
        lanes = np.flatnonzero(np.repeat(warps, WARP))
        mask = active[lanes]
        return Group(self, lanes, None if mask.all() else mask)

    # -- running a group -----------------------------------------------------------------------------
    def run_group(self, x, pc, others):
        """Run blocks from `pc` until the group splits, must wait, or reaches block `others`."""
        launch = self.launch
        blocks, counters = launch.program.blocks, self.counters
        registers = self.registers if x.lanes is None and x.mask is None else [None] * len(self.registers)
        own = registers is not self.registers
        written = 0
        polls = 0
        snapshot = None
        while True:
            block = blocks[pc]
            if own:
                self.gather(x, registers, block.live_in)
            run = block.run or launch.program.translate(block)
            result = run(x, x.mask, registers)
            written |= block.writes
            if counters is not None:
                counters.block(block, x)
            after = self.follow(x, block, result)
            if after is None:  # the group split, waits or has exited; pcs are stored
                live = 0
                for target in block.targets:
                    live |= blocks[target].live_in if target < self.exit else 0
                break
            pc, live = after, blocks[after].live_in if after < self.exit else 0
            if block.polls:
                polls += 1
                if (others < NOBODY or self.random is not None) and polls >= POLLS_BEFORE_YIELD:
                    self.penalty = np.zeros(self.n, bool) if self.penalty is None else self.penalty
                    self.penalty[x.positions()] = True
                    break
                if polls >= POLLS_BEFORE_HANG_CHECK:
                    snapshot = self.check_progress(x, block, registers, snapshot)
            if pc >= others:
                break
        if after is not None:
            self.pc[x.positions()] = pc
        if own:
            self.scatter(x, registers, written & live & ~block.delivered)

    def follow(self, x, block, result):
        """The group's next block, or None once its lanes' own pcs are stored."""
        ending, targets = block.ending, block.targets
        if ending is None or (ending.opcode == "bra" and ending.guard is None):
            return targets[0]
        if is_barrier(ending):
            return self.arrive(x, block, result)
        if ending.opcode == "trap":
            raise x.error(ending, int(np.argmax(result)), "trap")
        if ending.opcode == "brx":
            return self.follow_table(x, block, result)
        if ending.guard is None:  # ret, exit
            return self.leave(x, x.positions())
        if result.size == 1:
            target = targets[0] if result[0] else targets[1]
            return self.leave(x, x.positions()) if target == self.exit else target
        taken = result if x.mask is None else result & x.mask
        count = int(np.count_nonzero(taken))
        if count == 0:
            return targets[1]
        if count == x.active and targets[0] != self.exit:
            return targets[0]
        lanes = x.positions()
        self.pc[lanes] = np.where(
            result if x.mask is None else result[x.mask], np.int32(targets[0]), np.int32(targets[1])
        )
        if targets[0] == self.exit:
            self.leave(x, lanes[self.pc[lanes] == self.exit])
        return None

    def follow_table(self, x, block, index):
        targets = np.array(block.targets, np.int32)
        if index.size == 1:
            return int(targets[int(index[0])])
        lanes = x.positions()
        self.pc[lanes] = targets[(index if x.mask is None else index[x.mask]).astype(np.int64)]
        return None

    def leave(self, x, lanes):
        self.pc[lanes] = self.exit
        if (self.barrier >= 0).any():  # a barrier may have waited only for these
            for number in np.unique(self.barrier[self.barrier >= 0]):
                self.release(int(number))
        return None

    # -- registers of a part of the chunk ------------------------------------------------------------
    def gather(self, x, registers, needed):
        for i in bits(needed):
            if registers[i] is None:
                value = self.registers[i]
                registers[i] = value if value.size == 1 or x.lanes is None else value[x.lanes]

    def scatter(self, x, registers, which):
        lanes = x.positions()
        for i in bits(which):
            old, new = self.registers[i], registers[i]
            if old.size == 1:
                if new.size == 1 and old.tobytes() == new.tobytes():
                    continue
                old = np.repeat(old, self.n)
            else:
                old = old.copy()
            old[lanes] = new if new.size == 1 or x.mask is None else new[x.mask]
            self.registers[i] = old

    # -- barriers ------------------------------------------------------------------------------------
    def arrive(self, x, block, result):
        """A group at bar.sync, bar.arrive or bar.red: go on, or wait."""
        number, count, value = result
        following = block.targets[0]
        modifiers = block.ending.modifiers
        lanes = x.positions()
        if (
            count is None
            and number.size == 1
            and value is None
            and (x is self.everyone or self.holds_whole_blocks(lanes))
        ):
            if self.counters is not None:
                self.counters.barrier(np.unique(lanes // self.pitch).size)
            return following
        spread = lambda a: np.broadcast_to(a, x.n) if x.mask is None else np.broadcast_to(a, x.n)[x.mask]  # noqa: E731
        self.pc[lanes] = following
        if "arrive" in modifiers:
            self.note_arrival(lanes, spread(number), spread(count))
        else:
            self.barrier[lanes] = spread(number).astype(np.int32)
            self.barrier_count[lanes] = 0 if count is None else spread(count).astype(np.int64)
            self.barrier_value[lanes] = False if value is None else spread(value)
        for each in np.unique(spread(number)):
            self.release(int(each))
        return None

    def holds_whole_blocks(self, lanes):
        alive = (self.pc != self.exit).reshape(self.count, self.pitch).sum(1)
        here = np.bincount(lanes // self.pitch, minlength=self.count)
        return bool(((here == 0) | (here == alive)).all())

    def note_arrival(self, lanes, numbers, counts):
        for warp in np.unique(lanes // WARP):
            first = np.flatnonzero(lanes // WARP == warp)[0]
            key = (int(warp) * WARP // self.pitch, int(numbers[first]))
            self.arrived[key] = self.arrived.get(key, 0) + WARP

    def release(self, number):
        """Let the lanes go that wait at a barrier which is now complete."""
        waiting = (self.barrier == number).reshape(self.count, self.pitch)
        counts = np.where(waiting, self.barrier_count.reshape(waiting.shape), 0).max(1)
        alive = (self.pc != self.exit).reshape(waiting.shape)
        threads = waiting.reshape(self.count, -1, WARP).any(2).sum(1) * WARP
        for block in np.flatnonzero(waiting.any(1)):
            if counts[block]:
                arrived = self.arrived.get((int(block), number), 0)
                complete = threads[block] + arrived >= counts[block]
            else:
                complete = (waiting[block] | ~alive[block]).all()
            if complete:
                self.arrived.pop((int(block), number), None)
                if self.counters is not None:
                    self.counters.barrier(1)
                self.pass_barrier(block * self.pitch + np.flatnonzero(waiting[block]))

    def pass_barrier(self, lanes):
        self.barrier[lanes] = -1
        for pc in np.unique(self.pc[lanes]):
            ending = self.launch.program.blocks[pc - 1].ending
            if ending is None or "red" not in ending.modifiers:
                continue
            here = lanes[self.pc[lanes] == pc]
            values = self.barrier_value[lanes]
            destination = ending.operands[0].index
            register = self.registers[destination]
            register = np.repeat(register, self.n) if register.size == 1 else register.copy()
            if "popc" in ending.modifiers:
                register[here] = np.count_nonzero(values)
            else:
                register[here] = values.all() if "and" in ending.modifiers else values.any()
            self.registers[destination] = register

    # -- when nothing moves --------------------------------------------------------------------------
    def check_progress(self, x, block, registers, snapshot):
        state = (block, self.changes, [registers[i] for i in bits(block.live_in)])
        if snapshot is None or snapshot[0] is not block:
            return state if snapshot is None else snapshot
        same = all(
            a is b or (a.size == b.size and a.tobytes() == b.tobytes())
            for a, b in zip(snapshot[2], state[2], strict=True)
        )
        if same and snapshot[1] == state[1]:
            raise Deadlock(self.standstill(x.positions()))
        return state

    def give_up_if_idle(self):
        self.idle_rounds = self.idle_rounds + 1 if self.changes == getattr(self, "changes_seen", -1) else 0
        self.changes_seen = self.changes
        if self.idle_rounds > POLLS_BEFORE_HANG_CHECK:
            raise Deadlock(self.standstill(np.flatnonzero(self.pc != self.exit)))

    def standstill(self, polling=()):
        """What every group of lanes waits for."""
        lines = [f"{self.launch.program.name}: no thread can go on"]
        for block in self.launch.program.blocks:
            after = (
                np.flatnonzero((self.barrier >= 0) & (self.pc == block.index + 1)) if block.ending is not None else ()
            )
            if len(after) and is_barrier(block.ending):
                who = f"{len(after)} threads wait at barrier {self.barrier[after[0]]}"
                lines.append(f"  {who}, {block.ending.where}, the first is {self.describe(int(after[0]), short=True)}")
        if len(polling):
            block = self.launch.program.blocks[int(self.pc[polling[0]])]
            where = (block.code or [block.ending])[0].where
            lines.append(
                f"  {len(polling)} threads repeat a loop at {where}, the first is {self.describe(int(polling[0]), short=True)}"
            )
            if self.count < self.launch.blocks:
                lines.append(
                    f"  (only {self.count} of {self.launch.blocks} blocks are resident: see settings(chunk_lanes=...))"
                )
        return "\n".join(lines)

    def describe(self, lane, short=False):
        block, thread = divmod(lane, self.pitch)
        where = f"thread {self.launch.thread_of(thread)} of block {self.launch.block_of(self.first + block)}"
        return where if short else f"kernel {self.launch.program.name}, {where}"
