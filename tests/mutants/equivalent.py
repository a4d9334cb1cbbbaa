"""Mutants that no test can catch, each with the reason why nothing that anybody could observe is different."""

#: Reason -> (file, line as the mutant has it).
EQUIVALENT: dict[str, list[tuple[str, str]]] = {}


def reason(mutant) -> str | None:
    """Why this mutant is equivalent to the kernel, if it is known to be."""
    for why, lines in EQUIVALENT.items():
        if (mutant.file, mutant.mutated_line) in lines:
            return why
    return None
