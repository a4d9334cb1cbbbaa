"""Basic blocks to Python functions: one NumPy call per instruction, over all lanes.

A block becomes `def block(x, m, R)`: x is the Group, m its mask (None: all lanes), R the registers.
Within a block every result has its own local name, so that a value never changes under an alias and
the order of evaluation is free: mma instructions are collected and multiplied together when the
first of their results is needed.
"""

import numpy as np

from . import fma, numerics
from .flow import bits, results, sources
from .isa import types_of
from .lower_copies import COPIES
from .lower_float import FLOAT
from .lower_integer import INTEGER
from .lower_mbarrier import MBARRIER
from .lower_memory import MEMORY
from .lower_warp import WARP
from .mma_batch import MmaBatch
from .runtime import NAMESPACE
from .shadow import Shadow
from .syntax import SINK, Address, Literal, Not, Register, Special, Variable

# How a register of a PTX type is kept.
KEPT = {
    "pred": "?", "b8": "u1", "u8": "u1", "s8": "u1", "b16": "u2", "u16": "u2", "s16": "u2", "f16": "u2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "u4", "f16x2": "u4", "bf16x2": "u4", "f32": "f4",
    "b64": "u8", "u64": "u8", "s64": "u8", "f64": "f8", "b128": "c16",
}  # fmt: skip
# How an instruction of a PTX type sees it.
SEEN = {**KEPT, "s8": "i1", "s16": "i2", "s32": "i4", "s64": "i8", "tf32": "u4"}

LOWERING = {**COPIES, **FLOAT, **INTEGER, **MEMORY, **MBARRIER, **WARP}
_FLOATING = frozenset(("f16", "bf16", "f16x2", "bf16x2", "f32", "f64"))


class Constants:
    """Length-1 arrays that translated code refers to by name."""

    def __init__(self):
        self.namespace = dict(NAMESPACE)
        self.names = {}
        self.scalars = {}  # names of the arrays -> of the same without a dimension

    def array(self, value):
        """The name of a NumPy scalar."""
        key = (value.dtype.str, value.tobytes())
        if key not in self.names:
            self.names[key] = name = f"k{len(self.names)}"
            self.namespace[name] = value.reshape(1)
            self.scalars[name] = f"{name}_0"
            self.namespace[f"{name}_0"] = value.reshape(())
        return self.names[key]

    def thing(self, thing):
        """The name of any other object."""
        key = id(thing)
        if key not in self.names:
            self.names[key] = name = f"o{len(self.names)}"
            self.namespace[name] = thing
        return self.names[key]


