"""The scheduler: lanes of a chunk of blocks in lockstep, lowest program counter first.

Where calls need a stack, lanes that are within more of them go first (MinSP-PC; Collange 2011, "Stack-less SIMT
reconvergence at low cost"). Lanes that stand at the same basic block run it together. A group keeps running while it
stays together and below every other runnable lane. Lanes leave the runnable set at a barrier until it is complete, and
at a warp instruction until the lanes it names are there; those that wait at an mbarrier in vain fall behind all others.
"""

import numpy as np

from .async_copy import AsyncCopies
from .barrier import Barriers
from .cooperative import why_trap
from .errors import Deadlock
from .flow import bits, is_barrier
from .group import WARP, Group, NotConverged, both
from .mbarrier import Mbarriers
from .memory import GenericSpace, LocalMemory, SharedMemory
from .numerics import lowest, some
from .recurrence import Recurrence, same
from .stack import Stack

NOBODY = 2**31 - 1  # as a program counter
POLLS_BEFORE_YIELD = 32
POLLS_BEFORE_HANG_CHECK = 300
RESCUES_WITHOUT_CHANGE = 30_000  # a million polls of somebody who counts them, say, are no hang yet
STEPS_BEFORE_HANG_CHECK = 4000  # blocks that a group runs at one go


