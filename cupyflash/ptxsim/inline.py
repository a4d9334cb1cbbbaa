"""Calls of device functions, replaced by the function's code: the simulator itself knows no stack."""

import dataclasses

from .syntax import Address, Function, Instruction, Label, Memory, Not, Pair, Register, Variable


def inline_calls(function: Function, functions: dict) -> Function:
    """A copy of a kernel with every call of a function of the module written out.

    A callee's registers and variables are added to the kernel once; its code once for each call.
    Raises NotImplementedError for recursion and for functions that the module does not define.
    """
    if not any(i.opcode == "call" for i in function.code):
        return function
    return _Inliner(function, functions).run()


class _Inliner:
    def __init__(self, function, functions):
        self.functions = functions
        fresh = {"registers": list(function.registers), "variables": list(function.variables)}
        self.result = dataclasses.replace(function, **fresh, code=[], labels={}, tables={})
        self.source = function
        self.registers = {}  # callee -> its first register among the kernel's
        self.calls = 0

    def run(self):
        self.copy(self.source, (self.source.name,), {}, 0, "", None)
        return self.result

    def copy(self, function, stack, variables, first, suffix, after):
        """Append a function's code. `after`: where its returns go (None: they end the kernel)."""
        code = self.result.code
        position = {}
        for number, instruction in enumerate(function.code):
            position[number] = len(code)
            operands = tuple(self.operand(o, variables, first, suffix) for o in instruction.operands)
            guard = self.operand(instruction.guard, variables, first, suffix)
            if instruction.opcode == "call":
                self.call(instruction, operands, guard, stack)
            elif instruction.opcode == "ret" and after is not None:
                code.append(_branch(instruction, after, guard))
            else:
                code.append(dataclasses.replace(instruction, operands=operands, guard=guard))
        position[len(function.code)] = len(code)
        for label, number in function.labels.items():
            self.result.labels[label + suffix] = position[number]
        for name, targets in function.tables.items():
            self.result.tables[name + suffix] = [t + suffix for t in targets]

    def call(self, instruction, operands, guard, stack):
        results, name, arguments = _call_operands(instruction, operands)
        if name in ("vprintf", "__assertfail"):
            self.result.code.append(
                dataclasses.replace(instruction, opcode=name, modifiers=(), operands=arguments, guard=guard)
            )
            return
        callee = self.functions.get(name)
        if callee is None or name in stack:
            why = "recursion" if callee else "a function outside the module"
            raise NotImplementedError(f"{instruction} {name} ({instruction.place}): {why} is not supported")
        self.calls += 1
        suffix = f"@{self.calls}"
        after = f"return{suffix}"
        if guard is not None:
            skip = guard.register if isinstance(guard, Not) else Not(guard)
            self.result.code.append(_branch(instruction, after, skip))
        if name not in self.registers:
            self.registers[name] = len(self.result.registers)
            for register in callee.registers:
                self.result.registers.append(dataclasses.replace(register, index=len(self.result.registers)))
            self.result.variables += callee.variables
        passed = dict(zip(callee.parameters, (*results, *arguments), strict=True))
        self.copy(callee, (*stack, name), passed, self.registers[name], suffix, after)
        self.result.labels[after] = len(self.result.code)

    def operand(self, operand, variables, first, suffix):
        """An operand of a callee, with the kernel's register, the caller's variable, a fresh label."""
        if not suffix:
            return operand
        again = lambda o: self.operand(o, variables, first, suffix)  # noqa: E731
        if isinstance(operand, Register):
            return self.result.registers[first + operand.index]
        if isinstance(operand, Variable):
            return variables.get(operand, operand)
        if isinstance(operand, Label):
            return operand if operand.name in self.functions else Label(operand.name + suffix)
        if isinstance(operand, tuple):
            return tuple(again(o) for o in operand)
        if isinstance(operand, Address):
            return Address(again(operand.base), operand.offset)
        if isinstance(operand, Memory):
            return Memory(again(operand.address))
        if isinstance(operand, Not):
            return Not(again(operand.register))
        if isinstance(operand, Pair):
            return Pair(again(operand.value), again(operand.predicate))
        return operand


def _call_operands(instruction, operands):
    """(result variables, callee's name, argument variables) of `(r), f, (a, b)`."""
    at = next((n for n, o in enumerate(operands) if isinstance(o, Label)), None)
    if at is None or len(operands) > at + 2:
        raise NotImplementedError(
            f"{instruction} ({instruction.place}): calls through function pointers are not supported"
        )
    plain = lambda group: tuple(o.base if isinstance(o, Address) else o for o in group)  # noqa: E731
    results = plain(operands[0]) if at else ()
    arguments = plain(operands[at + 1]) if len(operands) > at + 1 else ()
    return results, operands[at].name, arguments


def _branch(at, label, guard):
    return Instruction("bra", (), (Label(label),), guard, at.line, at.source)
