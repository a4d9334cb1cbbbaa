"""Random straight-line PTX, every register of every lane against a scalar interpreter; and that no instruction of the
table escapes it."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyflash.ptxsim import isa
from cupyflash.ptxsim.syntax import Instruction

from .fuzz.catalogue import FORMS
from .fuzz.compare import fails, report, shrunk
from .fuzz.program import Generator

LENGTH = 25

# What acts on more than one lane's registers and own memory is tested for itself.
ELSEWHERE = {
    **dict.fromkeys(("bar", "barrier"), "test_barriers.py"),
    **dict.fromkeys(("bra", "brx", "ret", "exit", "call"), "test_control_flow.py"),
    **dict.fromkeys(("trap", "__assertfail"), "test_refusals.py"),
    **dict.fromkeys(("membar", "fence", "nanosleep", "brkpt", "griddepcontrol"), "test_hints.py"),
    **dict.fromkeys(("prefetch", "prefetchu", "applypriority"), "test_hints.py"),
    **dict.fromkeys(("cvta", "isspacep"), "test_memory_spaces.py"),
    **dict.fromkeys(("ldmatrix", "stmatrix", "movmatrix", "mma"), "test_tensor_core.py"),
    "cp": "test_async_copies.py",
    "vprintf": "test_ordinary_kernels.py",
}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 2**32))
def test_random_programs(seed):
    program = Generator(random.Random(seed)).program(LENGTH)
    assert not fails(program), report(shrunk(program))


def test_what_is_tested_elsewhere_is():
    for opcode, file in ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text()
        assert any(word in text for word in (opcode, *INDIRECTLY.get(opcode, ()))), (opcode, file)


# C++ that compiles to the instruction.
INDIRECTLY = {
    "vprintf": ("printf(",),
    "__assertfail": ("assert(",),
    "call": ("__noinline__",),
    "bra": ("if (",),
    "brx": ("switch (",),
    "cvta": ("pointers",),
    "ret": ("return",),
    "exit": ("return",),
}

# Orders, scopes and cache hints do not change what a single lane reads and writes.
ACCESSES = {"ld", "ldu", "st", "atom", "red"}
FUZZED = {(form.opcode, frozenset(form.modifiers)) for form in FORMS}
LINES = [(opcode, line) for opcode, lines in isa.LINES.items() if opcode not in ELSEWHERE for line in lines]


@pytest.mark.parametrize("opcode", sorted({opcode for opcode, _ in LINES} - ACCESSES))
def test_every_instruction_of_the_table_is_fuzzed(opcode):
    spellings = {frozenset((*m, *t)) for name, line in LINES if name == opcode for m, t in line.spellings()}
    assert {s for s in spellings if (opcode, s) not in FUZZED} <= UNFUZZED.get(opcode, set())


UNFUZZED = {"rsqrt": {frozenset(("approx", "f64"))}}  # only its error is promised: test_approximations.py


@pytest.mark.parametrize("opcode", ["ld", "st", "atom", "red"])
def test_every_type_and_operation_of_memory_accesses_is_fuzzed(opcode):
    placement = {"", "global", "shared", "local", "v2", "v4"} if opcode in ("ld", "st") else {"", "global", "shared"}
    missing = set()
    for name, line in LINES:
        if name == opcode and line.since < 100:
            for groups, types in line.spellings():
                plain = frozenset((*groups, *types))
                if plain - frozenset(types) - placement <= OPERATIONS and (opcode, plain) not in FUZZED:
                    missing.add(plain)
    assert {m for m in missing if not too_wide(m)} == set()


OPERATIONS = set("add min max inc dec and or xor exch cas noftz".split())


def too_wide(modifiers):
    """A vector of 32 bytes: only for the 256-bit accesses of sm_100."""
    return "v4" in modifiers and any(m.endswith("64") for m in modifiers)


def test_the_table_admits_every_fuzzed_form():
    """What the fuzz knows and the table does not would be an instruction that was forgotten."""
    for form in FORMS:
        operands = (None,) * (len(form.sources) + 1)
        instruction = Instruction(form.opcode, form.modifiers, operands, None, 0, None)
        assert isa.first_architecture(instruction) is not None, form
