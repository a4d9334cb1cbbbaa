"""What kind of access an instruction makes, as far as races are concerned."""

import numpy as np

from ..flow import is_barrier, results
from ..isa import types_of
from ..syntax import Address, Literal, Memory, Register, Variable
from ..translate import SEEN

PLAIN, VOLATILE, ATOMIC, COPY = range(4)
_ATOMIC = {"relaxed", "acquire", "release", "acq_rel", "mmio"}
_VOLATILE = {"volatile", "cv", "wt"}
_MEMORY = ("ld", "ldu", "st", "atom", "red")
_SPACES = {"shared", "shared::cta", "global", "local", "param", "const"}


def kinds(program):
    """The kind of every instruction of a kernel that accesses memory."""
    guesses = _guesses(program)
    found, waits = {}, []
    for block in program.blocks:
        loop = _waiting_loop(program.blocks, block)
        changing = _changing(loop)
        for ins in block.code:
            if ins in guesses:
                found[ins] = ATOMIC
            elif ins.opcode in ("cp", "ldmatrix", "stmatrix", "mbarrier") or ins.opcode in _MEMORY:
                found[ins] = _kind(ins, loop, changing)
                if loop and ins.opcode == "ld" and found[ins] == ATOMIC:
                    waits.append(({b.index for b in loop}, ins.operands[1].address))
    for block in program.blocks:
        ahead = [address for loop, address in waits if not loop.isdisjoint(block.targets)]
        for ins in block.code:  # the first look, which compilers take out of the loop
            if ins.opcode == "ld" and found.get(ins) == VOLATILE and ins.operands[1].address in ahead:
                found[ins] = ATOMIC
    return found


def _kind(ins, loop, changing):
    """`loop`: the blocks of a loop that stores nothing, `changing`: the registers that it writes."""
    if ins.opcode == "cp":
        return COPY
    if ins.opcode == "mbarrier":
        return PLAIN
    if ins.opcode in ("atom", "red") or not _ATOMIC.isdisjoint(ins.modifiers):
        return ATOMIC
    if _VOLATILE.isdisjoint(ins.modifiers):
        return PLAIN
    if ins.opcode == "ld" and loop:
        base = ins.operands[1].address.base
        if not (isinstance(base, Register) and base.index in changing):
            return ATOMIC  # it does nothing but wait for one place to change
    return VOLATILE


def _waiting_loop(blocks, block, most=3):
    """The blocks of a short loop from a block to itself in which nothing is stored but what calls pass, or none.
    Short: with so many branches; code for debugging jumps about between them."""
    paths = [[block]]
    while paths:
        path = paths.pop()
        stores = any(ins.opcode in ("st", "atom", "red") and not _passed(ins) for ins in path[-1].code)
        if stores or is_barrier(path[-1].ending):
            continue
        if block.index in path[-1].targets:
            return path
        if sum(len(b.targets) > 1 for b in path) < most:
            ahead = set(path[-1].targets).difference(b.index for b in path)
            paths += [[*path, blocks[target]] for target in ahead if target < len(blocks)]
    return []


def _changing(loop):
    """The registers that a loop writes, but for those that hold the address of a variable in every turn."""
    fixed, changing = set(), set()
    for ins in (ins for block in loop for ins in block.code):
        into = changing
        if ins.opcode in ("mov", "cvt", "cvta"):
            source = ins.operands[1]
            if isinstance(source, Variable | Address) or (isinstance(source, Register) and source.index in fixed):
                into = fixed
        into |= {register.index for register in results(ins)}
    return changing


def _passed(ins):
    """The variable of a call that an instruction stores to or loads from, or None."""
    memory = next((o for o in ins.operands if isinstance(o, Memory)), None)
    base = memory and memory.address.base
    return base if isinstance(base, Variable) and base.space == "param" else None


def _guesses(program):
    """Loads whose value a compare-and-swap compares with: a wrong guess only costs it another turn. In code for
    debugging it gets there by calls."""
    written = {}
    given = {}  # variable of a call -> the registers that are stored to it
    swaps = []
    for block in program.blocks:
        for ins in block.code:
            for register in results(ins):
                written.setdefault(register.index, []).append(ins)
            if ins.opcode == "st" and _passed(ins):
                given.setdefault(_passed(ins), []).append(ins.operands[1])
            if ins.opcode == "atom" and "cas" in ins.modifiers:
                swaps.append(ins.operands[2])
    found, seen = set(), set()
    waiting = [register for register in swaps if isinstance(register, Register)]
    while waiting:
        register = waiting.pop()
        if register.index in seen:
            continue
        seen.add(register.index)
        for ins in written.get(register.index, []):
            if ins.opcode in ("ld", "ldu"):
                found.add(ins)
                waiting += [operand for operand in given.get(_passed(ins), ()) if isinstance(operand, Register)]
            elif ins.opcode == "mov":
                waiting += [operand for operand in ins.operands[1:] if isinstance(operand, Register)]
    return found


def only_reads(ins):
    """Whether an atomic cannot change anything: atomicAdd(p, 0) and the like are loads."""
    value = ins.operands[-1]
    return not {"add", "or", "xor"}.isdisjoint(ins.modifiers) and isinstance(value, Literal) and value.value == 0


def shortest(program, space):
    """Bytes of the shortest access to a space that a kernel has, at most 4."""
    words = [4]
    for block in program.blocks:
        for ins in block.code:
            if ins.opcode in _MEMORY:
                named = {m.removesuffix("::cta") for m in _SPACES.intersection(ins.modifiers)}
                if not named or space in named:
                    words.append(np.dtype(SEEN[types_of(ins)[0]]).itemsize)
    return min(words)
