"""Calls of device functions, replaced by the function's code wherever that is possible.

It is not where a function may call itself, and where a pointer says which one is called. The code of such functions
stands once behind the kernel's, with copies of the registers and variables of all that is inlined in it; the calls of
them remain, with the operands of `Enter`.
"""

import dataclasses
import itertools
import re
from typing import NamedTuple

from .callgraph import BUILTIN, call_of, candidates, needing_a_stack, sizes
from .frames import Frame
from .syntax import Address, Function, Instruction, Label, Memory, Module, Not, Pair, Register, Variable

_DEVICE_RUNTIME = re.compile(r"(__cudaCDP2?|cuda)(GetParameterBuffer|LaunchDevice)")  # what `kernel<<<...>>>` calls


class Enter(NamedTuple):
    """The operands of a call that needs a stack: whom it calls; the variables that stand for the parameters; where the
    new frame begins; and the names of the functions that it may call."""

    target: Label | Register
    passed: tuple
    end: Variable
    names: tuple


def inline_calls(function: Function, module: Module) -> Function:
    """A copy of a kernel with the code of every function that it calls.

    Raises NotImplementedError for functions that the module does not define, and for calls that do not fit them.
    """
    if not any(i.opcode == "call" for i in function.code):
        return function
    return _Inliner(function, module).run()


class _Copy(NamedTuple):
    """One copy of a function's code: the frame that it is part of, and what its names are called there."""

    function: Function
    frame: Frame
    suffix: str  # of labels; the kernel has none and keeps all its names
    passed: dict  # parameter -> variable of the caller
    after: str | None  # where returns go; None: they stay what they are