class Chunk:
    """Some blocks of a launch, simulated together."""

    def __init__(self, launch, first, count):
        self.launch, self.first, self.count = launch, first, count
        program, settings = launch.program, launch.settings
        self.observers = launch.observers
        self.pitch = -(-launch.threads // WARP) * WARP  # lanes for each block
        self.n = count * self.pitch
        self.exit = len(program.blocks)
        thread = np.arange(self.pitch)
        self.pc = np.tile(np.where(thread < launch.threads, 0, self.exit).astype(np.int32), count)
        self.lane = np.tile((thread % WARP).astype(np.uint32), count)
        self.barriers = Barriers(self)
        self.parked = np.zeros(self.n, bool)  # at a warp instruction, for other lanes
        self.behind = np.zeros(self.n, bool)  # set back, because they only poll
        self.polls = np.zeros(self.n, np.int64)  # since a lane was last set back
        self.hung = np.full(self.n, -1, np.int64)  # `changes` when a lane was seen to repeat itself for ever
        self.changes = self.ticks = self.steps = 0
        self.last_rescue, self.idle_rescues = None, 0
        self.rescues = Recurrence(self)
        self.shared = SharedMemory("shared", launch.shared_pitch, count)
        self.local = LocalMemory("local", program.local_bytes, self.n if program.local_bytes else 0)
        self.shared_base = np.repeat(np.arange(count, dtype=np.int64) * self.shared.pitch, self.pitch)
        self.local_base = np.arange(self.n, dtype=np.int64) * self.local.pitch
        self.generic = GenericSpace(launch.global_, self.shared, self.local, launch.param)
        self.random = np.random.default_rng((settings.seed, first)) if settings.schedule == "random" else None
        self.copies = AsyncCopies(self.n, self.random, self.observers)
        self.stack = Stack(self) if program.function.frames else None
        self.mbarriers = Mbarriers(self)
        self.vain = -1, {}  # `changes`, and the states that groups have waited in at mbarriers since then
        self.everyone = Group(self, None, None)
        self.registers = launch.initial_registers(self)

    def run(self):
        """Until every lane has exited."""
        for observer in self.observers:
            observer.begin(self)
        while (chosen := self.choose()) is not None:
            self.run_group(*chosen)
        for observer in self.observers:
            observer.end(self)

    # -- choosing who runs ---------------------------------------------------------------------------
    def choose(self):
        """The next group, its block, the lowest block of the others that are ready, and whether anybody else could
        run at all; None at the end."""
        away = self.pc == self.exit
        if self.barriers.somebody:
            away |= self.barriers.waiting >= 0
        if some(self.parked):
            self.meet()
            away |= self.parked
        key = self.pc.copy()
        if self.stack is not None:
            key -= self.stack.depth * self.exit
        key[away] = NOBODY
        ready = key if not some(self.behind) else np.where(self.behind, NOBODY, key)
        low = lowest(ready)
        if low == NOBODY:
            if lowest(self.pc == self.exit):
                return None
            self.rescue()
            return self.choose()
        if self.random is not None:
            return self.choose_warp(ready, key)
        active = ready == low
        ready[active] = key[active] = NOBODY
        return self.group(active), *self.blocks_of(low, lowest(ready)), lowest(key) < NOBODY

    def choose_warp(self, ready, key):
        warps = ready.reshape(-1, WARP).min(1)
        warp = int(self.random.choice(np.flatnonzero(warps < NOBODY)))
        own = slice(warp * WARP, warp * WARP + WARP)
        active = np.zeros(self.n, bool)
        active[own] = ready[own] == warps[warp]
        others = np.where(active[own], NOBODY, key[own]).min()
        return self.group(active), *self.blocks_of(int(warps[warp]), int(others)), True

    def blocks_of(self, key, others):
        """The block that a key stands for, and the block that the lowest of the other keys stands for at this depth of
        calls: one below all if that is deeper."""
        pc = key % self.exit
        return pc, others - key + pc

    def group(self, active):
        if lowest(active):
            return self.everyone
        warps = active.reshape(-1, WARP).any(1)
        if lowest(warps):
            return Group(self, None, active)
        lanes = np.flatnonzero(np.repeat(warps, WARP))
        mask = active[lanes]
        return Group(self, lanes, None if mask.all() else mask)

    def meet(self):
        """Wake parked lanes at whose instruction another lane of their warp has arrived."""
        for warp in np.flatnonzero(self.parked.reshape(-1, WARP).any(1)):
            own = slice(warp * WARP, warp * WARP + WARP)
            there = self.pc[own][~self.parked[own]]
            self.parked[own] &= ~np.isin(self.pc[own], there)

    def rescue(self):
        """Nobody is ready: try again those who poll or wait for lanes, which may have exited meanwhile."""
        state = (self.steps, self.changes)
        idle = self.last_rescue is not None and self.last_rescue[1] == state[1]
        hopeless = self.hung == self.changes
        stuck = self.last_rescue == state or not (self.parked.any() or (self.behind & ~hopeless).any())
        self.idle_rescues = self.idle_rescues + 1 if idle else 0
        again = self.idle_rescues > 0 and self.rescues.again(self.idle_rescues)
        if stuck or self.idle_rescues > RESCUES_WITHOUT_CHANGE or again:
            raise self.standstill()
        self.last_rescue = state
        self.parked[:] = False
        self.behind &= hopeless

    # -- running a group -----------------------------------------------------------------------------
    def run_group(self, x, pc, others, company):
        """Run blocks from `pc` until the group splits, must wait, or reaches block `others`; with `company`, until
        it has only polled for a while."""
        program = self.launch.program
        own = x is not self.everyone
        self.mbarriers.refused = False
        registers = [None] * len(self.registers) if own else self.registers
        written = polls = steps = 0
        snapshot = None
        while True:
            block = program.blocks[pc]
            if own:
                self.gather(x, registers, block)
            try:
                result = (block.run or program.translate(block))(x, x.mask, registers)
            except NotConverged:
                self.parked[x.positions()] = True
                live = block.live_in
                break
            self.steps += 1
            steps += 1
            written |= block.writes
            for observer in self.observers:
                observer.block(block, x)
            pc = self.follow(x, block, result)
            if pc is None:  # the group split, waits or has exited; its lanes' pcs are stored
                live = block.live_out & ~block.delivered
                polls += block.polls
                break
            live = program.blocks[pc].live_in
            if block.polls:
                polls += 1
                if self.mbarriers.refused:
                    self.suspend(x, pc, registers)
                    break
                if company:
                    if polls == POLLS_BEFORE_YIELD // 2:
                        snapshot = steps, pc, self.state(pc, registers)
                    elif polls == POLLS_BEFORE_YIELD:
                        self.fall_behind(x, self.repeats(pc, registers, snapshot))
                        break
            if polls >= POLLS_BEFORE_HANG_CHECK or steps >= STEPS_BEFORE_HANG_CHECK:
                if self.repeats(pc, registers, snapshot):
                    self.fall_behind(x, True)
                    break
                if snapshot is None or steps >= 2 * snapshot[0]:
                    snapshot = steps, pc, self.state(pc, registers)
            if pc >= others:
                break
        if pc is not None:
            self.pc[x.positions()] = pc
        if polls and (company or self.stack is not None):  # a loop with calls in it is made of many groups
            self.tire(x.positions(), polls)
        if own:
            self.scatter(x, registers, written & live)
        if pc is None and self.stack is not None and (block.ending.opcode == "call" or not block.targets):
            self.stack.move(x, block, result)

    def follow(self, x, block, result):
        """The group's next block, or None once its lanes' own pcs are stored."""
        ending, targets = block.ending, block.targets
        if ending is None or (ending.opcode == "bra" and ending.guard is None):
            return targets[0]
        if is_barrier(ending):
            return targets[0] if self.barriers.arrive(x, block, *result) else None
        if ending.opcode == "trap":
            raise x.error(ending, 0 if x.mask is None else int(np.argmax(x.mask)), why_trap(self.launch), "trap")
        if ending.opcode == "brx":
            pcs = self.indexed(x, block, *result)
            self.tell_branch(x, block, pcs if pcs.size > 1 else None)
            return self.split(x, pcs)
        if ending.opcode == "call" or not targets:
            return None  # the stack moves its lanes, once their registers are stored
        if ending.guard is None:  # ret, exit
            return self.split(x, np.array(targets, np.int32))
        if result.size > 1:
            taken = result if x.mask is None else result & x.mask
            count = int(np.count_nonzero(taken))
            if 0 < count < x.active:
                self.tell_branch(x, block, result)
                return self.split(x, np.where(result, np.int32(targets[0]), np.int32(targets[1])))
            result = (count > 0,)
        self.tell_branch(x, block, None)
        return self.split(x, np.array([targets[0 if result[0] else 1]], np.int32))

    def indexed(self, x, block, index, taken):
        """Each lane's next block after brx; `taken`: its guard, or None. Inactive lanes get any."""
        ending, targets = block.ending, np.array(block.targets, np.int32)
        labels = targets.size if taken is None else targets.size - 1
        acts = both(x.mask, np.True_ if taken is None else taken)
        outside = (index >= labels) & acts
        if outside.any():
            lane = int(np.argmax(np.broadcast_to(outside, x.n)))
            value = int(np.broadcast_to(index, x.n)[lane])
            raise x.error(ending, lane, f"{ending} with index {value} into a table of {labels}", "indexed branch")
        return targets[np.where(acts, index.astype(np.int64), targets.size - 1)]

    def tell_branch(self, x, block, ways):
        """`ways`: what decides where each lane goes, a predicate or a block; None if they stay together."""
        if not self.observers:
            return
        diverged = False
        if ways is not None:
            active = np.ones(x.n, bool) if x.mask is None else x.mask
            if ways.dtype != bool:
                ways = ways.reshape(-1, WARP)
                first = active.reshape(-1, WARP).argmax(1)[:, None]
                ways = (ways != np.take_along_axis(ways, first, 1)).ravel()
            gone, all_ = (np.packbits(lanes).view(np.uint32) for lanes in (ways & active, active))
            diverged = (gone != 0) & (gone != all_)
        for observer in self.observers:
            observer.branch(block, x, diverged)

    def split(self, x, pcs):
        """Send lanes to their next blocks: the block if it is one for all, else None."""
        if pcs.size == 1 and pcs[0] != self.exit:
            return int(pcs[0])
        lanes = x.positions()
        self.pc[lanes] = pcs = x.of_active(pcs)
        if some(pcs == self.exit):
            self.barriers.after_exits()
        return None

    # -- registers of a part of the chunk ------------------------------------------------------------
    def gather(self, x, registers, block):
        for i in block.needs:
            if registers[i] is None:
                value = self.registers[i]
                registers[i] = value if value.size == 1 or x.lanes is None else value[x.lanes]

    def scatter(self, x, registers, which):
        lanes = x.positions()
        for i in bits(which):
            value = registers[i]
            old = self.registers[i]
            if not (value.size == 1 and old.size == 1 and value.tobytes() == old.tobytes()):
                self.write_register(i, lanes, value if value.size == 1 or x.mask is None else value[x.mask])

    def write_register(self, i, lanes, value):
        """Arrays may be shared between registers, so they are never changed in place."""
        old = self.registers[i]
        new = np.repeat(old, self.n) if old.size == 1 else old.copy()
        new[lanes] = value
        self.registers[i] = new

    # -- when nothing moves --------------------------------------------------------------------------
    def tire(self, lanes, polls):
        """Lanes that poll in ever new groups fall behind, too."""
        self.polls[lanes] += polls
        lanes = lanes[(self.polls[lanes] >= POLLS_BEFORE_YIELD) & (self.pc[lanes] != self.exit)]
        self.behind[lanes] = True
        self.polls[lanes] = 0

    def fall_behind(self, x, hung):
        """Let others run first; if the group is hung, until memory has changed."""
        lanes = x.positions()
        self.behind[lanes] = True
        if hung:
            self.hung[lanes] = self.changes
            self.mbarriers.forget(lanes)

    def suspend(self, x, pc, registers):
        """Lanes of a group, before block `pc`, have waited at an mbarrier in vain and fallen behind: if it was in the
        same state the last time, it is hung."""
        changes, states = self.vain
        if changes != self.changes:
            self.vain = self.changes, (states := {})
        lanes, state = x.positions(), self.state(pc, registers)
        key = pc, lanes.tobytes()
        before, states[key] = states.get(key), state
        if before is not None and _same_state(before, state):
            self.hung[lanes] = self.changes

    def state(self, pc, registers):
        """All that decides what a group before block `pc` does next, as long as nobody else writes memory."""
        live = [registers[i] for i in bits(self.launch.program.blocks[pc].live_in)]
        return self.changes, self.ticks, live

    def repeats(self, pc, registers, snapshot):
        """Whether a group is where it was, in the state that it was in: it will be so for ever."""
        return snapshot is not None and snapshot[1] == pc and _same_state(snapshot[2], self.state(pc, registers))

    def standstill(self):
        """The exception that says what every group of lanes waits for."""
        groups = []
        at_barrier, expected = self.barriers.waiting >= 0, self.barriers.count
        looping = ~at_barrier & ~self.parked & (self.pc != self.exit)
        at_mbarrier = looping & self.mbarriers.waiting()
        for (what, ins), lanes in self.mbarriers.awaited(at_mbarrier).items():
            groups += self.stuck("deadlock", lanes, what, ins)
        looping &= ~at_mbarrier
        before = None
        for block in self.launch.program.blocks:
            here = self.pc == block.index
            first = (block.code or [block.ending])[0]
            for count in np.unique(expected[here & at_barrier]):
                doing = f"waiting at a barrier for {f'{count} threads' if count else 'all others'}"
                groups += self.stuck("deadlock", here & at_barrier & (expected == count), doing, before)
            groups += self.stuck("deadlock", here & self.parked, "waiting for other lanes of the warp", first)
            groups += self.stuck("livelock", here & looping, "repeating a loop for ever", first)
            before = block.ending
        if self.count < self.launch.blocks:
            hint = f"; {self.count} of {self.launch.blocks} blocks run at a time (settings: chunk_lanes)"
            groups = [(kind, what + hint, *rest) for kind, what, *rest in groups]
        lines = [f"{self.launch.program.name}: no thread can go on"]
        lines += [f"  {what}, {where}" for _, what, where, _ in groups]
        return Deadlock("\n".join(lines), groups)

    def stuck(self, kind, lanes, doing, instruction):
        found = np.flatnonzero(lanes)
        if not found.size:
            return []
        left = np.unique(found // self.pitch)
        exited = (self.pc.reshape(-1, self.pitch)[left, : self.launch.threads] == self.exit).sum()
        first = self.describe(int(found[0]))
        what = (
            f"1 thread {doing}, {first}" if found.size == 1 else f"{found.size} threads {doing}, the first is {first}"
        )
        if exited:
            what += f" ({exited} of {'its block' if left.size == 1 else 'their blocks'} have exited)"
        return [(kind, what, instruction.where, found.size)]

    def describe(self, lane):
        return self.launch.describe(self.first * self.pitch + lane)


def _same_state(a, b):
    return a[:2] == b[:2] and all(map(same, a[2], b[2]))
