"""Integer expressions of 8 to 128 bits: what NVRTC makes of them in the simulator, against the machine's C compiler.

What compilers write for one operator, such as a division by a constant or of 128 bits, no other test runs.
"""

import ctypes
import random
import shutil
import subprocess

import numpy as np
import pytest

from cupyflash import ptxsim

COMPILER = shutil.which("cc")
COUNT = 60  # expressions of a kernel
LANES = 64
WIDTHS = 8, 16, 32, 64, 128
TYPES = """
typedef unsigned char u8; typedef signed char s8; typedef unsigned short u16; typedef short s16;
typedef unsigned u32; typedef int s32; typedef unsigned long long u64; typedef long long s64;
typedef unsigned __int128 u128; typedef __int128 s128;
"""
VARIABLES = "u64 x0 = x[4 * t], x1 = x[4 * t + 1], x2 = x[4 * t + 2], x3 = x[4 * t + 3];"
CONSTANTS = 0, 1, 2, 3, 7, 10, 255, 641, 65535, 1000003, 2**31 - 1, 2**31, 2**32 - 1, 2**63


class Expressions:
    """Random expressions without undefined behaviour: unsigned but where signs matter, divisors odd, shifts masked."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def of(self, bits, depth):
        """One of an unsigned type."""
        return f"(u{bits})({self.leaf(bits) if depth == 0 else self.node(bits, depth - 1)})"

    def leaf(self, bits):
        either = f"{self.random.choice(CONSTANTS)}ull", f"(u{bits})x0 << {min(bits // 2, 63)} | x1"
        return self.random.choice([*(f"x{k}" for k in range(4)), *either])

    def node(self, bits, depth):
        a, b, c, d = (self.of(bits, depth) for _ in range(4))
        sign = self.random.choice("us")
        u, s, either = f"(u{bits})", f"(s{bits})", f"({sign}{bits})"
        shift = f"({self.of(32, depth)} & {bits - 1})"
        other = self.random.choice(WIDTHS)
        right = f"{s}({b} >> {self.random.randrange(1, bits - 1)} | 1)"
        constant = f"{either}{max(self.random.choice(CONSTANTS) % 2 ** (bits - 1), 3)}"
        compare = self.random.choice(["<", "<=", "==", "!=", ">", ">="])
        divide = self.random.choice("/%")
        return self.random.choice(
            [
                f"{a} + {b}",
                f"{a} - {b}",
                f"(u{max(bits, 32)}){a} * {b}",
                f"{a} {divide} {u}({b} | 1)",
                f"{s}{a} {divide} {right}",
                f"{either}{a} {divide} {constant}",
                f"{a} << {shift}",
                f"{either}{a} >> {shift}",
                f"{a} {self.random.choice('&|^')} {b}",
                f"~{a}",
                f"{either}{a} {compare} {either}{b} ? {c} : {d}",
                f"{s}{a} < 0 ? -{a} : {a}",
                f"({sign}{other}){self.of(other, depth)}",
                f"{a} << {self.random.randrange(1, bits)} | {b} >> {self.random.randrange(1, bits)}",
            ]
        )

    def statements(self):
        """As many stores to out, two words each."""
        lines = []
        for k in range(COUNT):
            value = self.of(self.random.choice(WIDTHS), self.random.randrange(2, 5))
            lines.append(f"{{ u128 v = {value}; out[{2 * k}] = v; out[{2 * k + 1}] = v >> 64; }}")
        return "\n".join(lines)


def operands(seed):
    """Four words for each lane: any, small ones, and ends of ranges."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**64, (LANES, 4), dtype=np.uint64)
    x[::3] >>= rng.integers(0, 64, x[::3].shape).astype(np.uint64)
    x[1::7] = rng.choice(np.array([*CONSTANTS, 2**64 - 1], np.uint64), x[1::7].shape)
    return x


def on_the_host(statements, x, folder):
    (folder / "host.c").write_text(
        f"{TYPES} void all(const u64* x, u64* out) {{ for (int t = 0; t < {LANES}; ++t, out += {2 * COUNT}) {{"
        f"{VARIABLES}\n{statements} }} }}"
    )
    library = folder / "host.so"
    options = "-w", "-fwrapv", "-shared", "-fPIC", "-o", library
    subprocess.run([COMPILER, *options, folder / "host.c"], check=True)
    out = np.zeros((LANES, COUNT, 2), np.uint64)
    ctypes.CDLL(library).all(x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
    return out


def simulated(statements, x, arch):
    code = (
        f'{TYPES} extern "C" __global__ void all(const u64* x, u64* out) {{'
        f"int t = threadIdx.x; out += {2 * COUNT} * t; {VARIABLES}\n{statements} }}"
    )
    out = np.zeros((LANES, COUNT, 2), np.uint64)
    with ptxsim.settings(arch=arch):
        ptxsim.RawModule(code=code, options=("--device-int128",)).get_function("all")((1,), (LANES,), (x, out))
    return out


def compare(seed, folder):
    statements, x = Expressions(seed).statements(), operands(seed)
    got = simulated(statements, x, random.Random(seed).choice(["sm_75", "sm_80", "sm_90", "sm_120"]))
    different = (got != on_the_host(statements, x, folder)).any((0, 2))
    assert not different.any(), f"seed {seed}: {statements.splitlines()[int(different.argmax())]}"


needs_a_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@needs_a_compiler
def test_expressions(tmp_path):
    compare(random.randrange(2**32), tmp_path)


@needs_a_compiler
@pytest.mark.deep
@pytest.mark.parametrize("seed", range(300))
def test_many_expressions(seed, tmp_path):
    compare(seed, tmp_path)
