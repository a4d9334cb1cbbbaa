"""Runs a program on the simulator and compares every bit with the interpreter."""

import numpy as np

from cupyflash import ptxsim
from cupyflash.ptxsim import parse
from cupyflash.ptxsim.kernel import Kernel
from cupyflash.ptxsim.loaded import LoadedModule

from .interpreter import run
from .memory_forms import SLOT
from .program import REGISTERS, TYPES, Label, Program, Skip, line, ptx

TARGET = "sm_100"


class PtxModule:
    """A module of PTX text, as a Kernel wants it."""

    def __init__(self, text):
        self.text, self.code, self.file_path, self.options = text, "", None, ()
        self.loaded, self.dynamic_limits = {}, {}
        self.enable_cooperative_groups = False

    def _load(self, arch):
        if arch not in self.loaded:
            self.loaded[arch] = LoadedModule(self, parse.parse(self.text), {}, arch)
        return self.loaded[arch]


def launch_ptx(text, name, grid, block, args, arch=TARGET, **settings):
    """Run a kernel of PTX text."""
    with ptxsim.settings(arch=arch, **settings):
        Kernel(PtxModule(text), name)(grid, block, args)


def simulated(program, **settings):
    """The simulator's bits of every register: name -> uint64 array over lanes."""
    values = np.array([program.values[name] for name in REGISTERS], np.uint64)
    scratch = np.zeros(SLOT // 16 * program.threads * 2, np.complex128)
    out = np.full(values.shape, 0xA5A5A5A5A5A5A5A5, np.uint64)
    launch_ptx(ptx(program), "fuzzed", (1,), (program.threads,), (values, scratch, out), **settings)
    widths = [8 if t == "pred" else TYPES[t].bits for t in REGISTERS.values()]
    masks = np.array([(1 << w) - 1 for w in widths], np.uint64)
    return dict(zip(REGISTERS, out & masks[:, None], strict=True))


def fails(program, **settings):
    """(register, lane, expected bits, simulated bits) wherever the two disagree, or the error that was raised."""
    expected = run(program)
    try:
        got = simulated(program, **settings)
    except Exception as error:
        return [error]
    return [
        (name, lane, bits, int(got[name][lane]))
        for name, column in expected.items()
        for lane, bits in enumerate(column)
        if bits is not None and bits != int(got[name][lane])
    ]


def shrunk(program, **settings):
    """The program without the statements that its failure can do without."""
    statements = list(program.statements)
    size = len(statements)
    while size:
        at = 0
        while at < len(statements):
            shorter = statements[:at] + statements[at + size :]
            if whole(shorter) and fails(Program(shorter, program.threads, program.values), **settings):
                statements = shorter
            else:
                at += size
        size //= 2
    return Program(statements, program.threads, program.values)


def whole(statements):
    """Whether every jump still has its label, and every named group of lanes its ballot and its jump."""
    labels = {s.name for s in statements if isinstance(s, Label)}
    if not all(s.label in labels for s in statements if isinstance(s, Skip)):
        return False
    for k, s in enumerate(statements):
        if getattr(s, "members", None) == "%members":
            region = next((n for n in range(k, 0, -1) if "%members" in getattr(statements[n], "results", ())), None)
            if region is None or not isinstance(statements[region + 1], Skip):
                return False
    return True


def report(program, **settings):
    """The text of a failure: statements, and the first differences with the values that the lane began with."""
    found = fails(program, **settings)
    lines = [line(s) for s in program.statements]
    for difference in found[:4]:
        if isinstance(difference, Exception):
            lines.append(f"  raised {type(difference).__name__}: {difference}")
            continue
        name, lane, bits, got = difference
        lines.append(f"  lane {lane}: {name} expected {bits:#x}, simulated {got:#x}")
        text = "\n".join(lines)
        start = {n: hex(column[lane]) for n, column in program.values.items() if n in text}
        lines.append(f"    began with {start}")
    return "\n".join(lines)