class _Inliner:
    def __init__(self, kernel, module):
        self.module, self.source = module, kernel
        self.recursive, pointed = needing_a_stack(kernel, module)
        self.stacked = self.recursive | pointed
        fresh = {"registers": list(kernel.registers), "variables": list(kernel.variables)}
        self.result = dataclasses.replace(kernel, **fresh, code=[], labels={}, tables={}, frames=[])
        self.numbers = itertools.count(1)
        self.entered = []  # names of the functions that are called with a stack, in the order of their code

    def run(self):
        frame = Frame(self.source, None, False, {self.source.name: 0})
        self.copy(_Copy(self.source, frame, "", {}, None))
        if frame.passed:  # there are calls left
            self.close(frame)
        for name in self.entered:
            own, here = self.register("%frame"), len(self.result.code)
            frame = Frame(self.module.functions[name], own, name in self.recursive, position=here)
            self.copy(self.copy_of(frame.function, frame, {}, None))
            self.close(frame)
        return self.result

    def copy_of(self, function, frame, passed, after):
        """A further copy of a function's code. A frame has its registers and variables once for all of them."""
        if function.name not in frame.registers:
            frame.registers[function.name] = len(self.result.registers)
            for register in function.registers:
                self.result.registers.append(dataclasses.replace(register, index=len(self.result.registers)))
            for v in function.variables + (function.parameters if function is frame.function else []):
                if v.space in ("local", "param") and frame.register:
                    frame.variables[v] = dataclasses.replace(v, frame=frame.register)
                else:
                    self.result.variables.append(v)
        return _Copy(function, frame, f"@{next(self.numbers)}", passed, after)

    def copy(self, copy):
        """Append a function's code."""
        function, code = copy.function, self.result.code
        position = {}
        for number, instruction in enumerate(function.code):
            position[number] = len(code)
            operands = tuple(self.operand(o, copy) for o in instruction.operands)
            guard = self.operand(instruction.guard, copy)
            if instruction.opcode == "call":
                self.call(instruction, operands, guard, copy)
            elif instruction.opcode == "ret" and copy.after is not None:
                code.append(_branch(instruction, copy.after, guard))
            elif instruction.opcode == "ret" and copy.frame.register:
                after = self.behind(instruction, guard)
                code.append(dataclasses.replace(instruction, guard=None))
                self.result.labels[after] = len(code)
            else:
                code.append(dataclasses.replace(instruction, operands=operands, guard=guard))
        position[len(function.code)] = len(code)
        for label, number in function.labels.items():
            self.result.labels[label + copy.suffix] = position[number]
        for name, targets in function.tables.items():
            self.result.tables[name + copy.suffix] = [t + copy.suffix for t in targets]

    def call(self, instruction, operands, guard, copy):
        code, call = self.result.code, call_of(instruction, operands)
        name = call.target.name if isinstance(call.target, Label) else None
        if name in BUILTIN:
            self.builtin(instruction, call, guard)
            return
        if name is None:
            names = candidates(copy.function, call_of(instruction, instruction.operands), self.module)
        else:
            names = {name}
            self.check(instruction, call)
        after = self.behind(instruction, guard)
        if name is None or name in self.stacked:
            self.enter(instruction, call, names, copy.frame)
        else:
            callee = self.module.functions[name]
            passed = dict(zip(callee.parameters, call.passed, strict=True))
            self.copy(self.copy_of(callee, copy.frame, passed, after))
        self.result.labels[after] = len(code)

    def builtin(self, instruction, call, guard):
        """A call of what the simulator has itself: its result is a register, stored where the caller expects it."""
        results = [self.register("%result") for _ in call.results]

        def add(opcode, modifiers, *operands):
            code = dataclasses.replace(instruction, opcode=opcode, modifiers=modifiers, operands=operands, guard=guard)
            self.result.code.append(code)

        add(call.target.name, (), *results, *call.arguments)
        for variable, register in zip(call.results, results, strict=True):
            add("st", ("param", "b32"), Memory(Address(variable, 0)), register)

    def register(self, name):
        """A further register of the kernel."""
        register = Register(len(self.result.registers), name, "b32")
        self.result.registers.append(register)
        return register

    def behind(self, instruction, guard):
        """The label of what follows an instruction, to be defined there; lanes that a guard turns off branch to it."""
        after = f"return@{next(self.numbers)}"
        if guard is not None:
            off = guard.register if isinstance(guard, Not) else Not(guard)
            self.result.code.append(_branch(instruction, after, off))
        return after

    def check(self, instruction, call):
        """Raise for a call by name that there is no function for."""
        callee = self.module.functions.get(call.target.name)
        what = f"{instruction} {call.target.name} ({instruction.place})"
        if callee is None:
            if _DEVICE_RUNTIME.match(call.target.name):
                raise NotImplementedError(f"{what}: kernels cannot launch kernels here (dynamic parallelism)")
            raise NotImplementedError(f"{what}: a function outside the module is not supported")
        if sizes(callee.parameters) != sizes(call.passed):
            raise NotImplementedError(
                f"{what}: passes {sizes(call.passed)} bytes for parameters of {sizes(callee.parameters)}"
            )

    def enter(self, instruction, call, names, frame):
        frame.passed.append(call.passed)
        frame.callees |= names
        operands = Enter(call.target, call.passed, frame.end, tuple(sorted(names)))
        self.result.code.append(dataclasses.replace(instruction, operands=operands, guard=None))
        self.entered += sorted(names.difference(self.entered))

    def close(self, frame):
        """End the code of a frame."""
        code = self.result.code
        last = code[-1]
        code.append(Instruction("ret", (), (), None, last.line, last.source, last.calls))
        self.result.frames.append(frame)
        own = code[frame.position :]
        calls = [n for n, i in enumerate(own) if i.opcode == "call"]
        apart = {}  # variable -> the stretches of code within which it may be used
        for before, n, behind in zip([-1, *calls], calls, [*calls[1:], len(own)], strict=False):
            for variable in own[n].operands.passed:
                apart.setdefault(variable, []).append(range(before + 1, behind))
        for n, i in enumerate(own):
            for variable in (o.address.base for o in i.operands if isinstance(o, Memory)):
                if variable in apart and not any(n in stretch for stretch in apart[variable]):
                    raise NotImplementedError(f"{i} {variable.name} ({i.place}): another call comes between")

    def operand(self, operand, copy):
        """An operand of a function, with the kernel's register, the frame's or the caller's variable, a fresh label."""
        if not copy.suffix:
            return operand
        again = lambda o: self.operand(o, copy)  # noqa: E731
        if isinstance(operand, Register):
            return self.result.registers[copy.frame.registers[copy.function.name] + operand.index]
        if isinstance(operand, Variable):
            return copy.passed.get(operand) or copy.frame.variables.get(operand, operand)
        if isinstance(operand, Label):
            return operand if operand.name in self.module.addresses else Label(operand.name + copy.suffix)
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


def _branch(at, label, guard):
    return Instruction("bra", (), (Label(label),), guard, at.line, at.source)
