"""Random PTX on partly undefined registers: what depends on them is found, and fully defined programs are clean."""

import random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim

from .fuzz.catalogue import SCALAR, WARP
from .fuzz.compare import launch_ptx
from .fuzz.memory_forms import SLOT
from .fuzz.program import REGISTERS, Generator, Program, Step, ptx

OPCODES = {form.opcode for form in (*SCALAR, *WARP)}


def draw(seed):
    """A program without accesses to memory and without what puts one value together from several: such a value counts
    as undefined only if all of its parts are, and one that bits of a defined one were put into as defined. Guards are
    predicates that are always defined."""
    rng = random.Random(seed)
    program = Generator(rng, OPCODES).program(25)
    kept = [s for s in program.statements if not (isinstance(s, Step) and joins(s.form))]
    for step in kept:
        if isinstance(step, Step) and step.guard is not None:
            step.guard = f"%q{rng.randrange(2)}", step.guard[1]
    return Program(kept, program.threads, program.values)


def joins(form):
    if form.opcode in ("bfi", "prmt", "shf", "lop3") or (form.opcode in ("or", "xor") and ".pred" not in form.text):
        return True
    return form.vector == "sources" or (form.opcode == "cvt" and len(form.sources) > 1)


def run(program, values):
    """Bits of every register at the end, (registers, lanes), and the findings."""
    out = np.zeros((len(REGISTERS), program.threads), np.uint64)
    with ptxsim.sanitize() as report:
        scratch = np.zeros(SLOT // 16 * program.threads * 2, np.complex128)
        launch_ptx(ptx(program), "fuzzed", (1,), (program.threads,), (values, scratch, out))
    return out, report.findings


def stored_lines(program):
    """Where each register is stored."""
    lines = enumerate(ptx(program).splitlines(), 1)
    found = [f"PTX line {k}" for k, text in lines if "st.global" in text and "[%out+" in text]
    return dict(zip(REGISTERS, found, strict=True))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 2**32))
def test_what_differs_with_an_undefined_value_is_found(seed):
    """The same program with several contents of what is undefined: a result that differs depends on it."""
    program = draw(seed)
    rng = np.random.default_rng(seed)
    defined = np.array([program.values[name] for name in REGISTERS], np.uint64)
    unknown = rng.random(defined.shape) < 0.1
    unknown[[name.startswith("%q") for name in REGISTERS]] = False
    values = ptxsim.empty(defined.shape, np.uint64)
    values[~unknown] = defined[~unknown]
    _, found = run(program, values)
    results = []
    for _ in range(3):
        contents = np.where(unknown, rng.integers(0, 2**64, values.shape, np.uint64), defined)
        out, others = run(program, contents)
        assert all("CC.CF" in f.message for f in others)  # a carry that no instruction has set
        results.append(out)
    differs = (results[0] != results[1]) | (results[0] != results[2])
    assert all("the value of st.global" in f.message for f in found)
    counted = {}
    for finding in found:
        use = finding.other or finding.where
        counted[use] = counted.get(use, 0) + finding.count
    for (name, line), lanes in zip(stored_lines(program).items(), differs.sum(1), strict=True):
        assert counted.get(line, 0) >= lanes, (name, line, lanes, found)
