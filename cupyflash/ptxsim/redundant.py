"""Instructions of PTX that an assembler may leave out: unused, computed before, or the same in each turn of a loop."""

import collections

from .flow import POLLING_MODIFIERS, bits, results, sources
from .syntax import Address, Literal, Memory, Not, Pair, Register

_EFFECTS = {
    "st", "red", "atom", "stmatrix", "cp", "bar", "barrier", "mbarrier", "membar", "fence", "vprintf",
    "__assertfail", "trap",
}  # fmt: skip
_LOADS = {"ld", "ldmatrix"}
_SPACES = {"global", "shared", "local", "param", "const"}
_ROUNDING = {"rn", "rz", "rm", "rp"}
_ONES = {0x3F800000, 0x3FF0000000000000, 0x3C00, 0x3C003C00, 0x3F80, 0x3F803F80}  # of f32, f64, f16, bf16
_SIGNS = {1 << 31, 1 << 63, 1 << 15, 1 << 31 | 1 << 15}
_NEUTRAL = {0} | _SIGNS | _ONES | {one | sign for one in _ONES for sign in _SIGNS}  # among them 0, -0, 1, -1 of each


class Redundant:
    """The instructions that need not be in the machine code, of a program's basic blocks: `instruction in redundant`.

    `looping`: indices of the blocks that are in a loop.
    """

    def __init__(self, blocks):
        self.blocks = blocks
        self.literals = set()  # instructions that a constant enters
        loops = _loops(blocks, set(range(len(blocks))))
        self.looping = set().union(*loops)
        self.without = self.unused() | self.repeated()
        for loop, entries in loops.items():
            self.without |= self.unchanged(loop, entries)

    def __contains__(self, ins):
        return ins in self.without

    def literal(self, ins):
        """Whether a constant is among the operands."""
        return ins in self.literals

    def unused(self):
        """Instructions whose results reach no store, branch or other effect."""
        code = [ins for block in self.blocks for ins in block.code]
        needed = {r for block in self.blocks if block.ending for r in sources(block.ending)}
        size = None
        while size != len(needed):
            size = len(needed)
            for ins in reversed(code):
                if _acts(ins) or not needed.isdisjoint(results(ins)):
                    needed.update(sources(ins))
        return {ins for ins in code if not _acts(ins) and needed.isdisjoint(results(ins))}

    def repeated(self):
        """Instructions that compute what an earlier one, in the order of the program, has computed, or an operand."""
        written = collections.Counter(r for b in self.blocks for ins in _all(b) for r in results(ins))
        several = {r for r, count in written.items() if count > 1}
        reaching = _reaching(self.blocks, several)
        numbers, known, constant, again = {}, {}, set(), set()  # register -> value, what it is made of -> value
        for block in self.blocks:
            here, writes = {}, []  # values of registers that are written several times; what has written memory
            stored = set()  # addresses

            def value(operand, here=here, before=reaching[block.index]):
                return _value(operand, lambda r: here.get(r) or before.get(r) or numbers.get(r, r))

            for ins in block.code:
                read = [value(operand) for operand in ins.operands[1:]]
                fixed = [isinstance(v, Literal) or v in constant for v in read]
                if any(fixed):
                    self.literals.add(ins)
                if ins.opcode in _EFFECTS:
                    writes.append(ins)
                if ins.opcode == "st":
                    stored.add(value(ins.operands[0]))
                if _acts(ins) or ins.guard is not None:
                    number = object()
                elif ins.opcode == "mov" and isinstance(ins.operands[1], Register | Literal):
                    number = read[0]
                else:
                    made_of = ins.opcode, ins.modifiers, frozenset(read)
                    if ins.opcode in _LOADS:
                        made_of += block.index, sum(_may_change(other, ins) for other in writes)
                    forwarded = ins.opcode == "ld" and read[0] in stored
                    if made_of in known or forwarded or _trivial(ins, read):
                        again.add(ins)
                    number = known.setdefault(made_of, len(known) + 1)
                    if all(fixed) and fixed:
                        constant.add(number)
                found = results(ins)
                for position, register in enumerate(found):
                    where = here if register in several else numbers
                    where[register] = number if len(found) == 1 else (number, position)
        return again

    def unchanged(self, loop, entries):
        """Instructions in a loop that find the same operands in each turn."""
        code = [ins for index in loop for ins in self.blocks[index].code]
        writes = [ins for index in loop for ins in _all(self.blocks[index]) if ins.opcode in _EFFECTS]
        carried = {bit for e in entries for bit in bits(self.blocks[e].live_in)}
        changing = {r for ins in code for r in results(ins) if r.index in carried}

        def changes(ins):
            if _acts(ins) or not changing.isdisjoint(sources(ins)):
                return True
            return ins.opcode in _LOADS and any(_may_change(other, ins) for other in writes)

        size = None
        while size != len(changing):
            size = len(changing)
            for ins in code:
                if changes(ins):
                    changing.update(results(ins))
        return {ins for ins in code if not changes(ins)}


