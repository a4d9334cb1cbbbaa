"""The same for gradients: of every operand that options have."""

from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from tests.mutants import variant_cases
from tests.mutants.backward_cases import BackwardCase, within_bounds

CASES = [BackwardCase(within_bounds, BackwardProblem(problem, with_dlse=True)) for problem in variant_cases.PROBLEMS]
