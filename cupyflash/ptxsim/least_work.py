"""The least that machine code must do for the PTX that a launch executed: what no assembler can merge away.

PTX is not machine code. ptxas turns a multiplication and an addition into one fused multiply-add, a tree of logic
operations into one LOP3, the two halves of a product into one IMAD.WIDE; it folds additions into addresses, replaces
multiplications by a loop's counter, computes once what is computed twice or in every turn of a loop, shares the
reciprocal of a common divisor, drops copies and address conversions, unrolls loops, joins neighbouring accesses of 4
bytes into one of 16, and moves what is the same for all threads of a warp to a scalar unit. So of each warp instruction
only this counts, and only

* where a value that depends on the thread enters (else the scalar unit may do it), without a guard,
* if its result is used,
* once of those anywhere in the program that have one opcode, modifiers and operands (whatever their order, and operands
  that were computed alike are one), in the first block that has it. A load is the same again only within a basic
  block and if nothing writes in between; after a store to its address there, it may find the value in a register,
* in a loop if every loop around it changes an operand: what a loop loads (if it writes memory or has a barrier, or the
  address changes), what it carries from turn to turn, and what depends on that. Nothing of the rest counts.

What counts then:

* Nothing for integer arithmetic and logic except min and max, nor for moves, selections, address conversions, branches,
  barriers, comparisons of integers, parameters, constants, local memory.
* f32, f64: each fma, each add or mul with a rounding modifier (`.rn`: never fused), and of the others the additions or
  the multiplications by anything but 0, 1 and -1, whichever are more. Exact roots and divisions: one.
* f16, bf16: the same, where a scalar instruction is half of a packed one.
* min, max of registers: one; half from sm_90 on, where three operands are taken at once. Comparisons of float32: half
  of that, as one gives a predicate and its opposite.
* ex2, lg2, sin, cos, tanh, rsqrt, sqrt and approximate rcp: one special function; of rcp and sqrt whichever are more,
  as the reciprocal of a root is one. Divisions: none, and approximate ones nothing at all. Exact reciprocals: nothing,
  as a subroutine may know those of some numbers.
* cvt between integers and floats: one; float32 to float16 or bfloat16: half, as a packed conversion does two; the
  others nothing.
* mma, ldmatrix, stmatrix, movmatrix, cp.async, shfl, atom, red, match, redux: one.
* Loads and stores of global and shared memory: one; where a neighbour may be joined, the fraction that its bytes are of
  16, and so of its wavefronts, for an access that takes 16 bytes of each lane still has to serve each bank as often
  as the worst of its parts. A neighbour is an access of the same kind and base register less than 16 bytes away in
  the basic block, or in the next turn of a loop; there, all that share the base are counted as one.

A compiler that moved work to a branch where it is executed less often could beat this; NVRTC has done that in its PTX.
"""

import collections
import functools
import weakref

from .flow import results, sources
from .isa import types_of
from .redundant import Redundant
from .syntax import Literal, Memory, Register, Special

_THREAD = ("tid", "laneid", "lanemask")
_UNIFORM = {"vote", "match", "redux", "activemask", "elect"}  # results that all threads of the warp share
_PER_LANE = {
    "shfl",
    "mma",
    "wmma",
    "ldmatrix",
    "movmatrix",
}  # results that differ between threads, whatever the operands
_HALVES = {"f16", "bf16", "f16x2", "bf16x2"}
_FLOATS = _HALVES | {"f32", "f64"}
_ROUNDING = {"rn", "rz", "rm", "rp"}
_SPECIAL = {"ex2", "lg2", "sin", "cos", "tanh", "rsqrt"}
_ALWAYS = {"ldmatrix", "stmatrix", "movmatrix", "atom", "red", "match", "redux"}
_SHORT = {"f16": "f16", "bf16": "f16", "f16x2": "f16", "bf16x2": "f16", "f32": "f32", "f64": "f64"}
_VECTOR = {"v2": 2, "v4": 4, "v8": 8}
_WIDEST = 16  # bytes of one lane's access


