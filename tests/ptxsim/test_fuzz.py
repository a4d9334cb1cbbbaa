"""Random straight-line PTX, every register of every lane against a scalar interpreter; and that no instruction of the
table escapes it."""

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim
from cupyflash.ptxsim import isa
from cupyflash.ptxsim.syntax import Instruction

from .fuzz.catalogue import FORMS, by_opcode
from .fuzz.compare import fails, launch_ptx, report, shrunk
from .fuzz.memory_forms import MemoryForm
from .fuzz.program import Generator
from .launching import poisoned

LENGTH = 25

# What acts on more than one lane's registers and own memory is tested for itself.
ELSEWHERE = {
    **dict.fromkeys(("bar", "barrier"), "test_barriers.py"),
    **dict.fromkeys(("bra", "brx", "ret", "exit", "call"), "test_control_flow.py"),
    **dict.fromkeys(("trap", "__assertfail"), "test_refusals.py"),
    **dict.fromkeys(("membar", "fence", "nanosleep", "brkpt", "griddepcontrol"), "test_hints.py"),
    **dict.fromkeys(("prefetch", "prefetchu", "applypriority"), "test_hints.py"),
    **dict.fromkeys(("cvta", "isspacep"), "test_memory_spaces.py"),
    "wmma": "test_wmma.py",
    **dict.fromkeys(("ldmatrix", "stmatrix", "movmatrix", "mma"), "test_tensor_core.py"),
    "cp": "test_async_copies.py",
    "mbarrier": "test_mbarrier.py",
    "vprintf": "test_ordinary_kernels.py",
}


def plain(form):
    """Whether a load or store has no cache operator: those are left to the random programs."""
    return not set(form.modifiers) & {"ca", "cg", "cs", "cv", "wt", "volatile", "relaxed"}


@settings(max_examples=90, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 2**32))
def test_random_programs(seed):
    """Observed or not, in lockstep or warp by warp: the same bits."""
    program = Generator(random.Random(seed)).program(LENGTH)
    how = seed % 4
    with (contextlib.nullcontext, contextlib.nullcontext, ptxsim.profile, ptxsim.sanitize)[how]():
        choice = {"schedule": "random", "seed": seed} if how == 1 else {}
        assert not fails(program, **choice), report(shrunk(program, **choice), **choice)


BY_OPCODE = by_opcode(form for form in FORMS if not isinstance(form, MemoryForm) or plain(form))


@pytest.mark.parametrize("opcode", sorted(BY_OPCODE))
def test_every_form_once(opcode):
    """Every spelling of an opcode on special and random values, a few to a program."""
    forms = BY_OPCODE[opcode]
    for first in range(0, len(forms), LENGTH):
        for seed in range(5):
            program = Generator(random.Random(f"{opcode} {first} {seed}")).program_of(forms[first : first + LENGTH])
            assert not fails(program), report(shrunk(program))


CARRY = """
.version 8.8
.target sm_75
.address_size 64
.visible .entry chain(.param .u64 out)
{
.reg .b64 %at; .reg .b32 %t, %low, %high; .reg .pred %some, %odd;
ld.param.u64 %at, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %at, %t, 4, %at;
setp.gt.u32 %some, %t, 9; and.b32 %low, %t, 1; setp.ne.u32 %odd, %low, 0;
add.cc.u32 %low, %t, 0;
@%some add.cc.u32 %low, %t, 0xfffffffc;
@%odd bra over;
add.u32 %low, %low, 1;
over:
addc.u32 %high, 100, 0;
st.global.u32 [%at], %high;
ret;
}"""


def test_the_carry_flag_outlives_branches_and_respects_guards():
    out = poisoned(32, np.uint32)
    launch_ptx(CARRY, "chain", (1,), (32,), (out,), arch="sm_75")
    np.testing.assert_array_equal(out, np.where(np.arange(32) > 9, 101, 100))


NAN = """
.version 8.8
.target sm_86
.address_size 64
.visible .entry largest(.param .u64 out)
{
.reg .b64 %at; .reg .f32 %a, %b;
ld.param.u64 %at, [out]; mov.f32 %a, 0f7FC00000; ld.global.f32 %b, [%at];
max.xorsign.abs.f32 %b, %a, %b;
st.global.f32 [%at], %b;
ret;
}"""


def test_of_two_nans_xorsign_makes_the_canonical_one():
    out = np.array([0xFF800001], np.uint32)
    launch_ptx(NAN, "largest", (1,), (1,), (out,), arch="sm_86")
    assert out[0] == 0x7FFFFFFF


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


UNFUZZED = {
    "rsqrt": {frozenset(("approx", "f64"))},  # only its error is promised: test_approximations.py
    "mov": {frozenset(("b128",))},  # for atomics of 16 bytes: test_vector_atomics.py
}


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
    """A vector of 32 bytes, only for the 256-bit accesses of sm_100; a value of 16: test_vector_atomics.py."""
    return "b128" in modifiers or ("v4" in modifiers and any(m.endswith("64") for m in modifiers))


def test_the_table_admits_every_fuzzed_form():
    """What the fuzz knows and the table does not would be an instruction that was forgotten."""
    for form in FORMS:
        operands = (None,) * (len(form.sources) + 1)
        instruction = Instruction(form.opcode, form.modifiers, operands, None, 0, None)
        assert isa.first_architecture(instruction) is not None, form
