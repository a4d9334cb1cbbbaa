"""Single instructions, each in a kernel of its own: what the kernels of this library are made of.

A lane reads its registers from consecutive elements of arrays (lanes, registers) and writes its results likewise, so
that nothing has to be known of fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

#: Bytes of a register -> its C++ type and the letter of asm constraints. Floats travel as bits: NaN keeps them.
_REGISTERS = {2: ("unsigned short", "h"), 4: ("unsigned int", "r"), 8: ("unsigned long long", "l")}
BLOCK, LANES = 128, 1 << 14
SEED = 0

Allowed = Callable[[np.ndarray, np.ndarray], np.ndarray]  # operand, nearest result -> largest difference


@dataclass(frozen=True)
class Registers:
    """A vector of ``count`` registers of ``pack`` elements each, which have no more bits than ``bits_of`` has."""

    dtype: np.dtype
    count: int = 1
    pack: int = 1
    bits_of: np.dtype | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the array of all lanes."""
        return LANES, self.count * self.pack

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * self.pack


@dataclass(frozen=True)
class Instruction:
    """Its PTX, the registers that it reads and the ones that it writes.

    ``allowed`` is how far the PTX ISA says that a result may be from the nearest one, which the simulator computes;
    None where it leaves nothing open.
    """

    ptx: str
    operands: tuple[Registers, ...]
    result: Registers
    arch: int = 75
    allowed: Allowed | None = None

    @property
    def is_mma(self) -> bool:
        return self.ptx.startswith("mma")

    @property
    def kernel(self) -> str:
        """Its name in the source."""
        return self.ptx.replace(".", "_")

    @property
    def source(self) -> str:
        """CUDA C++ of the kernel."""
        vectors = {"result": self.result, **{f"operand{n}": x for n, x in enumerate(self.operands)}}
        pointers = [f"{'' if name == 'result' else 'const '}{_c(x)}* {name}" for name, x in vectors.items()]
        places, constraints = [], {"result": [], "operand": []}
        first = 0
        for name, registers in vectors.items():
            numbers = ", ".join(f"%{first + n}" for n in range(registers.count))
            places.append(f"{{{numbers}}}" if registers.count > 1 else numbers)
            first += registers.count
            kind, mark = ("result", "=") if name == "result" else ("operand", "")
            letter = _REGISTERS[registers.bytes][1]
            constraints[kind] += [
                f'"{mark}{letter}"({name}[lane * {registers.count} + {n}])' for n in range(registers.count)
            ]
        return (
            f'extern "C" __global__ void {self.kernel}({", ".join(pointers)}) {{\n'
            "    int lane = blockIdx.x * blockDim.x + threadIdx.x;\n"
            f'    asm("{self.ptx} {", ".join(places)};"\n'
            f"        : {', '.join(constraints['result'])}\n"
            f"        : {', '.join(constraints['operand'])});\n"
            "}\n"
        )

    def inputs(self) -> list[np.ndarray]:
        """An array for each operand: half of it random bits, half ordinary numbers; of mma only the latter."""
        rng = np.random.default_rng(SEED)
        return [_ordinary(rng, x) if self.is_mma else _any(rng, x) for x in self.operands]


def _c(registers: Registers) -> str:
    return _REGISTERS[registers.bytes][0]


def _ordinary(rng: np.random.Generator, registers: Registers) -> np.ndarray:
    """Normal numbers over a few powers of two."""
    values = rng.standard_normal(registers.shape) * 2.0 ** rng.integers(-6, 6, registers.shape)
    return values.astype(registers.bits_of or registers.dtype).astype(registers.dtype)


def _any(rng: np.random.Generator, registers: Registers) -> np.ndarray:
    values = _ordinary(rng, registers)
    half = values[: LANES // 2]
    half[...] = np.frombuffer(rng.bytes(half.nbytes), half.dtype).reshape(half.shape)
    special = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, np.inf, -np.inf, np.nan]
    values[: len(special), 0] = special
    return values


def _ulp(count: float) -> Allowed:
    return lambda x, nearest: count * _spacing(nearest)


