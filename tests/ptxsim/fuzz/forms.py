"""What a form of an instruction is, and the types its operands may have."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..exact import F32
from ..values import TYPES, PtxType

TYPES = {
    **TYPES,
    **{f"{kind[0]}8": PtxType(f"{kind[0]}8", 8, "", "", kind) for kind in ("unsigned", "signed")},
    "b8": PtxType("b8", 8, "", "", "unsigned"),
    **{f"raw_f{n}": PtxType(f"raw_f{n}", n, "", "", "unsigned") for n in (32, 64)},
    "pred": PtxType("pred", 1, "", "", "unsigned"),
    "tf32": PtxType("tf32", 32, "", "", "float", F32),
}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
# The NaN that an instruction makes; of float64 the ISA does not say which one.
CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": None, "tf32": None}


@dataclass(frozen=True)
class Form:
    """One opcode with its modifiers, and the formula of its results.

    `sources` and `results` are names of TYPES. `formula` maps Python ints, floats or (low, high) pairs to a result, or
    to a tuple of them where there are several; None stands for a value that the ISA leaves open. `wide`: registers
    may be wider than the types. `carry`: whether the carry flag is "read", "written", both or neither.
    `constant`: what the last source must be, an immediate below this number. `small`: sources that are shift
    amounts, positions and the like, of which small values tell more. `vector`: "sources" or "results", if those are
    written between braces.
    """

    text: str
    sources: tuple
    results: tuple
    formula: Callable
    wide: bool = False
    carry: tuple = ()
    constant: int | None = None
    small: tuple = ()
    vector: str = ""

    @property
    def opcode(self):
        return self.text.split(".")[0]

    @property
    def modifiers(self):
        return tuple(self.text.split(".")[1:])

    def __str__(self):
        return f"{self.text} ({' '.join(self.sources)} -> {' '.join(self.results)})"


def form(text, signature, formula, **more):
    """A Form with its signature as one string, "s32 s32 -> s32"."""
    sources, results = (tuple(part.split()) for part in signature.split("->"))
    return Form(text, sources, results, formula, **more)


def bits_of(type_):
    return TYPES[type_].bits


def encode(value, type_):
    """The bits of a result, None where they are open."""
    if value is None:
        return None
    t = TYPES[type_]
    if t.kind == "packed":
        low, high = (encode(v, t.fmt.name) for v in value)
        return None if low is None or high is None else low | high << 16
    if t.kind == "float" and math.isnan(value):
        return CANONICAL_NAN[type_]
    return t.encode(value)


def decode(bits, type_):
    """The value that the low bits of a register are for an instruction of this type."""
    return TYPES[type_].decode(bits & (1 << bits_of(type_)) - 1)
