"""A fault that is planted by hand."""

from dataclasses import dataclass

import kernels_cu
from tests.mutants.generate import Mutant


@dataclass(frozen=True)
class Fault:
    """What is wrong, the one place of a file where it is planted, and what stands there then.

    ``about`` is a word of cases that know it, an option or what is asked; the battery begins with these.
    """

    what: str
    file: str
    right: str
    wrong: str
    about: str = ""

    def mutant(self) -> Mutant:
        """Raises ValueError where the source no longer has the text, or has it more than once."""
        text = kernels_cu.source(self.file)
        if text.count(self.right) != 1:
            raise ValueError(f"{self.file}: {text.count(self.right)} places read {self.right!r}, expected one")
        return Mutant("fixed", self.file, text.index(self.right), self.right, self.wrong)
