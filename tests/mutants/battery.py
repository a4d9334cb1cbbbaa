"""All cases, of every kernel, in the order in which a mutant meets them."""

import itertools
from collections.abc import Callable, Mapping

from tests.mutants import (
    backward_cases,
    fma_backward_cases,
    fma_cases,
    forward_cases,
    naive_cases,
    variant_backward_cases,
    variant_cases,
)
from tests.mutants.case import Case

FAMILIES = (
    variant_cases.CASES,
    variant_backward_cases.CASES,
    forward_cases.CASES,
    backward_cases.CASES,
    fma_cases.CASES,
    fma_backward_cases.CASES,
    naive_cases.CASES,
)
#: Each family's first case, then each one's second: a fault in a file that several share is seen by one of the first.
CASES: list[Case] = [case for cases in itertools.zip_longest(*FAMILIES) for case in cases if case is not None]


def first_failure(
    original_sources: Mapping[Case, tuple[str, ...]], tick: Callable[[], None] = lambda: None, about: str = ""
) -> str | None:
    """What catches the kernels as they are now; ``original_sources`` holds each case's without the fault.

    ``tick`` is called before each case; those with ``about`` in what they are come first.

    Raises CompileError where they do not compile, and Unchanged where no case's PTX differs.
    """
    unchanged = True
    for number, case in sorted(enumerate(CASES), key=lambda numbered: about not in repr(numbered[1])):
        sources = case.sources()
        if sources == original_sources[case]:
            continue
        tick()
        if case.ptx(sources) == case.ptx(original_sources[case]):
            continue
        unchanged = False
        try:
            case.judge(case)
        except Exception as error:  # of any kind: wrong results, faults in memory, deadlocks
            return f"{number} {case.judge.__name__}, {type(error).__name__}: {str(error).splitlines()[:1]}"
    if unchanged:
        raise Unchanged
    return None


class Unchanged(Exception):
    """The PTX of every case is what it was."""
