"""Which registers hold no defined value: what translated code of a sanitized program says about that.

Every register that can be undefined at all has a second local in translated code, its shadow: None while all lanes
are defined, else an array over lanes (sanitizer/halves.py), 0 for defined lanes. Undefined values may be moved,
computed with and selected away; it is their use that is a fault.
"""

from .copied import constants, copies, masked, steps, structures
from .flow import bits, results, sources
from .isa import types_of
from .lower_memory import OBSERVED, address_of, space_of, vector_of
from .lower_warp import matrix_count, shared_address
from .syntax import SINK, Literal, Memory, Not, Pair, Register

DEFINED = "None"
_SOURCES = ("ld", "ldu", "atom", "ldmatrix", "shfl")
_MIXES = {"prmt", "and", "lop3", "shl", "shr", "shf", "bfe", "bfi"}  # may drop the half that is undefined


def may_be_undefined(program):
    """Indices of the registers that are read before they are written on some path, or depend on memory or on
    a lane that may be inactive."""
    found = set(bits(program.unwritten()))
    rest = []
    for i in program.function.code:
        if i.opcode in _SOURCES and not _loads_constant(program, i):
            found.update(r.index for r in results(i))
        elif results(i):
            rest.append(({r.index for r in sources(i)}, {r.index for r in results(i)}))
    grown = True
    while grown:
        grown = False
        for read, written in rest:
            if not written <= found and read & found:
                found |= written
                grown = True
    return found


def _loads_constant(program, i):
    """Whether an instruction loads constants or parameters of the kernel, which are always defined."""
    memory = i.operands[1]
    return isinstance(memory, Memory) and space_of(program, i, memory) in ("param", "const")


