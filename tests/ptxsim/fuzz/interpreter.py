"""Runs a program lane by lane on Python ints. None stands for bits that the ISA leaves open."""

from .forms import TYPES, decode, encode
from .memory_forms import SLOT, MemoryForm
from .program import ADDRESSES, FULL, REGISTERS, Label, Skip
from .warp_forms import WarpForm


class Lane:
    """The registers and the memory of one thread."""

    def __init__(self, number, values):
        self.number = number
        self.bits = {name: column[number] for name, column in values.items()}
        self.bits["%members"] = self.bits["%leader"] = 0
        self.memory = {space: [0] * SLOT for space in ADDRESSES}
        self.carry = None
        self.waits_for = None  # the label that the lane jumps to

    def holds(self, guard):
        """Whether a guard is true; None if its predicate is open."""
        if guard is None:
            return True
        name, negated = guard
        return None if self.bits[name] is None else bool(self.bits[name]) != negated

    def operand(self, operand, type_):
        if isinstance(operand, int):
            return decode(operand, type_)
        if isinstance(operand, tuple):
            bits = self.bits[operand[1]]
            return None if bits is None else 1 - bits
        bits = self.bits[operand]
        return None if bits is None else decode(bits, type_)

    def write(self, name, value, type_, certain):
        """Give a register a value, widened by the sign of the type; `certain`: whether the guard is known to hold."""
        if name is None:
            return
        bits = encode(value, type_) if certain else None
        if bits is not None and name in REGISTERS:
            width = TYPES[REGISTERS[name]].bits
            bits = (decode(bits, type_) if TYPES[type_].kind == "signed" else bits) & (1 << width) - 1
        self.bits[name] = bits


def run(program):
    """The bits of every register of every lane at the end: name -> list with None where they are open."""
    lanes = [Lane(k, program.values) for k in range(program.threads)]
    for statement in program.statements:
        if isinstance(statement, Label):
            for lane in lanes:
                if lane.waits_for == statement.name:
                    lane.waits_for = None
            continue
        here = [lane for lane in lanes if lane.waits_for is None]
        if isinstance(statement, Skip):
            for lane in here:
                if lane.holds(statement.guard):
                    lane.waits_for = statement.label
        elif isinstance(statement.form, WarpForm):
            for first in range(0, program.threads, 32):
                warp_step(statement, [lane for lane in here if first <= lane.number < first + 32])
        else:
            for lane in here:
                holds = lane.holds(statement.guard)
                if holds is not False:
                    (memory_step if isinstance(statement.form, MemoryForm) else step)(statement, lane, holds)
    return {name: [lane.bits[name] for lane in lanes] for name in REGISTERS}


def step(statement, lane, certain):
    form = statement.form
    values = [lane.operand(o, t) for o, t in zip(statement.operands, form.sources, strict=True)]
    if "read" in form.carry:
        values.append(lane.carry)
    known = None not in values
    if form.carry:
        result, out = form.formula(*values) if known else (None, None)
        if "written" in form.carry:
            lane.carry = out if certain else None
        lane.write(statement.results[0], result, form.results[0], certain)
        return
    results = form.formula(*values) if known else None
    several = len(form.results) > 1
    for k, (name, type_) in enumerate(zip(statement.results, form.results, strict=True)):
        value = results[k] if several and results is not None else results
        lane.write(name, value, type_, certain)


def memory_step(statement, lane, certain):
    form = statement.form
    space, offset = statement.place
    memory, size = lane.memory[space], TYPES[form.element].bits // 8
    if form.opcode == "ld":
        read = [get(memory, offset + k * size, size) for k in range(form.count)]
        for name, bits, type_ in zip(statement.results, read, form.results, strict=True):
            value = None if bits is None else decode(bits, type_)
            lane.write(name, value, type_, certain)
        return
    values = [lane.operand(o, t) for o, t in zip(statement.operands, form.sources, strict=True)]
    if form.opcode == "st":
        for k, (value, type_) in enumerate(zip(values, form.sources, strict=True)):
            put(memory, offset + k * size, size, encode(value, type_) if certain else None)
        return
    old = get(memory, offset, size)
    new = None
    if old is not None and None not in values:
        new = encode(form.formula(decode(old, form.element), *values), form.element)
    put(memory, offset, size, new if certain else None)
    if form.opcode == "atom":
        if statement.results[0] is not None:
            lane.bits[statement.results[0]] = old if certain else None


def get(memory, offset, size):
    part = memory[offset : offset + size]
    return None if None in part else int.from_bytes(bytes(part), "little")


def put(memory, offset, size, bits):
    memory[offset : offset + size] = [None] * size if bits is None else bits.to_bytes(size, "little")


def warp_step(statement, lanes):
    """The lanes that are here and that the mask names; a mask names exactly those here, by construction."""
    form = statement.form
    if not lanes:
        return
    assert statement.members == FULL or all(
        lane.bits["%members"] == sum(1 << other.number % 32 for other in lanes) for lane in lanes
    )
    columns = [[lane.operand(o, t) for lane in lanes] for o, t in zip(statement.operands, form.sources, strict=True)]
    if any(None in column for column in columns):
        results = [(None,) * len(form.results)] * len(lanes)
    else:
        results = form.formula([lane.number % 32 for lane in lanes], *columns)
    for lane, row in zip(lanes, results, strict=True):
        for name, type_, value in zip(statement.results, form.results, row, strict=True):
            lane.write(name, value, type_, True)
