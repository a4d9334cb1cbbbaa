"""Registers of 128 bits, which only mov and atomics have, as pairs of 64 bits."""

import dataclasses

from .rewrite import rewritten
from .syntax import Function, Register


def split_wide_registers(function: Function) -> Function:
    """A copy of a kernel in which `{low, high}` stands for each register of 128 bits."""
    registers, pairs = list(function.registers), {}
    for register in function.registers:
        if register.type == "b128":
            low = dataclasses.replace(register, type="b64")
            registers[register.index] = low
            registers.append(Register(len(registers), register.name, "b64"))
            pairs[register] = low, registers[-1]
    if not pairs:
        return function

    def replacement(instruction):
        operands = tuple(pairs.get(o, o) if isinstance(o, Register) else o for o in instruction.operands)
        if instruction.opcode != "mov" or "b128" not in instruction.modifiers:
            return [dataclasses.replace(instruction, operands=operands)]
        halves = zip(*operands, strict=True)
        return [dataclasses.replace(instruction, modifiers=("b64",), operands=half) for half in halves]

    return rewritten(function, registers, replacement)