class BlockTranslator:
    """Collects the source lines of one block."""

    def __init__(self, program, block):
        self.program, self.block = program, block
        self.constants = program.constants
        self.lines = []
        self.count = 0
        self.current = {}  # register index -> local name, of any dtype of its size
        self.kinds = {}  # local name -> dtype
        self.casts = {}
        self.flushed = set()  # local names that hold no subnormal
        self.used_once = _single_uses(block)
        self.mma = MmaBatch(self)
        self.fma = fma.FmaBatch(self)
        self.guard = None
        self.shadow = Shadow(self) if program.sanitized else None

    # -- names -------------------------------------------------------------------------------------
    def fresh(self, kind):
        self.count += 1
        name = f"v{self.count}"
        self.kinds[name] = kind
        return name

    def let(self, expression, kind):
        """A new local with the value of an expression."""
        name = self.fresh(kind)
        self.lines.append(f"{name} = {expression}")
        return name

    def line(self, text):
        self.lines.append(text)

    @staticmethod
    def seen(type_):
        return SEEN[type_]

    @staticmethod
    def width(type_):
        """Bits of a type."""
        return 8 * np.dtype(SEEN[type_]).itemsize

    def constant(self, value, kind):
        return self.constants.array(np.dtype(kind).type(value))

    def register(self, register):
        """The local that holds a register now."""
        index = register.index
        name = self.current.get(index)
        if name is None:
            name = self.fresh(KEPT[register.type])
            self.lines.insert(0, f"{name} = R[{index}]")
            self.current[index] = name
            if index in self.program.flushed:
                self.flushed.add(name)
        elif name in self.mma.results:
            self.mma.emit()
        elif name in self.fma.pending:
            self.fma.emit()
        return name

    # -- operands ------------------------------------------------------------------------------------
    def use(self, operand, type_):
        """An expression for an operand, as an array of the dtype that `type_` is seen in."""
        kind = SEEN[type_]
        if isinstance(operand, Register):
            return self.cast(self.register(operand), kind)
        if isinstance(operand, Literal):
            return self.literal(operand, type_)
        if isinstance(operand, Special):
            return self.cast(self.special(operand), kind)
        if isinstance(operand, Not):
            return self.let(f"logical_not({self.register(operand.register)})", "?")
        if isinstance(operand, (Address, Variable)):
            return self.address(operand, kind)
        if isinstance(operand, tuple):
            return self.pack(operand, type_)
        raise NotImplementedError(f"operand {operand!r}")

    def broadcast(self, *names):
        """Arguments of a ufunc, with constants as arrays without a dimension: for a warp's lanes it then takes a third
        of the time. One at least keeps its dimension, and with it the result."""
        scalars = self.constants.scalars
        if all(name in scalars for name in names):
            return names
        return tuple(scalars.get(name, name) for name in names)

    def cast(self, name, kind):
        have = self.kinds[name]
        if have == kind:
            return name
        key = (name, kind)
        if key not in self.casts:
            same = np.dtype(have).itemsize == np.dtype(kind).itemsize and "?" not in (have, kind)
            if same:
                text = f"{name}.view('{kind}')"
            elif have[0] == "f" and kind[0] != "f":
                text = f"{name}.view('u{have[1]}').astype('{kind}')"
            else:
                text = f"{name}.astype('{kind}')"
            self.casts[key] = self.let(text, kind)
        return self.casts[key]

    def literal(self, literal, type_):
        kind = np.dtype(SEEN[type_])
        value = literal.value
        if literal.kind in ("f32", "f64"):
            bits_ = np.array([value], "u4" if literal.kind == "f32" else "u8")
            number = bits_.view("f4" if literal.kind == "f32" else "f8")
            exact = bits_.view(kind) if bits_.itemsize == kind.itemsize else number.astype(kind)
            scalar = exact[0]
        elif literal.kind == "float" or kind.kind == "f":
            scalar = kind.type(value)
        elif kind.kind == "b":
            scalar = np.bool_(value)
        else:
            width = 8 * kind.itemsize
            scalar = np.array([value & (1 << width) - 1], f"u{kind.itemsize}").view(kind)[0]
        name = self.constants.array(scalar)
        self.kinds[name] = kind.str.lstrip("<|").replace("b1", "?")
        if kind == np.float32 and (scalar == 0 or not abs(scalar) < numerics.F32_NORMAL):
            self.flushed.add(name)
        return name

    def special(self, operand):
        name = operand.name
        if name in ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
            return self.let(f"clock(x, '{name}')", "u8" if name in ("clock64", "globaltimer") else "u4")
        index, kind = self.program.special(operand)
        local = self.current.get(index)
        if local is None:
            local = self.fresh(kind)
            self.lines.insert(0, f"{local} = R[{index}]")
            self.current[index] = local
        return local

    def address(self, operand, kind):
        """An address as an operand value: of a variable, or `register + offset`."""
        base, offset = (operand.base, operand.offset) if isinstance(operand, Address) else (operand, 0)
        if isinstance(base, Variable) and base.space == "global":
            return self.let(f"x.variable_address({base.name!r}, {offset})", kind)
        if isinstance(base, Variable):
            base, offset = base.frame, self.program.places[base] + offset
        if base is None:
            name = self.constant(offset, kind)
            self.kinds[name] = kind
            return name
        value = self.cast(self.register(base), kind)
        if not offset:
            return value
        key = (value, offset)
        if key not in self.casts:
            step = self.constant(np.array([offset]).astype(kind)[0], kind)
            self.casts[key] = self.let("np_add({}, {})".format(*self.broadcast(value, step)), kind)
        return self.casts[key]

    def pack(self, items, type_):
        """`{low, ..., high}` as one wider value."""
        kind = SEEN[type_]
        part = f"b{8 * np.dtype(kind).itemsize // len(items)}"
        parts = ", ".join(self.use(item, part) for item in items)
        return self.let(f"join(({parts},), '{kind}')", kind)

    # -- results -------------------------------------------------------------------------------------
    def define(self, operand, name, type_, flushed=False):
        """Give a register the value of a local, widened to its size; respects the guard."""
        if operand == SINK:
            return
        kind, seen = KEPT[operand.type], SEEN[type_]
        if np.dtype(self.kinds[name]).itemsize != np.dtype(kind).itemsize:
            name = self.widen(name, seen, kind)
        if self.guard is not None:
            kind = self.kinds[name]
            old = self.cast(self.register(operand), kind)
            flushed = flushed and old in self.flushed
            name = self.let(f"where({self.guard}, {name}, {old})", kind)
        if flushed:
            self.flushed.add(name)
        self.current[operand.index] = name

    def widen(self, name, seen, kind):
        have = self.kinds[name]
        if seen[0] == "i":
            return self.let(f"{self.cast(name, seen)}.astype('i{kind[1]}').view('{kind}')", kind)
        if have[0] == "f":
            name = self.cast(name, f"u{have[1]}")
        return self.let(f"{name}.astype('u{kind[1]}').view('{kind}')", kind)

    def flush_input(self, name):
        if name in self.flushed:
            return name
        key = (name, "flush")
        if key not in self.casts:
            self.casts[key] = self.let(f"flush({name})", "f4")
            self.flushed.add(self.casts[key])
        return self.casts[key]

    def mask(self):
        """The expression for the lanes that an instruction with side effects acts for."""
        if self.guard is None:
            return "m"
        key = (self.guard, "mask")
        if key not in self.casts:
            self.casts[key] = self.let(f"both(m, {self.guard})", "?")
        return self.casts[key]

    def tell(self, call):
        """Call a method of every observer."""
        if self.program.profiled:
            self.line(f"x.counters.{call}")
        if self.program.sanitized:
            self.line(f"x.checker.{call}")

    def site(self, instruction):
        """The name of an instruction in translated code, for error messages and counters."""
        return self.constants.thing(instruction)

    # -- the block -----------------------------------------------------------------------------------
    def translate(self):
        for instruction in self.block.code:
            self.instruction(instruction)
        if self.shadow is not None:
            self.shadow.ending(self.block.ending)
        result = self.ending()
        self.mma.emit()
        self.fma.emit()
        for index in bits(self.block.writes & self.block.live_out):
            if index in self.current:
                value = self.cast(self.current[index], KEPT[self.program.function.registers[index].type])
                self.lines.append(f"R[{index}] = {value}")
        if self.shadow is not None:
            first, last = self.shadow.close()
            self.lines = first + self.lines + last
        self.lines.append(f"return {result}")
        source = "def block(x, m, R):\n" + "".join(f"    {line}\n" for line in self.lines)
        namespace = self.constants.namespace
        exec(compile(source, f"<{self.program.name} block {self.block.index}>", "exec"), namespace)
        return namespace.pop("block")

    def instruction(self, instruction):
        self.guard = None
        if instruction.guard is not None:
            self.guard = self.use(instruction.guard, "pred")
        types = types_of(instruction)
        floating = instruction.opcode in FLOAT and types and types[-1] in _FLOATING
        lower = (FLOAT if floating else LOWERING)[instruction.opcode]
        if self.shadow is None:
            lower(self, instruction, types)
        else:
            after = self.shadow.begin(instruction)
            lower(self, instruction, types)
            self.shadow.end(after)
        if self.guard is not None:
            self.tell(f"guarded(x, both(m, {self.guard}), {self.site(instruction)})")
        self.guard = None

    def ending(self):
        """What the block returns: see Chunk.follow."""
        ending = self.block.ending
        if ending is None:
            return "None"
        if ending.opcode in ("bar", "barrier"):
            return self.barrier(ending)
        if ending.opcode == "brx":
            guard = "None" if ending.guard is None else self.use(ending.guard, "pred")
            return f"{self.use(ending.operands[0], 'u32')}, {guard}"
        if ending.opcode == "call":
            call = ending.operands
            target = self.use(call.target, "u64") if isinstance(call.target, Register) else "None"
            return f"{target}, {self.use(call.end, 'u32')}"
        if ending.guard is not None:
            return self.use(ending.guard, "pred")
        return "None"

    def barrier(self, ending):
        operands = list(ending.operands)
        value = "None"
        if "red" in ending.modifiers:
            operands.pop(0)
            value = self.use(operands.pop(), "pred")
        number = self.use(operands[0], "u32")
        count = self.use(operands[1], "u32") if len(operands) > 1 else "None"
        return f"{number}, {count}, {value}"


def _single_uses(block):
    """(instruction, register index) of definitions that are read exactly once, inside the block."""
    uses, at = {}, {}
    everything = block.code + ([block.ending] if block.ending else [])
    for instruction in everything:
        for register in sources(instruction):
            if register.index in at:
                uses[at[register.index]] += 1
        for register in results(instruction):
            at[register.index] = key = (instruction, register.index)
            uses[key] = 0
            if instruction.guard is not None:
                uses[key] = 2
    for index, key in at.items():
        if block.live_out >> index & 1:
            uses[key] += 2
    return {key for key, count in uses.items() if count == 1}
