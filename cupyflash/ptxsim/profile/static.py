"""What an instruction counts as, whoever runs it: its class, its opcode with what picks the unit, its FLOPs."""

import re

from ..isa import TYPES, types_of

_CLASSES = {
    "tensor": ("mma", "wmma", "ldmatrix", "stmatrix", "movmatrix"),
    "memory": ("ld", "ldu", "st", "cp", "prefetch", "prefetchu"),
    "atomic": ("atom", "red"),
    "warp": ("shfl", "vote", "match", "redux", "activemask", "elect"),
    "barrier": ("bar", "barrier", "mbarrier", "membar", "fence"),
    "control": ("bra", "brx", "ret", "exit", "trap", "call"),
    "conversion": ("cvt", "cvta"),
    "special function": ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"),
    "move and select": ("mov", "selp", "slct", "setp", "set"),
}
_CLASS_OF = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes}
_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}
_OPERATIONS = {"add": 1, "sub": 1, "mul": 1, "fma": 2, "mad": 2}
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_SPACES = ("global", "shared", "shared::cta", "local", "param", "const")
_ATOMICS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")

# Modifiers that pick the unit or the sequence of machine instructions, by opcode.
_PICKS = {
    **dict.fromkeys(("ld", "ldu", "st", "prefetch"), _SPACES),
    **dict.fromkeys(("atom", "red"), (*_SPACES, *_ATOMICS, *TYPES)),
    **dict.fromkeys(("mul", "mad", "mul24", "mad24", "madc"), ("wide", "lo", "hi", *TYPES)),
    **dict.fromkeys(("div", "rcp", "sqrt", "rsqrt"), ("approx", "full", "rn", "rz", "rm", "rp", *TYPES)),
    **dict.fromkeys(("bar", "barrier"), ("sync", "arrive", "red", "warp")),
    "shf": ("l", "r", *TYPES),
    "shfl": ("up", "down", "bfly", "idx"),
    "vote": ("all", "any", "uni", "ballot"),
    "match": ("all", "any"),
    "redux": (*_ATOMICS, *TYPES),
    "cp": ("async", "commit_group", "wait_group", "wait_all", "mbarrier"),
    "mbarrier": ("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait"),
    "ldmatrix": ("x1", "x2", "x4"),
    "stmatrix": ("x1", "x2", "x4"),
    "movmatrix": (),
    "wmma": ("load", "store"),
}


def instruction_class(instruction):
    """The class that an instruction is counted in."""
    found = _CLASS_OF.get(instruction.opcode)
    return found or ("float arithmetic" if _FLOATS & set(instruction.modifiers) else "integer arithmetic")


def opcode_key(instruction):
    """Opcode, and those modifiers that matter to its cost: "fma.f32", "ld.global", "mma.m16n8k16.f16".

    Of mma: shape and type of A, and the accumulators' type if that is not f32.
    """
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode == "mma":
        types = types_of(instruction)
        shape = next(m for m in modifiers if _SHAPE.fullmatch(m))
        kept = (shape, types[1], *([types[0]] if types[0] != "f32" else []))
    else:
        picks = _PICKS.get(opcode, TYPES)
        kept = [m for m in modifiers if m in picks]
        if opcode in ("ld", "ldu", "st", "atom", "red") and not set(kept) & set(_SPACES):
            kept.insert(0, "generic")
    return ".".join((opcode, *kept)).replace("shared::cta", "shared")


def scalar_flops(instruction):
    """(type, operations of one lane) of an addition, a multiplication or both; else None."""
    types = [t for t in types_of(instruction) if t in _FLOATS]
    if instruction.opcode not in _OPERATIONS or not types:
        return None
    operations = _OPERATIONS[instruction.opcode]
    return types[-1].removesuffix("x2"), operations * (2 if types[-1].endswith("x2") else 1)


def mma_flops(instruction):
    """Operations of one warp's matrix product."""
    if instruction.opcode != "mma":
        return 0
    shape = next(_SHAPE.fullmatch(m) for m in instruction.modifiers if _SHAPE.fullmatch(m))
    return 2 * int(shape[1]) * int(shape[2]) * int(shape[3])


def source_of(instruction):
    """(file, line) that an instruction is counted for."""
    return instruction.source or ("PTX", instruction.line)