class LeastWork:
    """What a program does at least, for each of its basic blocks and for one warp."""

    def __init__(self, program):
        self.blocks = program.blocks
        self.varying = _varying(program)
        self.redundant = Redundant(program.blocks)
        self.looping = self.redundant.looping
        self.kept = {}  # instruction of shared or global memory -> fraction that joining leaves
        self.of_block = [self.count(block) for block in self.blocks]

    def count(self, block):
        """Kind -> warp instructions; tensor products as ("mma", type) -> multiply-adds."""
        kinds = collections.Counter()
        self.join(block)
        for ins in block.code:
            if ins in self.redundant:
                self.kept[ins] = 0
            elif ins.guard is None:
                for kind, count in _kinds(ins, self.kept.get(ins), self.varies(ins), self.redundant.literal(ins)):
                    kinds[kind] += count
        return kinds

    def varies(self, ins):
        """Whether a value that depends on the thread enters."""
        return any(r in self.varying for r in sources(ins)) or _names_thread(ins)

    def join(self, block):
        """Note for each access of global or shared memory the fraction that is left if its neighbours are joined."""
        groups = collections.defaultdict(list)
        for ins, base, offset in _places(block):
            groups[ins.opcode, base].append((offset, ins))
        for (_, base), group in groups.items():
            group.sort(key=lambda item: item[0])
            offsets = [offset for offset, _ in group]
            near = self.meets_itself(block, base)
            for n, (offset, ins) in enumerate(group):
                beside = offsets[max(n - 1, 0) : n] + offsets[n + 1 : n + 2]
                joins = near or any(abs(other - offset) < _WIDEST for other in beside)
                size = _access_bytes(ins)
                fraction = size / _WIDEST / (len(group) if near else 1)
                self.kept[ins] = fraction if joins and size < _WIDEST and "volatile" not in ins.modifiers else 1

    def meets_itself(self, block, base):
        """Whether an access may be a neighbour of itself in the next turn of a loop."""
        if block.index not in self.looping:
            return False
        steps = self.steps(base)
        return steps is None or any(abs(step) < _WIDEST for step in steps)

    def steps(self, base):
        """By how much a base register changes from turn to turn: constants, none if never, None if unknown."""
        if isinstance(base, tuple):
            return None
        if not isinstance(base, Register):
            return ()
        found = []
        for index in self.looping:
            for ins in self.blocks[index].code:
                if base in results(ins):
                    amount = _added_constant(ins)
                    if amount is None or amount[0] is not base:
                        return None
                    found.append(amount[1])
        return found


_known = weakref.WeakKeyDictionary()


def least_work(program):
    """The LeastWork of a program, worked out once."""
    if program not in _known:
        _known[program] = LeastWork(program)
    return _known[program]


def _kinds(ins, kept, varies, literal):
    """(kind, count) of one instruction. `literal`: whether a constant is among its operands."""
    opcode = ins.opcode
    types = types_of(ins)
    type_ = types[-1] if types else None
    if kept is not None:
        return [("memory", kept)]
    if opcode == "mma":
        return [("tensor", 1), (("mma", _tensor_type(types)), _multiply_adds(ins))]
    if opcode == "cp":
        return [("memory", 1)] if len(ins.operands) > 1 else []
    if opcode in _ALWAYS:
        return [("other", 1)]
    if not varies:
        return []
    if opcode == "shfl":
        return [("shuffle", 1)]
    if opcode == "cvt":
        return _conversion(types)
    if opcode in _SPECIAL:
        return [("special", 1)]
    if type_ in _FLOATS:
        return _floating(ins, type_, literal)
    if opcode in ("min", "max") and not literal and not type_.endswith("64"):
        return [("minimum", 1)]
    return []


