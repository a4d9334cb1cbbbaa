"""One mutant: whether the battery catches it, and what does."""

import functools

from cupyflash import _launch, ptxsim
from tests.mutants import battery, generate

CAUGHT, EQUIVALENT, SURVIVED, NOT_COMPILED, UNCHANGED = "caught", "equivalent", "SURVIVED", "not compiled", "unchanged"


def judge(mutant: generate.Mutant, tick=lambda: None, about: str = "") -> tuple[str, str]:
    """(outcome, why); ``tick`` is called before each case of the battery, which begins with those ``about`` it."""
    original_sources()
    with generate.planted(mutant.file, mutant.applied()):
        try:
            failure = battery.first_failure(original_sources(), tick, about)
        except ptxsim.CompileError as error:
            return NOT_COMPILED, str(error).splitlines()[0]
        except battery.Unchanged:
            return UNCHANGED, ""
        finally:
            _forget_mutants()
    return (CAUGHT, failure) if failure else (SURVIVED, "")


@functools.cache
def original_sources() -> dict[battery.Case, tuple[str, ...]]:
    """What the battery's kernels are compiled from without a fault."""
    return {case: case.sources() for case in battery.CASES}


def _forget_mutants():
    """Keeps kernels without the fault, which the next mutant may launch again."""
    originals = {source for sources in original_sources().values() for source in sources}
    for key in [key for key in _launch.modules.values if key[2] not in originals]:
        del _launch.modules.values[key]
