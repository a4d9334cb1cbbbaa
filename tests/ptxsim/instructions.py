"""Tables of single instructions: each is compiled into a small kernel, run over many lanes, and judged lane by lane.

TABLE = InstructionTable([Instruction("add.s32", "s32 s32 -> s32", lambda a, b: a + b), ...])

@pytest.mark.parametrize("instruction", TABLE, ids=str)
def test_integer_arithmetic(instruction):
    TABLE.check(instruction)
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cupyflash import ptxsim

from .values import TYPES, random_bits, specials

OPTIONS = ("-std=c++17", "-fmad=false")
POISON = 0xA5
GUARD = 32


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction (or a C++ expression over a, b, c) with the formula its result must equal.

    `signature` names the operands' types and the result's, "s32 s32 -> s32". `formula` maps Python ints, floats or
    (low, high) pairs to the result; None leaves a lane unchecked. `asm` overrides "<name> %0, %1, ...;", and `c` is an
    expression to compile instead. `values` lists, per operand, what to try in place of the type's specials and random
    bits (None keeps those). `accept(expected, got)` replaces bitwise equality, for approximations.
    """

    name: str
    signature: str
    formula: Callable
    asm: str | None = None
    c: str | None = None
    values: tuple = field(default=(), compare=False)
    accept: Callable | None = None

    def __str__(self):
        return f"{self.c or self.name} ({self.signature})"

    @property
    def operands(self):
        return [TYPES[name] for name in self.signature.split("->")[0].split()]

    @property
    def result(self):
        return TYPES[self.signature.split("->")[1].strip()]

    def kernel(self, name):
        """CUDA source of a kernel that applies the instruction to lane i of every operand array."""
        letters = "abcdefg"[: len(self.operands)]
        parameters = ", ".join(f"const {t.c_type}* {x}_" for t, x in zip(self.operands, letters, strict=True))
        loads = " ".join(f"{t.c_type} {x} = {x}_[i];" for t, x in zip(self.operands, letters, strict=True))
        if self.c:
            compute = f"{self.result.c_type} out = {self.c};"
        else:
            places = ", ".join(f"%{k}" for k in range(len(letters) + 1))
            text = (self.asm or f"{self.name} {places};").replace("\n", " ")
            inputs = ", ".join(f'"{t.constraint}"({x})' for t, x in zip(self.operands, letters, strict=True))
            compute = f'{self.result.c_type} out; asm("{text}" : "={self.result.constraint}"(out) : {inputs});'
        body = f"{loads} {compute} out_[i] = out;"
        return (
            f'extern "C" __global__ void {name}({parameters}, {self.result.c_type}* out_, int n) {{\n'
            f"  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) {{ {body} }}\n}}\n"
        )

    def inputs(self, rng):
        """Operand arrays: every combination of special values (thinned beyond 1500), then random lanes."""
        given = self.values or (None,) * len(self.operands)
        pools = [
            specials(t.name) if v is None else np.array([t.encode(x) for x in v], t.dtype)
            for t, v in zip(self.operands, given, strict=True)
        ]
        rows = np.array(list(itertools.product(*(range(len(p)) for p in pools))))
        if len(rows) > 1500:
            rows = rows[rng.choice(len(rows), 1500, replace=False)]
        arrays = []
        for k, (t, v) in enumerate(zip(self.operands, given, strict=True)):
            more = random_bits(t.name, rng, 203) if v is None else rng.choice(pools[k], 203)
            arrays.append(np.concatenate([pools[k][rows[:, k]], more]))
        return arrays


class InstructionTable(Sequence):
    """Instructions compiled together into one module at first use."""

    def __init__(self, instructions, arch="sm_80"):
        self.instructions = list(instructions)
        self.arch = arch

    def __len__(self):
        return len(self.instructions)

    def __getitem__(self, index):
        return self.instructions[index]

    @functools.cached_property
    def module(self):
        source = "".join(one.kernel(f"instruction_{k}") for k, one in enumerate(self.instructions))
        with ptxsim.settings(arch=self.arch):
            return ptxsim.RawModule(code=source, options=OPTIONS)

    def run(self, instruction, operands):
        """The raw result bits for operand arrays of raw bits; the output is poisoned and guarded."""
        index = next(k for k, one in enumerate(self.instructions) if one is instruction)
        n = len(operands[0])
        out = np.empty(n + GUARD, instruction.result.dtype)
        out.view(np.uint8)[:] = POISON
        with ptxsim.settings(arch=self.arch):
            kernel = self.module.get_function(f"instruction_{index}")
            kernel((-(-n // 96),), (96,), (*operands, out, np.int32(n)))
        assert (out[n:].view(np.uint8) == POISON).all(), "wrote past the end of the output"
        return out[:n]

    def check(self, instruction, operands=None):
        """Run the instruction and compare every lane with the formula; the message shows the first wrong lanes."""
        rng = np.random.default_rng(len(instruction.name) * 1009 + sum(map(ord, str(instruction))))
        operands = instruction.inputs(rng) if operands is None else operands
        results = self.run(instruction, operands)
        wrong = []
        for lane, bits in enumerate(results.tolist()):
            values = [t.decode(int(x[lane])) for t, x in zip(instruction.operands, operands, strict=True)]
            expected = instruction.formula(*values)
            if expected is None:
                continue
            accept = instruction.accept
            good = (
                accept(expected, instruction.result.decode(bits)) if accept else instruction.result.same(expected, bits)
            )
            if not good:
                raw = ", ".join(f"{v!r} (0x{int(x[lane]):x})" for v, x in zip(values, operands, strict=True))
                wrong.append(f"  {raw} -> {instruction.result.decode(bits)!r} (0x{bits:x}), expected {expected!r}")
        assert not wrong, f"{instruction}: {len(wrong)} of {len(results)} lanes wrong\n" + "\n".join(wrong[:5])
