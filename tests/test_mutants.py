"""The battery passes on the kernels as they are, and catches the mutants made by hand.

Of the mutants the first of each file is judged in every run of the tests, and of the battery the first cases of each
family; the others by ``make deep``.
"""

import pytest

from tests.mutants import battery, equivalent, generate
from tests.mutants.fixed import FAULTS
from tests.mutants.judge import CAUGHT, judge

IN_EVERY_RUN = 28  # cases, of families in turn


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n < IN_EVERY_RUN else pytest.mark.deep) for n in range(len(battery.CASES))],
)
def test_the_battery_finds_no_fault_in_the_kernels(number):
    case = battery.CASES[number]
    case.judge(case)


def in_turn(faults):
    """Parameters of which all but the first of each file are left to deep runs."""
    firsts = {fault.file: fault for fault in reversed(faults)}
    return [pytest.param(f, id=f.what, marks=() if f is firsts[f.file] else pytest.mark.deep) for f in faults]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_planted_in_one_place(fault):
    fault.mutant()


@pytest.mark.parametrize("fault", in_turn(FAULTS))
def test_a_planted_fault_is_caught(fault, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    outcome, why = judge(fault.mutant(), about=fault.about)
    assert outcome == CAUGHT, why


def test_patterns_find_mutants_of_every_kind_in_every_file():
    mutants = generate.mutants()
    assert {m.kind for m in mutants} == {
        "assembly", "cast", "comparison", "condition", "constant", "name", "operator", "order", "sign", "statement",
    }  # fmt: skip
    files = set(generate.source_files(*generate.ENTRY_FILES)) - {"options.cuh"}  # which only names others
    assert {m.file for m in mutants} == files
    assert len(mutants) > 2500


def test_mutants_called_equivalent_are_made():
    """No entry has outlived the line that it is about."""
    made = generate.mutants()
    for reason, lines in equivalent.EQUIVALENT.items():
        for file, line in lines:
            assert any(m.file == file and m.mutated_line.startswith(line) for m in made), f"{reason}: {line}"
