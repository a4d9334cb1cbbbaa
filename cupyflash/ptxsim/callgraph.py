"""Who calls whom: which functions need a stack, because they may call themselves or are called through pointers."""

from typing import NamedTuple

from .syntax import Address, Function, Instruction, Label, Module, Register, Variable

BUILTIN = ("vprintf", "__assertfail")


class Call(NamedTuple):
    """The operands of `call (results), target, (arguments), table`. The target is a Label or, of a pointer, a Register;
    `table` names its `.calltargets` or `.callprototype`."""

    results: tuple
    target: Label | Register
    arguments: tuple
    table: Label | None

    @property
    def passed(self):
        """Results and arguments, as they stand among the parameters of the function."""
        return self.results + self.arguments


def call_of(instruction: Instruction, operands: tuple) -> Call:
    """A call, in whatever its operands are now."""
    at = 1 if operands and isinstance(operands[0], tuple) else 0
    target, *rest = operands[at:] or (None,)
    if not isinstance(target, Label | Register):
        raise NotImplementedError(f"{instruction} ({instruction.place}): a call of neither a function nor a register")
    plain = lambda group: tuple(o.base if isinstance(o, Address) else o for o in group)  # noqa: E731
    results = plain(operands[0]) if at else ()
    arguments = plain(rest.pop(0)) if rest and isinstance(rest[0], tuple) else ()
    if not all(isinstance(o, Variable) for o in results + arguments):
        raise NotImplementedError(f"{instruction} ({instruction.place}): passes something else than .param variables")
    return Call(results, target, arguments, rest[0] if rest else None)


def sizes(parameters) -> list[int]:
    """Bytes of parameters, or of what is passed for them: what callers and functions must agree on."""
    return [p.size for p in parameters]


def candidates(function: Function, call: Call, module: Module) -> set[str]:
    """The functions that a call through a pointer may reach: of its `.calltargets`, or of all whose address the module
    uses, those with parameters like what it passes."""
    table = function.tables.get(call.table.name) if call.table else None
    names = module.taken if table is None else table
    known = (module.functions[name] for name in names if name in module.functions)
    return {f.name for f in known if not f.entry and sizes(f.parameters) == sizes(call.passed)}


def needing_a_stack(kernel: Function, module: Module) -> tuple[set[str], set[str]]:
    """Of the functions that a kernel may reach, those that may call themselves, and those called through pointers."""
    callees, pointed, waiting = {}, set(), [kernel]
    while waiting:
        function = waiting.pop()
        reached = callees[function.name] = set()
        for instruction in function.code:
            if instruction.opcode != "call":
                continue
            call = call_of(instruction, instruction.operands)
            if isinstance(call.target, Register):
                found = candidates(function, call, module)
                pointed |= found
            else:
                found = {call.target.name} & module.functions.keys()
            waiting += [module.functions[name] for name in found - callees.keys() - reached]
            reached |= found
    return _on_cycles(callees), pointed


def _on_cycles(callees):
    """The functions that may run again before they return, and those between two such."""
    size = None
    while size != len(callees):
        size = len(callees)
        called = set().union(*callees.values())
        callees = {name: of & callees.keys() for name, of in callees.items() if name in called and of & callees.keys()}
    return set(callees)
