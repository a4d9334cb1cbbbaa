"""What the code of a kernel shows about its values: which are mere copies of memory, and which have got bits of
others. The sanitizer needs it to tell padding and bit-fields from data."""

from .flow import results
from .isa import types_of
from .lower_memory import vector_of
from .syntax import Literal, Register

_INTEGERS = {f"{kind}{size}" for kind in "bus" for size in (8, 16, 32, 64)}
_SPACES = {"global", "shared", "shared::cta", "local"}
_MASKS = {"shl", "shr", "bfe", "bfi", "prmt", "shf", "lop3"}
_MOVES = {"mov", "selp", "shfl", "and", "or", "shl", "shr", "bfe", "bfi", "prmt"}
_PASSES_ON = {"mov", "selp", "or", "xor", "cvt"}


def _operands(i):
    """The operands whose bits a copy passes on."""
    values = i.operands[1 : {"selp": 3, "shfl": 2}.get(i.opcode)]
    return [part for value in values for part in (value if isinstance(value, tuple) else (value,))]


def _written_once(program):
    """The instructions that alone write a register, by its index."""
    written = {}
    for i in program.function.code:
        for r in results(i):
            written.setdefault(r.index, []).append(i)
    return {index: found[0] for index, found in written.items() if len(found) == 1}


def constants(program):
    """The literals of the registers that only ever hold one, by index."""
    alone = _written_once(program).items()
    return {n: i.operands[1] for n, i in alone if i.opcode == "mov" and isinstance(i.operands[1], Literal)}


def steps(program):
    """The registers that are another one and a literal: (other, literal) by index."""
    alone = _written_once(program).items()
    sums = {n: i.operands[1:] for n, i in alone if i.opcode == "add" and i.guard is None}
    return {n: (a, b.value) for n, (a, b) in sums.items() if isinstance(a, Register) and isinstance(b, Literal)}


def copies(program):
    """Indices of the registers that hold nothing but what was loaded from memory, or literals; bytes of it may have
    been taken apart and put together, as the compiler does for memcpy."""
    others = set()
    grown = True
    while grown:
        before = len(others)
        for i in program.function.code:
            if not _is_copy(i, others):
                others.update(r.index for r in results(i))
        grown = len(others) > before
    return {r.index for r in program.function.registers} - others


def _is_copy(i, others):
    if i.opcode in ("ld", "ldu"):
        return True
    if i.opcode not in _MOVES and not (i.opcode == "cvt" and _INTEGERS.issuperset(types_of(i))):
        return False
    return all(isinstance(o, Literal) or (isinstance(o, Register) and o.index not in others) for o in _operands(i))


def masked(program):
    """Indices of the registers from which bits may have been taken away to make room for others."""
    found = set()
    grown = True
    while grown:
        before = len(found)
        for i in program.function.code:
            if i.opcode in _MASKS or (i.opcode == "and" and "pred" not in i.modifiers) or _passes_on(i, found):
                found.update(r.index for r in results(i))
        grown = len(found) > before
    return found


def _passes_on(i, found):
    return i.opcode in _PASSES_ON and any(isinstance(o, Register) and o.index in found for o in _operands(i))


class Stores:
    """Stores that make up the copy of one structure; `shadows`: of their values, as far as they have been met;
    `computed`: whether one of these is of no copy."""

    def __init__(self, last):
        self.last = last
        self.shadows = []
        self.computed = False


def structures(block, copied, steps, width):
    """The Stores that each store of a block belongs to, but for stores of single values.

    They are the elements of a vector, and stores of one line at constant offsets from one register that follow each
    other without a gap, if any of their values is a copy. A loop that copies bytes has no last store."""
    runs = {}
    for position, i in enumerate(block.code):
        if i.opcode == "st":
            memory, value = i.operands
            values = value if isinstance(value, tuple) else (value,)
            base, offset = memory.address.base, memory.address.offset
            for _ in steps:  # at most so many, should registers go round in circles
                if isinstance(base, Register) and base.index in steps:
                    base, step = steps[base.index]
                    offset += step
            space = _SPACES.intersection(i.modifiers)
            key = i.where, i.calls, frozenset(space), repr(i.guard), repr(base)
            size = width(types_of(i)[0]) // 8 * vector_of(i)
            copy = any(isinstance(v, Register) and v.index in copied for v in values)
            runs.setdefault(key, []).append((offset, size, position, copy))
    found = {}
    for stores in runs.values():
        run = []
        for store in [*sorted(stores), None]:
            if run and (store is None or store[0] != run[-1][0] + run[-1][1]):
                found |= _together(block, run)
                run = []
            run.append(store)
    return found


def _together(block, run):
    instructions = [block.code[position] for *_, position, _ in run]
    if not any(copy for *_, copy in run):
        return {}
    if len(run) == 1 and vector_of(instructions[0]) == 1:
        loops = block.index in block.targets and run[0][1] == 1
        return {instructions[0]: Stores(None)} if loops else {}
    group = Stores(block.code[max(position for *_, position, _ in run)])
    return dict.fromkeys(instructions, group)