class Shadow:
    """Writes the lines about shadows of one block. `begin` an instruction before it is lowered, `end` it after."""

    def __init__(self, translator):
        self.t = translator
        self.possible = translator.program.undefinable
        self.current = {}  # register index -> shadow local, or DEFINED
        self.fetched = {}
        self.merged = {}
        self.count = 0
        self.copied, self.masked = self.known(copies), self.known(masked)
        self.structures = structures(translator.block, self.copied, self.known(steps), translator.width)

    def known(self, analysis):
        """What an analysis of the whole program has found, made once."""
        program = self.t.program
        if analysis not in program.memo:
            program.memo[analysis] = analysis(program)
        return program.memo[analysis]

    # -- names ---------------------------------------------------------------------------------------
    def of(self, operand):
        """The shadow of an operand: of a vector, that of its elements together."""
        if isinstance(operand, Not):
            operand = operand.register
        if isinstance(operand, Memory):
            operand = operand.address.base
        if isinstance(operand, tuple):
            return self.all_of([self.of(o) for o in operand])
        if not isinstance(operand, Register) or operand.index not in self.possible:
            return DEFINED
        if operand.index not in self.current:
            name = self.fresh()
            self.fetched[operand.index] = self.current[operand.index] = name
        return self.current[operand.index]

    def all_of(self, names):
        """The shadow of what is undefined if all of its parts are."""
        if DEFINED in names or len(names) == 1:
            return names[0] if len(names) == 1 else DEFINED
        return self.let(f"U.all_of({', '.join(names)})")

    def fresh(self):
        self.count += 1
        return f"u{self.count}"

    def let(self, text):
        name = self.fresh()
        self.t.line(f"{name} = {text}")
        return name

    def merge(self, names):
        """The shadow of what depends on several operands."""
        names = sorted({n for n in names if n != DEFINED})
        if len(names) < 2:
            return names[0] if names else DEFINED
        key = tuple(names)
        if key not in self.merged:
            if len(names) == 2:
                a, b = names
                self.merged[key] = self.let(f"{a} if {b} is None else {b} if {a} is None else U.either({a}, {b})")
            else:
                self.merged[key] = self.merge([self.merge(names[:-1]), names[-1]])
        return self.merged[key]

    # -- instructions --------------------------------------------------------------------------------
    def begin(self, i):
        """Check what the instruction uses; returns what `end` is to do."""
        if i.guard is not None:
            self.use(i.guard, i, "the predicate", mask="m")
        handler = getattr(self, f"do_{i.opcode}", None)
        found = handler(i, types_of(i)) if handler else None
        if found is None:
            shadow = self.merge([self.of(o) for o in i.operands[1:]])
            found = [(register, shadow) for register in results(i)]
        if i.opcode in _MIXES:
            found = [(r, u if u == DEFINED else f"U.whole({u})") for r, u in found]
        return found, self.t.guard

    def end(self, after):
        """Give the results of an instruction their shadows: (register, name or expression) pairs."""
        found, guard = after
        for register, text in found:
            if register == SINK or register.index not in self.possible:
                continue
            if guard is not None:
                old = self.of(register)
                if text != DEFINED or old != DEFINED:
                    text = self.let(f"U.chosen({guard}, {text}, {old})")
            elif text != DEFINED and not text.isidentifier():
                text = self.let(text)
            self.current[register.index] = text

    def use(self, operand, i, what, mask=None):
        """Report the lanes that are undefined here."""
        name = self.of(operand)
        if name != DEFINED:
            self.t.line(f"if {name} is not None: U.use(x, {mask or self.t.mask()}, {name}, {self.t.site(i)}, {what!r})")

    def ending(self, i):
        """Check what decides where a block goes on."""
        if i is None:
            return
        if i.guard is not None:
            self.use(i.guard, i, "the predicate", mask="m")
        if i.opcode in ("bar", "barrier", "brx"):
            for operand in i.operands[1 if results(i) else 0 :]:
                self.use(operand, i, "an operand")
        if i.opcode == "call":
            self.use(i.operands.target, i, "the address")
        for register in results(i):
            self.current[register.index] = DEFINED

    def close(self):
        """Lines for the begin and the end of the block."""
        block = self.t.block
        first = [f"{name} = S.get({index})" for index, name in self.fetched.items()]
        written = block.writes & block.live_out
        kept = {index: name for index, name in self.current.items() if written >> index & 1}
        kept = {index: name for index, name in kept.items() if self.fetched.get(index) != name}
        last = []
        if kept:
            pairs = ", ".join(f"({index}, {name})" for index, name in kept.items())
            new = "".join(f" or {name} is not None" for name in sorted({*kept.values()} - {DEFINED}))
            last = [f"if S{new}: U.keep(x, ({pairs},))"]
        if first or last:
            first = ["S = U.registers(x)", *first]
        return ["U = x.checker.undefined", *first], last

    # -- loads and stores ----------------------------------------------------------------------------
    def place(self, i, memory, what="the address"):
        """Name of the state space (None: read-only) and local of the address of an access."""
        self.use(memory, i, what)
        address, space = address_of(self.t, memory, space_of(self.t.program, i, memory))
        return OBSERVED.get(space), address

    def do_ld(self, i, types):
        d, memory = i.operands
        space, address = self.place(i, memory)
        if space is None:
            return [(r, DEFINED) for r in results(i)]
        count, size = vector_of(i), self.t.width(types[0]) // 8
        text = f"U.read(x, {self.t.mask()}, {space!r}, {address}, {size}, {count}, {self.t.site(i)})"
        if count == 1:
            return [(d, text)]
        name = self.let(text)
        return [(r, f"{name} and {name}[{n}]") for n, r in enumerate(d)]

    do_ldu = do_ld

    def do_st(self, i, types):
        memory, value = i.operands
        space, address = self.place(i, memory)
        if space is None:
            return []
        values = value if vector_of(i) > 1 else (value,)
        shadows = [self.of(v) for v in values]
        size = self.t.width(types[0]) // 8
        used = self.used(i, values, shadows)
        given = f"({', '.join(shadows)},), {used}"
        self.t.line(f"U.write(x, {self.t.mask()}, {space!r}, {address}, {size}, {given}, {self.t.site(i)})")
        return []

    def used(self, i, values, shadows):
        """The shadows of what counts as used by a store to global memory, None for all values. Of the copy of a
        structure, padding may be undefined, but not everything."""
        group = self.structures.get(i)
        if group is None:
            return None
        group.shadows += shadows
        used = [u for v, u in zip(values, shadows, strict=True) if u != DEFINED and v.index not in self.copied]
        group.computed = group.computed or bool(used)
        if i is group.last and not group.computed:
            used = [self.all_of(group.shadows)]
        return f"({''.join(f'{u}, ' for u in used)})"

    def do_atom(self, i, types):
        d, memory, *values = i.operands if i.opcode == "atom" else (SINK, *i.operands)
        space, address = self.place(i, memory)
        count, size, exchange = vector_of(i), self.t.width(types[0]) // 8, "exch" in i.modifiers
        if types[0] == "b128":
            count, size = 2, 8
        for value in values:
            for part in value if isinstance(value, tuple) else (value,):
                self.use(part, i, "an operand")
        text = f"U.change(x, {self.t.mask()}, {space!r}, {address}, {size}, {count}, {exchange}, {self.t.site(i)})"
        old = self.let(text)
        return [(r, f"{old} and {old}[{n}]") for n, r in enumerate(results(i))] if count > 1 else [(d, old)]

    do_red = do_atom

    def do_ldmatrix(self, i, types):
        d, memory = i.operands
        registers = d if isinstance(d, tuple) else (d,)
        self.use(memory, i, "the address")
        address = shared_address(self.t, i, memory)
        trans = "trans" in i.modifiers
        name = self.let(f"U.read_matrix(x, {address}, {matrix_count(i)}, {trans}, {self.t.site(i)})")
        return [(r, f"{name} and {name}[{n}]") for n, r in enumerate(registers)]

    def do_stmatrix(self, i, types):
        memory, values = i.operands
        self.use(memory, i, "the address")
        address = shared_address(self.t, i, memory)
        values = values if isinstance(values, tuple) else (values,)
        shadows = "".join(f"{self.of(v)}, " for v in values)
        trans = "trans" in i.modifiers
        self.t.line(f"U.write_matrix(x, {address}, ({shadows}), {trans}, {self.t.site(i)})")
        return []

    def do_mbarrier(self, i, types):
        for operand in i.operands[bool(results(i)) :]:
            self.use(operand, i, "the address" if isinstance(operand, Memory) else "an operand")
        if "init" in i.modifiers:
            address = shared_address(self.t, i, i.operands[0])
            self.t.line(f"U.write(x, {self.t.mask()}, 'shared', {address}, 8, ({DEFINED},), None, {self.t.site(i)})")
        return [(register, DEFINED) for register in results(i)]

    def do_cp(self, i, types):
        for operand in i.operands:
            self.use(operand, i, "the address" if isinstance(operand, Memory) else "the size")
        return []

    # -- what lanes tell each other ------------------------------------------------------------------
    def do_shfl(self, i, types):
        d, a, b, c, members = i.operands
        value, predicate = (d.value, d.predicate) if isinstance(d, Pair) else (d, SINK)
        which = self.merge([self.of(b), self.of(c)])
        mode = next(m for m in i.modifiers if m in ("up", "down", "bfly", "idx"))
        operands = ", ".join(self.t.use(o, "u32") for o in (b, c, members))
        shadow = self.let(f"U.shuffled(x, {self.t.mask()}, {self.of(a)}, {mode!r}, {operands}, {self.t.site(i)})")
        return [(value, self.merge([shadow, which])), (predicate, which)]

    def across(self, i, members, decided="None"):
        """A result that depends on an operand of all lanes of the warp, or of those that are named."""
        shadow = self.of(i.operands[1])
        if shadow != DEFINED:
            shadow = self.let(f"U.of_warps(x, {self.t.mask()}, {shadow}, {members}, {decided})")
        return [(register, shadow) for register in results(i)]

    def do_movmatrix(self, i, types):
        return self.across(i, "None")

    def do_match(self, i, types):
        return self.across(i, self.t.use(i.operands[2], "u32"))

    do_redux = do_match

    def do_vote(self, i, types):
        _, a, members = i.operands
        decided = "None"
        if self.of(a) != DEFINED and not {"all", "any"}.isdisjoint(i.modifiers):
            decided = self.t.use(a, "pred")
            if "all" in i.modifiers:
                decided = self.t.let(f"logical_not({decided})", "?")
        return self.across(i, self.t.use(members, "u32"), decided)

    def do_mma(self, i, types):
        d, a, b, c = ((o if isinstance(o, tuple) else (o,)) for o in i.operands)
        groups = [[self.of(r) for r in group] for group in (a, b, c)]
        names = sorted({n for group in groups for n in group} - {DEFINED})
        if not names:
            return [(r, DEFINED) for r in d]
        given = ", ".join(f"({', '.join(group)},)" for group in groups)
        defined = " and ".join(f"{n} is None" for n in names)
        name = self.let(f"None if {defined} else U.mma(x, {given})")
        return [(r, f"{name} and {name}[{n}]") for n, r in enumerate(d)]

    # -- what may make undefined values harmless -----------------------------------------------------
    def do_selp(self, i, types):
        d, a, b, p = i.operands
        chosen = DEFINED
        if {self.of(a), self.of(b)} != {DEFINED}:
            chosen = self.let(f"U.chosen({self.t.use(p, 'pred')}, {self.of(a)}, {self.of(b)})")
        return [(d, self.merge([chosen, self.of(p)]))]

    def do_and(self, i, types):
        """0 and anything is 0, all ones or anything is all ones."""
        d, a, b = i.operands
        if {self.of(a), self.of(b)} == {DEFINED}:
            return None
        if types != ["pred"]:
            return self.and_bits(i, types) if i.opcode == "and" else self.insert(i)
        values = [self.t.use(o, "pred") for o in (a, b)]
        if i.opcode == "and":
            values = [self.t.let(f"logical_not({v})", "?") for v in values]
        return [(d, f"U.undecided({self.of(a)}, {values[0]}, {self.of(b)}, {values[1]})")]

    do_or = do_and

    def and_bits(self, i, types):
        d, a, b = i.operands
        if isinstance(a, Literal) or isinstance(b, Literal):
            return None
        defined = " and ".join(f"{u} is None" for u in {self.of(a): 0, self.of(b): 0} if u != DEFINED)
        zero = [f"{self.t.use(o, types[0])} == 0" for o in (a, b)]
        return [(d, f"None if {defined} else U.undecided({self.of(a)}, {zero[0]}, {self.of(b)}, {zero[1]})")]

    def insert(self, i):
        """Bits of a defined value where those of an undefined one were masked away: a field has been set."""
        d, *values = i.operands
        makes_room = [isinstance(v, Register) and v.index in self.masked for v in values]
        if not any(makes_room):
            return None
        a, b = map(self.of, values)
        return [(d, f"U.inserted({a}, {makes_room[0]}, {b}, {makes_room[1]})")]

    def do_xor(self, i, types):
        return None if types == ["pred"] else self.insert(i)

    def do_bfi(self, i, types):
        d, a, b, *where = i.operands
        return [(d, self.merge([self.of((a, b)), *map(self.of, where)]))]

    do_shf = do_bfi

    def do_prmt(self, i, types):
        literals = self.known(constants)
        d, a, b, choice = (literals.get(getattr(o, "index", None), o) for o in i.operands)
        values = [a, b]
        if isinstance(choice, Literal):
            picked = {choice.value >> 4 * n & 7 for n in range(4)}
            values = [v for v, own in ((a, range(4)), (b, range(4, 8))) if not picked.isdisjoint(own)]
        values = [v for v in values if not isinstance(v, Literal)]
        return [(d, self.merge([self.all_of([self.of(v) for v in values] or [DEFINED]), self.of(choice)]))]

    def do_setp(self, i, types):
        _, a, b, *c = i.operands
        shadow = self.merge([self.of(a), self.of(b)])
        combine = next((m for m in i.modifiers if m in ("and", "or")), None)
        if c and combine and shadow != DEFINED:
            value = self.t.use(c[0], "pred")
            if combine == "and":
                value = self.t.let(f"logical_not({value})", "?")
            shadow = self.let(f"U.undecided({shadow}, False, {self.of(c[0])}, {value})")
        elif c:
            shadow = self.merge([shadow, self.of(c[0])])
        return [(r, shadow) for r in results(i)]

    def do_mov(self, i, types):
        d, a = i.operands
        if isinstance(a, tuple):
            middle = len(a) // 2
            low, high = a[:middle], a[middle:]
            if self.is_float32(d) and all(isinstance(o, Literal) for o in low):  # a bfloat16 becomes a float32
                return [(d, self.of(high))]
            return [(d, self.pair(self.of(low), self.of(high)))]
        shadow = self.of(a)
        if not isinstance(d, tuple) or shadow == DEFINED:
            return [(r, shadow) for r in results(i)]
        return [(r, f"U.half({shadow}, {2 * n // len(d)})") for n, r in enumerate(d)]

    def do_cvt(self, i, types):
        d, *values = i.operands
        shadows = [self.of(v) for v in values]
        return [(d, shadows[0] if len(values) == 1 else self.pair(*reversed(shadows)))]

    def pair(self, low, high):
        """The shadow of what is packed from two halves."""
        if {low, high} == {DEFINED}:
            return DEFINED
        defined = " and ".join(f"{u} is None" for u in sorted({low, high} - {DEFINED}))
        return self.let(f"None if {defined} else U.pair({low}, {high})")

    def is_float32(self, register):
        """Whether any instruction of the kernel takes a register for a float32."""
        memo = self.t.program.memo
        if "float32" not in memo:
            code = self.t.program.function.code
            memo["float32"] = {r.index for i in code if "f32" in i.modifiers for r in sources(i)}
        return register.index in memo["float32"]

    def do_lop3(self, i, types):
        """An operand that may be masked away makes the result undefined only together with the others."""
        d, *values, table = i.operands
        always, some = [], []
        for value, bit in zip(values, (4, 2, 1), strict=True):
            differs = [(table.value >> n ^ table.value >> (n | bit)) & 1 for n in range(8) if not n & bit]
            if any(differs) and not isinstance(value, Literal):
                some.append(self.of(value))
                always += [self.of(value)] * all(differs)
        return [(d, self.merge([*always, self.all_of(some or [DEFINED])]))]
