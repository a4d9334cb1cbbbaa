"""What PTX text is made of: registers, variables, operands, instructions, functions."""

import dataclasses

FUNCTION_WINDOW = 5 << 60  # where the addresses of functions begin, above those of all state spaces

SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Register:
    """A virtual register of one function: its position among all of them, its name and type."""

    index: int
    name: str
    type: str


@dataclasses.dataclass(slots=True, eq=False)
class Variable:
    """A named piece of memory. `data`: its initial bytes, in which `pointers` are filled in when addresses are known,
    each a position, an Address and whether it is a generic one. `offset`: of a kernel's parameter, among all of them.
    `frame`: the register that holds where it is counted from, for what each call of a function has anew."""

    name: str
    space: str
    size: int
    align: int
    type: str = "b8"
    data: bytes | None = None
    pointers: tuple = ()
    offset: int = 0
    extern: bool = False
    frame: Register | None = None


def place(variables, places):
    """Give variables of one space their places, one after another; returns the bytes that they take."""
    end = 0
    for v in variables:
        places[v] = -(-end // v.align) * v.align
        end = places[v] + v.size
    return end


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """`base + offset`, base a Register, a Variable or None."""

    base: object
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """A memory operand `[address]`."""

    address: Address


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """A number: an int, or a float given by its bits (`kind` f32 / f64) or as text (`kind` float)."""

    value: int | float
    kind: str = "int"


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """A read-only register of the machine, such as %tid.x."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """A name that is no variable: a branch target, a table of them, or a function."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """`value|predicate`: two results."""

    value: object
    predicate: object


@dataclasses.dataclass(frozen=True, slots=True)
class Not:
    """`!p`: a negated predicate."""

    register: Register


SINK = Special("_")


@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
    """One PTX instruction. Operands: the classes above, and tuples for `{a, b}` and `(a, b)`."""

    opcode: str
    modifiers: tuple
    operands: tuple
    guard: object  # Register, Not or None
    line: int  # in the PTX text
    source: tuple | None  # (file, line) in CUDA C++
    calls: tuple = ()  # "file:line" of the calls that its function is inlined at, innermost first

    def __str__(self):
        return ".".join((self.opcode, *self.modifiers))

    @property
    def where(self):
        """`file:line` of the CUDA source where known, else the line of the PTX text."""
        return f"{self.source[0]}:{self.source[1]}" if self.source else f"PTX line {self.line}"

    @property
    def path(self):
        """`where`, with the calls that this code is inlined at."""
        return " called at ".join((self.where, *self.calls))

    @property
    def place(self):
        """The line of the PTX text, and that of the CUDA source with the calls that this code is inlined at."""
        return f"PTX line {self.line}, {self.path}" if self.source else f"PTX line {self.line}"


@dataclasses.dataclass(slots=True, eq=False)
class Function:
    """A kernel (`.entry`) or a function: parameters, registers, the variables it declares, and its code.

    A kernel that is ready to run also has the code of functions that need a stack behind its own: `frames`.
    """

    name: str
    parameters: list
    entry: bool = True
    registers: list = dataclasses.field(default_factory=list)
    variables: list = dataclasses.field(default_factory=list)
    code: list = dataclasses.field(default_factory=list)
    labels: dict = dataclasses.field(default_factory=dict)  # name -> position in code
    tables: dict = dataclasses.field(default_factory=dict)  # .branchtargets, .calltargets
    attributes: dict = dataclasses.field(default_factory=dict)  # .maxntid ...
    frames: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class Module:
    """A PTX file. `addresses`: of functions, by name; `taken`: the functions whose address is used as a value; `used`:
    names of variables that occur outside of their declaration.
    """

    functions: dict = dataclasses.field(default_factory=dict)
    addresses: dict = dataclasses.field(default_factory=dict)
    taken: set = dataclasses.field(default_factory=set)
    used: set = dataclasses.field(default_factory=set)
    variables: dict = dataclasses.field(default_factory=dict)
    target: str = ""