def _relative(error: float) -> Allowed:
    """From the exact value, which is up to half an ulp from the nearest."""
    return lambda x, nearest: error * np.abs(nearest).astype(float) + 0.5 * _spacing(nearest)


def _logarithm(x: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    relative = np.abs(nearest) * 2.0**-22
    return np.where((x > 0.5) & (x < 2), 2.0**-22, relative) + 0.5 * _spacing(nearest)


def _spacing(nearest: np.ndarray) -> np.ndarray:
    """An ulp, as float64; near the least normal number as much as that, which one may flush and the other not."""
    least = float(ml_dtypes.finfo(nearest.dtype).smallest_normal)
    size = np.abs(nearest)
    with np.errstate(all="ignore"):
        spacing = np.spacing(size).astype(float)
    return np.where(size.astype(float) <= 2 * least, least, spacing)


F16, F32, F64 = (Registers(np.dtype(x)) for x in ("float16", "float32", "float64"))
BF16 = Registers(np.dtype(ml_dtypes.bfloat16))
F16X2, BF16X2 = (replace(x, pack=2) for x in (F16, BF16))
TF32 = replace(F32, bits_of=BF16.dtype)  # tf32 has as many exponents as float32, and more bits than bfloat16


def _mma(shape: str, types: str, factors: Registers, count: int, sums: Registers, arch: int = 80) -> Instruction:
    """The left matrix has ``count`` registers, the right one half of them."""
    left, right = replace(factors, count=count), replace(factors, count=count // 2)
    return Instruction(f"mma.sync.aligned.{shape}.row.col.{types}", (left, right, sums), sums, arch)


_SUMS, _HALF_SUMS = replace(F32, count=4), replace(F16X2, count=2)
#: Errors as the PTX ISA states them, section "Floating Point Instructions".
INSTRUCTIONS = (
    Instruction("ex2.approx.ftz.f32", (F32,), F32, allowed=_ulp(2)),
    Instruction("rcp.approx.ftz.f32", (F32,), F32, allowed=_ulp(1)),
    Instruction("lg2.approx.ftz.f32", (F32,), F32, allowed=_logarithm),
    Instruction("rsqrt.approx.ftz.f32", (F32,), F32, allowed=_relative(2.0**-22.9)),
    Instruction("tanh.approx.f32", (F32,), F32, allowed=_relative(2.0**-11)),
    Instruction("ex2.approx.f16", (F16,), F16, allowed=_relative(2.0**-9.9)),
    Instruction("div.full.ftz.f32", (F32, F32), F32, allowed=_ulp(2)),
    Instruction("div.rn.ftz.f32", (F32, F32), F32),
    Instruction("div.rn.f64", (F64, F64), F64),
    Instruction("sqrt.rn.ftz.f32", (F32,), F32),
    Instruction("add.rn.ftz.f32", (F32, F32), F32),
    Instruction("mul.rn.f32", (F32, F32), F32),
    Instruction("max.ftz.f32", (F32, F32), F32),
    Instruction("fma.rn.ftz.f32", (F32, F32, F32), F32),
    Instruction("fma.rn.f64", (F64, F64, F64), F64),
    Instruction("cvt.rn.f16.f32", (F32,), F16),
    Instruction("cvt.rn.bf16.f32", (F32,), BF16, arch=80),
    Instruction("cvt.rn.f16x2.f32", (F32, F32), F16X2, arch=80),
    Instruction("cvt.rn.bf16x2.f32", (F32, F32), BF16X2, arch=80),
    Instruction("cvt.f32.f16", (F16,), F32),
    Instruction("cvt.rn.ftz.f32.f64", (F64,), F32),
    _mma("m16n8k8", "f32.f16.f16.f32", F16X2, 2, _SUMS, arch=75),
    _mma("m16n8k16", "f32.f16.f16.f32", F16X2, 4, _SUMS),
    _mma("m16n8k16", "f32.bf16.bf16.f32", BF16X2, 4, _SUMS),
    _mma("m16n8k16", "f16.f16.f16.f16", F16X2, 4, _HALF_SUMS),
    _mma("m16n8k8", "f32.tf32.tf32.f32", TF32, 4, _SUMS),
)
