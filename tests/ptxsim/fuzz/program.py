"""Random programs: what they consist of, how they are drawn, and their PTX text."""

from dataclasses import dataclass, field

import numpy as np

from ..values import random_bits, specials
from .catalogue import MEMORY, SCALAR, WARP, by_opcode
from .forms import TYPES, Form
from .memory_forms import SLOT, MemoryForm
from .warp_forms import WarpForm

POOLS = {
    "%h": ("b16", 4),
    "%r": ("b32", 6),
    "%f": ("f32", 5),
    "%l": ("b64", 4),
    "%d": ("f64", 3),
    "%p": ("pred", 4),
    "%q": ("pred", 2),  # conditions of jumps: never written after the start
}
REGISTERS = {f"{name}{k}": type_ for name, (type_, count) in POOLS.items() for k in range(count)}
FULL = 0xFFFFFFFF
ADDRESSES = {"global": "%global", "shared": "%shared", "local": "%local"}


@dataclass
class Step:
    """One instruction. Results: register names or None for the sink; operands: register names, immediates as ints,
    or ("not", predicate). `guard`: (predicate, negated). `place`: (state space, offset) of a memory access. `members`:
    the mask of a warp instruction, a register name or an int."""

    form: Form
    results: tuple
    operands: tuple
    guard: tuple | None = None
    place: tuple | None = None
    members: object = None


@dataclass
class Skip:
    """A jump forward to a label, for the lanes where a predicate (or its negation) holds."""

    guard: tuple
    label: str


@dataclass
class Label:
    name: str


@dataclass
class Program:
    """Statements, the number of threads, and the first values of the registers: bits by name, for each lane."""

    statements: list
    threads: int
    values: dict = field(repr=False)

    @property
    def uniform(self):
        """Registers that begin with the same value in all lanes, written as immediates."""
        return {name for name, bits in self.values.items() if len(set(bits)) == 1 and not name.startswith(("%p", "%q"))}


# -- drawing -----------------------------------------------------------------------------------------------
_SCALAR, _WARP, _MEMORY = by_opcode(SCALAR), by_opcode(WARP), by_opcode(MEMORY)