def _all(block):
    return [*block.code, block.ending] if block.ending else block.code


def _acts(ins):
    """Whether it does more than compute its results."""
    return ins.opcode in _EFFECTS or not POLLING_MODIFIERS.isdisjoint(ins.modifiers)


def _trivial(ins, read):
    """Whether it may be left out as its operand is 0, 1 or -1: an addition or multiplication that may be fused."""
    if ins.opcode not in ("add", "sub", "mul") or _ROUNDING & set(ins.modifiers):
        return False
    return any(isinstance(value, Literal) and value.value in _NEUTRAL for value in read)


def _may_change(ins, load):
    """Whether an instruction with an effect may change what a load finds: not if it is in another state space."""
    if "nc" in load.modifiers:
        return False
    if ins.opcode not in ("st", "red", "atom") or "generic" in (_space(ins), _space(load)):
        return True
    return _space(ins) == _space(load)


def _space(ins):
    if ins.opcode == "ldmatrix":
        return "shared"
    return next((m for m in ins.modifiers if m.partition("::")[0] in _SPACES), "generic").partition("::")[0]


def _reaching(blocks, registers):
    """For each block: register -> names of the blocks whose values of it may arrive there, as a bit set."""
    writes = [{r for ins in _all(block) for r in results(ins)} & registers for block in blocks]
    arriving = [collections.defaultdict(int) for _ in blocks]
    waiting = list(range(len(blocks)))
    while waiting:
        index = waiting.pop()
        leaving = arriving[index] | {r: 1 << index for r in writes[index]}
        for target in blocks[index].targets:
            if target == len(blocks):
                continue
            known, more = arriving[target], False
            for r, found in leaving.items():
                more |= bool(found & ~known[r])
                known[r] |= found
            if more:
                waiting.append(target)
    return [{r: (r, found) for r, found in known.items()} for known in arriving]


def _value(operand, of):
    """An operand with the values of its registers in their place."""
    if isinstance(operand, Register):
        return of(operand)
    if isinstance(operand, Memory):
        return _value(operand.address, of)
    if isinstance(operand, Address):
        return _value(operand.base, of), operand.offset
    if isinstance(operand, Not):
        return "not", of(operand.register)
    if isinstance(operand, Pair):
        return _value(operand.value, of), _value(operand.predicate, of)
    return tuple(_value(item, of) for item in operand) if isinstance(operand, tuple) else operand


def _loops(blocks, within):
    """Loops among some blocks: (their indices, frozen) -> those that control comes in by. Inner ones are loops of what
    is left without these."""
    after = {n: [t for t in blocks[n].targets if t in within] for n in within}
    reaches = {n: _reached(after, n) for n in within}
    found, left = {}, set(within)
    for start in sorted(within):
        if start not in left or start not in reaches[start]:
            continue
        loop = frozenset(n for n in reaches[start] if start in reaches[n])
        left -= loop
        inside = {t for n, block in enumerate(blocks) if n not in loop for t in block.targets} | {0}
        entries = loop & inside or {start}
        found[loop] = entries
        found |= _loops(blocks, loop - entries)
    return found


def _reached(after, start):
    seen, waiting = set(), list(after[start])
    while waiting:
        block = waiting.pop()
        if block not in seen:
            seen.add(block)
            waiting += after[block]
    return seen
