"""Reads machine code (SASS) of kernels: what a pass of the main loop costs. No GPU, no driver.

``python -m experiments.sass FILE.cubin...`` prints it for the kernels of any cubin, your own or a peer's.

A main loop is an innermost natural loop of the control-flow graph that holds both tensor-core products (HMMA) and
exponentials (MUFU.EX2): attention computes both for every tile. Each of its instructions takes a turn of the scheduler,
an issue slot; per HMMA of 16 x 8 x 16 that is a figure which kernels with other tiles can be compared by. A branch may
leave instructions out in some passes: those that copy from device memory belong to every pass but the last ones; those
that multiply and no more rescale where a maximum has moved, and are told apart; those with products, exponentials or
accesses to shared memory are taken to be the work of half of the warps, as in a pair that shares it.

What is not understood raises a SassError: products of another kind, an indirect branch. A main loop that calls a
function, or holds a smaller loop that makes unknown passes, has no figures. The command names both on stderr.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from cupyflash.ptxsim.occupancy import known, occupancy
from experiments import cubin
from experiments.control_flow import Graph, IrreducibleError, natural_loops, optional_regions

EXPONENTIAL = "MUFU.EX2"
LOCAL = ("LDL", "STL")  # loads and stores of a thread's stack
WORK = ("HMMA", "MUFU", "LDSM", "LDS", "STS", "BAR")  # what no warp leaves out unless another one does it
MULTIPLICATIONS = ("FMUL", "FMUL2")
COPIES = ("LDG", "LDGSTS", "STG", "UBLKCP", "UTMALDG")  # from and to device memory
_PRODUCTS = {"16816": 1.0, "1688": 0.5}  # shapes of HMMA, m n k, in products of 16 x 8 x 16
_ELSEWHERE = ("BRX", "BRXU", "JMX", "JMXU", "JMP", "BREAK")  # branches to places that their operands do not name
_OTHER_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "IMMA", "BMMA", "DMMA", "QMMA", "OMMA", "UTC")

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)")
_LABEL = re.compile(r"^([.$\w]\S*):\s*$")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\(([^)]+)\)")
_ARCH = re.compile(r"(?:\.target\s+sm_|EF_CUDA_SM)(\d+)")
_CONDITION = re.compile(r"!?U?P\d")  # a branch's first operand, if it has one


class SassError(ValueError):
    """Machine code that is not understood, or no figure that means anything."""


@dataclass(frozen=True)
class Instruction:
    """One line: its address, guard ("P0", "!UP1" or None), opcode with modifiers, and operands."""

    address: int
    guard: str | None
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Code:
    """Instructions of one kernel in order, and the place of each label among them."""

    kernel: str
    arch: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @cached_property
    def blocks(self) -> list[range]:
        """Basic blocks: places of instructions that are executed one after the other or not at all."""
        end = len(self.instructions)
        starts = {0, *self.labels.values()}
        starts |= {place + 1 for place in range(end) if self.next_of(place) != [place + 1]}
        bounds = [*sorted(start for start in starts if start < end), end]
        return [range(*pair) for pair in pairwise(bounds)]

    @cached_property
    def graph(self) -> Graph:
        """Of each basic block, those that may be next."""
        number = {block[0]: index for index, block in enumerate(self.blocks)}
        return [[number[place] for place in self.next_of(block[-1])] for block in self.blocks]

    def next_of(self, place: int) -> list[int]:
        """Places of the instructions that may be next."""
        ins = self.instructions[place]
        following = [place + 1] if place + 1 < len(self.instructions) else []
        if ins.name in ("EXIT", "RET"):
            return following if ins.guard else []
        if ins.name in _ELSEWHERE or (ins.name == "BSYNC" and place + 1 not in self.joins):
            raise self.not_understood(ins)
        target = self.target(ins)
        if target is None or ins.guard in ("!PT", "!UPT"):
            return following
        may_pass = ins.guard not in (None, "PT", "UPT") or _CONDITION.match(ins.operands)
        return list(dict.fromkeys([target, *following])) if may_pass else [target]

    def target(self, ins: Instruction) -> int | None:
        """Where a branch leads, None for other instructions. ptxas also writes CALL for a branch over a distance."""
        label = _TARGET.search(ins.operands)
        if ins.name == "CALL" and ins.opcode.endswith(".NOINC") and label and label[1].startswith(".L_"):
            return self.place_of(ins, label[1])
        if ins.name != "BRA" or ins.opcode.startswith("BRA.DIV"):
            # BRA.DIV leads to code for warps whose threads have parted; at a matrix product all are together.
            return None
        if label is None or not set(ins.opcode.split(".")[1:]) <= {"U"}:
            raise self.not_understood(ins)
        return self.place_of(ins, label[1])

    def place_of(self, ins: Instruction, label: str) -> int:
        """Of the instruction behind a label."""
        if self.labels.get(label, len(self.instructions)) == len(self.instructions):
            raise self.not_understood(ins)
        return self.labels[label]

    @cached_property
    def joins(self) -> set[int]:
        """Where threads that have parted go on together, as BSSY announces it before they do."""
        found = (_TARGET.search(ins.operands) for ins in self.instructions if ins.name == "BSSY")
        return {self.labels[label[1]] for label in found if label and label[1] in self.labels}

    def not_understood(self, ins: Instruction) -> SassError:
        return SassError(
            f"{self.kernel}: {ins.opcode} {ins.operands} at {ins.address:#x}: where it leads is not understood"
        )

    @cached_property
    def multiplies(self) -> bool:
        """Whether tensor cores are used at all."""
        return any(ins.name.startswith(("HMMA", *_OTHER_PRODUCTS)) for ins in self.instructions)

    @property
    def without_main_loop(self) -> str:
        """Why it has none."""
        why = f"no loop with HMMA and {EXPONENTIAL}" if self.multiplies else "no tensor-core products"
        return f"{self.kernel}: {why}"

    def without_figures(self, loop: MainLoop) -> str:
        """Why a main loop has none."""
        return f"{self.kernel}: the loop at {loop.address:#x} holds {loop.unknown}: no figures"

    def in_order(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        """Instructions of some basic blocks."""
        return tuple(self.instructions[place] for block in sorted(blocks) for place in self.blocks[block])


def disassemble(path: Path) -> str:
    """What nvdisasm prints of a cubin's code."""
    done = subprocess.run([nvdisasm(), "-c", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise SassError(f"nvdisasm: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def nvdisasm() -> str:
    """The disassembler: of the package nvidia-cuda-nvdisasm, or of a CUDA toolkit on PATH."""
    package = importlib.util.find_spec("nvidia")
    for root in (package and package.submodule_search_locations) or ():
        for found in sorted(Path(root).glob("*/bin/nvdisasm*")):
            return str(found)
    if found := shutil.which("nvdisasm"):
        return found
    raise SassError('no nvdisasm: pip install "cupyflash[experiments]" brings it, and a CUDA toolkit has it')


def parse(text: str) -> list[Code]:
    """Kernels of a disassembly."""
    arch, kernels, labels = "", {}, {}
    current = None
    for line in text.splitlines():
        if match := _SECTION.match(line):
            current = match[1]
            kernels[current], labels[current] = [], {}
        elif match := _ARCH.search(line):
            arch = f"sm_{match[1]}"
        elif current is None:
            continue
        elif match := _LABEL.match(line):
            labels[current][match[1]] = len(kernels[current])
        elif match := _INSTRUCTION.match(line):
            address, guard, opcode, operands = match.groups()
            kernels[current].append(Instruction(int(address, 16), guard, opcode, operands.strip()))
        elif re.match(r"^\s+/\*[0-9a-f]{4,}\*/", line):
            raise SassError(f"{current}: no instruction: {line.strip()}")
    if not any(kernels.values()):
        raise SassError("no code: not what nvdisasm prints of a cubin")
    return [Code(name, arch, tuple(found), labels[name]) for name, found in kernels.items()]


@dataclass(frozen=True)
class MainLoop:
    """Instructions of one pass, all of them; and those that some passes leave out, part by part.

    ``unknown`` names what makes a pass cost more than them, where something does.
    """

    address: int
    instructions: tuple[Instruction, ...]
    optional: tuple[tuple[Instruction, ...], ...] = ()
    unknown: str = ""

    @cached_property
    def divided(self) -> tuple[tuple[Instruction, ...], ...]:
        """Parts that some warps leave out in every pass, as others do their work."""
        return tuple(part for part in self.optional if not _has(part, COPIES) and _has(part, WORK))

    @property
    def slots(self) -> float:
        """Issue slots of a warp in a pass that leaves nothing else out."""
        return sum(self.names.values())

    @cached_property
    def hmma(self) -> float:
        """Products of 16 x 8 x 16."""
        return products(self.instructions) - sum(products(part) for part in self.divided) / 2

    @property
    def rescaling(self) -> int:
        """Slots of multiplications that a pass may leave out."""
        parts = (part for part in self.optional if not _has(part, COPIES + WORK) and _has(part, MULTIPLICATIONS))
        return sum(map(len, parts))

    @property
    def slots_per_hmma(self) -> float:
        return self.slots / self.hmma

    @property
    def least_slots_per_hmma(self) -> float:
        """At rest: of a pass that rescales nothing."""
        return (self.slots - self.rescaling) / self.hmma

    @cached_property
    def names(self) -> dict[str, float]:
        """How often a warp executes each opcode, without modifiers."""
        count = Counter(ins.name for ins in self.instructions)
        of_others = Counter(ins.name for part in self.divided for ins in part)
        return {name: times - of_others[name] / 2 for name, times in count.items()}

    @property
    def local(self) -> int:
        """Loads and stores of local memory in the code."""
        return sum(ins.name in LOCAL for ins in self.instructions)


def _has(part: Iterable[Instruction], names: tuple[str, ...]) -> bool:
    return any(ins.name in names for ins in part)


def products(instructions: Iterable[Instruction]) -> float:
    """Tensor-core products, as multiples of 16 x 8 x 16."""
    total = 0.0
    for ins in instructions:
        if ins.name == "HMMA":
            shape = ins.opcode.split(".")[1]
            if shape not in _PRODUCTS or "SP" in ins.opcode.split("."):
                raise SassError(f"{ins.opcode} at {ins.address:#x}: a product of unknown size")
            total += _PRODUCTS[shape]
        elif ins.name.startswith(_OTHER_PRODUCTS):
            raise SassError(f"{ins.opcode} at {ins.address:#x}: products of this kind are not understood")
    return total


def main_loops(code: Code) -> list[MainLoop]:
    """In the order of the code. None in a kernel without such a loop; a SassError for what is not understood."""
    if not code.multiplies:
        return []
    try:
        loops = natural_loops(code.graph)
    except IrreducibleError as error:
        raise SassError(f"{code.kernel}: {error}") from error
    main = {header: loop for header, loop in loops.items() if _is_main(code.in_order(loop))}
    innermost = {header: loop for header, loop in main.items() if not any(other < loop for other in main.values())}
    return [_main_loop(code, header, innermost[header], loops) for header in sorted(innermost)]


def _is_main(loop: tuple[Instruction, ...]) -> bool:
    return products(loop) > 0 and any(ins.opcode == EXPONENTIAL for ins in loop)


def _main_loop(code: Code, header: int, loop: set[int], loops: dict[int, set[int]]) -> MainLoop:
    def address(block: int) -> int:
        return code.in_order([block])[0].address

    instructions = code.in_order(loop)
    inner = [address(other) for other, body in loops.items() if body < loop]
    calls = [ins.address for ins in instructions if ins.name == "CALL" and code.target(ins) is None]
    unknown = [
        f"{what} at {', '.join(map(hex, sorted(places)))}"
        for what, places in (("loops", inner), ("calls", calls))
        if places
    ]
    optional = optional_regions(code.graph, header, loop)
    return MainLoop(address(header), instructions, tuple(map(code.in_order, optional)), " and ".join(unknown))


@dataclass(frozen=True)
class Kernel:
    """What machine code and its file say of a kernel."""

    code: Code
    resources: cubin.KernelResources

    @cached_property
    def main_loops(self) -> list[MainLoop]:
        return main_loops(self.code)

    @property
    def interior_loop(self) -> MainLoop:
        """The main loop with fewest slots: what others have more of is the mask of tiles at a boundary."""
        if not self.main_loops:
            raise SassError(self.code.without_main_loop)
        loop = min(self.main_loops, key=lambda loop: loop.slots_per_hmma)
        if loop.unknown:
            raise SassError(self.code.without_figures(loop))
        return loop

    @property
    def blocks(self) -> int | None:
        """Of an SM, as far as the file says what a block needs."""
        arch, needs = self.code.arch, self.resources
        if not needs.threads or not known(arch):
            return None
        return occupancy(arch, needs.threads, needs.registers, needs.static_shared_bytes).blocks

    @property
    def local_elsewhere(self) -> int:
        """Loads and stores of local memory outside of the interior loop."""
        return sum(ins.name in LOCAL for ins in self.code.instructions) - self.interior_loop.local


def read(content: bytes) -> dict[str, Kernel]:
    """Kernels of a cubin by name."""
    resources = cubin.read(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(content)
        codes = parse(disassemble(path))
    return {code.kernel: Kernel(code, resources[code.kernel]) for code in codes if code.kernel in resources}


COUNTED = ("LDSM", "MUFU")  # opcodes that have a column
HEAD = (
    "kernel", "arch", "registers", "stack B", "shared B", "threads", "blocks/SM",
    "loop at", "slots", "HMMA", "slots/HMMA", "at rest", "local", *COUNTED,
)  # fmt: skip
FOOT = "shared B is static, and blocks/SM what it, registers and threads allow: a launch may ask for more shared memory"


def table(kernels: Iterable[Kernel]) -> tuple[list[tuple[str, ...]], list[str]]:
    """A row for each main loop; and what has no figures, with the reason."""
    rows, reasons = [], []
    for kernel in kernels:
        try:
            loops = kernel.main_loops
        except SassError as error:
            reasons.append(str(error))
            continue
        if not loops:
            reasons.append(kernel.code.without_main_loop)
        needs = kernel.resources
        sizes = needs.registers, needs.stack_bytes, needs.static_shared_bytes, needs.threads, kernel.blocks
        for loop in loops:
            if loop.unknown:
                reasons.append(kernel.code.without_figures(loop))
                continue
            figures = loop.slots, loop.hmma, loop.slots_per_hmma, loop.least_slots_per_hmma, loop.local
            counts = (loop.names.get(name, 0) for name in COUNTED)
            cells = (*map(_shown, sizes), f"{loop.address:#x}", *map(_shown, (*figures, *counts)))
            rows.append((needs.name, kernel.code.arch, *cells))
    return rows, reasons


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) and value % 1 else f"{value:g}"


def main(paths: list[str]) -> int:
    """Print the table of all kernels, and on stderr what has no figures; the status is 1 where a file has none."""
    usage = f"usage: python -m experiments.sass FILE.cubin...\n\n{__doc__}"
    if paths[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if not paths or paths[0].startswith("-"):
        print(usage, file=sys.stderr)
        return 2
    rows, notes, failed = [], [], False
    for path in paths:
        try:
            found, reasons = table(read(Path(path).read_bytes()).values())
        except OSError as error:
            found, reasons = [], [error.strerror]
        except ValueError as error:
            found, reasons = [], [str(error)]
        rows += found
        notes += [f"{path}: {reason}" for reason in reasons]
        failed |= not found
    if rows:
        print(aligned([HEAD, *rows]), FOOT, sep="\n")
    for note in notes:
        print(note, file=sys.stderr)
    return int(failed)


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Columns under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
