"""One mutant -> whether the battery catches it, and what does."""

import functools

from cupyflash import ptxsim
from tests.mutants import battery, generate

CAUGHT, EQUIVALENT, SURVIVED, NOT_COMPILED, UNCHANGED = "caught", "equivalent", "SURVIVED", "not compiled", "unchanged"


def judge(mutant: generate.Mutant, tick=lambda: None) -> tuple[str, str]:
    """(outcome, why); ``tick`` is called before each case of the battery."""
    original_ptx()
    with generate.planted(mutant.file, mutant.applied()):
        try:
            failure = battery.first_failure(original_ptx(), tick)
        except ptxsim.CompileError as error:
            return NOT_COMPILED, str(error).splitlines()[0]
        except battery.Unchanged:
            return UNCHANGED, ""
    return (CAUGHT, failure) if failure else (SURVIVED, "")


@functools.cache
def original_ptx() -> dict[battery.Case, tuple[str, ...]]:
    """What the battery's kernels compile to without a fault."""
    return {case: case.ptx() for case in battery.CASES}