class Generator:
    """Draws programs with a `random.Random` (or Hypothesis's). `only`: opcodes to choose from, or None for all."""

    def __init__(self, rng, only=None):
        self.rng = rng
        pick = lambda table: {k: v for k, v in table.items() if only is None or k in only}  # noqa: E731
        self.scalar, self.warp, self.memory = pick(_SCALAR), pick(_WARP), pick(_MEMORY)
        self.labels = 0

    def program(self, length):
        statements = []
        while len(statements) < length:
            statements += self.statement(2)
        threads = self.rng.choice((32, 64))
        return Program(statements, threads, self.values(threads))

    def program_of(self, forms):
        """Each of these forms once, unguarded; most results go where few operands come from, to keep special values."""
        steps = [self.memory_step(f) if isinstance(f, MemoryForm) else self.step(f) for f in forms]
        for step in steps:
            step.guard, step.members = None, FULL
            if len(step.results) == 1 and step.results[0] is not None:
                step.results = (f"{step.results[0][:2]}0",)
        return Program(steps, 64, self.values(64))

    def statement(self, depth):
        kind = self.rng.randrange(20)
        if kind == 0 and depth:
            return self.jump(depth)
        if kind == 1 and self.warp and depth == 2:
            return self.warp_region()
        if kind < 4 and self.warp and depth == 2:
            return [self.warp_step(FULL)]
        if kind < 8 and self.memory:
            return [self.memory_step()]
        if kind < 10 and "add" in self.scalar:
            return self.carry_chain()
        return [self.step(self.choice(self.scalar))] if self.scalar else []

    def choice(self, table):
        return self.rng.choice(table[self.rng.choice(sorted(table))])

    def label(self):
        self.labels += 1
        return f"L{self.labels}"

    def condition(self):
        return f"%q{self.rng.randrange(POOLS['%q'][1])}", bool(self.rng.randrange(2))

    def jump(self, depth):
        """A part that some lanes jump over; half of the time with another part for those."""
        predicate, negated = self.condition()
        end = self.label()
        body = [s for _ in range(self.rng.randint(1, 4)) for s in self.statement(depth - 1)]
        statements = [Skip((predicate, negated), end), *body, Label(end)]
        if self.rng.randrange(2):
            end = self.label()
            body = [s for _ in range(self.rng.randint(1, 4)) for s in self.statement(depth - 1)]
            statements += [Skip((predicate, not negated), end), *body, Label(end)]
        return statements

    def warp_region(self):
        """Warp instructions among the lanes on one side of a branch, named by a ballot before it."""
        predicate, negated = self.condition()
        ballot = next(f for f in _WARP["vote"] if f.text == "vote.sync.ballot.b32")
        leader = next(f for f in _WARP["elect"])
        operand = ("not", predicate) if negated else predicate
        end = self.label()
        inside = [s for _ in range(self.rng.randint(0, 2)) for s in self.statement(0)]
        steps = [self.warp_step("%members") for _ in range(self.rng.randint(1, 3))]
        return [
            Step(ballot, ("%members",), (operand,), members=FULL),
            Skip((predicate, not negated), end),
            *inside,
            Step(leader, ("%leader", None), (), members="%members"),
            *steps,
            Label(end),
        ]

    def carry_chain(self):
        """The opening of a chain, perhaps something else, links, and perhaps an end that leaves the flag alone."""
        opcodes = "add", "sub", "mad"
        openings = [f for opcode in opcodes for f in _SCALAR[opcode] if f.carry]
        links = [f for opcode in opcodes for f in _SCALAR[opcode + "c"]]
        steps = [self.step(self.rng.choice(openings))]
        for _ in range(self.rng.randint(1, 3)):
            if self.rng.randrange(4) == 0:
                steps += self.statement(0) if self.rng.randrange(2) else [Label(self.label())]
            steps.append(self.step(self.rng.choice(links)))
        return steps

    def step(self, form):
        results = tuple(self.register(t, form, True) for t in form.results)
        if len(results) > 1 and self.rng.randrange(4) == 0:
            sink = self.rng.randrange(len(results))
            results = tuple(None if k == sink else name for k, name in enumerate(results))
        results = self.distinct(results, form)
        return Step(form, results, self.operands(form), self.guard())

    def distinct(self, results, form):
        seen = []
        for name in results:
            seen.append(None if name in seen and name is not None else name)
        if seen and all(name is None for name in seen):
            seen[0] = self.register(form.results[0], form, True)
        return tuple(seen)

    def operands(self, form):
        operands = [self.operand(t, form) for t in form.sources]
        for k in form.small:
            if self.rng.randrange(2):
                operands[k] = self.rng.choice((*range(10), 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 255, 0x1F1F, FULL))
        if form.constant:
            operands[-1] = self.rng.randrange(form.constant)
        if form.opcode == "setp" and len(operands) == 3 and self.rng.randrange(2):
            operands[2] = ("not", operands[2])
        return tuple(operands)

    def guard(self):
        if self.rng.randrange(4):
            return None
        return f"%p{self.rng.randrange(POOLS['%p'][1])}", bool(self.rng.randrange(2))

    def register(self, type_, form, result=False):
        """A register whose declared type admits the operand's."""
        bits, kind = TYPES[type_].bits, type_.removeprefix("raw_")
        if type_ == "pred":
            pools = ["%p"]
        elif kind in ("f32", "f64"):
            pools = ["%f", "%f", "%f", "%r"] if kind == "f32" else ["%d", "%d", "%l"]
        elif bits == 32:
            pools = ["%r", "%f"] if type_ == "b32" else ["%r"]
        else:
            pools = {8: ["%h"], 16: ["%h"], 64: ["%l"]}[bits]
        if form.wide and kind not in ("f16", "bf16", "tf32", "f32", "f64"):
            pools = [*pools, *([] if bits > 16 else ["%r"]), *([] if bits > 32 else ["%l"])]
        pool = self.rng.choice(pools)
        return f"{pool}{self.rng.randrange(POOLS[pool][1])}"

    def operand(self, type_, form):
        t = TYPES[type_]
        plain = (t.kind in ("signed", "unsigned") and t.bits >= 16) or type_ in ("f32", "f64")
        if plain and not form.wide and not isinstance(form, MemoryForm) and self.rng.randrange(6) == 0:
            name = type_.removeprefix("raw_")
            return int(self.rng.choice(specials(name).tolist()))
        return self.register(type_, form)

    def memory_step(self, form=None):
        form = form or self.choice(self.memory)
        space = form.space or self.rng.choice(
            ("global", "shared") if form.opcode in ("atom", "red") else tuple(ADDRESSES)
        )
        size = TYPES[form.element].bits // 8 * form.count
        offset = self.rng.randrange(SLOT // size) * size if size < 8 else self.rng.randrange(2) * size
        step = self.step(form)
        step.place = space, offset
        return step

    def warp_step(self, members):
        """Among some lanes, a shuffle reads the own lane or the first of them: others need not take part."""
        form = self.choice(self.warp)
        step = self.step(form)
        step.guard, step.members = None, members
        if form.opcode == "shfl" and members != FULL:
            step.operands = (step.operands[0], "%leader" if ".idx." in form.text else 0, 31 * (".up." not in form.text))
        return step

    # -- first values --------------------------------------------------------------------------------------
    def values(self, threads):
        numbers = np.random.default_rng(self.rng.randrange(1 << 32))
        values = {}
        for name, type_ in REGISTERS.items():
            if type_ == "pred":
                values[name] = numbers.integers(0, 2, threads).tolist()
                continue
            bits = lane_values(numbers, type_, threads)
            values[name] = [int(bits[0])] * threads if self.rng.randrange(5) == 0 else bits.tolist()
        return values


_SEEN_AS = {
    "b16": ("b16", "f16", "bf16", "s16"),
    "b32": ("b32", "u32", "f16x2", "bf16x2", "f32"),
    "b64": ("b64", "f64"),
    "f32": ("f32",),
    "f64": ("f64",),
}


# Negative and signalling ones, which `specials` lacks.
_NANS = {
    "f16": (0xFE00, 0x7C01),
    "bf16": (0xFFC0, 0x7F81),
    "f16x2": (0xFE003C00, 0x3C00FC01),
    "bf16x2": (0xFFC03F80, 0x3F80FF81),
    "f32": (0xFFC00000, 0xFF800001),
    "f64": (0xFFF8000000000000, 0x7FF0000000000001),
}


def lane_values(numbers, type_, count):
    """Special values, random bits, and floats that lie close together, as one of the types of a register."""
    seen = numbers.choice(_SEEN_AS[type_])
    bits = random_bits(seen, numbers, count)
    special = np.concatenate([specials(seen), np.array(_NANS.get(seen, ()), bits.dtype)])
    return np.where(numbers.random(count) < 0.4, numbers.choice(special, count), bits)


# -- text --------------------------------------------------------------------------------------------------
def ptx(program, target="sm_100"):
    """The program as a kernel `fuzzed(values, scratch, out)`: 8 bytes per register and lane, SLOT bytes per lane."""
    lines = [
        f".version 8.8\n.target {target}\n.address_size 64",
        ".visible .entry fuzzed(.param .u64 values, .param .u64 scratch, .param .u64 out)\n{",
        f".shared .align 16 .b8 tile[{SLOT * program.threads}];",
        f".local .align 16 .b8 own[{SLOT}];",
        ".reg .b64 %in, %out, %at, %global, %local, %to_shared, %to_local;",
        ".reg .b32 %members, %leader, %t, %shared, %flag;",
        *(f".reg .{t} {name};" for name, t in REGISTERS.items()),
        "mov.u32 %members, 0; mov.u32 %leader, 0; mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 8;",
        "ld.param.u64 %in, [values]; add.u64 %in, %in, %at; ld.param.u64 %out, [out]; add.u64 %out, %out, %at;",
        f"mul.wide.u32 %at, %t, {SLOT}; ld.param.u64 %global, [scratch]; add.u64 %global, %global, %at;",
        f"mov.u32 %shared, tile; mad.lo.u32 %shared, %t, {SLOT}, %shared; cvt.u64.u32 %to_shared, %shared;",
        "cvta.shared.u64 %to_shared, %to_shared; mov.u64 %local, own; cvta.local.u64 %to_local, %local;",
    ]
    for offset in range(0, SLOT, 8):
        lines += [f"st.{space}.u64 [{ADDRESSES[space]}+{offset}], 0;" for space in ADDRESSES]
    stride = 8 * program.threads
    for k, (name, type_) in enumerate(REGISTERS.items()):
        if type_ == "pred":
            lines.append(f"ld.global.b32 %flag, [%in+{k * stride}]; setp.ne.u32 {name}, %flag, 0;")
        elif name in program.uniform:
            lines.append(f"mov.{type_} {name}, {immediate(program.values[name][0], type_)};")
        else:
            lines.append(f"ld.global.{type_} {name}, [%in+{k * stride}];")
    lines += [line(s) for s in program.statements]
    for k, (name, type_) in enumerate(REGISTERS.items()):
        if type_ == "pred":
            lines.append(f"selp.b32 %flag, 1, 0, {name}; st.global.b32 [%out+{k * stride}], %flag;")
        else:
            lines.append(f"st.global.{type_} [%out+{k * stride}], {name};")
    return "\n".join([*lines, "ret;\n}"])


def immediate(bits, type_):
    kind = type_.removeprefix("raw_")
    if kind in ("f32", "f64"):
        return f"0f{bits:08X}" if kind == "f32" else f"0d{bits:016X}"
    return str(TYPES[type_].decode(bits))


def line(statement):
    if isinstance(statement, Label):
        return f"{statement.name}:"
    guard = ""
    if statement.guard:
        name, negated = statement.guard
        guard = f"@{'!' if negated else ''}{name} "
    if isinstance(statement, Skip):
        return f"{guard}bra {statement.label};"
    form = statement.form
    results = [name or "_" for name in statement.results]
    operands = [written(o, t) for o, t in zip(statement.operands, form.sources, strict=True)]
    if isinstance(form, MemoryForm):
        operands = memory_operands(statement, results, operands)
    else:
        joined = "{" + ", ".join(results) + "}" if form.vector == "results" else "|".join(results)
        operands = ["{" + ", ".join(operands) + "}"] if form.vector == "sources" else operands
        operands = [joined, *operands]
    if isinstance(form, WarpForm) and form.opcode != "activemask":
        operands.append(statement.members if isinstance(statement.members, str) else f"{statement.members:#x}")
    return f"{guard}{form.text} {', '.join(operands)};"


def written(operand, type_):
    if isinstance(operand, tuple):
        return f"!{operand[1]}"
    return operand if isinstance(operand, str) else immediate(operand, type_)


def memory_operands(step, results, operands):
    space, offset = step.place
    base = ADDRESSES[space] if step.form.space or space == "global" else f"%to_{space}"
    place = f"[{base}+{offset}]"
    braces = lambda names: "{" + ", ".join(names) + "}" if step.form.count > 1 else ", ".join(names)  # noqa: E731
    if step.form.opcode == "st":
        return [place, braces(operands)]
    return [*([braces(results)] if results else []), place, *operands]
