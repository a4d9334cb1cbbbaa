"""Control flow: basic blocks in layout order, what ends each, and which registers live across them."""

import dataclasses

from .syntax import Address, Function, Instruction, Memory, Not, Pair, Register, Variable

POLLING = {"atom", "nanosleep", "membar", "fence"}
POLLING_MODIFIERS = {"volatile", "relaxed", "acquire", "cv", "mmio", "test_wait", "try_wait"}


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """Instructions that run together. `ending` is the instruction that decides what comes next:
    bra, brx, call, ret, exit, a barrier, trap, or None where control falls into the next block."""

    index: int
    code: list
    ending: Instruction | None
    targets: tuple  # block indices; a conditional branch has (taken, fall through), a return to a caller none
    reads: int = 0  # registers, as bit sets
    writes: int = 0
    delivered: int = 0  # what its ending, a bar.red, writes when all threads have arrived
    live_in: int = 0
    live_out: int = 0
    needs: list | None = None  # positions of the registers that the code reads, special ones included
    polls: bool = False
    run: object = None  # the translated function, made at the first visit


def is_barrier(instruction):
    return instruction is not None and instruction.opcode in ("bar", "barrier") and "warp" not in instruction.modifiers


def may_wait(instruction):
    """Warp instructions wait for the lanes they name, and therefore begin a block."""
    return instruction.opcode in ("shfl", "vote", "match", "redux", "elect", "bar")


def ends_block(instruction):
    return instruction.opcode in ("bra", "brx", "call", "ret", "exit", "trap") or is_barrier(instruction)


def basic_blocks(function: Function) -> list[Block]:
    """Blocks of a kernel, and of the functions whose frames it has. Index `len(blocks)` stands for the exit."""
    code = function.code
    starts = {0, *function.labels.values(), *(frame.position for frame in function.frames)}
    called = min((frame.position for frame in function.frames if frame.register), default=len(code))
    for position, instruction in enumerate(code):
        if ends_block(instruction):
            starts.add(position + 1)
            if is_barrier(instruction) and instruction.guard is not None:
                starts.add(position)
        elif may_wait(instruction):
            starts.add(position)
    starts = sorted(s for s in starts if s < len(code))
    number = {position: index for index, position in enumerate(starts)}
    number[len(code)] = exit_index = len(starts)
    blocks = []
    for index, start in enumerate(starts):
        stop = starts[index + 1] if index + 1 < len(starts) else len(code)
        body = code[start:stop]
        ending = body.pop() if body and ends_block(body[-1]) else None
        following = index + 1
        if ending is None or ending.opcode == "call" or is_barrier(ending):
            targets = (following,)
        elif ending.opcode == "bra":
            taken = number[_position(function, ending.operands[0].name, ending)]
            targets = (taken,) if ending.guard is None else (taken, following)
        elif ending.opcode == "brx":
            table = function.tables[ending.operands[1].name]
            targets = tuple(number[_position(function, name, ending)] for name in table)
            if ending.guard is not None:
                targets += (following,)
        elif ending.opcode == "ret" and start >= called:
            targets = ()
        else:
            targets = (exit_index,) if ending.guard is None else (exit_index, following)
        blocks.append(Block(index, body, ending, targets))
    for frame in function.frames:
        frame.entry = number[frame.position]
    _liveness(blocks)
    return blocks


def leave_at_branches(blocks):
    """Let conditional branches to a bare `ret` end their lanes at once. That block, the last one, would run after all
    others, and until then barriers would wait for lanes that have nothing left to do."""
    bare = {b.index for b in blocks if not b.code and b.ending and b.ending.opcode in ("ret", "exit")}
    bare = {index for index in bare if blocks[index].targets == (len(blocks),)}
    for block in blocks:
        if len(block.targets) > 1:
            block.targets = tuple(len(blocks) if target in bare else target for target in block.targets)


def in_loop(blocks, block):
    """Whether control can come back to a block."""
    seen, open_ = set(), list(block.targets)
    while open_:
        target = open_.pop()
        if target not in seen and target < len(blocks):
            seen.add(target)
            open_ += blocks[target].targets
    return block.index in seen


def _position(function, label, instruction):
    if label not in function.labels:
        raise NotImplementedError(f"{instruction.where}: branch to unknown label {label}")
    return function.labels[label]


def registers_of(operand):
    """Registers that an operand depends on, in order."""
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, tuple):
        return [r for item in operand for r in registers_of(item)]
    if isinstance(operand, Memory):
        return registers_of(operand.address)
    if isinstance(operand, Address):
        return registers_of(operand.base)
    if isinstance(operand, Not):
        return [operand.register]
    if isinstance(operand, Variable):
        return [operand.frame] if operand.frame else []
    if isinstance(operand, Pair):
        return registers_of(operand.value) + registers_of(operand.predicate)
    return []


_NO_RESULT = {
    "st", "red", "bra", "brx", "call", "ret", "exit", "trap", "brkpt", "bar", "barrier", "cp", "membar", "fence",
    "nanosleep", "prefetch", "prefetchu", "stmatrix", "__assertfail", "applypriority", "griddepcontrol",
}  # fmt: skip


def _has_result(instruction):
    """Whether the first operand is what an instruction writes."""
    if instruction.opcode in ("bar", "barrier") and "red" in instruction.modifiers:
        return True
    first = instruction.operands[:1]
    return instruction.opcode not in _NO_RESULT and bool(first) and not isinstance(first[0], Memory)


def results(instruction: Instruction) -> list[Register]:
    """Registers that an instruction writes."""
    return registers_of(instruction.operands[0]) if _has_result(instruction) else []


def sources(instruction: Instruction) -> list[Register]:
    """Registers that an instruction reads, its guard included."""
    read = [r for operand in instruction.operands[_has_result(instruction) :] for r in registers_of(operand)]
    if instruction.guard is not None:
        read += registers_of(instruction.guard)
    return read


def polls(instruction):
    """Whether an instruction may be there to see what another thread has written."""
    modifiers = instruction.modifiers
    past_l1 = instruction.opcode == "ld" and "cg" in modifiers
    return instruction.opcode in POLLING or past_l1 or not POLLING_MODIFIERS.isdisjoint(modifiers)


def _liveness(blocks):
    for block in blocks:
        written = read = 0
        for instruction in block.code + ([block.ending] if block.ending else []):
            for register in sources(instruction):
                read |= (1 << register.index) & ~written
            for register in results(instruction):
                bit = 1 << register.index
                if instruction.guard is not None:  # lanes that skip it keep the old value
                    read |= bit & ~written
                written |= bit
            block.polls |= polls(instruction)
        block.reads, block.writes = read, written
        block.delivered = sum(1 << r.index for r in results(block.ending)) if block.ending else 0
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = 0
            for target in block.targets:
                if target < len(blocks):
                    out |= blocks[target].live_in
            live = block.reads | (out & ~block.writes)
            if live != block.live_in or out != block.live_out:
                block.live_in, block.live_out, changed = live, out, True


def bits(mask: int) -> list[int]:
    """Positions of the ones of a bit set, lowest first.

    >>> bits(0b1011)
    [0, 1, 3]
    """
    text, found = bin(mask)[:1:-1], []
    at = text.find("1")
    while at >= 0:
        found.append(at)
        at = text.find("1", at + 1)
    return found
