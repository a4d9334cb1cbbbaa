"""A kernel with some of its instructions replaced by others."""

import dataclasses

from .syntax import Function


def rewritten(function: Function, registers, replacement) -> Function:
    """A copy of a kernel with these registers, and with the instructions that `replacement(instruction)` lists in the
    place of each."""
    code, positions = [], []
    for instruction in function.code:
        positions.append(len(code))
        code += replacement(instruction)
    positions.append(len(code))
    labels = {label: positions[position] for label, position in function.labels.items()}
    return dataclasses.replace(function, registers=registers, code=code, labels=labels)