def _floating(ins, type_, literal):
    opcode, short = ins.opcode, _SHORT[type_]
    amount = 0.5 if type_ in ("f16", "bf16") else 1
    exact = {"approx", "full"}.isdisjoint(ins.modifiers)
    if opcode == "rcp":
        return [] if exact else [("reciprocal", 1)]
    if opcode in ("sqrt", "div"):
        return [("root", 1)] * (opcode == "sqrt") + [(f"{short} fma", 1)] * exact
    if opcode in ("fma", "mad"):
        return [(f"{short} fma", amount)]
    if opcode in ("add", "sub", "mul"):
        if _ROUNDING & set(ins.modifiers):
            return [(f"{short} fma", amount)]
        return [(f"{short} {'mul' if opcode == 'mul' else 'add'}", amount)]
    if opcode == "setp" and type_ == "f32":
        return [("minimum", 0.5)]
    return [("minimum", 1)] if opcode in ("min", "max") and type_ == "f32" and not literal else []


def _conversion(types):
    to, from_ = types[0], types[-1]
    if from_ == "f32" and to in ("f16x2", "bf16x2"):
        return [("to half", 1)]
    if from_ == "f32" and to in ("f16", "bf16"):
        return [("to half", 0.5)]
    if (to in _FLOATS) != (from_ in _FLOATS) and "tf32" not in types:
        return [("integer conversion", 1)]
    return []


def _tensor_type(types):
    """Which rate an mma goes at: the type of A, and of the accumulators if they are float16."""
    inputs = "f16" if types[1] in ("f16", "bf16") else types[1]
    return "f16 f16" if inputs == "f16" and types[0] == "f16" else inputs


@functools.lru_cache
def _sizes(shape):
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m) * int(n) * int(k)


def _multiply_adds(ins):
    return _sizes(next(m for m in ins.modifiers if m[0] == "m" and "n" in m and "k" in m and m[1].isdigit()))


def _access_bytes(ins):
    count = next((_VECTOR[m] for m in ins.modifiers if m in _VECTOR), 1)
    type_ = types_of(ins)[-1]
    return count * (4 if type_.endswith("x2") else int(type_.lstrip("bufs")) // 8)


def _places(block):
    """(access of global or shared memory, base, offset). The base is a register or variable that the block does not
    change, or (register, position) where it does; additions of constants are followed back."""
    known = {}
    for position, ins in enumerate(block.code):
        memory = next((o for o in ins.operands if isinstance(o, Memory)), None)
        if ins.opcode in ("ld", "st") and memory and {"local", "param", "const"}.isdisjoint(ins.modifiers):
            base, offset = memory.address.base, memory.address.offset
            start, more = known.get(base, (base, 0))
            yield ins, start, offset + more
        added = None if ins.guard is not None else _added_constant(ins)
        if added is not None:
            start, more = known.get(added[0], (added[0], 0))
        for register in results(ins):
            known[register] = ((register, position), 0) if added is None else (start, more + added[1])


def _added_constant(ins):
    """(register, constant) of `add d, register, constant`, else None."""
    if ins.opcode in ("add", "sub") and isinstance(ins.operands[1], Register) and isinstance(ins.operands[2], Literal):
        return ins.operands[1], ins.operands[2].value if ins.opcode == "add" else -ins.operands[2].value
    return None


def _names_thread(ins):
    return any(isinstance(o, Special) and o.name.startswith(_THREAD) for o in ins.operands)


def _varying(program):
    """Registers whose value certainly differs between the threads of a warp as far as an assembler can know."""
    code = [ins for block in program.blocks for ins in block.code]
    varying, changed = set(), True
    while changed:
        changed = False
        for ins in code:
            written = [r for r in results(ins) if r not in varying]
            if written and ins.opcode not in _UNIFORM and _differs(ins, varying):
                varying.update(written)
                changed = True
    return varying


def _differs(ins, varying):
    return ins.opcode in _PER_LANE or _names_thread(ins) or any(r in varying for r in sources(ins))
